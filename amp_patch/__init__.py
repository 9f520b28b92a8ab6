"""Mixed precision for PyTorch with opt_levels and editable op lists: the functions of apex.amp, on current torch.

import amp_patch as amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
"""
# ruff: noqa: F403, F405

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import amp as amp
    from .api import *
    from .errors import *

__version__ = "0.3.0"

__all__ = [
    "AmpError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "BannedOpError",
    "CheckpointError",
    "GradientOverflowError",
    "LossIdError",
    "MissingExtraError",
    "ModelError",
    "NonFiniteError",
    "OpListError",
    "OptimizerError",
    "PolicyError",
    "RecordError",
    "SessionError",
    "SettingsError",
    "Stats",
    "amp",
    "disable_casts",
    "float_function",
    "fsdp_policy",
    "get_original",
    "half_function",
    "initialize",
    "is_patched",
    "load_state_dict",
    "master_params",
    "match_function",
    "promote_function",
    "refresh",
    "register_float_function",
    "register_half_function",
    "register_match_function",
    "register_promote_function",
    "reset",
    "scale",
    "scale_loss",
    "scope",
    "session",
    "state_dict",
    "stats",
    "unscale",
]


class _Package(types.ModuleType):
    """The class of this module. Its attribute `session` is always the public function of that name.

    There is also a subpackage of that name. When Python imports the subpackage, it sets the attribute `session` to it.
    The setter below ignores this.
    """

    @property
    def session(self) -> Any:
        return importlib.import_module(f"{__name__}.api").session

    @session.setter
    def session(self, value: Any) -> None:
        pass


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Return the object of a public name, and import its module if this is the first use of the name.

    So `import amp_patch` does not import torch. Importing torch would make every command slow, even `amp-patch --help`.
    Raises AttributeError for any other name.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "amp":
        return importlib.import_module(f"{__name__}.amp")
    module = "errors" if name.endswith("Error") else "api"
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    """Return the public names and the usual attributes of a package, without submodules other than `amp`."""
    return [*__all__, "__version__", "__doc__", "__name__", "__file__", "__path__", "__spec__"]
