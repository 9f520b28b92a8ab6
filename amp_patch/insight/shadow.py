"""`Shadow`: measures, in a run in float32, the errors that ops would have in 16 bits.

Each op that can be repeated runs once more, in 16 bits and on inputs that are rounded to 16 bits. So the error of its
kernel counts, too, such as the rounding of each addition in index_add. Two kinds of ops run in float32 instead, and
their results are rounded: *products*, such as matrix products and convolutions, whose 16-bit kernels add in float32;
and ops that raise an error in 16 bits. The error is kept until the backward pass, where the gradient of the result
shows how much the error matters.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..casting import cast_tree
from ..config import op_lists
from ..native import as_written
from .ops import random_numbers_kept
from .records import LowOpRecord
from .tensors import tensors_in

Function = Callable[..., Any]


@dataclass(slots=True)
class _Sums:
    """The errors of one op in one module, over all its calls or over its calls at one line of the script.

    `LowOpRecord` explains the attributes.
    """

    is_listed: bool
    overflow_in: float = 0.0
    overflow: float = 0.0
    error: float = 0.0
    gradient_error: float = 0.0
    gradient: float = 0.0
    effect: float = 0.0
    backward_error: float = 0.0


class LowResults(NamedTuple):
    """The results of a function from rounded inputs.

    Attributes:
        overflow_in: the largest share of the values of an input that overflow in 16 bits.
        tensors: the results; empty if the function cannot run on rounded inputs.
        call: makes the call again, to measure its backward pass. None if gradients are disabled or no input is rounded,
            and for products, whose backward passes are products, too.
    """

    overflow_in: float
    tensors: list[Tensor]
    call: "_LowCall | None" = None


class _LowCall:
    """A call on inputs in 16 bits, which it holds until the backward pass."""

    def __init__(self, function: Function, args: Any, kwargs: Any, low: dict[int, Tensor]) -> None:
        self._function = function
        self._args, self._kwargs = cast_tree([args, kwargs], functools.partial(_pick, by_id=low))
        self._inputs = list(low.values())

    def find_backward_error(self, gradient: Tensor, index: int) -> float:
        """Return the relative error (L2) of the gradients of the inputs if the backward pass runs in 16 bits.

        `gradient` is the gradient of the result `index` of the call. Inputs whose gradients are not finite in 16 bits
        are left out; if none is left, the error is 0. The other gradients count as one vector, because a single one may
        be nothing but rounding error, as the gradient of the keys' bias in attention is.
        """
        low = self._inputs[0].dtype
        rounded = gradient.detach().to(low)
        exact_gradients = self._find_gradients(rounded.float(), index, torch.float32)
        gradients = self._find_gradients(rounded, index, low)
        pairs = [
            (exact.flatten(), from_low.float().flatten())
            for exact, from_low in zip(exact_gradients, gradients, strict=True)
            if exact is not None and from_low is not None and from_low.isfinite().all()
        ]
        if not pairs:
            return 0.0
        exact, from_low = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return _relative(from_low - exact, exact)

    def _find_gradients(self, gradient: Tensor, index: int, dtype: torch.dtype) -> Sequence[Tensor | None]:
        leaves: list[Tensor] = []

        def make_leaf(tensor: Tensor) -> Tensor:
            if all(tensor is not given for given in self._inputs):
                return tensor
            leaves.append(tensor.to(dtype).requires_grad_())
            return leaves[-1].clone()  # the function may write to it, which autograd refuses for a leaf

        with random_numbers_kept(self._inputs), torch.enable_grad(), as_written():
            args, kwargs = cast_tree([self._args, self._kwargs], make_leaf)
            result = list(tensors_in([self._function(*args, **kwargs)]))[index]
            return torch.autograd.grad(result, leaves, gradient.to(result.dtype), allow_unused=True)


class Shadow:
    """Collects the errors of calls, for each module and op.

    Args:
        low: the 16-bit dtype.
        get_scale: returns the loss scale that gradients carry.
    """

    def __init__(self, low: torch.dtype, get_scale: Callable[[], float]) -> None:
        self.low = low
        self._get_scale = get_scale
        self._sums: dict[tuple[str, str, str], _Sums] = {}  # by module, op and site
        self._handles: list[RemovableHandle] = []

    def records(self) -> list[LowOpRecord]:
        """Return the errors so far."""
        return [LowOpRecord(module, op, **asdict(sums), site=site) for (module, op, site), sums in self._sums.items()]

    def end_step(self) -> None:
        """Drop the tensors of the step."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def run(self, module: str, op: str, function: Function, args: Any, kwargs: Any, *, is_listed: bool) -> Any:
        """Call a function, measure its errors in 16 bits, and return the result of the call."""
        low = self.run_low(op, function, args, kwargs)
        result = function(*args, **kwargs)
        self.compare(module, op, low, result, is_listed=is_listed)
        return result

    def run_low(self, op: str, function: Function, args: Any, kwargs: Any) -> "LowResults | None":
        """Return the results of a function on rounded inputs. None if a second call would differ even on equal inputs.

        Use this before the call itself, which may write to its arguments.
        """
        if _cannot_run_again(op, [*args, *kwargs.values()]):
            return None
        given = [tensor for tensor in tensors_in([*args, *kwargs.values()]) if _is_plain(tensor)]
        with torch.no_grad():
            rounded = {id(tensor): self._round(tensor) for tensor in given}
            shares = [_share(_overflows(tensor, rounded[id(tensor)])) for tensor in given]
        results, call = self._run_low(function, args, kwargs, given, rounded), None
        if given and torch.is_grad_enabled() and not _is_product(function):
            low = {key: tensor.to(self.low) for key, tensor in rounded.items()}
            call = _LowCall(function, args, kwargs, low)
        return LowResults(max(shares, default=0.0), results, call)

    def compare(
        self, module: str, op: str, low: "LowResults | None", result: Any, *, is_listed: bool, site: str = ""
    ) -> None:
        """Add the errors of a call.

        Args:
            low: the result of `run_low`.
            result: the result of the call itself.
            site: the line of the script, if each line is to have a record of its own; else "".
        """
        if low is None or not any(map(_is_plain, tensors_in([result]))):
            return
        sums = self._sums.setdefault((module, op, site), _Sums(is_listed))
        if not low.tensors:
            return
        with torch.no_grad(), contextlib.suppress(Exception):
            sums.overflow_in = max(sums.overflow_in, low.overflow_in)
            for index, (tensor, from_rounded) in enumerate(zip(tensors_in([result]), low.tensors, strict=True)):
                is_alike = tensor.shape == from_rounded.shape and from_rounded.is_floating_point()
                if _is_plain(tensor) and is_alike and tensor.numel():
                    self._compare(sums, tensor, self._round(from_rounded), low.call, index)

    def _run_low(
        self, function: Function, args: Any, kwargs: Any, given: Sequence[Tensor], rounded: dict[int, Tensor]
    ) -> list[Tensor]:
        """Return the results of a function on rounded inputs; [] if it cannot run on them."""
        attempts = [rounded]
        if not _is_product(function):
            low = {key: tensor.to(self.low) for key, tensor in rounded.items()}
            attempts.insert(0, low)
        for inputs in attempts:
            copies = {key: tensor.clone() for key, tensor in inputs.items()}  # the function may write them
            # restore the random numbers, so that the call itself draws the same as without a shadow
            with random_numbers_kept(given), torch.no_grad(), as_written(), contextlib.suppress(Exception):
                low_args, low_kwargs = cast_tree([args, kwargs], functools.partial(_pick, by_id=copies))
                return list(tensors_in([function(*low_args, **low_kwargs)]))
        return []

    def _round(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.low).float()

    def _compare(self, sums: _Sums, tensor: Tensor, low: Tensor, call: _LowCall | None, index: int) -> None:
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
            if call is not None:
                with contextlib.suppress(Exception):  # the function has no backward pass in 16 bits
                    sums.backward_error = max(sums.backward_error, call.find_backward_error(gradient, index))

        self._handles.append(tensor.register_hook(measure_effect))


def _is_product(function: Function) -> bool:
    return op_lists.is_product(getattr(function, "__name__", ""))


def _pick(tensor: Tensor, by_id: dict[int, Tensor]) -> Tensor:
    """Return the entry of a tensor in `by_id`, or else a copy of the tensor, because the function may write to it."""
    known = by_id.get(id(tensor))
    return tensor.clone() if known is None else known


def _cannot_run_again(op: str, values: Sequence[Any]) -> bool:
    """Return whether a second call would differ: it returns uninitialized memory, or draws from the user's
    generator.
    """
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
