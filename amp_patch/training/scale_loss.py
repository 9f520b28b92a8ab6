"""`LossBlock`: the `with` block around one loss and its backward pass."""

import contextlib
import types
from collections.abc import Iterable

import torch
from torch import Tensor

from ..casting import Mode, Switch, WeightCache
from ..errors import NoLoss, SessionError
from ..events import tell, watchers
from ..reporting import warn
from ..torch_dispatch import without_functions
from .gradient_sums import GradientSums
from .loss_scaler import LossScaler
from .overflow_flags import Block, OverflowFlags
from .split_masters import has_gradient

_mul = torch.ops.aten.mul.Tensor  # op lists may patch torch.mul, but cannot patch this


class LossBlock(Block, NoLoss, contextlib.AbstractContextManager[Tensor]):
    """A `with` block that yields the loss times the loss scale, and divides gradients by the scale when it ends.
    See `amp_patch.scale_loss`.

    Args:
        all_flags: the overflow flags of the optimizers that the script has passed for this loss.
        gradients: all gradients of the session.
        is_delayed: whether to leave the gradients scaled and unchecked when the block ends.
        switch: the switch of the session's casts.
        cache: the weight cache of the session, or None without one. The block invalidates the copies in it, unless it
            is delayed.
    """

    def __init__(
        self,
        loss: Tensor,
        scaler: LossScaler,
        all_flags: Iterable[OverflowFlags],
        gradients: GradientSums,
        is_delayed: bool,
        switch: Switch,
        cache: WeightCache | None,
    ) -> None:
        super().__init__(scaler, all_flags)
        self._loss: Tensor | None = loss
        self._gradients = gradients
        self._is_delayed = is_delayed
        self._switch = switch
        self._cache = cache if not is_delayed else None  # a delayed block leaves the copies for the next block

    def __enter__(self) -> Tensor:
        loss, self._loss = self._loss, None  # the block must not keep the graph of the loss alive
        if loss is None:
            raise SessionError("this scale_loss block was used before: call scale_loss again for every backward pass")
        if self._cache is not None and not self._gradients.open_blocks():
            self._cache.leave_to_graphs()
        self._gradients.await_step(self)
        scaled_loss = loss
        if loss.dtype is not torch.float32:  # in 16 bits, the product with the scale could overflow
            with self._switch.region(Mode.OFF):
                scaled_loss = loss.float()
        if not self.scaler.is_identity:
            self.scale = self.scaler.scale_on(loss.device)
            scaled_loss = _mul(scaled_loss, self.scale)
            if self.scaler.awaits_backward and scaled_loss.requires_grad:
                scaled_loss.register_hook(self.scaler.note_backward)
        with without_functions():
            self._gradients.begin(self)
        if watchers:
            self._tell(loss, scaled_loss)
        return scaled_loss

    def _tell(self, loss: Tensor, scaled_loss: Tensor) -> None:
        try:
            tell(self._switch.region(Mode.OFF), "loss_scaled", loss, scaled_loss)
        except BaseException as error:
            self.__exit__(type(error), error, None)  # Python does not call __exit__ if __enter__ raises
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        self.has_failed = kind is not None
        with without_functions():
            # after an exception, do not leave gradients to a later block: the script may not enter one
            self._gradients.end(self, is_delayed=self._is_delayed and not self.has_failed)
        if self._cache is not None:
            self._cache.invalidate_all()
        if self.scaler.awaits_backward and not self.has_failed:
            self._check_backward()

    def _check_backward(self) -> None:
        """Warn if the optimizers of the block have gradients although no loss of this scaler has gone backward yet."""
        for flags in self.affected:
            if any(map(has_gradient, flags.groups.parameters())):
                self.scaler.awaits_backward = False
                warn(
                    "the scaled loss of this scale_loss block did not go backward in it, but gradients are divided by"
                    " the loss scale after it: call scaled_loss.backward() inside the block, not loss.backward()"
                )
                return


class UnscaledBlock(contextlib.nullcontext[Tensor], NoLoss):
    """A block that yields the loss as it is. `scale_loss` returns it while amp is disabled."""
