"""`BackwardPasses`: the `scale_loss` blocks of a session, one inside another if need be."""

import contextlib
import types
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..errors import SessionError
from .gradients import GradientSet
from .loss_scaler import LossScaler, OverflowCheck
from .optimizer import OptimizerBinding


class BackwardPasses:
    """Scales losses, and unscales the gradients that their backward passes leave.

    A pass may reach parameters of optimizers that were not passed with the loss (a GAN's discriminator), and parameters
    of no optimizer (`outside`): their gradients are unscaled as well, only no overflow of theirs is judged.
    """

    def __init__(
        self, get_bindings: Callable[[], list[OptimizerBinding]], outside: GradientSet, tell_over: Callable[[], None]
    ) -> None:
        self.get_bindings = get_bindings
        self.tell_over = tell_over  # called at the end of every pass that is not delayed
        self.open: list[LossBlock] = []
        self._outside = outside

    def scale_loss(
        self, loss: Tensor, bindings: Sequence[OptimizerBinding], scaler: LossScaler, delay_unscale: bool
    ) -> "LossBlock":
        """Return a context manager that gives the scaled loss.

        The steps of `bindings` will be skipped if their gradients overflow.
        """
        return LossBlock(self, loss, bindings, scaler, delay_unscale)

    def all_gradients(self) -> list[GradientSet]:
        """Return everything that a pass may leave gradients in."""
        return [*(binding.gradients for binding in self.get_bindings()), self._outside]


class LossBlock(contextlib.AbstractContextManager[Tensor]):
    """One `with` block around one loss. A class, and not a generator: it is on the way of every backward pass."""

    __slots__ = (
        "_bindings",
        "_check",
        "_delay_unscale",
        "_handle",
        "_loss",
        "_passes",
        "_scale",
        "_scaled_loss",
        "_scaler",
    )

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
        self._bindings = bindings
        self._scaler = scaler
        self._delay_unscale = delay_unscale
        self._scale: Tensor | None = None
        self._scaled_loss: weakref.ref[Tensor] | None = None
        self._check: OverflowCheck | None = None
        self._handle: RemovableHandle | None = None

    def __enter__(self) -> Tensor:
        loss, self._loss = self._loss, None
        if loss is None:
            raise SessionError("this scale_loss block is over: call scale_loss again for every backward pass")
        scaler = self._scaler
        self._scale = scale = None if scaler.is_identity else scaler.scale_on(loss.device)
        scaled_loss = loss.float() if scale is None else loss.float() * scale
        self._scaled_loss = weakref.ref(scaled_loss)
        for binding in self._bindings:
            binding.abandon_window_if_empty()
        for gradients in self._passes.all_gradients():
            if scale is not None or not gradients.is_idle:
                gradients.enter(scale)
        if scale is not None:
            self._check = check = scaler.open_check(loss.device)
            for binding in self._bindings:
                binding.add_check(check)
        if self._passes.open:
            self._handle = self._passes.open[-1].refuse_backward(scale)
        self._passes.open.append(self)
        return scaled_loss

    def refuse_backward(self, scale: Tensor | None) -> RemovableHandle | None:
        """Keep the loss from going backward while a block of another scale is open inside: its gradients would be
        divided by the wrong scale.
        """
        scaled_loss = None if self._scale is scale or self._scaled_loss is None else self._scaled_loss()
        return scaled_loss.register_hook(_refuse) if scaled_loss is not None and scaled_loss.requires_grad else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        check = self._check
        try:
            if kind is not None:
                if check is not None:
                    for binding in self._bindings:
                        binding.drop_check(check)
                    self._scaler.discard(check)
                self._close(())
                return
            if check is not None:
                check.is_open = False
            self._close([binding.gradients for binding in self._bindings] if self._delay_unscale else ())
            if check is not None and not any(binding.awaits(check) for binding in self._bindings):
                self._scaler.decide()  # they all stepped in the middle of the pass
        finally:
            if self._handle is not None:
                self._handle.remove()
            if not self._delay_unscale:
                self._passes.tell_over()

    def _close(self, delayed: Sequence[GradientSet]) -> None:
        """Unscale everything but what is `delayed`, and scale it again for the block around this one, whose pass may be
        yet to come.
        """
        open_blocks = self._passes.open
        open_blocks.pop()
        if not open_blocks:
            for binding in self._passes.get_bindings():
                binding.close_checks()
        for gradients in self._passes.all_gradients():
            if gradients.is_idle and not gradients.is_in_block:
                continue  # in this block as in those around it
            gradients.leave()
            if gradients not in delayed:
                gradients.settle()
            if open_blocks:
                gradients.enter(open_blocks[-1]._scale)


def _refuse(_: Tensor) -> None:
    raise SessionError(
        "backward() of an outer scale_loss inside an inner one with another loss scale: the gradients would be divided"
        " by the wrong scale. Call it after the inner block, or use the same loss_id for both."
    )
