"""`Shadow`: measures in a run in float32 the errors that ops would have in 16 bits.

Each op runs a second time in float32, with inputs that are rounded to 16 bits, and its results are rounded, too. So no
16-bit kernel is needed. The error is kept until the backward pass, where the gradient of the result shows how much the
error matters.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ...casting import cast_tree
from ..ops import random_numbers_kept
from ..records import LowOpRecord
from ..tensors import tensors_in

Function = Callable[..., Any]


@dataclass(slots=True)
class _Sums:
    """The errors of one op in one module, over its calls."""

    is_listed: bool
    overflow_in: float = 0.0
    overflow: float = 0.0
    error: float = 0.0
    gradient_error: float = 0.0
    gradient: float = 0.0
    effect: float = 0.0


class Shadow:
    """Collects the errors of calls, for each module and op.

    Args:
        low: the 16-bit dtype.
        get_scale: returns the loss scale that gradients carry.
    """

    def __init__(self, low: torch.dtype, get_scale: Callable[[], float]) -> None:
        self._low = low
        self._get_scale = get_scale
        self._sums: dict[tuple[str, str], _Sums] = {}
        self._handles: list[RemovableHandle] = []

    def records(self) -> list[LowOpRecord]:
        """Return the errors so far."""
        return [LowOpRecord(module, op, **asdict(sums)) for (module, op), sums in self._sums.items()]

    def end_step(self) -> None:
        """Drop the tensors of the step."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def run(self, module: str, op: str, function: Function, args: Any, kwargs: Any, *, is_listed: bool) -> Any:
        """Call a function, measure its errors in 16 bits, and return the result of the call."""
        if _cannot_run_again(op, [*args, *kwargs.values()]):
            return function(*args, **kwargs)
        given = [tensor for tensor in tensors_in([*args, *kwargs.values()]) if _is_plain(tensor)]
        with torch.no_grad():
            # Before the call, which may write its arguments in place.
            rounded = {id(tensor): self._round(tensor) for tensor in given}
            shares = [_share(_overflows(tensor, rounded[id(tensor)])) for tensor in given]
        shadow: list[Tensor] = []
        # Dropout draws the same numbers in the shadow as in the call. A function may refuse to run twice.
        with random_numbers_kept(given), torch.no_grad(), contextlib.suppress(Exception):
            low_args, low_kwargs = cast_tree([args, kwargs], lambda tensor: rounded.get(id(tensor), tensor))
            shadow = list(tensors_in([function(*low_args, **low_kwargs)]))
        result = function(*args, **kwargs)
        if not any(map(_is_plain, tensors_in([result]))):
            return result
        sums = self._sums.setdefault((module, op), _Sums(is_listed))
        if not shadow:
            return result
        with torch.no_grad(), contextlib.suppress(Exception):
            sums.overflow_in = max((sums.overflow_in, *shares))
            for tensor, low in zip(tensors_in([result]), shadow, strict=True):
                if _is_plain(tensor) and tensor.shape == low.shape and tensor.numel():
                    self._compare(sums, tensor, self._round(low))
        return result

    def _round(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._low).float()

    def _compare(self, sums: _Sums, tensor: Tensor, low: Tensor) -> None:
        exact = tensor.detach()
        sums.overflow = max(sums.overflow, _share(_overflows(exact, low)))
        delta = torch.where(exact.isfinite() & low.isfinite(), low - exact, 0.0)
        sums.error = max(sums.error, _relative(delta, exact))
        if not (tensor.requires_grad and tensor.grad_fn is not None):
            return

        def measure_effect(gradient: Tensor) -> None:
            with torch.no_grad():
                scale = self._get_scale()
                full = gradient.detach().float()
                largest = float(full.abs().amax()) / scale
                if math.isfinite(largest):
                    sums.gradient = max(sums.gradient, largest)
                    # The first-order change of the loss: gradient times error, summed before the absolute value.
                    sums.effect += abs(float((full * delta).sum())) / scale
                    rounded = self._round(full)
                    error = torch.where(rounded.isfinite(), rounded - full, 0.0)
                    sums.gradient_error = max(sums.gradient_error, _relative(error, full))

        self._handles.append(tensor.register_hook(measure_effect))


def _cannot_run_again(op: str, values: Sequence[Any]) -> bool:
    """Return whether a second call would differ: uninitialised memory, or numbers from the user's own generator."""
    is_unwritten = op.rpartition(".")[2].startswith(("empty", "new_empty"))
    return is_unwritten or any(isinstance(value, torch.Generator) for value in values)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.layout is torch.strided


def _overflows(exact: Tensor, low: Tensor) -> Tensor:
    return exact.isfinite() & ~low.isfinite()


def _share(mask: Tensor) -> float:
    if not mask.numel():
        return 0.0
    return float(mask.float().mean())


def _relative(error: Tensor, exact: Tensor) -> float:
    whole = float(torch.linalg.vector_norm(torch.where(exact.isfinite(), exact, 0.0)))
    if not whole:
        return 0.0
    return float(torch.linalg.vector_norm(error)) / whole
