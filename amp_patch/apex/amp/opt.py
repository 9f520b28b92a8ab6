"""`OptimWrapper`: the result of `amp.init().wrap_optimizer(...)`, Apex's interface from before `initialize`."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .._core import bind_optimizer, require_session


class OptimWrapper:
    """Wraps an optimizer, with one loss scaler for each of the `num_loss` losses in a step.

    Attributes other than `scale_loss` and `step` are read from the optimizer. While `amp_handle.is_active()` is False,
    `scale_loss` yields the loss as it is, and `step` only calls the optimizer's `step`.
    """

    def __init__(self, optimizer: Optimizer, amp_handle: Any, num_loss: int) -> None:
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0
        self._first_scaler = 0
        if amp_handle.is_active():
            self._first_scaler = bind_optimizer(require_session(), optimizer, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Context manager: yield the loss times its scale. The n-th loss of a step uses the n-th scaler.

        Raises IndexError if a step has more than `num_loss` losses.
        """
        if not self._amp_handle.is_active():
            yield loss
            return
        if self._loss_idx == self._num_loss:
            raise IndexError(
                f"{self._num_loss + 1} losses in one step: num_loss={self._num_loss} of wrap_optimizer is too small"
            )
        loss_id, self._loss_idx = self._first_scaler + self._loss_idx, self._loss_idx + 1
        with require_session().scale_loss(loss, [self._optimizer], loss_id, delay_unscale=False) as scaled_loss:
            yield scaled_loss

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, or skip the step after an overflow.

        While `amp_handle.is_active()` is True, a closure raises NotImplementedError.
        """
        if not self._amp_handle.is_active():
            return self._optimizer.step(closure=closure)
        self._loss_idx = 0
        if closure is not None:
            # not a class of `amp_patch.errors`, because Apex raised NotImplementedError
            raise NotImplementedError(
                "step(closure) does not work where a step may be skipped: call step() without a closure"
            )
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # `copy` reads attributes before the copy has any
            raise AttributeError(name)
        return getattr(self._optimizer, name)
