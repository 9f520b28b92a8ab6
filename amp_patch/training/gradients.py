"""`GradientSet`: the gradients of some parameters, the loss scale they carry, and the way from 16-bit gradients to
float32 masters.

Between backward passes `.grad` holds true, unscaled sums, so that accumulating, clipping and logging need no thought. A
backward pass of a scaled loss adds scaled gradients; therefore `enter` first multiplies what is there by the same scale
(exact for powers of two), and `settle` divides the sum. The sums stay right across scales, losses and delayed passes,
and DistributedDataParallel reduces complete sums.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..multi_tensor import copy_, group
from ..torch_private import foreach_add_
from .loss_scaler import OverflowCheck, dense_values, rescale_, unscale_
from .masters import Pair


class GradientSet:
    """The gradients of `parameters()` (read anew at each call) and of `pairs()`: (16-bit parameter, float32 master).

    A 16-bit parameter's gradient only lives from the backward pass to its end: it is added to the master's gradient in
    float32 and dropped.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]], pairs: Callable[[], Collection[Pair]]) -> None:
        self._parameters = parameters
        self._pairs = pairs
        self._carried: Tensor | None = None  # the scale that the gradients carry, 0-dim; None: they are true sums
        self._owed: list[OverflowCheck] = []  # checks of passes whose gradients are still scaled
        self.is_in_block = False  # between enter and leave
        self._block_scale: Tensor | None = None

    @property
    def is_scaled(self) -> bool:
        """Whether the gradients carry a loss scale now."""
        return self._carried is not None

    @property
    def is_idle(self) -> bool:
        """Whether a pass without a loss scale has nothing to do here, neither before nor after: no scale, no check, no
        masters.
        """
        return self._carried is None and not self._owed and not self._pairs()

    def enter(self, scale: Tensor | None) -> None:
        """Make the gradients ready for a backward pass of a loss multiplied by `scale` (0-dim; None: not scaled)."""
        self._prepare(scale)
        self.is_in_block, self._block_scale = True, scale

    def leave(self) -> None:
        """Say that the pass is over. The gradients stay as they are: `settle` unscales them."""
        self.is_in_block, self._block_scale = False, None

    def owe(self, check: OverflowCheck) -> None:
        """Record in `check`, when the gradients are unscaled, whether any was inf or NaN."""
        self._owed.append(check)
        check.wait_for(lambda: self.settle() if self.owes(check) else None)

    def forgive(self, check: OverflowCheck) -> None:
        """Owe `check` nothing any more: its pass has failed."""
        self._owed = [other for other in self._owed if other is not check]

    def owes(self, check: OverflowCheck) -> bool:
        """Tell whether `check` is still to be filled."""
        return any(other is check for other in self._owed)

    def settle(self) -> None:
        """Turn the gradients into true sums and fill the checks owed.

        In the middle of a pass, scale them for the rest of it again.
        """
        self.unscale()
        self.resume()

    def resume(self) -> None:
        """Scale the gradients again for the rest of the pass, after a step in the middle of it."""
        if self.is_in_block:
            self._prepare(self._block_scale)

    def unscale(self) -> None:
        """Divide the gradients by the scale they carry, fold those of 16-bit parameters into their masters, and fill
        the checks owed.
        """
        if self.is_idle:
            return
        scale, self._carried = self._carried, None
        owed, self._owed = (
            self._owed,
            [check for check in self._owed if check.is_open],
        )  # of a pass under way there may be more to come
        check = OverflowCheck(owed[0].scaler, owed[0].found_inf.device) if len(owed) > 1 else owed[0] if owed else None
        if scale is not None:
            unscale_(self._plain_gradients(), scale, check)
        self._fold(scale, check)
        for other in owed:
            if check is not None and other is not check:
                other.found_inf.copy_(torch.maximum(other.found_inf, check.found_inf.to(other.found_inf.device)))

    def _prepare(self, scale: Tensor | None) -> None:
        if self._carried is scale and scale is not None:
            return
        self.unscale()
        if scale is not None:
            rescale_(self._plain_gradients(), scale)
        self._carried = scale

    def is_empty(self) -> bool:
        """Tell whether no parameter and no master has a gradient."""
        if any(parameter.grad is not None for parameter in self._parameters()):
            return False
        return all(parameter.grad is None and master.grad is None for parameter, master in self._pairs())

    def drop(self) -> None:
        """Forget the masters' gradients."""
        for _, master in self._pairs():
            master.grad = None

    def find_nonfinite(self) -> list[Tensor]:
        """Return the parameters (or masters) whose gradients hold inf or NaN. Waits for the device once for each."""
        holders = [*self._parameters(), *(master for _, master in self._pairs())]
        return [holder for holder in holders if holder.grad is not None and not _is_finite(holder.grad)]

    def _plain_gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    @torch.no_grad()
    def _fold(self, scale: Tensor | None, check: OverflowCheck | None) -> None:
        """Add each 16-bit parameter's gradient, divided by `scale`, to its master's gradient."""
        if scale is None:
            _add_each(self._take(is_on_cpu=True))
        pairs = list(self._take())
        if not pairs:
            return
        full = _to_float32([gradient for _, gradient in pairs], [master for master, _ in pairs])
        if scale is not None:
            unscale_(full, scale, check)
        _add_each((master, gradient) for (master, _), gradient in zip(pairs, full, strict=True))

    def _take(self, *, is_on_cpu: bool = False) -> Iterator[Pair]:
        """Take the 16-bit parameters' gradients (only those on a CPU) away and yield them, one by one, with their
        masters.
        """
        for parameter, master in self._pairs():
            gradient = parameter.grad
            if gradient is not None and (gradient.is_cpu or not is_on_cpu):
                parameter.grad = None
                yield master, gradient


def _add_each(pairs: Iterable[Pair]) -> None:
    """Add gradients to those that masters have; dense ones in one call.

    A first one of 16 bits is freed before the next is looked at.
    """
    sums: list[Tensor] = []
    addends: list[Tensor] = []
    for master, gradient in pairs:
        total = master.grad
        if total is None:
            is_alike = gradient.is_sparse or gradient.stride() == master.stride()
            master.grad = gradient.float() if is_alike else _to_float32([gradient], [master])[0]
        elif gradient.is_sparse or total.is_sparse:
            master.grad = (
                gradient.float() + total if total.is_sparse else total + gradient
            )  # the dense one must come first
        else:
            sums.append(total)
            addends.append(gradient)
    if sums:
        foreach_add_(sums, addends)  # a CPU needs no float32 copies to sum up two dtypes


def _to_float32(low: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Tensor]:
    """Return float32 copies of gradients, in one kernel for each (device, dtype)."""
    full = [
        torch.empty_like(master, requires_grad=False) if gradient.layout == torch.strided else gradient.float()
        for gradient, master in zip(low, masters, strict=True)
    ]
    dense = [index for index, gradient in enumerate(low) if gradient.layout == torch.strided]
    copy_(group([full[index] for index in dense], [low[index] for index in dense]))
    return full


def _is_finite(gradient: Tensor) -> bool:
    return bool(torch.isfinite(dense_values(gradient)).all())
