# PYTHON_ARGCOMPLETE_OK
"""The `amp-patch` command: one module for each subcommand."""

from .main import main

__all__ = ["main"]
