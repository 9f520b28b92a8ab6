"""`LossScaler`: multiply the loss, divide the gradients, and decide after each step what the next scale is.

The state is two 0-dim tensors on the device of the loss, so that neither scaling nor unscaling waits for the device.
Reading a value back (`loss_scale()`, `state_dict()`, `OverflowCheck.is_overflow()`) does, unless it was sent to the
host before. The scaler knows no optimizer.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..multi_tensor import group
from ..torch_private import foreach_mul_, foreach_non_finite_check_and_unscale_, get_sparse_values, update_scale_

GROWTH_FACTOR = 2.0
BACKOFF_FACTOR = 0.5
GROWTH_INTERVAL = 2000
"""Good steps before the scale doubles, and the factors: the values Apex and torch.amp.GradScaler both use."""

INIT_SCALE = 2.0**16


class EarlyReading:
    """A number on its way from a 0-dim tensor to the host. From a CUDA device it arrives with the work queued before
    it; elsewhere it is read when it is asked for.
    """

    __slots__ = ("_event", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            with torch.cuda.device(tensor.device):
                self._tensor = torch.empty((), dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()

    def is_here(self) -> bool:
        """Tell whether there is any use in asking later."""
        return self._event is None or bool(self._event.query())

    def value(self) -> float:
        """Return the number. Waits for it, but for no work queued after it."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._tensor.item())


class OverflowCheck:
    """Whether the gradients of one backward pass were finite.

    `found_inf` is a 0-dim float32 tensor, 0.0 or 1.0, on the device of the loss; the scaler's unscaling writes it.
    """

    __slots__ = ("_reading", "_unsettled", "found_inf", "is_open", "scaler")

    def __init__(self, scaler: "LossScaler", device: torch.device) -> None:
        self.scaler = scaler
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self.is_open = (
            False  # while the backward pass is still to come, or under way, no decision takes the check into account
        )
        self._reading: EarlyReading | None = None
        self._unsettled: list[Callable[[], None]] = []

    def wait_for(self, settle: Callable[[], None]) -> None:
        """Call `settle` before the flag is read: it unscales gradients that a delayed pass left scaled."""
        self._unsettled.append(settle)

    def settle(self) -> None:
        """Have every gradient of this pass unscaled, so that the flag is complete."""
        while self._unsettled:
            self._unsettled.pop()()

    def read_early(self) -> EarlyReading:
        """Send the flag, as it is by now, to the host. Waits for nothing."""
        if self.is_open:  # there may be more to come
            return EarlyReading(self.found_inf.clone())
        self.settle()
        if self._reading is None:
            self._reading = EarlyReading(self.found_inf)
        return self._reading

    def is_overflow(self) -> bool:
        """Tell whether any gradient element was inf or NaN. Waits for the device, the first time after the pass."""
        return bool(self.read_early().value())


