"""`GradientReads`: notices gradients that a script measures or clamps itself while a GradScaler scales them.

It patches functions of torch from the end of a scaled backward pass until the next call of the GradScaler, or the next
region of autocast, so that a forward pass meets no patch.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..casting import compiling
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
"""Functions whose result on gradients depends on the scale, and the kind of misuse. The last two are called by
`clip_grad_value_`.
"""


_ORIGINALS = {(owner, name): getattr(owner, name) for owner, name, _ in _READERS}

_ALWAYS = 10
"""Scaled backward passes at the start of a run. Patching takes 0.3 ms, which small steps would feel."""


class GradientReads:
    """The tensors that were measured or clamped since the last call of `clear`."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Kind, str]] = {}  # by the address of the data
        self._patcher: Patcher | None = None

    def begin(self, count: int) -> None:
        """Patch torch, until `end`. `count`: the number of scaled backward passes so far.

        Later in a run, it patches only after those passes after which scripts log: of steps that are multiples of ten.
        """
        if count > _ALWAYS and count % 10 > 1:
            return
        if self._patcher is None:
            self._patcher = Patcher()
            # not on top of a session's patch, which may be undone before this one
            readers = [reader for reader in _READERS if getattr(*reader[:2]) is _ORIGINALS[reader[:2]]]
            patches = [Patch(owner, name, self._noting(kind)) for owner, name, kind in readers]
            # which knows torch's functions by their identity
            self._patcher.install([*patches, Patch(torch.jit, "script", self._end_before)])

    def end(self) -> None:
        """Undo the patches."""
        if self._patcher is not None:
            self._patcher.undo()
            self._patcher = None

    def clear(self) -> None:
        """Forget what was read."""
        self._found.clear()

    def find(self, parameters: Iterable[Tensor]) -> tuple[Kind, str] | None:
        """Return the kind and the line of a call that read the gradient of one of these parameters, or None."""
        if not self._found:
            return None
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.layout is torch.strided and gradient.data_ptr() in self._found:
                return self._found[gradient.data_ptr()]
        return None

    def _end_before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.end()
            return original(*args, **kwargs)

        return call

    def _noting(self, kind: Kind) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def factory(original: Callable[..., Any]) -> Callable[..., Any]:
            def read(*args: Any, **kwargs: Any) -> Any:
                if not compiling.is_compiling():
                    self._note(kind, args[0] if args else kwargs.get("input"), sys._getframe(1).f_code.co_filename)
                return original(*args, **kwargs)

            return read

        return factory

    def _note(self, kind: Kind, read: Any, caller: str) -> None:
        # clip_grad_norm_ is noticed by itself, and may only measure
        if kind is Kind.READ and caller == _CLIP_FILE:
            return
        for tensor in [read] if isinstance(read, Tensor) else read if isinstance(read, (list, tuple)) else ():
            # a gradient has no history, unless it was made with create_graph=True
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.grad_fn is None:
                self._found.setdefault(tensor.data_ptr(), (kind, find_line()))
