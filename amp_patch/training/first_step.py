"""`FirstStepChecks`: warns about mistakes that stop or harm training, at an early step of each optimizer."""

import weakref
from collections.abc import Callable, Iterable

from torch import Tensor
from torch.optim import Optimizer

from ..reporting import warn
from .masters import Masters
from .overflow_flags import OverflowFlags
from .scale_updates import ScaleUpdates


class FirstStepChecks:
    """Warns once about an optimizer without gradients, a dynamic scale without scaled losses, or 16-bit buffers that
    training changes.

    Args:
        optimizer: held by a weak reference.
        get_names: returns names of parameters and buffers.

    Attributes:
        is_done: whether the checks were made. Buffers and gradients are checked at the first step after a `scale_loss`
            block. A step with gradients under a dynamic scale that has scaled no loss is only warned about.
    """

    def __init__(
        self,
        optimizer: "weakref.ref[Optimizer]",
        flags: OverflowFlags,
        scale_updates: ScaleUpdates,
        masters: Masters,
        get_names: Callable[[Iterable[Tensor]], list[str]],
    ) -> None:
        self.is_done = False
        self._optimizer = optimizer
        self._flags = flags
        self._scale_updates = scale_updates
        self._masters = masters
        self._get_names = get_names

    def check(self) -> None:
        """Make the checks, if they are due. Call it before a step, when its gradients are unscaled.

        Waits for the device if the session has cast buffers.
        """
        if self._flags.was_passed:
            self.is_done = True
            self._check_buffers()
            self._check_gradients()
        elif all(scaler.awaits_loss for scaler in self._scale_updates.scalers) and self._flags.groups.has_gradients():
            self.is_done = True
            for scaler in self._scale_updates.scalers:
                scaler.awaits_loss = False
            warn(
                f"step() of {self._describe()} under a dynamic loss scale, but no loss has been scaled: small gradients"
                " may be lost, and overflows may go unnoticed. Write `with amp.scale_loss(loss, optimizer) as"
                " scaled_loss: scaled_loss.backward()`, or pass loss_scale=1.0 to initialize."
            )

    def _describe(self) -> str:
        return type(self._optimizer()).__name__

    def _check_buffers(self) -> None:
        changed = self._masters.find_changed_buffers()
        if changed:
            names = self._get_names(changed[:3])
            warn(
                f"buffers that training changes are in 16 bits ({', '.join(names)}): updates that are small"
                " compared with their values may be lost. Keep the module that holds them in float32, with a list such"
                " as `modules: [{match: NAME, run: float32}]`"
            )

    def _check_gradients(self) -> None:
        # where ranks decide together, a rank may hold no shard, and so no gradient
        if self._scale_updates.process_groups or self._flags.groups.has_gradients():
            return
        if all(scaler.awaits_backward for scaler in self._scale_updates.scalers):
            warn(f"step() of {self._describe()} before a scaled loss went backward: call scaled_loss.backward()")
            return
        warn(
            f"step() of {self._describe()} after a scale_loss block, but none of its parameters has a gradient: it"
            " trains nothing. Did backward() run since the last zero_grad()? Does the optimizer hold parameters that"
            " the model no longer uses? Move, shard or wrap the model first, then create the optimizer, then call"
            " initialize."
        )
