"""`BackwardPasses`: the `scale_loss` blocks of a session, one inside another if need be."""

import contextlib
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from ..casting import Mode, Switch
from ..errors import NoLoss, SessionError
from ..events import tell
from .backward_pass import BackwardPass
from .decisions import Decisions
from .gradients import GradientSet
from .loss_scaler import LossScaler
from .optimizer import OptimizerBinding
from .reduction import LocalGradients, UnshardedSums

ENTERING, RUNNING, ENDING = range(3)
"""Where a block is. One that an interrupt left entering or ending is stale: no code of its thread runs it any more."""


class OpenBlock:
    """What the session knows of a block that has not ended.

    Attributes:
        block: the context manager; one that is gone has never ended.
        scale: the scale that its backward pass multiplies gradients by, 0-dim; None: 1.
        backward_pass: its record; None without a scale.
        bindings: the optimizers whose steps await it.
        phase: ENTERING, RUNNING or ENDING.
        has_failed: it ends with an exception, or has never begun.
    """

    __slots__ = (
        *("backward_pass", "bindings", "block", "handle", "has_failed", "is_delayed", "phase", "scale", "scaled_loss"),
        *("scaler", "thread"),
    )

    def __init__(
        self, block: "LossBlock", scaler: LossScaler, bindings: Sequence[OptimizerBinding], delay: bool
    ) -> None:
        self.block = weakref.ref(block)
        self.scaler = scaler
        self.bindings = bindings
        self.is_delayed = delay
        self.scale: Tensor | None = None
        self.backward_pass: BackwardPass | None = None
        self.scaled_loss: weakref.ref[Tensor] | None = None
        self.handle: RemovableHandle | None = None
        self.phase = ENTERING
        self.has_failed = True
        self.thread = threading.get_ident()

    def is_stale(self) -> bool:
        """Tell whether an interrupt kept the block from ending."""
        return self.block() is None or (self.phase != RUNNING and self.thread == threading.get_ident())

    def refuse_backward(self, scale: Tensor | None) -> RemovableHandle | None:
        """Keep the loss from going backward while a block of another scale is open inside: its gradients would be
        divided by the wrong scale.
        """
        scaled_loss = None if self.scale is scale or self.scaled_loss is None else self.scaled_loss()
        return scaled_loss.register_hook(_refuse) if scaled_loss is not None and scaled_loss.requires_grad else None


