"""`StepFollower`: tells a `Sampler` when steps begin and end, in a script with a training loop of its own."""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ... import events
from ...interrupts import UndoStack
from ...native import NativeSession
from ...session import Session, current
from ...step_counter import StepCounter
from ..recorder import describe_run
from ..records import RunRecord
from .sampler import Sampler


class StepFollower(events.Watcher):
    """Follows the steps of optimizers: by the events of the session to which they belong, or else by hooks.

    Args:
        sampler: samples the steps.
        get_models: returns the models to sample.
        before_end: called before a sampled step ends.

    Attributes:
        run: the record of the run of the last session that has closed; None before.
    """

    def __init__(
        self, sampler: Sampler, get_models: Callable[[], Iterable[nn.Module]], before_end: Callable[[], None]
    ) -> None:
        self.run: RunRecord | None = None
        self._sampler = sampler
        self._get_models = get_models
        self._before_end = before_end
        self._hooks: weakref.WeakKeyDictionary[Optimizer, tuple[RemovableHandle, ...]] = weakref.WeakKeyDictionary()
        self._scalers: list[Any] = []
        self._counter = StepCounter()
        self._step = 0
        self._told: Optimizer | None = None  # the optimizer whose step a session has reported, until the step ends
        self._has_stepped = False

    def open(self, undo: UndoStack) -> None:
        """Follow steps until `undo` is closed."""
        undo.callback(self._forget)
        undo.callback(events.watch(self))

    def add(self, optimizers: Sequence[Optimizer], scalers: Sequence[Any], undo: UndoStack) -> None:
        """Follow optimizers. A step that a GradScaler skips runs no hook, so follow the `step` of GradScalers, too."""
        for optimizer in optimizers:
            self._hooks.setdefault(optimizer, ())
        for scaler in scalers:
            if not any(scaler is known for known in self._scalers):
                self._scalers.append(scaler)
                undo.callback_on(scaler, _restore_step, vars(scaler).get("step"))
                vars(scaler)["step"] = _ScalerStep(self, scaler)
        self._follow(current.state.session)

    def begin(self) -> None:
        """Begin the first step."""
        self._sampler.begin_step(self._step)

    # ---- events of a session -----------------------------------------------------------------------------------------

    def session_opened(self, session: Session) -> None:
        """Take masters, loss scales and steps from the session."""
        self._follow(session)

    def session_closing(self, session: Session) -> None:
        """Go on without the session."""
        self.run = describe_run(session)
        self._told = None
        self._follow(None)

    def step_begun(self, optimizer: Optimizer) -> None:
        """Sample the gradients, also if the step will be skipped."""
        self._told = optimizer
        self._begin(optimizer)

    def step_ended(self, optimizer: Optimizer) -> None:
        """Count a step, taken or skipped."""
        is_begun, self._told = self._told is not None, None
        if not is_begun:  # for a step with a closure, the session only reports the end
            if self._hooks.get(optimizer):  # its hook has counted this step
                return
            self._begin(optimizer)
        self._end(optimizer)

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def _begin_by_hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._told is None and not _has_closure(args, kwargs):
            self._begin(optimizer)

    def _end_by_hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._told is not None:
            return
        if _has_closure(args, kwargs):  # the closure has computed the gradients in the step
            self._begin(optimizer)
        self._end(optimizer)

    def step_by_scaler(self, original: Callable[..., Any], optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Call `GradScaler.step`. If no hook of the optimizer ran, GradScaler has skipped the step: count it."""
        self._has_stepped = False
        result = original(optimizer, *args, **kwargs)
        if not self._has_stepped and optimizer in self._hooks:
            self._begin(optimizer)
            self._end(optimizer)
        return result

    # ---- events and hooks --------------------------------------------------------------------------------------------

    def _begin(self, optimizer: Optimizer) -> None:
        if self._sampler.is_sampling and optimizer in self._hooks:
            self._sampler.look_at_gradients(optimizer)

    def _end(self, optimizer: Optimizer) -> None:
        self._has_stepped = True
        if optimizer not in self._hooks or not self._counter.note(optimizer):
            return
        if self._sampler.is_sampling:
            self._before_end()
            self._sampler.end_step(self._step)
        self._step += 1
        self._sampler.begin_step(self._step)

    def _follow(self, session: Session | None) -> None:
        """Follow the optimizers of a session by its events, and other optimizers by hooks.

        Optimizers that were passed to `initialize` get no hook: amp_patch lets a fused optimizer skip a step on the
        device only if it has no hooks of this kind. Optimizers of a `NativeSession` (a script with torch.autocast) keep
        their hooks. The hooks do nothing during a step that the session reports.
        """
        self._sampler.attach(self._get_models, session, self._scalers)
        bound: list[Optimizer] = []
        if session is not None and not isinstance(session, NativeSession):
            bound = [optimizer for optimizer in session.optimizers() if optimizer in self._hooks]
        self._remove_hooks(bound)
        for optimizer, handles in self._hooks.items():
            if not handles and not any(optimizer is known for known in bound):
                begin = optimizer.register_step_pre_hook(self._begin_by_hook)
                self._hooks[optimizer] = begin, optimizer.register_step_post_hook(self._end_by_hook)

    def _remove_hooks(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            for handle in self._hooks[optimizer]:
                handle.remove()
            self._hooks[optimizer] = ()

    def _forget(self) -> None:
        """Remove the hooks, and forget the objects of the script."""
        self._remove_hooks(list(self._hooks))
        self._hooks.clear()
        self._scalers = []


class _ScalerStep:
    """The `step` of a GradScaler while a `StepFollower` follows it. In a deep copy or a pickle of the GradScaler, it
    becomes torch's own `step`.
    """

    def __init__(self, follower: StepFollower, scaler: Any) -> None:
        self._follower = follower
        self._original: Callable[..., Any] = scaler.step
        self._scaler = weakref.ref(scaler)
        functools.update_wrapper(self, self._original)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (self._scaler(), "step")

    def __call__(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return self._follower.step_by_scaler(self._original, optimizer, args, kwargs)


def _restore_step(scaler: Any, previous: Any) -> None:
    """Put back the `step` of a GradScaler, unless a script has replaced it since."""
    if not isinstance(vars(scaler).get("step"), _ScalerStep):
        return
    if previous is None:
        del scaler.step
    else:
        scaler.step = previous


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Return whether `step` was called with a closure. `args` begins with the optimizer."""
    return kwargs.get("closure") is not None or any(map(callable, args[1:]))
