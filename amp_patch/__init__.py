"""Mixed precision for PyTorch by levels and editable op lists: what apex.amp offered, for today's torch.

import amp_patch as amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
"""

from . import amp as amp
from .api import *  # noqa: F403
from .api import __all__ as _api_names
from .errors import (
    AmpError,
    ArgumentTypeError,
    BannedOpError,
    CheckpointError,
    GradientOverflowError,
    ModelError,
    OpListError,
    OptimizerError,
    PolicyError,
    SessionError,
)

__version__ = "0.1.0"

__all__ = [
    *_api_names,
    "AmpError",
    "ArgumentTypeError",
    "BannedOpError",
    "CheckpointError",
    "GradientOverflowError",
    "ModelError",
    "OpListError",
    "OptimizerError",
    "PolicyError",
    "SessionError",
    "amp",
]
