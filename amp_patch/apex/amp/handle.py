"""`scale_loss` and `disable_casts`, and the handles of Apex's older interface."""

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import Tensor

from ...errors import NoLoss, SessionError
from .._core import Session, api, as_optimizers, find_session, remove_casts
from ._amp_state import _amp_state
from ._process_optimizer import show_skip
from .opt import OptimWrapper

disable_casts = api.disable_casts


def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> contextlib.AbstractContextManager[Tensor]:
    """See `amp_patch.scale_loss`.

    As in Apex, an overflow shows at the exit: in `loss_scale()`, `_amp_stash.already_patched` and `optimizer.step`.
    Waits for the device at the exit under a dynamic scale, unless delayed.
    """
    return _Block(_scale_loss(loss, optimizers, loss_id, delay_unscale, delay_overflow_check))


class _Block(NoLoss, contextlib.AbstractContextManager[Tensor]):
    """A `scale_loss` block."""

    def __init__(self, inner: contextlib.AbstractContextManager[Tensor]) -> None:
        self._inner = inner

    def __enter__(self) -> Tensor:
        return self._inner.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        return self._inner.__exit__(*raised)


@contextlib.contextmanager
def _scale_loss(
    loss: Tensor, optimizers: Any, loss_id: int, delay_unscale: bool, delay_overflow_check: bool
) -> Iterator[Tensor]:
    properties = getattr(_amp_state, "opt_properties", None)
    session = find_session()
    # scripts switch amp off for a while by setting `opt_properties.enabled`
    if session is not None and properties is not None and not properties.enabled:
        yield loss
        return
    if session is not None and session.scaler(loss_id).is_identity and not session.policy.master_weights:
        # Apex did not look at the optimizers then, so scripts may pass any
        find = session.bindings.find_optimizer
        known = [optimizer for optimizer in as_optimizers(optimizers) if find(optimizer) is not None]
        context = session.scale_loss(loss, known, loss_id, delay_unscale=delay_unscale)
    else:
        known = [] if session is None else as_optimizers(optimizers)
        context = api.scale_loss(loss, optimizers, loss_id, delay_unscale=delay_unscale)
    with context as scaled_loss:
        yield scaled_loss
    if delay_unscale:
        return
    _amp_state.clear_overflow(loss_id)
    # Apex replaced `step` at the exit of a block, and scripts compare it with the usual one
    if not delay_overflow_check:
        for optimizer in known:
            show_skip(optimizer)


class AmpHandle:
    """The casts in force. Made by `init`, and by `initialize` at levels that patch functions."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_deactivated = False

    def is_active(self) -> bool:
        """Return whether functions cast their arguments."""
        return self._session.switch.is_on_here()

    @property
    def _is_active(self) -> bool:
        return self.is_active()

    @_is_active.setter
    def _is_active(self, value: bool) -> None:
        if not value:
            self._session.switch.turn_off()
        # `_deactivate` has restored the original functions, so there is nothing to switch on
        elif not self._is_deactivated:
            self._session.switch.turn_on()

    def _disable_casts(self) -> contextlib.AbstractContextManager[None]:
        return disable_casts()

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Return the optimizer with `num_loss` loss scalers of its own."""
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: Tensor, optimizer: Any) -> NoReturn:
        """Apex took this out in favour of `amp.scale_loss`. Raises SessionError."""
        raise SessionError(
            "amp_handle.scale_loss is the oldest interface, and was removed from Apex: call model, optimizer ="
            " amp.initialize(model, optimizer) instead of amp.init(), and use `with amp.scale_loss(loss, optimizer) as"
            " scaled_loss:`"
        )

    def _clear_cache(self) -> None:
        api.refresh()

    def _deactivate(self) -> None:
        """Restore the original functions. Models and optimizers stay as `initialize` changed them."""
        self._is_deactivated = True
        remove_casts(self._session)

    def has_ended(self) -> bool:
        """Return whether this is the handle of the session in force, and `_deactivate` was called."""
        return self._is_deactivated and self._session is find_session()


class NoOpHandle:
    """The result of `init(enabled=False)`: the same names, without effect."""

    _is_active = False

    def is_active(self) -> bool:
        """Return False."""
        return False

    def _disable_casts(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Return a wrapper that changes nothing."""
        return OptimWrapper(optimizer, self, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        """Yield the loss unchanged."""
        yield loss

    def _clear_cache(self) -> None:
        """Do nothing."""

    def _deactivate(self) -> None:
        """Do nothing."""