class BackwardPasses:
    """Scales losses, and unscales the gradients that their backward passes leave.

    A pass may reach parameters of optimizers that were not passed with the loss (a GAN's discriminator), and parameters
    of no optimizer (`parameters_outside`): their gradients are unscaled as well, only no overflow of theirs is judged.
    """

    def __init__(
        self,
        get_bindings: Callable[[], list[OptimizerBinding]],
        parameters_outside: Callable[[], Iterable[Tensor]],
        local: LocalGradients,
        switch: Switch,
        decisions: Decisions,
        sharded: Iterable[Module],
        on_end: Callable[[], None],
    ) -> None:
        self._get_bindings = get_bindings
        self._outside = GradientSet(parameters_outside, lambda: ())
        self._local = local
        self._switch = switch
        self._decisions = decisions
        self._unsharded = UnshardedSums(sharded)
        self._on_end = on_end  # called at the end of every pass that is not delayed
        self._open: list[OpenBlock] = []  # outermost first

    def scale_loss(
        self, loss: Tensor, bindings: Sequence[OptimizerBinding], scaler: LossScaler, delay_unscale: bool
    ) -> "LossBlock":
        """Return a context manager that gives the scaled loss.

        The steps of `bindings` are skipped if their gradients overflow.
        """
        return LossBlock(self, loss, bindings, scaler, delay_unscale)

    @staticmethod
    def leave_unscaled(loss: Tensor) -> contextlib.AbstractContextManager[Tensor]:
        """Return a context manager that gives the loss as it is."""
        return UnscaledBlock(loss)

    def is_block_open(self) -> bool:
        """Tell whether a block is running, after ending those that an interrupt left open."""
        self.end_stale()
        return bool(self._open)

    def end_stale(self) -> None:
        """End the blocks that an interrupt kept from ending."""
        for block in [block for block in self._open if block.is_stale()] if self._open else ():
            self.end(block)

    def begin(self, block: OpenBlock, loss: Tensor) -> Tensor:
        """Begin the pass of a block and return the scaled loss."""
        self.end_stale()
        outer = self._open[-1] if self._open else None
        self._refuse_other_threads(block)
        self._open.append(block)  # before anything is changed, so that an interrupt leaves nothing that is unknown
        scaler = block.scaler
        block.scale = scale = None if scaler.is_identity else scaler.scale_on(loss.device)
        with self._switch.region(Mode.OFF):  # products may be on a list
            scaled_loss = loss.float() if scale is None else loss.float() * scale
        block.scaled_loss = weakref.ref(scaled_loss)
        for binding in block.bindings:
            binding.window.begin()
        if scale is not None:
            block.backward_pass = backward_pass = scaler.begin_pass(loss.device, is_delayed=block.is_delayed)
            for binding in block.bindings:
                binding.window.add(backward_pass)
        self._begin_in_all(block)
        self._unsharded.carry(scale)
        if outer is not None:
            block.handle = outer.refuse_backward(scale)
        tell(self._switch.region(Mode.OFF), "loss_scaled", loss, scaled_loss)
        return scaled_loss

    def _refuse_other_threads(self, block: OpenBlock) -> None:
        """Raise SessionError if a block of another thread is open: a pass scales and unscales all gradients."""
        if all(other.thread == block.thread for other in self._open):
            return
        if all(one.scaler.is_identity for one in (block, *self._open)) and not any(
            gradients.has_masters for gradients in self._all_gradients()
        ):
            return  # nothing is changed
        raise SessionError(
            "a scale_loss block of another thread is open, and both would scale the same gradients. Let one thread at a"
            " time be in a block and in the step() after it (a threading.Lock), or train each model in a process of its"
            " own."
        )

    def _begin_in_all(self, block: OpenBlock) -> None:
        joined = [binding.gradients for binding in block.bindings]
        for gradients in self._all_gradients():
            if block.scale is not None or not gradients.is_idle:
                is_joined = block.backward_pass is not None and gradients in joined
                gradients.begin(block.scale, block.backward_pass if is_joined else None)

    def end(self, block: OpenBlock) -> None:
        """End the pass of a block: unscale everything but what is held, and scale it again for the block around it,
        whose pass may be yet to come. Harmless twice, and after an interrupted end.
        """
        backward_pass, others = block.backward_pass, [other for other in self._open if other is not block]
        if backward_pass is not None:
            backward_pass.close()
        if not others:
            for binding in self._get_bindings():
                binding.window.close_passes()
        self._end_in_all(block, others[-1] if others else None)
        if backward_pass is not None and block.has_failed and not self._has_overflowed(block):
            block.scaler.discard(backward_pass)  # there may have been no backward pass
        if block.handle is not None:
            block.handle.remove()
        self._open = others
        if backward_pass is not None and not block.has_failed and not backward_pass.awaited_by:
            self._decisions.judge_outside_of_steps([backward_pass])  # all stepped in the middle of the pass
        if not block.is_delayed:
            self._on_end()

    def _end_in_all(self, block: OpenBlock, outer: OpenBlock | None) -> None:
        is_delayed = block.is_delayed and not block.has_failed
        delayed = [binding.gradients for binding in block.bindings] if is_delayed else ()
        local = self._local.parameter_ids()
        self._local.end_pass()
        for gradients in self._all_gradients():
            if gradients.is_idle and not gradients.is_in_block:
                continue  # in this block as in those around it
            gradients.end()
            gradients.is_local = bool(local) and gradients.are_any_of(local)
            if gradients in delayed or gradients.is_local:
                gradients.hold()
            else:
                gradients.unscale()
            if outer is not None:
                gradients.begin(outer.scale)

    @staticmethod
    def _has_overflowed(block: OpenBlock) -> bool:
        """Tell whether a block that failed left inf or NaN, which no pass before it has answered for.

        Waits for the device, unless that has failed too.
        """
        own = block.backward_pass
        if own is None or not block.scaler.is_dynamic:
            return False
        before = [one for binding in block.bindings for one in binding.window.passes() if one is not own]
        with contextlib.suppress(RuntimeError):
            return own.is_overflow() and not any(one.is_overflow() for one in before if not one.is_open)
        return False

    def _all_gradients(self) -> list[GradientSet]:
        """Return everything that a pass may leave gradients in."""
        found = {id(binding.gradients): binding.gradients for binding in self._get_bindings()}
        return [*found.values(), self._outside]


class UnscaledBlock(contextlib.nullcontext[Tensor], NoLoss):
    """The block around a loss while amp is disabled: it gives the loss as it is."""


class LossBlock(NoLoss, contextlib.AbstractContextManager[Tensor]):
    """One `with` block around one loss. A class, and not a generator: it is on the way of every backward pass."""

    __slots__ = ("_loss", "_open", "_passes")

    def __init__(
        self,
        passes: BackwardPasses,
        loss: Tensor,
        bindings: Sequence[OptimizerBinding],
        scaler: LossScaler,
        delay_unscale: bool,
    ) -> None:
        self._passes = passes
        self._loss: Tensor | None = loss
        self._open = OpenBlock(self, scaler, bindings, delay_unscale)

    def __enter__(self) -> Tensor:
        loss, self._loss = self._loss, None
        if loss is None:
            raise SessionError("this scale_loss block is over: call scale_loss again for every backward pass")
        try:
            scaled_loss = self._passes.begin(self._open, loss)
        except BaseException:
            self._passes.end_stale()
            raise
        self._open.phase = RUNNING
        return scaled_loss

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        self._open.has_failed, self._open.phase = kind is not None, ENDING
        self._passes.end(self._open)


def _refuse(_: Tensor) -> None:
    raise SessionError(
        "backward() of an outer scale_loss inside an inner one with another loss scale: the gradients would be divided"
        " by the wrong scale. Call it after the inner block, or use the same loss_id for both."
    )
