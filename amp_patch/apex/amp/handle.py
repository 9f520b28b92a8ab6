"""Apex's `apex.amp.handle`: `scale_loss` and `disable_casts`, and the handles of its older interface, `init`."""

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

    As in Apex, if the gradients overflow under a dynamic scale, the end of the block replaces `optimizer.step` (see
    `_process_optimizer.show_skip`), and scripts may look for that. So under a dynamic scale, the end of the block waits
    for the device, unless `delay_unscale` or `delay_overflow_check` is set. While a script sets
    `_amp_state.opt_properties.enabled` to False, blocks yield the loss itself.
    """
    return _Block(_scale_loss(loss, optimizers, loss_id, delay_unscale, delay_overflow_check))


class _Block(NoLoss, contextlib.AbstractContextManager[Tensor]):
    """The context manager `inner`, with a `backward` (from `NoLoss`) that raises an error with advice.

    Scripts may take `scale_loss(...)` for the loss, and call `backward()` on it.
    """

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
    known_optimizers: list[Any] = []  # the optimizers of the block that the session knows
    if session is not None and session.scaler(loss_id).is_identity and not session.policy.master_weights:
        # without a loss scale and masters, Apex did not look at the optimizers, so scripts pass unknown ones, too
        for optimizer in as_optimizers(optimizers):
            if session.bindings.find_optimizer(optimizer) is not None:
                known_optimizers.append(optimizer)
        block = session.scale_loss(loss, known_optimizers, loss_id, delay_unscale=delay_unscale)
    else:
        if session is not None:
            known_optimizers = as_optimizers(optimizers)
        # raises an error for an optimizer that is not of the session
        block = api.scale_loss(loss, optimizers, loss_id, delay_unscale=delay_unscale)
    with block as scaled_loss:
        yield scaled_loss
    if delay_unscale:
        return
    _amp_state.clear_overflow(loss_id)
    # Apex replaced `step` at the end of a block if the next step was to be skipped, and scripts look for that
    if not delay_overflow_check:
        for optimizer in known_optimizers:
            show_skip(optimizer)


class AmpHandle:
    """Switches the casts of torch's functions on and off.

    `init` returns one, unless it patches nothing. `initialize` makes one at opt_levels that patch functions. Both store
    it as `_amp_state.handle`.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_deactivated = False

    def is_active(self) -> bool:
        """Return whether functions cast their arguments in this thread now."""
        return self._session.switch.is_on_here()

    @property
    def _is_active(self) -> bool:
        return self.is_active()

    @_is_active.setter
    def _is_active(self, value: bool) -> None:
        if not value:
            self._session.switch.turn_off()
        # `_deactivate` has restored the functions, so there is nothing to switch on
        elif not self._is_deactivated:
            self._session.switch.turn_on()

    def _disable_casts(self) -> contextlib.AbstractContextManager[None]:
        return disable_casts()

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Return an `OptimWrapper` of the optimizer, with a loss scaler for each of `num_loss` losses in a step."""
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: Tensor, optimizer: Any) -> NoReturn:
        """Raise SessionError: Apex has `amp.scale_loss` instead of this method."""
        raise SessionError(
            "amp_handle.scale_loss is the oldest interface, and was removed from Apex: call model, optimizer ="
            " amp.initialize(model, optimizer) instead of amp.init(), and use `with amp.scale_loss(loss, optimizer) as"
            " scaled_loss:`"
        )

    def _clear_cache(self) -> None:
        api.refresh()

    def _deactivate(self) -> None:
        """Restore torch's own functions. Models and optimizers stay as `initialize` changed them."""
        self._is_deactivated = True
        remove_casts(self._session)

    def has_ended(self) -> bool:
        """Return whether `_deactivate` was called, and the session of the handle is still in force."""
        return self._is_deactivated and self._session is find_session()


class NoOpHandle:
    """A handle without effect, with Apex's methods of `AmpHandle`. `init` returns it if it patches nothing."""

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
