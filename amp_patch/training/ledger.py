"""`Ledger`: the overflow flags of one optimizer since its last step; `Block`: those of one `scale_loss` block."""

import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from .groups import Groups
from .loss_scaler import LossScaler
from .unscaling import either, unscale_


class Ledger:
    """The overflow flags of one optimizer, like GradScaler's state per optimizer.

    Every flag is a 0-dim float32 tensor: 1.0 after an overflow, else 0.0. None means that there is no flag yet.

    Attributes:
        flags: one flag for each scaler that scaled a loss of this optimizer since its last step or `zero_grad`. If the
            scaler is dynamic and its flag is set, the next step is skipped.
        to_recheck: scalers whose flags no longer describe the gradients: these were zeroed after the check, or were
            never checked. The next step checks the gradients it finds.
        overflow: whether the sums hold inf or NaN already. A later overflow in the same sums cannot be detected.
        overflow_of_others: whether the loss of another optimizer left inf or NaN in the gradients of these masters. The
            next block with this optimizer reports it.
        partners: the ledgers of optimizers that share a parameter with this one: an overflow counts for all of them.
        has_begun: whether this optimizer was ever passed to `scale_loss`.
        awaits_step: whether a block began since the last step or `zero_grad`.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.flags: dict[LossScaler, Tensor] = {}
        self.to_recheck: dict[LossScaler, None] = {}
        self.overflow: Tensor | None = None
        self.overflow_of_others: Tensor | None = None
        self.partners: list[Ledger] = []
        self.has_begun = False
        self.awaits_step = False

    def note(self, scaler: LossScaler, found_inf: Tensor) -> None:
        """Add the flag of a block: the next step depends on it.

        In a parameter that two optimizers share, an overflow may be new for one of them and not for the other.
        """
        for partner in self.partners:
            if partner.overflow is not None:
                found_inf = either(partner.overflow, found_inf)
        self.flags[scaler] = either(self.flags.get(scaler), found_inf)

    def recheck_at_step(self, scalers: Iterable[LossScaler]) -> None:
        """Have the next step check the gradients it finds, for those of the scalers that may skip it."""
        for scaler in scalers:
            if scaler.is_dynamic:
                self.to_recheck[scaler] = None

    def end_window(self) -> None:
        """Clear all flags, after the optimizer has stepped or skipped a step."""
        self.flags = {}
        self.to_recheck = {}
        self.overflow = None
        self.overflow_of_others = None
        self.awaits_step = False

    def is_overflow(self) -> bool:
        """Return whether the next step will be skipped. Waits for the device."""
        return any(scaler.is_dynamic and bool(found_inf) for scaler, found_inf in self.flags.items())

    def recheck(self) -> dict[LossScaler, Tensor]:
        """Return `flags`, with the present gradients checked on behalf of the scalers in `to_recheck`.

        Gradient surgery (PCGrad) zeroes gradients after each backward pass and steps on a sum of saved copies, which
        may hold an overflow of any of these passes.
        """
        found_inf = torch.zeros((), dtype=torch.float32, device=next(iter(self.to_recheck)).scale.device)
        no_scale = torch.ones_like(found_inf)
        gradients: list[Tensor] = []
        for parameter in self.groups.parameters():
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        unscale_(gradients, no_scale, found_inf)
        flags = dict(self.flags)
        for scaler in self.to_recheck:
            flags[scaler] = either(flags.get(scaler), found_inf)
        return flags


class Block:
    """One `scale_loss` block and its backward pass.

    Attributes:
        scaler: the scaler of its loss.
        scale: the factor of its loss, 0-dim float32. None means 1.
        ledgers: those of the optimizers whose next step an overflow skips.
        found_inf: whether an overflow was found so far, 0-dim float32. None means that nothing was checked yet.
        stepped_early: ledgers of optimizers that stepped before all gradients of the block were checked.
        has_failed: it ended with an exception, so there may have been no backward pass.
        thread: the thread that runs it.
    """

    def __init__(self, scaler: LossScaler, ledgers: Iterable[Ledger]) -> None:
        self.scaler = scaler
        self.scale: Tensor | None = None
        self.ledgers: list[Ledger] = []
        for ledger in ledgers:
            for affected in (ledger, *ledger.partners):
                if affected not in self.ledgers:
                    self.ledgers.append(affected)
        self.found_inf: Tensor | None = None
        self.stepped_early: list[Ledger] = []
        self.has_failed = False
        self.thread = threading.get_ident()
