"""`Stepper`: one step of an optimizer under a session: unscale, look at found_inf, update the scale, step or skip, push
the masters.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..casting import Mode, Switch
from ..errors import OptimizerError
from ..events import tell, watchers
from ..reporting import warn
from ..torch_private import mark_step_called
from .decisions import Decisions
from .fused_skip import DeviceSkip, evaluates_closure_first, skip_by
from .ledger import Ledger
from .ledgers import Ledgers
from .loss_scaler import LossScaler
from .masters import OptimizerMasters
from .steps import Outcome, Steps, waits_for_each
from .unscaling import either


class Stepper:
    """Runs the steps of one optimizer.

    Args:
        get_optimizer: the optimizer.
        ledger, masters, steps: those of the optimizer.
        ledgers: of the session.
        switch: turned off while the optimizer steps.
        decisions: updates the loss scales; under a dynamic one a step may be skipped.
    """

    def __init__(
        self,
        get_optimizer: Callable[[], Any],
        ledger: Ledger,
        ledgers: Ledgers,
        masters: OptimizerMasters,
        steps: Steps,
        switch: Switch,
        decisions: Decisions,
    ) -> None:
        self._get_optimizer = get_optimizer
        self._ledger = ledger
        self._ledgers = ledgers
        self._masters = masters
        self._steps = steps
        self._switch = switch
        self._decisions = decisions
        self.is_bound = False  # else `step` is the optimizer's own
        self._is_stepping = False
        self._is_pushed = False  # by a hook of the step under way
        self._has_looked_for_gradients = False
        self.device_skip: DeviceSkip | None = None  # None: the optimizer's step cannot skip by itself

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Step by `original`, the optimizer's own method, or skip the step. See `amp_patch.scale_loss`."""
        if self._is_stepping or not self.is_bound:  # wrappers step optimizers they hold
            return original(*args, **kwargs)
        closure = kwargs.get("closure", args[0] if args else None)
        if callable(closure):
            return self._step_with(closure, original, args, kwargs)
        return self._step(original, args, kwargs)

    def _step(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, has_closure: bool = False
    ) -> Any:
        self._ledgers.release_unreduced(self._ledger)
        if self._masters.use_masters:
            self._masters.masters.pull()
        self._ledgers.prepare_step(self._ledger)
        try:
            if watchers and not has_closure:
                self._tell("step_begun")
            self._is_stepping = True
            result = self._step_or_skip(original, args, kwargs)
        finally:
            self._is_stepping = False
            self._ledgers.resume(self._ledger)
        if watchers:
            self._tell("step_ended")
        return result

    def _tell(self, event: str) -> None:
        tell(self._switch.region(Mode.OFF), event, self._get_optimizer())

    def _step_or_skip(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._has_looked_for_gradients:
            self._look_for_gradients()
        found_inf = self._ledger.flags
        if self._ledger.zeroed:
            found_inf = self._ledger.find_again()
        found_inf = self._decisions.judge(found_inf)
        outcome = flag = result = None
        is_skip = False
        if found_inf:
            outcome = Outcome(found_inf)
            if outcome.may_skip:
                flag = self._find_flag(found_inf, outcome)
                if flag is None:
                    outcome.read()
                    is_skip = outcome.is_skip
        if is_skip:
            mark_step_called(self._get_optimizer())
        else:
            result = self._take_step(flag, original, args, kwargs)
        self._ledgers.end_window(self._ledger)
        try:
            if outcome is None:
                self._steps.add_taken()
            else:
                self._steps.add(outcome)
        finally:
            if self._masters.use_masters:
                self._drop_gradients()
        return result

    def _drop_gradients(self) -> None:
        """Forget the gradients of the masters, but for those that another optimizer is yet to step on."""
        shared: set[int] = set()
        for partner in self._ledger.partners:
            if partner.awaits_step:
                shared.update(map(id, partner.step_parameters()))
        self._masters.drop_gradients(but=shared)

    def _find_flag(self, found_inf: dict[LossScaler, Tensor], outcome: Outcome) -> Tensor | None:
        """Return the flag that the optimizer is to skip by on the device: 0-dim float32, 0.0 or 1.0. None where the
        host decides, which waits for it.
        """
        if outcome.is_known() or waits_for_each():
            return None
        if self.device_skip is None or not self.device_skip.is_possible(self._get_optimizer()):
            return None
        flag: Tensor | None = None
        for scaler, found in found_inf.items():
            if scaler.is_dynamic:
                flag = either(flag, found)
        return flag

    def _look_for_gradients(self) -> None:
        """Warn, once, of a first step without any gradient, or without a loss that was scaled."""
        optimizer = type(self._get_optimizer()).__name__
        if self._ledger.has_begun:
            self._has_looked_for_gradients = True
            if self._ledger.is_empty() and not self._decisions.groups:  # a rank may hold no shard
                warn(
                    f"step() of {optimizer} after a backward pass of a loss that it was passed with, but none of its"
                    " parameters has a gradient: it trains nothing. Does it hold parameters that the model has no more?"
                    " Move, shard or wrap the model first, then make the optimizer, then call initialize."
                )
        elif all(scaler.awaits_loss for scaler in self._decisions.scalers) and not self._ledger.is_empty():
            self._has_looked_for_gradients = True
            for scaler in self._decisions.scalers:
                scaler.awaits_loss = False
            warn(
                f"step() of {optimizer} under a dynamic loss scale, but no loss has been scaled: small gradients may be"
                " lost, and no overflow is noticed. Write `with amp.scale_loss(loss, optimizer) as scaled_loss:"
                " scaled_loss.backward()`, or give initialize loss_scale=1.0."
            )

    def _take_step(
        self, flag: Tensor | None, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._is_pushed = False
        run = original
        if flag is not None:
            run = functools.partial(skip_by, flag, self._get_optimizer(), original)
        if self._switch.on:
            with self._switch.region(Mode.OFF):
                result = run(*args, **kwargs)
        else:
            result = run(*args, **kwargs)
        if self._masters.use_masters and not self._is_pushed:
            self._masters.push()
        return result

    def push(self) -> None:
        """Push the masters at the end of the optimizer's own step, before its hooks run."""
        self._masters.push()
        self._is_pushed = True

    def _step_with(
        self, closure: Callable[[], Any], original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if any(scaler.is_dynamic for scaler in self._decisions.scalers):
            return self._step_after(closure, original, args, kwargs)
        args, kwargs = _replace_closure(self._prepare_closure(closure), args, kwargs)
        return self._step(original, args, kwargs, has_closure=True)

    def _step_after(
        self, closure: Callable[[], Any], original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
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
        self._step(original, args, kwargs)
        return loss

    def _prepare_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure as it is to be called in the step: by the lists, on what the step has made so far."""

        def evaluate() -> Any:
            with self._switch.region(Mode.BY_LISTS):
                self._masters.push()
                loss = closure()
            self._masters.masters.pull()
            self._ledgers.prepare_step(self._ledger)
            self._ledgers.resume(self._ledger)
            self._decisions.judge_outside_of_steps(self._ledger.flags)
            return loss

        return evaluate


def _replace_closure(
    closure: Callable[[], Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a `step` with another closure."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (closure, *args[1:]), kwargs
