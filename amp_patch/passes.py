"""`BackwardPasses`: the `scale_loss` blocks of a session, one inside another if need be."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from .errors import SessionError
from .gradients import GradientSet
from .optimizers import OptimizerBinding
from .scaler import LossScaler


@dataclass(frozen=True, slots=True)
class _Block:
    scale: Tensor | None
    scaled_loss: "weakref.ref[Tensor]"


class BackwardPasses:
    """Scales losses, and unscales the gradients that their backward passes leave.

    A pass may reach parameters of optimizers that were not passed with the loss (a GAN's discriminator), and parameters of no optimizer (`outside`):
    their gradients are unscaled as well, only no overflow of theirs is judged.
    """

    def __init__(self, get_bindings: Callable[[], list[OptimizerBinding]], outside: GradientSet) -> None:
        self._get_bindings = get_bindings
        self._outside = outside
        self._open: list[_Block] = []

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, bindings: Sequence[OptimizerBinding], scaler: LossScaler, delay_unscale: bool) -> Iterator[Tensor]:
        """Yield the scaled loss. The steps of `bindings` will be skipped if their gradients overflow."""
        scale = None if scaler.is_identity else scaler.scale_on(loss.device)
        for binding in bindings:
            binding.abandon_window_if_empty()
        for gradients in self._all_gradients():
            gradients.enter(scale)
        check = None if scale is None else scaler.open_check(loss.device)
        if check is not None:
            for binding in bindings:
                binding.add_check(check)
        scaled_loss = loss.float() if scale is None else loss.float() * scale
        try:
            with self._only_innermost_backward(scale):
                self._open.append(_Block(scale, weakref.ref(scaled_loss)))
                yield scaled_loss
        except BaseException:
            if check is not None:
                for binding in bindings:
                    binding.drop_check(check)
                scaler.discard(check)
            self._close(())
            raise
        else:
            if check is not None:
                check.is_open = False
            self._close([binding.gradients for binding in bindings] if delay_unscale else ())
            if check is not None and not any(binding.awaits(check) for binding in bindings):
                scaler.decide()  # they all stepped in the middle of the pass

    def _all_gradients(self) -> list[GradientSet]:
        return [*(binding.gradients for binding in self._get_bindings()), self._outside]

    def _close(self, delayed: Sequence[GradientSet]) -> None:
        """Unscale everything but what is `delayed`, and scale it again for the block around this one, whose pass may be yet to come."""
        self._open.pop()
        if not self._open:
            for binding in self._get_bindings():
                binding.close_checks()
        for gradients in self._all_gradients():
            gradients.leave()
            if gradients not in delayed:
                gradients.settle()
            if self._open:
                gradients.enter(self._open[-1].scale)

    @contextlib.contextmanager
    def _only_innermost_backward(self, scale: Tensor | None) -> Iterator[None]:
        """While a block of another scale is open inside, the outer loss must not go backward: its gradients would be divided by the wrong scale."""
        outer = self._open[-1] if self._open else None
        scaled_loss = None if outer is None or outer.scale is scale else outer.scaled_loss()
        if scaled_loss is None or not scaled_loss.requires_grad:
            yield
            return
        handle = scaled_loss.register_hook(_refuse)
        try:
            yield
        finally:
            handle.remove()


def _refuse(_: Tensor) -> None:
    raise SessionError(
        "backward() of an outer scale_loss inside an inner one with another loss scale: the gradients would be divided by the wrong scale. "
        "Call it after the inner block, or use the same loss_id for both."
    )
