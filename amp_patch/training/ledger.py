"""`Ledger`: what is known of the gradients of one optimizer; `Block`: of one backward pass."""

import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from .groups import Groups
from .loss_scaler import LossScaler
from .unscaling import either, unscale_


class Ledger:
    """What is known of the gradients of one optimizer.

    Args:
        groups: what the optimizer steps on.

    Attributes:
        flags: for each scaler of a pass since the last step or zeroing its found_inf: whether one of its losses
            overflowed, 0-dim float32, 0.0 or 1.0.
        unchecked: scalers of passes since the last step whose gradients were zeroed, or judged by nobody: the step
            looks at what is there by then.
        overflow: whether one of these passes has overflowed, 0-dim float32; None: there was none.
        unjudged: whether a pass that the optimizer was not passed with has left inf or NaN in gradients of its masters:
            0-dim float32; None: there was none. It counts for the next pass that the optimizer is passed with.
        partners: the ledgers of optimizers with a parameter in common: an overflow counts for all of them.
        has_begun: whether there ever was a block with this optimizer.
        awaits_step: whether there was a pass since its last step or zeroing.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.flags: dict[LossScaler, Tensor] = {}
        self.unchecked: dict[LossScaler, None] = {}
        self.overflow: Tensor | None = None
        self.unjudged: Tensor | None = None
        self.partners: list[Ledger] = []
        self.has_begun = False
        self.awaits_step = False

    def note(self, scaler: LossScaler, found_inf: Tensor) -> None:
        """Have the next step depend on what a pass of a scaler has found.

        In a parameter that another optimizer steps on as well, an overflow may be new to one and not to the other.
        """
        for partner in self.partners:
            if partner.overflow is not None:
                found_inf = either(partner.overflow, found_inf)
        self.flags[scaler] = either(self.flags.get(scaler), found_inf)

    def look_again(self, scalers: Iterable[LossScaler]) -> None:
        """Have the next step look at what is there by then, if one of these scalers may skip it."""
        for scaler in scalers:
            if scaler.is_dynamic:
                self.unchecked[scaler] = None

    def end_window(self) -> None:
        """Forget everything: the optimizer has stepped, or skipped its step."""
        self.flags = {}
        self.unchecked = {}
        self.overflow = None
        self.unjudged = None
        self.awaits_step = False

    def is_overflow(self) -> bool:
        """Tell whether the next step will be skipped. Waits for the device."""
        return any(scaler.is_dynamic and bool(found_inf) for scaler, found_inf in self.flags.items())

    def find_again(self) -> dict[LossScaler, Tensor]:
        """Return `flags`, with the gradients that are there now looked at, for the scalers of those that were zeroed.

        A sum that is put together of several backward passes by hand (PCGrad) may hold an overflow of any of them.
        """
        found_inf = torch.zeros((), dtype=torch.float32, device=next(iter(self.unchecked)).scale.device)
        no_scale = torch.ones_like(found_inf)
        gradients: list[Tensor] = []
        for holder in self.groups.parameters():
            if holder.grad is not None:
                gradients.append(holder.grad)
        unscale_(gradients, no_scale, found_inf)
        flags = dict(self.flags)
        for scaler in self.unchecked:
            flags[scaler] = either(flags.get(scaler), found_inf)
        return flags


class Block:
    """What is known of one `scale_loss` block and its backward pass.

    Attributes:
        scaler: of its loss.
        scale: that its loss is multiplied by, 0-dim float32; None: 1.
        ledgers: of the optimizers whose steps are skipped if it overflows.
        found_inf: what was found so far, 0-dim float32; None: nothing was looked at.
        served: ledgers whose optimizers have stepped before all was looked at.
        has_failed: it has ended with an exception: there may have been no backward pass.
        thread: that it runs in.
    """

    def __init__(self, scaler: LossScaler, ledgers: Iterable[Ledger]) -> None:
        self.scaler = scaler
        self.scale: Tensor | None = None
        self.ledgers: list[Ledger] = []
        for ledger in ledgers:
            for one in (ledger, *ledger.partners):
                if one not in self.ledgers:
                    self.ledgers.append(one)
        self.found_inf: Tensor | None = None
        self.served: list[Ledger] = []
        self.has_failed = False
        self.thread = threading.get_ident()
