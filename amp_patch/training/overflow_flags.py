"""`OverflowFlags`: the flags on which the next step of an optimizer depends; `Block`: one `scale_loss` block.

`found_inf` is a flag as in torch.amp: a 0-dim float32 tensor, 1.0 if a check found inf or NaN, else 0.0. There is one
for each block (`Block`), one for each pair of an optimizer and a scaler (`OverflowFlags`), and one for each scaler
(`LossScaler`). The check of a block reports to the block, and the block to its optimizers and its scaler.
"""

import enum
import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from .groups import Groups
from .loss_scaler import LossScaler
from .split_masters import open_gradients
from .unscaling import either, unscale_


class OptState(enum.Enum):
    """The state of an optimizer between two steps. Blocks of its partners (optimizers that share a parameter with it)
    count as its own.
    """

    READY = enum.auto()
    """It is new, or has stepped, or its gradients were zeroed outside of its blocks. No block of it has begun since."""

    PENDING = enum.auto()
    """A `scale_loss` block of this optimizer has begun."""

    UNCHECKED = enum.auto()
    """It has gradients that no block of this optimizer has checked. Its next block with a loss scale checks them, or
    its next step if the scale is dynamic.

    For example, they are from a backward pass outside of `scale_loss`, or from before `initialize`.
    """


class OverflowFlags:
    """The overflow flags of one optimizer since its last step.

    Attributes:
        groups: the parameter groups of the optimizer.
        found_inf: a flag for each scaler whose blocks have reported to this optimizer since its last step or
            `zero_grad`. If the scaler is dynamic and its flag is set, the next step is skipped.
        state: the state of the optimizer between two steps.
        was_zeroed: whether gradients were zeroed after a block had checked them. A script may have saved them, and may
            put them back (PCGrad and other gradient surgery). Under a dynamic scale, the next step checks again.
        was_passed: whether a `scale_loss` block with this optimizer, or with a partner, was ever entered.
        partners: the flags of the optimizers that share a parameter with this one. An overflow counts for all of them.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.found_inf: dict[LossScaler, Tensor] = {}
        self.state = OptState.READY
        self.was_zeroed = False
        self.was_passed = False
        self.partners: list[OverflowFlags] = []

    def add_found_inf(self, scaler: LossScaler, found_inf: Tensor) -> None:
        """Add the flag of a block to the flag of its scaler, on which the next step depends.

        If the flags of a partner already show an overflow in a shared parameter, `mask` may have removed it from the
        flag of the block. So the flags of partners are added, too.
        """
        for partner in self.partners:
            for flag in partner.found_inf.values():
                found_inf = either(flag, found_inf)
        self.found_inf[scaler] = either(self.found_inf.get(scaler), found_inf)

    def mask(self, found_inf: Tensor) -> Tensor:
        """Return `found_inf`, or 0.0 if a flag of this optimizer is set already.

        A sum of gradients that held inf or NaN before the last pass still holds it, so a check cannot tell whether that
        pass has overflowed. Unmasked, one overflow could lower the scales of all scalers with a pass before the step.
        """
        for flag in self.found_inf.values():
            found_inf = found_inf * (1.0 - flag.to(found_inf.device))
        return found_inf

    def clear(self) -> None:
        """Forget all flags after a step, taken or skipped."""
        self.found_inf = {}
        self.state = OptState.READY
        self.was_zeroed = False

    def will_skip(self) -> bool:
        """Return whether the next step will be skipped, as far as blocks have checked. Waits for the device."""
        return any(scaler.is_dynamic and bool(found_inf) for scaler, found_inf in self.found_inf.items())

    def check_at_step(self, scalers: Iterable[LossScaler]) -> dict[LossScaler, Tensor]:
        """Return the flags on which the step depends, by scaler.

        If the state is UNCHECKED, or gradients were zeroed, check the present gradients now: the returned flags of all
        dynamic `scalers` include the result. `found_inf` itself stays as it is.
        """
        if self.state is not OptState.UNCHECKED and not self.was_zeroed:
            return self.found_inf
        dynamic = [scaler for scaler in scalers if scaler.is_dynamic]
        if not dynamic:  # a static scale skips no step, so the check is not needed
            return self.found_inf
        found_inf = torch.zeros((), dtype=torch.float32, device=dynamic[0].scale.device)
        check_(self.groups.parameters(), found_inf)
        flags = dict(self.found_inf)
        # it is not known which scaler's loss left these gradients, and any dynamic flag skips the step
        for scaler in dynamic:
            flags[scaler] = either(flags.get(scaler), found_inf)
        return flags


def check_(holders: Iterable[Tensor], found_inf: Tensor) -> None:
    """Set `found_inf` (0-dim float32) to 1.0 if a gradient of these tensors holds inf or NaN. Does not wait for the
    device.
    """
    gradients: list[Tensor] = []
    holders = list(holders)
    open_gradients(holders)
    for holder in holders:
        if holder.grad is not None:
            gradients.append(holder.grad)
    unscale_(gradients, torch.ones_like(found_inf), found_inf)


class Block:
    """One `scale_loss` block and its backward pass.

    Attributes:
        scaler: the scaler of its loss.
        scale: the factor of its loss, 0-dim float32. None means 1.
        affected: the flags of the optimizers whose next step is skipped if the block overflows under a dynamic scale.
        found_inf: 0-dim float32, 1.0 if a check found an overflow so far. None means that nothing was checked yet.
        stepped: the flags of its optimizers that have stepped since the block began.
        has_failed: whether the block ended with an exception, or never reached its end. Its loss may not have gone
            backward then.
        thread: the id of the thread that made the block.
    """

    def __init__(self, scaler: LossScaler, all_flags: Iterable[OverflowFlags]) -> None:
        self.scaler = scaler
        self.scale: Tensor | None = None
        self.affected: list[OverflowFlags] = []
        for flags in all_flags:
            # the step of a partner would also write an overflow in a shared parameter into the weights
            for affected in (flags, *flags.partners):
                if affected not in self.affected:
                    self.affected.append(affected)
        self.found_inf: Tensor | None = None
        self.stepped: list[OverflowFlags] = []
        self.has_failed = False
        self.thread = threading.get_ident()

    def is_spent(self, flags: OverflowFlags) -> bool:
        """Return whether the flag of this block so far no longer matters to an optimizer.

        This is so if the optimizer has stepped since the block began, or its gradients were zeroed since the block.
        """
        return flags in self.stepped or flags.state is OptState.READY
