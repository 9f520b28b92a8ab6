"""`from amp_patch import amp`: the public functions as a module, in the form of Apex's `from apex import amp`."""

from .api import *  # noqa: F403
