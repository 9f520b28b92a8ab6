"""`GradientReads`: notices gradients that a script measures or clamps while they are multiplied by the loss scale.

After the first backward passes of scaled losses, and some of the later ones (see `begin`), it patches functions that
scripts use for this, such as `Tensor.norm`. `ScalerWatch` (`scaler_watch.py`) removes the patches at the next region of
autocast, backward pass, or call of `scale`, `unscale_` or `step`.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..casting import compiling
from ..dtypes import PLAIN_CLASSES
from ..patching import Patch, Patcher
from .misuse import Kind
from .roots import find_line

_CLIP_FILE = torch.nn.utils.clip_grad.__file__

_READERS: tuple[tuple[Any, str, Kind], ...] = (
    (Tensor, "norm", Kind.READ),
    (torch, "norm", Kind.READ),
    (torch, "_foreach_norm", Kind.READ),
    (torch.linalg, "norm", Kind.READ),
    (torch.linalg, "vector_norm", Kind.READ),
    (Tensor, "pow", Kind.READ),
    (Tensor, "__pow__", Kind.READ),
    (Tensor, "square", Kind.READ),
    (Tensor, "std", Kind.READ),
    (Tensor, "histc", Kind.READ),
    (torch, "histc", Kind.READ),
    (Tensor, "clamp", Kind.CLIPPED),
    (torch, "clamp", Kind.CLIPPED),
    (Tensor, "clamp_", Kind.CLIPPED),
    (torch, "clamp_", Kind.CLIPPED),
    (Tensor, "clip_", Kind.CLIPPED),
    (torch, "_foreach_clamp_min_", Kind.CLIPPED),
    (torch, "_foreach_clamp_max_", Kind.CLIPPED),
)
"""The functions to patch, each with the kind of misuse if it is called on scaled gradients.

`clip_grad_value_` may call the last two.
"""

_ORIGINALS = {(owner, name): getattr(owner, name) for owner, name, _ in _READERS}
"""The functions as they were when this module was imported."""

_FIRST_PASSES = 10
"""After the backward passes of this many scaled losses, torch is patched less often: see `GradientReads.begin`.
Patching takes about 0.3 ms, which is much for a small step.
"""


class GradientReads:
    """Records which tensors a script measures or clamps while torch is patched."""

    def __init__(self) -> None:
        # the misuse and the line (`train.py:12`) of the call, by the address of the tensor's data
        self._read: dict[int, tuple[Kind, str]] = {}
        self._patcher: Patcher | None = None

    def begin(self, count: int) -> None:
        """Patch torch, until `end`. `count`: how many scaled losses have gone backward so far.

        After the first ten, patch only if `count` ends in 0 or 1, because many scripts log in every tenth step.
        """
        if count > _FIRST_PASSES and count % 10 > 1:
            return
        if self._patcher is None:
            self._patcher = Patcher()
            # Leave out functions that a session has patched: the session may undo its patches first, but patches must
            # be undone in reverse order.
            patches = [
                Patch(owner, name, self._make_noting(kind))
                for owner, name, kind in _READERS
                if getattr(owner, name) is _ORIGINALS[owner, name]
            ]
            # torch.jit.script knows torch's functions by their identity, so they have to be back when it runs.
            self._patcher.install([*patches, Patch(torch.jit, "script", self._end_before)])

    def end(self) -> None:
        """Undo the patches."""
        if self._patcher is not None:
            self._patcher.undo()
            self._patcher = None

    def clear(self) -> None:
        """Forget the recorded tensors."""
        self._read.clear()

    def find(self, parameters: Iterable[Tensor]) -> tuple[Kind, str] | None:
        """Return the misuse and the line of a call that measured or clamped a gradient of these parameters, or None."""
        if not self._read:
            return None
        for parameter in parameters:
            address = 0 if parameter.grad is None else _find_address(parameter.grad)
            if address in self._read:
                return self._read[address]
        return None

    def _end_before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that undoes the patches and then calls the original."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.end()
            return original(*args, **kwargs)

        return call

    def _make_noting(self, kind: Kind) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a factory of replacements that record their first argument, and then call the original."""

        def replace(original: Callable[..., Any]) -> Callable[..., Any]:
            def read(*args: Any, **kwargs: Any) -> Any:
                if not compiling.is_compiling():
                    self._note(kind, args[0] if args else kwargs.get("input"), sys._getframe(1).f_code.co_filename)
                return original(*args, **kwargs)

            return read

        return replace

    def _note(self, kind: Kind, argument: Any, caller: str) -> None:
        """Record a tensor, or the tensors in a list, that may be gradients. `caller`: the file that makes the call."""
        # `ScalerWatch` notices clip_grad_norm_ itself. It allows calls with a large limit, which only measure the norm.
        if kind is Kind.READ and caller == _CLIP_FILE:
            return
        tensors = [argument] if isinstance(argument, Tensor) else argument
        if not isinstance(tensors, (list, tuple)):
            return
        for tensor in tensors:
            address = _find_address(tensor)
            # A gradient has no grad_fn, unless it was made with create_graph=True.
            if address and tensor.grad_fn is None:
                self._read.setdefault(address, (kind, find_line()))


def _find_address(value: Any) -> int:
    """Return the address of the data of a plain strided tensor; 0 for any other object, and without such an address."""
    if type(value) not in PLAIN_CLASSES or value.layout is not torch.strided:
        return 0
    try:
        return int(value.data_ptr())
    except RuntimeError:  # tensors inside torch.func, for example in torch.func.vmap, have no data
        return 0
