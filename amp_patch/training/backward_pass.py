"""`BackwardPass`: one backward pass of a scaled loss, from the start of its `scale_loss` block until it is judged.

A pass is OPEN while its block runs, CLOSED once the block has ended, and JUDGED when its scaler's update has taken it
into account. Its `found_inf` is complete only when every gradient set it is `scaled_in` has been unscaled; a delayed
pass leaves that to whoever needs the flag.
"""

import enum
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..multi_tensor import clone


class PassState(enum.Enum):
    """Where a backward pass is, as `torch.amp` names the phases of a step."""

    OPEN = "its block runs"
    CLOSED = "its block has ended"
    JUDGED = "the loss scale has been updated for it"


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
        """Tell whether reading it waits for nothing."""
        return self._event is None or bool(self._event.query())

    def value(self) -> float:
        """Return the number. Waits for it, but for no work queued after it."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._tensor.item())


class ScaledGradients(Protocol):
    """What a pass knows of gradients that carry its scale."""

    def unscale(self) -> None:
        """Divide by the scale, and fill the `found_inf` of the passes."""

    def resume(self) -> None:
        """Scale again for the rest of a pass under way."""

    @property
    def is_unreduced(self) -> bool:
        """Whether they wait for a pass that reduces them over the ranks."""

    def drop_pass(self, backward_pass: "BackwardPass") -> None:
        """Look at nothing for that pass any more."""


class BackwardPass:
    """One backward pass of a loss multiplied by a scaler's scale.

    Attributes:
        scaler: the `LossScaler` whose scale it is.
        found_inf: 0-dim float32 tensor on the device of the loss, 1.0 if a gradient that the pass added is inf or NaN.
        state: see `PassState`.
        scaled_in: gradient sets that hold gradients of this pass nobody has looked at.
        awaited_by: windows of the optimizers whose next step depends on it, by identity.
        is_delayed: its gradients stay scaled at its end.
    """

    __slots__ = ("_reading", "awaited_by", "found_inf", "is_delayed", "scaled_in", "scaler", "state")

    def __init__(self, scaler: Any, device: torch.device, *, is_delayed: bool = False) -> None:
        self.scaler = scaler
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self.state = PassState.OPEN
        self.scaled_in: list[ScaledGradients] = []
        self.awaited_by: list[object] = []
        self.is_delayed = is_delayed
        self._reading: EarlyReading | None = None

    @property
    def is_open(self) -> bool:
        """Whether gradients may still come."""
        return self.state is PassState.OPEN

    def close(self) -> None:
        """Say that its block has ended. Harmless twice, and once it is judged."""
        if self.state is PassState.OPEN:
            self.state = PassState.CLOSED

    @property
    def is_due(self) -> bool:
        """Whether an update may judge it: its block has ended, and no gradient of it waits to be reduced."""
        return self.state is PassState.CLOSED and not any(gradients.is_unreduced for gradients in self.scaled_in)

    def complete(self) -> None:
        """Have all its gradients unscaled, so that `found_inf` is final, but for those that wait to be reduced.

        Waits for nothing.
        """
        for gradients in tuple(self.scaled_in):
            if not gradients.is_unreduced:
                gradients.unscale()
                gradients.resume()

    def withdraw(self) -> None:
        """Take the pass out of all accounts: its body has failed."""
        self.state = PassState.JUDGED
        for gradients in tuple(self.scaled_in):
            gradients.drop_pass(self)
        self.scaled_in.clear()
        self.awaited_by.clear()

    def overrule(self, found_inf: Tensor) -> None:
        """Take the flag of all ranks together for that of this pass, which is closed."""
        self.close()
        self.found_inf, self._reading = found_inf, None

    def read_early(self) -> EarlyReading:
        """Send `found_inf`, as it is by now, to the host. Waits for nothing."""
        if not self.is_open:
            self.complete()
        if self.is_open or self.scaled_in:  # there may be more to come
            return EarlyReading(clone(self.found_inf))
        if self._reading is None:
            self._reading = EarlyReading(self.found_inf)
        return self._reading

    def is_overflow(self) -> bool:
        """Tell whether any gradient element that the pass added is inf or NaN. Waits for the device, the first time
        after the pass.
        """
        return bool(self.read_early().value())


def combine_found_inf(passes: Sequence[BackwardPass]) -> Tensor:
    """Return whether any of `passes`, at least one, found an overflow: 0-dim float32, 0.0 or 1.0, on the device of the
    first. Waits for nothing.
    """
    found_inf = passes[0].found_inf
    for other in passes[1:]:
        found_inf = torch.maximum(found_inf, other.found_inf.to(found_inf.device))
    return found_inf
