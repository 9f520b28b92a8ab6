"""Which models a script has: modules that are called from outside of any module."""

import sys
import types
from pathlib import Path

import torch
from torch import nn

from ..torch_private import MODULE_CALL, get_own_children

_NOT_THE_SCRIPTS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent.parent}/")

_WRAPPED = ("module", "_orig_mod")
"""Where DistributedDataParallel and DataParallel, and torch.compile, keep what they are around."""


def find_root(module: nn.Module) -> nn.Module:
    """Return the model that a module which is being called belongs to.

    That is the outermost module with a method under way that holds it: trainers call `training_step` and the like.
    """
    root = module
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = _read_self(frame)
            if isinstance(owner, nn.Module) and owner is not root and _holds(owner, root):
                root = owner
        frame = frame.f_back
    return unwrap(root)


def _read_self(frame: types.FrameType) -> object:
    """Return `self` of a call. Before Python 3.13, `f_locals` keeps all variables alive until the call is over."""
    variables = frame.f_locals
    owner: object = variables.get("self")
    if sys.version_info < (3, 13):
        variables.clear()
    return owner


def calls_under_way() -> list[tuple[nn.Module, types.FrameType]]:
    """Return the modules whose calls are under way in this thread and the frames of these calls, outermost first."""
    found: list[tuple[nn.Module, types.FrameType]] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            found.append((frame.f_locals["self"], frame))
        frame = frame.f_back
    return found[::-1]


def find_line() -> str:
    """Return the innermost line of the script that is running, as `train.py:12`; empty without one."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_SCRIPTS):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def unwrap(module: nn.Module) -> nn.Module:
    """Return what wrappers are around, under whose names a script knows its modules.

    A wrapper is of a library: a model of the script's may well have its only part under such a name.
    """
    for name in _WRAPPED * 2:
        children = dict(get_own_children(module).items())  # those of scripted modules are no dict
        inner = children.get(name)
        if inner is not None and len(children) == 1 and _is_of_library(module):
            module = inner
    return module


def _is_of_library(module: nn.Module) -> bool:
    """Tell whether the class of a module is torch's, ours, or of an installed package."""
    file = getattr(sys.modules.get(type(module).__module__), "__file__", None) or ""
    return file.startswith(_NOT_THE_SCRIPTS) or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _holds(owner: nn.Module, module: nn.Module) -> bool:
    return any(one is module for one in owner.modules())
