"""`GradientSet`: the gradients of some parameters, the loss scale they carry, and the way from 16-bit gradients to float32 masters.

Between backward passes `.grad` holds true, unscaled sums, so that accumulating, clipping and logging need no thought. A backward pass of a
scaled loss adds scaled gradients; therefore `prepare` first multiplies what is there by the same scale (exact for powers of two), and `unscale`
divides the sum. The sums stay right across scales, losses and delayed passes, and DistributedDataParallel reduces complete sums.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .scaler import OverflowCheck, rescale_, unscale_

Pair = tuple[Tensor, Tensor]


class GradientSet:
    """The gradients of `parameters()` (read anew at each call) and of `pairs()`: (16-bit parameter, float32 master).

    A 16-bit parameter's gradient only lives from the backward pass to its end: it is added to the master's gradient in float32 and dropped.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]], pairs: Callable[[], Iterable[Pair]]) -> None:
        self._parameters = parameters
        self._pairs = pairs
        self._carried: Tensor | None = None  # the scale that the gradients carry, 0-dim; None: they are true sums
        self._owed: OverflowCheck | None = None  # the check of delayed passes, filled when the gradients are unscaled

    def prepare(self, scale: Tensor | None) -> None:
        """Make the gradients ready for a backward pass of a loss multiplied by `scale` (None: not scaled)."""
        if self._carried is scale:
            if scale is None:
                self._fold(None, None)
            return
        self.settle()
        if scale is None:
            return
        self._fold(None, None)
        gradients = self._plain_gradients()
        if gradients:
            rescale_(gradients, scale)
        self._carried = scale

    def delay(self, check: OverflowCheck) -> OverflowCheck:
        """Leave the gradients scaled after a pass. Returns the check that will be filled once they are unscaled."""
        if self._owed is None:
            self._owed = check
            check.wait_for(self.settle)
        return self._owed

    def unscale(self, check: OverflowCheck | None) -> None:
        """Divide the gradients by the scale they carry, fold those of 16-bit parameters into their masters, and record overflow in `check`."""
        check = check or self._owed
        gradients = self._plain_gradients()
        if self._carried is not None and gradients:
            unscale_(gradients, self._carried, check)
        self._fold(self._carried, check)
        if self._owed is not None and check is not None and self._owed is not check:
            self._owed.found_inf.copy_(torch.maximum(self._owed.found_inf, check.found_inf.to(self._owed.found_inf.device)))
        self._carried = self._owed = None

    def settle(self) -> None:
        """Unscale what a delayed pass left scaled, and fold what a backward pass outside `scale_loss` left in 16-bit parameters."""
        self.unscale(None)

    def drop(self) -> None:
        """Forget the masters' gradients, and the scale that the others carry."""
        for _, master in self._pairs():
            master.grad = None

    def forget_scale(self) -> None:
        """Say that the gradients were zeroed: nothing carries a scale any more."""
        self._carried = self._owed = None

    def find_nonfinite(self) -> list[Tensor]:
        """Return the parameters (or masters) whose gradients hold inf or NaN. Waits for the device once for each."""
        holders = [*self._parameters(), *(master for _, master in self._pairs())]
        return [holder for holder in holders if holder.grad is not None and not _is_finite(holder.grad)]

    def _plain_gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    def _fold(self, scale: Tensor | None, check: OverflowCheck | None) -> None:
        """Add each 16-bit parameter's gradient, divided by `scale`, to its master's gradient."""
        masters: list[Tensor] = []
        low: list[Tensor] = []
        for parameter, master in self._pairs():
            if parameter.grad is not None:
                masters.append(master)
                low.append(parameter.grad)
                parameter.grad = None
        if not masters:
            return
        full = _to_float32(low, masters)
        if scale is not None:
            unscale_(full, scale, check)
        sums: list[Tensor] = []
        addends: list[Tensor] = []
        for master, gradient in zip(masters, full, strict=True):
            if master.grad is None:
                master.grad = gradient
            elif gradient.layout == torch.strided and master.grad.layout == torch.strided:
                sums.append(master.grad)
                addends.append(gradient)
            else:
                master.grad = master.grad + gradient
        if sums:
            torch._foreach_add_(sums, addends)


def _to_float32(low: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Tensor]:
    """Return float32 copies of gradients, in one kernel for each (device, dtype)."""
    result: list[Tensor] = []
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for gradient, master in zip(low, masters, strict=True):
        if gradient.layout != torch.strided:
            result.append(gradient.float())
            continue
        full = torch.empty_like(master, requires_grad=False)
        targets, sources = groups.setdefault((gradient.device, gradient.dtype), ([], []))
        targets.append(full)
        sources.append(gradient)
        result.append(full)
    with torch.no_grad():
        for targets, sources in groups.values():
            torch._foreach_copy_(targets, sources)
    return result


def _is_finite(gradient: Tensor) -> bool:
    values = gradient._values() if gradient.layout == torch.sparse_coo else gradient
    return bool(torch.isfinite(values).all())
