"""`from amp_patch import amp`: the public functions under the name that scripts use for them."""

from .api import *  # noqa: F403
