"""Records the magnitudes of modules and gradients in some steps, and finds those that grow."""

from .describe import describe_flight as describe_flight
