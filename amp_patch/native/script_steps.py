"""`ScriptSteps`: observes the losses, the GradScalers and the optimizer steps of a script.

It calls `StepChecks` for each step, and disables the region of `WholeScript` during steps without a closure. It reports
losses and steps to the session and to the watchers of `events`.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import events
from ..interrupts import UndoStack
from ..patching import Patch, Patcher
from ..torch_dispatch import get_found_inf
from ..torch_private import get_backward_id, reads_found_inf
from .changes import Changes, Kind
from .session import NativeSession, find_session, has_own_amp
from .step_checks import StepChecks
from .whole_script import WholeScript


@dataclass(slots=True)
class _ScalerStep:
    """A call of `GradScaler.step` that is under way.

    Attributes:
        is_scaling: whether the GradScaler is enabled.
        has_stepped: whether the optimizer's own `step` has run. On an overflow, GradScaler calls it only if
            the optimizer's kernel skips the step itself.
    """

    is_scaling: bool
    has_stepped: bool = False


class ScriptSteps:
    """Observes the losses and steps of a script.

    Args:
        changes: the changes to the regions of the script.
        unscales_first: unscale gradients before the step of a fused optimizer, so that watchers see unscaled gradients.
            Otherwise the optimizer's kernel unscales them during the step.
    """

    def __init__(
        self, changes: Changes, checks: StepChecks, whole_script: WholeScript, *, unscales_first: bool
    ) -> None:
        self._changes = changes
        self._checks = checks
        self._whole_script = whole_script
        self._unscales_first = unscales_first
        self._scaler: weakref.ref[Any] | None = None  # the newest GradScaler
        self._scaler_step: _ScalerStep | None = None
        self._open_session: Callable[[str], NativeSession | None] = lambda device_type: None
        self._scaled_loss_id: int | None = None  # the id of the last scaled loss, which `GradScaler.scale` returned

    def install(self, undo: UndoStack) -> None:
        """Patch GradScaler, and hook optimizer steps."""
        patcher = Patcher()
        undo.callback(patcher.undo)
        patcher.install(
            [
                Patch(torch.amp.GradScaler, "__init__", self._note_scaler),
                Patch(torch.amp.GradScaler, "scale", self._report_scaled_loss),
                Patch(torch.amp.GradScaler, "step", self._report_scaler_step),
            ]
        )
        undo.callback(register_optimizer_step_pre_hook(self._begin_step).remove)
        undo.callback(register_optimizer_step_post_hook(self._end_step).remove)

    def watch_losses(self, undo: UndoStack, open_session: Callable[[str], NativeSession | None]) -> None:
        """Report losses that no GradScaler scales, until `undo` is closed.

        Args:
            open_session: called with the device type of the loss. Returns the session, and opens one if there is none.
        """
        self._open_session = open_session
        patcher = Patcher()
        undo.callback(patcher.undo)
        patcher.install([Patch(torch.autograd, "backward", self._report_plain_loss)])

    def show_scaler(self, session: NativeSession) -> None:
        """Let a session that was just opened use the newest GradScaler of the script, if it is enabled."""
        scaler = None if self._scaler is None else self._scaler()
        if scaler is not None and scaler.is_enabled():
            session.use_scaler(scaler)

    # ---- losses ------------------------------------------------------------------------------------------------------

    def _note_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init(scaler: Any, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            self._scaler = weakref.ref(scaler)

        return init

    def _report_scaled_loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            session = find_session()
            if session is not None and scaler.is_enabled():
                session.use_scaler(scaler)
                if isinstance(outputs, Tensor):
                    self._scaled_loss_id = id(result)
                    events.tell(session.without_casts(), "loss_scaled", outputs, result)
            return result

        return scale

    def _report_plain_loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensors, Iterator):  # it can be read only once
                tensors = tuple(tensors)
            session = find_session()
            loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
            # Inside a backward pass, a checkpoint may call this, with gradients and not with a loss.
            if isinstance(loss, Tensor) and get_backward_id() == -1:
                session = session or self._open_session(loss.device.type)
            else:
                session = None
            if session is not None:
                if id(loss) != self._scaled_loss_id:
                    events.tell(session.without_casts(), "loss_scaled", loss, loss)
                self._scaled_loss_id = None
            return original(tensors, *args, **kwargs)

        return backward

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _report_scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            enclosing = self._scaler_step  # set if the optimizer is a wrapper whose `step` calls `scaler.step`
            this_step = self._scaler_step = _ScalerStep(scaler.is_enabled())
            # for optimizers that do not unscale by themselves, GradScaler.step unscales before it calls their step
            if self._unscales_first and this_step.is_scaling and _can_unscale_first(optimizer):
                with contextlib.suppress(RuntimeError):  # raised, for example, if the script has unscaled them already
                    scaler.unscale_(optimizer)
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                self._scaler_step = enclosing
            if this_step.has_stepped:
                if enclosing is not None:
                    enclosing.has_stepped = True
                return result

            # No hook has seen the step: GradScaler has skipped it, or the optimizer is no torch.optim.Optimizer.
            # Reading the flags does not wait, because GradScaler has read them already.
            flags = get_found_inf(scaler, optimizer)
            is_skipped = not flags or any(map(bool, flags))
            session = find_session()
            if not has_own_amp():
                self._checks.end_step(optimizer, is_open=session is not None)
            if session is not None and scaler.is_enabled():
                session.use_scaler(scaler)
                self._report_begin(session, optimizer)
                self._report_end(session, optimizer, is_skipped=is_skipped)
            return result

        return step

    def _begin_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Hook before each optimizer step. Without a closure, check and report the step, and disable the region of
        `WholeScript`.
        """
        if has_own_amp():
            self._checks.note_mixed_precision()
            return
        if _has_closure(args, kwargs):  # the step runs forward and backward itself, which need the region
            return
        self._check_step()
        self._whole_script.disable_for_step()
        session = find_session()
        if session is not None:
            self._report_begin(session, optimizer)

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Hook after each optimizer step: enable the region of `WholeScript` again, check a step with a closure, and
        report the step.
        """
        self._whole_script.enable_after_step()
        if has_own_amp():
            return
        if _has_closure(args, kwargs):
            self._check_step()
        if self._scaler_step is not None:
            self._scaler_step.has_stepped = True
        session = find_session()
        self._checks.end_step(optimizer, is_open=session is not None)
        if session is not None:
            found_inf = getattr(optimizer, "found_inf", None)  # GradScaler sets it for a fused step
            self._report_end(session, optimizer, is_skipped=found_inf if isinstance(found_inf, Tensor) else False)

    def _check_step(self) -> None:
        """Raise PolicyError if the changes to regions make this step wrong. Note whether the step would need a loss
        scale in float16.
        """
        session = find_session()
        is_scaling = self._scaler_step is not None and self._scaler_step.is_scaling
        low = None if session is None or self._changes.level is None else session.policy.low_dtype
        is_changing = self._changes.kind is not Kind.NOTHING
        self._checks.check(self._changes.level, low, is_changing=is_changing, is_scaling=is_scaling)
        if session is not None and self._checks.needs_scaler(is_scaling=is_scaling):
            session.needs_scaler = True

    def _report_begin(self, session: NativeSession, optimizer: Optimizer) -> None:
        session.note_optimizer(optimizer)
        events.tell(session.without_casts(), "step_begun", optimizer)

    def _report_end(self, session: NativeSession, optimizer: Optimizer, *, is_skipped: bool | Tensor) -> None:
        session.note_optimizer(optimizer)
        session.note_step(optimizer, is_skipped=is_skipped)
        events.tell(session.without_casts(), "step_ended", optimizer)


def _can_unscale_first(optimizer: Any) -> bool:
    """Return whether an optimizer's kernel unscales gradients that `GradScaler.unscale_` would accept as well."""
    if not reads_found_inf(optimizer):
        return False
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    # `unscale_` raises ValueError for float16 gradients, and the kernel takes them
    return all(parameter.grad is None or parameter.grad.dtype is not torch.float16 for parameter in parameters)


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Return whether `step` was called with a closure. `args` begins with the optimizer."""
    return kwargs.get("closure") is not None or any(map(callable, args[1:]))