class LossScaler:
    """A static or dynamic loss scale, as of Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2.

    Dynamic: start at 2**16 (or the bound that excludes it), halve after a step with a non-finite gradient, double after
    2000 good steps in a row, stay within [min_loss_scale, max_loss_scale]. There is one decision per optimizer step,
    however many backward passes led to it.
    """

    def __init__(
        self,
        loss_scale: float | Literal["dynamic"],
        *,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        growth_interval: int = GROWTH_INTERVAL,
    ) -> None:
        self.is_dynamic = loss_scale == "dynamic"
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        self.growth_interval = growth_interval
        start = (
            max(min(max_loss_scale, INIT_SCALE), min_loss_scale or 0.0)
            if loss_scale == "dynamic"
            else float(loss_scale)
        )
        self._scale = torch.tensor(start, dtype=torch.float32)
        self._good_steps = torch.zeros((), dtype=torch.int32)
        self.is_identity = not self.is_dynamic and start == 1.0
        self._undecided: list[OverflowCheck] = []

    @property
    def scale(self) -> Tensor:
        """The scale as a 0-dim float32 tensor where it was last used.

        It never changes in place: a later decision makes a new tensor.
        """
        return self._scale

    def scale_on(self, device: torch.device) -> Tensor:
        """Move the scale to `device` and return it."""
        if self._scale.device != device:
            self._scale = self._scale.to(device)
            self._good_steps = self._good_steps.to(device)
        return self._scale

    def open_check(self, device: torch.device) -> OverflowCheck:
        """Return the check of a new backward pass; the next decision takes it into account."""
        check = OverflowCheck(self, device)
        self._undecided.append(check)
        return check

    def decide(self) -> None:
        """Update the scale once for all checks since the last decision; without any, do nothing. Waits for nothing."""
        self._scale, self._good_steps = self._next_state()
        self._undecided = [check for check in self._undecided if check.is_open]

    def discard(self, check: OverflowCheck) -> None:
        """Leave a check out of the next decision: its backward pass has failed."""
        self._undecided = [other for other in self._undecided if other is not check]

    def _next_state(self) -> tuple[Tensor, Tensor]:
        """The state after a decision: what `decide` installs, and what readers are told while a decision is due."""
        due = [check for check in self._undecided if not check.is_open]
        if not due:
            return self._scale, self._good_steps
        for check in due:  # a delayed pass is judged when its gradients are unscaled
            check.settle()
        scale, good_steps = self._scale.clone(), self._good_steps.clone()
        if not self.is_dynamic:
            return scale, good_steps + 1
        found_inf = combine_flags(due).to(scale.device)
        update_scale_(scale, good_steps, found_inf, GROWTH_FACTOR, BACKOFF_FACTOR, self.growth_interval)
        # the smallest normal number stands in for "no minimum": a scale of 0 would turn every gradient into NaN for
        # good
        return scale.clamp_(self.min_loss_scale or torch.finfo(torch.float32).tiny, self.max_loss_scale), good_steps

    def loss_scale(self) -> float:
        """Return the scale that the next backward pass will use. Waits for the device."""
        return float(self._next_state()[0].item())

    def set_loss_scale(self, loss_scale: float) -> None:
        """Multiply the next losses by `loss_scale`, also under a static scale. A decision that is due is taken first.

        Raises ValueError unless it is finite and positive.
        """
        if not (math.isfinite(loss_scale) and loss_scale > 0):
            raise ValueError(f"loss_scale={loss_scale} must be finite and positive")
        self.decide()
        self._scale = torch.tensor(float(loss_scale), dtype=torch.float32, device=self._scale.device)
        self.is_identity = not self.is_dynamic and loss_scale == 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return `{"loss_scale": float, "unskipped": int}`, the entry Apex writes. Waits for the device."""
        scale, good_steps = self._next_state()
        return {"loss_scale": float(scale.item()), "unskipped": int(good_steps.item())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a scale and the number of good steps since it last changed. Raises KeyError, TypeError or
        ValueError on anything else.

        A static scale stays what it was set to: what another run had found by then is no reason to change it.
        """
        scale, unskipped = float(state["loss_scale"]), int(state["unskipped"])
        if not (math.isfinite(scale) and scale > 0 and unskipped >= 0):
            raise ValueError(
                f"loss_scale must be finite and positive and unskipped not negative, not {scale} and {unskipped}"
            )
        self._undecided.clear()
        if self.is_dynamic:
            self._scale = torch.tensor(scale, dtype=torch.float32, device=self._scale.device)
        # at the interval or beyond it the equality test of the growth rule would never hold again
        self._good_steps = torch.tensor(
            min(unskipped, self.growth_interval - 1) if self.is_dynamic else unskipped, dtype=torch.int32
        )
        self._good_steps = self._good_steps.to(self._scale.device)


def combine_flags(checks: Sequence[OverflowCheck]) -> Tensor:
    """Return whether any of `checks`, at least one, found an overflow: 0-dim float32, 0.0 or 1.0, on the device of the
    first. Waits for nothing.
    """
    found_inf = checks[0].found_inf
    for check in checks[1:]:
        found_inf = torch.maximum(found_inf, check.found_inf.to(found_inf.device))
    return found_inf


def unscale_(gradients: Sequence[Tensor], scale: Tensor, check: OverflowCheck | None) -> None:
    """Divide `gradients` by `scale` in place, one read and one write each, and record in `check` whether any element
    was inf or NaN.

    Gradients may be of any floating or complex dtype, dense or sparse, on any devices. `scale` is 0-dim float32. Waits
    for nothing.
    """
    groups = group(map(dense_values, gradients))
    if not groups:
        return
    inverse = (
        scale.double().reciprocal().float() if scale.device.type != "mps" else scale.reciprocal()
    )  # MPS has no float64
    for (values,) in groups:
        device = values[0].device
        found_inf = (
            torch.zeros((), dtype=torch.float32, device=device)
            if check is None or check.found_inf.device != device
            else check.found_inf
        )
        foreach_non_finite_check_and_unscale_(values, found_inf, inverse.to(device))
        if check is not None and found_inf is not check.found_inf:
            check.found_inf.copy_(torch.maximum(check.found_inf, found_inf.to(check.found_inf.device)))


def rescale_(gradients: Sequence[Tensor], scale: Tensor) -> None:
    """Multiply `gradients` by `scale` in place, so that a backward pass of a loss scaled by it may add to them."""
    for (values,) in group(map(dense_values, gradients)):
        foreach_mul_(values, scale.to(values[0].device))


def dense_values(gradient: Tensor) -> Tensor:
    """Return the values that a gradient stores, real, in the same memory: those of a sparse one without its zeros."""
    values = get_sparse_values(gradient) if gradient.layout == torch.sparse_coo else gradient
    return torch.view_as_real(values) if values.is_complex() else values
