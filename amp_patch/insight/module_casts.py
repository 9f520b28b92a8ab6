"""Notes the lines of a script that cast the weights of modules, such as `model.half()`."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..interrupts import UndoStack
from ..patching import Patch, Patcher
from .sites import find_site

_CASTS = ("half", "bfloat16", "float", "double", "to", "type")

_Call = tuple[int, str, torch.dtype]


class ModuleCasts:
    """The last cast of each parameter and buffer.

    Only methods of modules are noted, and only if they change a dtype. Casts by amp_patch are left out.
    """

    def __init__(self) -> None:
        # The last cast of each tensor, by the module whose method was called and the name of the tensor in it: the
        # number of the call, the text for reports, and the dtype. There is no weak reference to a tensor, because
        # torch.utils.swap_tensors refuses a tensor that has one.
        self._calls: weakref.WeakKeyDictionary[nn.Module, dict[str, _Call]] = weakref.WeakKeyDictionary()
        self._count = 0

    def install(self, undo: UndoStack) -> None:
        """Note casts until `undo` is closed."""
        patcher = Patcher()
        undo.callback(patcher.undo)
        patcher.install([Patch(nn.Module, name, self._make_noting(name)) for name in _CASTS])

    def find(self, tensor: Tensor) -> str:
        """Return the call that cast a parameter or buffer, as `.half() at train.py:6`; "" if none did.

        The tensor is found by its name in the module that was cast. If its dtype is not the one to which the call cast,
        the script has changed the dtype since, and the call does not count.
        """
        calls = [
            by_name[name]
            for module, by_name in self._calls.items()
            for name, own in _tensors_of(module)
            if own is tensor and name in by_name and by_name[name][2] is tensor.dtype
        ]
        return max(calls, key=lambda call: call[0])[1] if calls else ""

    def _make_noting(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def replace(original: Callable[..., Any]) -> Callable[..., Any]:
            def cast(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                before = {name: tensor.dtype for name, tensor in _tensors_of(module)}
                result = original(module, *args, **kwargs)
                self._note(module, name, before)
                return result

            return cast

        return replace

    def _note(self, module: nn.Module, name: str, before: dict[str, torch.dtype]) -> None:
        site = find_site()
        if site.by == "amp":
            return
        self._count += 1
        for key, tensor in _tensors_of(module):
            if before.get(key, tensor.dtype) is not tensor.dtype:
                call = self._count, f".{name}() at {site.place}", tensor.dtype
                self._calls.setdefault(module, {})[key] = call


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


casts = ModuleCasts()
"""The casts in this process, from the call of `note_casts` on."""


def note_casts() -> None:
    """Note the casts of models until the process ends."""
    casts.install(UndoStack())
