"""`Stepper`: one step of an optimizer under a session: unscale, look at found_inf, update the scale, step or skip, push
the masters.
"""

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..casting import Mode, Switch
from ..errors import OptimizerError
from ..events import tell
from ..interrupts import is_running
from ..reporting import warn
from ..torch_private import mark_step_called
from .backward_pass import BackwardPass
from .decisions import Decisions
from .fused_skip import DeviceSkip, evaluates_closure_first, skip_by
from .gradients import GradientSet
from .masters import OptimizerMasters
from .steps import StepResult, Steps, waits_for_each
from .window import Window


class Stepper:
    """Runs the steps of one optimizer.

    Args:
        get_optimizer: the optimizer.
        get_gradients, masters, window, steps: those of the optimizer.
        switch: turned off while the optimizer steps.
        decisions: judges the passes that a step depends on: under a dynamic scale it may be skipped.
        on_new_parameters: called where the optimizer turns out to have others than before.
    """

    def __init__(
        self,
        get_optimizer: Callable[[], Any],
        get_gradients: Callable[[], GradientSet],
        masters: OptimizerMasters,
        window: Window,
        steps: Steps,
        switch: Switch,
        decisions: Decisions,
        on_new_parameters: Callable[[], None],
    ) -> None:
        self._get_optimizer = get_optimizer
        self._get_gradients = get_gradients
        self._masters = masters
        self._window = window
        self._steps = steps
        self._switch = switch
        self._decisions = decisions
        self._on_new_parameters = on_new_parameters
        self._frame: types.FrameType | None = None  # of the step under way, or of one that was interrupted
        self._is_pushed = False  # by a hook of the step under way
        self._has_looked_for_gradients = False
        self.device_skip: DeviceSkip | None = None  # None: the optimizer's step cannot skip by itself

    @property
    def _gradients(self) -> GradientSet:
        return self._get_gradients()

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Step by `original`, the optimizer's own method, or skip the step. See `amp_patch.scale_loss`."""
        if self._frame is not None and is_running(self._frame):  # wrappers step optimizers they hold
            return original(*args, **kwargs)
        closure = kwargs.get("closure", args[0] if args else None)
        if callable(closure) and any(scaler.is_dynamic for scaler in self._decisions.scalers):
            return self._step_after(closure, original, args, kwargs)
        if self._gradients.is_unreduced:
            if self._gradients.has_masters:
                raise OptimizerError(
                    "step() with gradients that were never reduced over the ranks: every backward pass since the last"
                    " step was under no_sync(). Leave the last one of an accumulation window out of it."
                )
            self._gradients.is_local = False  # the step is one of this rank alone
        if callable(closure):
            args, kwargs = _replace_closure(self._prepare_closure(closure), args, kwargs)
        if self._masters.use_masters and self._masters.place_again(self._get_optimizer()):
            self._on_new_parameters()
        self._masters.masters.pull()
        self._gradients.unscale()
        if not callable(closure):
            self._tell("step_begun")
        passes = self._window.passes()
        try:
            self._frame = sys._getframe()
            result = self._step_or_skip(passes, original, args, kwargs)
        finally:
            self._frame = None
            self._gradients.resume()
            if self._gradients.is_in_block and passes:  # the rest of the pass under way is for the next step
                self._window.add(BackwardPass(passes[-1].scaler, passes[-1].found_inf.device))
        self._tell("step_ended")
        return result

    def _tell(self, event: str) -> None:
        tell(self._switch.region(Mode.OFF), event, self._get_optimizer())

    def _step_or_skip(
        self,
        passes: Sequence[BackwardPass],
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if not passes and self._decisions.scalers[0].awaits_loss:
            self._tell_of_unscaled()
        if self._window.has_begun and not self._has_looked_for_gradients:
            self._look_for_gradients()
        passes = self._decisions.judge(passes)
        if not passes:
            result = self._take_step(None, original, args, kwargs)
            self._window.end(())
            self._steps.add_taken()
            self._masters.drop_gradients()
            return result
        optimizer: Any = self._get_optimizer()
        found = StepResult(passes)
        flag = None
        may_wait = found.is_known() or waits_for_each()
        if not may_wait and self.device_skip is not None and self.device_skip.is_possible(optimizer):
            flag = found.found_inf()
        result = None
        if flag is None and found.find_overflowed(is_dynamic=True):
            mark_step_called(optimizer)
        else:
            result = self._take_step(flag, original, args, kwargs)
        self._window.end(passes)
        try:
            self._steps.add(found)
        finally:
            self._masters.drop_gradients()
        return result

    def _look_for_gradients(self) -> None:
        """Warn, once for each optimizer, of a first backward pass that gave it no gradient at all."""
        self._has_looked_for_gradients = True
        if self._gradients.is_empty() and not self._decisions.groups:  # a rank may hold no shard
            warn(
                f"step() of {type(self._get_optimizer()).__name__} after a backward pass of a loss that it was passed"
                " with, but none of its parameters has a gradient: it trains nothing. Does it hold parameters that the"
                " model has no more? Move, shard or wrap the model first, then make the optimizer, then call"
                " initialize."
            )

    def _tell_of_unscaled(self) -> None:
        """Warn, once in a session, of gradients under a dynamic scale that no loss was multiplied by."""
        if not all(scaler.awaits_loss for scaler in self._decisions.scalers) or self._gradients.is_empty():
            return
        for scaler in self._decisions.scalers:
            scaler.awaits_loss = False
        warn(
            f"step() of {type(self._get_optimizer()).__name__} under a dynamic loss scale, but no loss has been scaled:"
            " small gradients may be lost, and no overflow is noticed. Write `with amp.scale_loss(loss, optimizer) as"
            " scaled_loss: scaled_loss.backward()`, or give initialize loss_scale=1.0."
        )

    def _take_step(
        self, flag: Tensor | None, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._is_pushed = False
        region = self._switch.enter(Mode.OFF, frame=self._frame)  # not as a `with` block, which costs more
        try:
            if flag is None:
                result = original(*args, **kwargs)
            else:
                result = skip_by(flag, self._get_optimizer(), original, args, kwargs)
        finally:
            self._switch.leave(region)
        if not self._is_pushed:
            self._masters.push()
        return result

    def push(self) -> None:
        """Push the masters at the end of the optimizer's own step, before its hooks run."""
        self._masters.push()
        self._is_pushed = True

    def _step_after(
        self,
        closure: Callable[[], Any],
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the closure, then step or skip: which of them must be known before the optimizer's own step begins."""
        if not evaluates_closure_first(original):
            raise OptimizerError(
                f"step(closure) of {type(self._get_optimizer()).__name__} does not work with a dynamic loss scale:"
                " whether to skip must be known before the optimizer calls the closure, and only those of torch.optim"
                " but LBFGS are known to call it once, at first. Call step() without a closure, or give initialize a"
                " static loss_scale, or use a bfloat16 level (O4, O5)."
            )
        with torch.enable_grad():
            loss = closure()
        args, kwargs = _replace_closure(None, args, kwargs)
        self.step(original, *args, **kwargs)
        return loss

    def _prepare_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure as it is to be called in the step: by the lists, on what the step has made so far."""

        def evaluate() -> Any:
            with self._switch.region(Mode.BY_LISTS):
                self._masters.push()
                loss = closure()
            self._gradients.unscale()
            self._gradients.resume()
            return loss

        return evaluate


def _replace_closure(
    closure: Callable[[], Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a `step` with another closure."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (closure, *args[1:]), kwargs
