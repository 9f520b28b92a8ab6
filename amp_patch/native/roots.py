"""Searches the Python stack for the model of a called module, for calls of modules, and for lines of the script."""

import functools
import sys
import types
from pathlib import Path

import torch
from torch import nn

from ..torch_private import MODULE_CALL, get_own_children

_PACKAGES = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent.parent}/")

_WRAPPED = ("module", "_orig_mod")
"""Attributes in which wrappers hold the model: `DistributedDataParallel.module`, and `_orig_mod` of torch.compile."""


def find_root(module: nn.Module) -> nn.Module:
    """Return the model of a module that is being called.

    The model is the outermost module that contains `module` and has a method on the Python stack, without wrappers such
    as DistributedDataParallel (see `unwrap`). Any method whose first argument is `self` counts, not only `forward`,
    because trainers call methods such as `training_step`. If no such module is on the stack, `module` itself is the
    model.
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
    """Return the local variable `self` of a frame, or None if it is deleted."""
    # before Python 3.13, reading `f_locals` makes a dict that keeps all variables alive until the call is over
    variables = frame.f_locals
    owner: object = variables.get("self")
    if sys.version_info < (3, 13):
        variables.clear()
    return owner


def calls_under_way() -> list[tuple[nn.Module, types.FrameType]]:
    """Return the modules whose calls are under way in this thread, each with the frame of its call. The outermost call
    comes first.
    """
    calls: list[tuple[nn.Module, types.FrameType]] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            calls.append((frame.f_locals["self"], frame))
        frame = frame.f_back
    return calls[::-1]


def find_line() -> str:
    """Return the innermost line on the stack outside torch and this package, usually a line of the script, such as
    `train.py:12`. Return "" if there is none.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    return "" if frame is None else f"{_name_file(frame.f_code.co_filename)}:{frame.f_lineno}"


@functools.lru_cache(maxsize=256)
def _name_file(path: str) -> str:
    return Path(path).name


def is_in_library() -> bool:
    """Return whether the innermost code on the stack outside torch and this package is in `site-packages`."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    parts = () if frame is None else Path(frame.f_code.co_filename).parts
    return not {"site-packages", "dist-packages"}.isdisjoint(parts)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the model inside wrappers such as DistributedDataParallel.

    Only classes of libraries count as wrappers: the script's own model may have a single child named `module`.
    """
    for name in _WRAPPED * 2:  # twice, because either wrapper may be inside the other
        children = dict(get_own_children(module).items())  # scripted modules keep their children in another type
        inner = children.get(name)
        if inner is not None and len(children) == 1 and _is_of_library(module):
            module = inner
    return module


def _is_of_library(module: nn.Module) -> bool:
    """Return whether the class of a module is defined in torch, in this package, or in an installed package."""
    file = getattr(sys.modules.get(type(module).__module__), "__file__", None) or ""
    return file.startswith(_PACKAGES) or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _holds(owner: nn.Module, module: nn.Module) -> bool:
    return any(part is module for part in owner.modules())
