"""`OptimizerBinding`: puts float32 masters into the groups of an optimizer, and skips its step after an overflow.

`step`, `zero_grad` and `add_param_group` of the instance are replaced once, when the optimizer is bound.
"""

import contextlib
import enum
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..casting import Mode, Switch, WeightCache
from ..errors import OptimizerError
from ..events import tell, watchers
from ..interrupts import UndoStack
from ..reporting import say
from ..torch_private import STEP_POST_HOOKS, mark_step_called, put_first, remove_step_hook
from .bfloat16_states import Bfloat16States
from .first_step import FirstStepChecks
from .fused_skip import CopyMastersHook, DeviceSkip, evaluates_closure_first, step_with_flag, steps_separately
from .gradient_sums import GradientSums
from .groups import Groups
from .loss_scaler import LossScaler
from .masters import Masters
from .overflow_flags import OptState, OverflowFlags
from .step_log import Outcome, StepLog, waits_for_each
from .step_parts import step_in_parts
from .step_was_skipped import remove_step_was_skipped, set_step_was_skipped
from .stochastic_rounding import StochasticRounding
from .unscaling import either, find_nonfinite, move_to_masters_


class StepDecision(enum.Enum):
    """The effect of a call of `step`."""

    TAKE = enum.auto()
    SKIP = enum.auto()

    SKIP_ON_DEVICE = enum.auto()
    """Run the optimizer's own step, whose kernels read the flag and change nothing if it is set."""


class OptimizerBinding:
    """One optimizer in a session. `optimizer._amp_stash` holds it, or under `amp_patch.apex` a view of it.

    Args:
        optimizer: any torch.optim.Optimizer; held by a weak reference.
        masters, gradients: shared by all optimizers of the session.
        use_masters: whether every 16-bit parameter that is not opaque (`dtypes.is_opaque`) gets a float32 master.
        split_masters: whether masters may be split (in float32 only while in use). Only for optimizers that update each
            parameter separately.
        rounding: rounds optimizer state to bfloat16 after each step, for the same optimizers. None: do not round.
        switch: the switch of the session's casts.
        cache: the weight cache of the session, or None without one.
        get_names: returns names of parameters, for messages.
        on_new_parameters: called after parameters were added to the optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        masters: Masters,
        use_masters: bool,
        split_masters: bool,
        rounding: StochasticRounding | None,
        switch: Switch,
        cache: WeightCache | None,
        gradients: GradientSums,
        get_names: Callable[[Iterable[Tensor]], list[str]],
        on_new_parameters: Callable[[], None],
    ) -> None:
        self.reference = weakref.ref(optimizer)
        self.groups = Groups(optimizer, masters, use_masters=use_masters, on_new_parameters=self._on_parameters_put_in)
        self.flags = OverflowFlags(self.groups)
        self._masters = masters
        self._use_masters = use_masters
        self._split_masters = split_masters
        self._rounding = rounding
        self._states: Bfloat16States | None = None  # None also if the optimizer may not step in parts
        self._steps_in_parts = False
        self._switch = switch
        self._cache = cache
        self._gradients = gradients
        self._scale_updates = gradients.scale_updates
        self.step_log = StepLog(self.reference, self._scale_updates.scalers, self.find_nonfinite_gradients)
        self._first_step = FirstStepChecks(self.reference, self.flags, self._scale_updates, masters, get_names)
        self._get_names = get_names
        self._on_new_parameters = on_new_parameters
        self._device_skip: DeviceSkip | None = None  # None if the optimizer wraps another one: then the host decides
        self._undo = UndoStack()
        self._is_bound = False  # if not, the replaced methods only call the optimizer's own
        self._is_stepping = False
        self._is_stored = False  # whether `CopyMastersHook` has run in the current step

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, or None once it is gone."""
        return self.reference()

    # ---- binding -----------------------------------------------------------------------------------------------------

    def bind(self, float32_data: dict[int, Tensor]) -> None:
        """Put masters into the groups, and replace the methods.

        `float32_data` has the values of parameters before they were cast, by the parameter's id.
        """
        optimizer: Any = self.optimizer
        inner_optimizers = _find_inner_optimizers(optimizer)
        self._is_bound = True
        self._undo.callback(self.groups.restore)
        if self._split_masters or self._rounding is not None:
            self._decide_to_step_in_parts(optimizer, inner_optimizers)
        for group in optimizer.param_groups:
            self._adopt(optimizer, group, float32_data)
        move_to_masters_(self.groups.placed.values(), None, None)  # gradients from before `initialize`
        if not inner_optimizers:
            self._device_skip = DeviceSkip(optimizer, optimizer.step)
        replaced = {"step": self._step, "zero_grad": self._zero_grad, "add_param_group": self._add_param_group}
        for name, method in replaced.items():
            self._replace(optimizer, name, method)
        for inner in inner_optimizers:
            self.groups.adopt_inner(inner)
            for group in inner.param_groups:
                self._adopt(inner, group, float32_data)
            self._replace(inner, "step", self._step)
        if self._states is not None:
            self._bind_states(optimizer, self._states)
        if self._use_masters or self._states is not None:
            hook = CopyMastersHook(self._store_in_step)
            self._undo.callback_on(optimizer, remove_step_hook, hook)
            # before hooks of the script, which may read or edit the weights
            put_first(optimizer.register_step_post_hook(hook), STEP_POST_HOOKS, optimizer)
        self.attach("_amp_stash", self)
        self._undo.callback_on(optimizer, remove_step_was_skipped)
        set_step_was_skipped(optimizer, False)
        self.attach("_lazy_init_maybe_master_weights", _masters_exist)

    def _decide_to_step_in_parts(self, optimizer: Optimizer, inner_optimizers: list[Optimizer]) -> None:
        """Let new masters be split masters, and states be bfloat16, or say that this optimizer cannot have them."""
        self._steps_in_parts = not inner_optimizers and steps_separately(optimizer.step)
        if self._steps_in_parts:
            self.groups.are_split = self._split_masters
            self._states = None if self._rounding is None else Bfloat16States(optimizer, self.groups, self._rounding)
            return
        kept = ["masters"] if self._split_masters else []
        kept += [] if self._rounding is None else ["state"]
        say(
            "amp_patch: %s keeps float32 %s: it is not known to update each parameter by its own gradient alone",
            type(optimizer).__name__,
            " and ".join(kept),
        )

    def _bind_states(self, optimizer: Optimizer, states: Bfloat16States) -> None:
        """Round the state that the optimizer has, and the state that it will load."""

        def round_states(loaded: Optimizer) -> None:
            if loaded is self.optimizer:
                states.close_all()

        self._undo.callback(states.open_all)
        self._undo.callback(optimizer.register_load_state_dict_post_hook(round_states).remove)
        states.close_all()

    def attach(self, name: str, value: Any) -> None:
        """Set an attribute of the optimizer until the binding is undone. A property of its class takes precedence."""
        self._undo.callback_on(self.optimizer, _delete, name)
        vars(self.optimizer)[name] = value

    def _replace(self, target: Any, name: str, method: Callable[..., Any]) -> None:
        """Replace `target.name(...)` by `method(original, ...)`, until the binding is undone."""
        original = getattr(target, name)
        is_instance_attribute = name in vars(target)

        @functools.wraps(original)
        def replacement(self_: Any, *args: Any, **kwargs: Any) -> Any:
            return method(original, *args, **kwargs)

        vars(replacement)["_amp_stash"] = self  # by this, `_restore` knows the replacement
        self._undo.callback_on(target, _restore, self, name, is_instance_attribute)
        setattr(target, name, types.MethodType(replacement, target))

    def undo(self) -> None:
        """Restore the methods, parameters and states of the optimizer. A second call does nothing."""
        if self._is_bound and self.optimizer is not None:
            # reports the last steps while `step_was_skipped` still exists
            self.step_log.resolve()
        self._is_bound = False
        self._undo.close()

    def _adopt(self, optimizer: Optimizer, group: dict[str, Any], float32_data: dict[int, Tensor]) -> None:
        """Put masters into a group, and let the weight cache keep copies of its parameters."""
        self.groups.place(optimizer, group, float32_data)
        if self._cache is not None:
            self._cache.own(group["params"])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block, the replaced methods only call the optimizer's own."""
        self._is_bound = False
        try:
            yield
        finally:
            self._is_bound = True

    def copy_masters_to_parameters(self) -> None:
        """Copy the masters in the groups to their parameters. Inside `Groups.without_masters`, there are none."""
        pairs = self.groups.pairs()
        if pairs:
            self._masters.copy_to_parameters(pairs)

    def find_nonfinite_gradients(self) -> list[str]:
        """Return the names of the parameters whose gradients hold inf or NaN. Waits for the device."""
        return self._get_names(find_nonfinite(self.groups.parameters()))

    def _on_parameters_put_in(self) -> None:
        """Record that a script has put 16-bit parameters into a group. Their gradients count as unchecked."""
        self.flags.state = OptState.UNCHECKED
        self._on_new_parameters()

    # ---- zero_grad and add_param_group -------------------------------------------------------------------------------

    def _zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_bound:
            self._gradients.mark_zeroed(self.flags)
            for parameter, _ in self.groups.placed.values():
                parameter.grad = None
        return original(*args, **kwargs)

    def _add_param_group(self, original: Callable[..., Any], group: dict[str, Any]) -> Any:
        if not self._is_bound:
            return original(group)
        if isinstance(group, dict) and self._use_masters:
            added = group.get("params")
            added = [added] if isinstance(added, Tensor) else added
            known_ids = {id(parameter) for parameter in self.groups.model_parameters()}
            # torch's own check compares with the contents of the groups, which are masters
            if isinstance(added, (list, tuple)) and any(id(parameter) in known_ids for parameter in added):
                raise ValueError("some parameters appear in more than one parameter group")
        self._gradients.flush()
        result = original(group)
        optimizer: Any = self.optimizer
        self._adopt(optimizer, optimizer.param_groups[-1], {})
        self._on_new_parameters()
        return result

    # ---- step --------------------------------------------------------------------------------------------------------

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `original`, the optimizer's own method, or skip the step. See `amp_patch.scale_loss`."""
        # `_is_stepping`: this optimizer wraps another one, and its own step now calls the step of that one
        if self._is_stepping or not self._is_bound:
            return original(*args, **kwargs)
        closure = kwargs.get("closure", args[0] if args else None)
        if not callable(closure):
            return self._step_once(original, args, kwargs)
        if self._steps_in_parts or any(scaler.is_dynamic for scaler in self._scale_updates.scalers):
            return self._step_after_closure(closure, original, args, kwargs)
        # under static scales no step is skipped, so the optimizer may call the closure whenever it wants
        args, kwargs = _replace_closure(functools.partial(self._evaluate, closure), args, kwargs)
        return self._step_once(original, args, kwargs, has_closure=True)

    def _step_once(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, has_closure: bool = False
    ) -> Any:
        """Unscale the gradients, then take or skip the step."""
        self._gradients.release_unreduced(self.flags)
        if self._use_masters:
            self._masters.copy_from_parameters(warns=True)
        self._gradients.begin_step(self.flags)
        try:
            if watchers and not has_closure:  # a closure has not computed the gradients yet
                self._tell("step_begun")
            self._is_stepping = True
            result = self._take_or_skip(original, args, kwargs)
        finally:
            self._is_stepping = False
            self._gradients.end_step(self.flags)
        if watchers:
            self._tell("step_ended")
        return result

    def _tell(self, event: str) -> None:
        tell(self._switch.region(Mode.OFF), event, self.reference())

    def _take_or_skip(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Update the scales, then take the step or skip it. Either way, forget the flags and log the step."""
        if not self._first_step.is_done:
            self._first_step.check()
        if self._states is not None:
            self._states.begin_step()
        optimizer: Any = self.reference()
        found_inf = self._scale_updates.update(self.flags.check_at_step(self._scale_updates.scalers))
        outcome: Outcome | None = None  # stays None without a flag, as at a scale of 1
        decision = StepDecision.TAKE
        if found_inf:
            outcome = Outcome(found_inf)
            decision = self._decide(outcome)
        result = None
        if decision is StepDecision.SKIP:
            mark_step_called(optimizer)
        elif decision is StepDecision.TAKE:
            result = self._take_step(original, args, kwargs)
        else:
            step_on_device = functools.partial(step_with_flag, _find_dynamic_flag(found_inf), optimizer, original)
            result = self._take_step(step_on_device, args, kwargs)
        self._gradients.reset_flags(self.flags)
        try:
            self.step_log.add(outcome)
        finally:  # the log may raise GradientOverflowError, and the next pass must not add to these gradients
            if self._use_masters:
                self._drop_gradients()
            if self.groups.are_split:
                self._masters.end_step(self.groups.pairs())
        return result

    def _decide(self, outcome: Outcome) -> StepDecision:
        """Decide whether to take the step. May wait for the flags."""
        if not outcome.may_skip:
            return StepDecision.TAKE  # a static scale never skips
        is_unknown = not outcome.is_known() and not waits_for_each()
        if is_unknown and self._device_skip is not None and self._device_skip.is_possible(self.reference()):
            return StepDecision.SKIP_ON_DEVICE
        outcome.read()
        return StepDecision.SKIP if outcome.is_skip else StepDecision.TAKE

    def _take_step(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the optimizer's own step without casts, and copy the masters to the parameters."""
        self._is_stored = False
        if self._steps_in_parts:
            optimizer: Any = self.reference()
            whole_step = functools.partial(run, *args, **kwargs)
            part_calls = (self._begin_part, self._drop_gradients)
            has_states = self._states is not None
            run = functools.partial(step_in_parts, optimizer, self.groups, whole_step, has_states, *part_calls)
            args, kwargs = (), {}
        elif self._split_masters:  # another optimizer of the session may have made some masters split
            self._masters.open(self.groups.parameters())
        if self._switch.on:
            with self._switch.region(Mode.OFF):
                result = run(*args, **kwargs)
        else:
            result = run(*args, **kwargs)
        if self._use_masters and not self._is_stored:
            self.copy_masters_to_parameters()
        if self._states is not None:
            self._states.end_step()
        return result

    def _begin_part(self, parameters: list[Tensor], *, is_private: bool) -> None:
        """Give split masters and bfloat16 states their float32 values. See `step_in_parts`."""
        self._masters.open(parameters, is_private=is_private)
        if self._states is not None:
            self._states.open(parameters, is_private=is_private)

    def _store_in_step(self) -> None:
        """Copy the masters and round the states after the optimizer's own step, before other post-hooks run."""
        if self._use_masters:
            self.copy_masters_to_parameters()
        if self._states is not None:
            self._states.close(self.groups.parameters())
        self._is_stored = True

    def _drop_gradients(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Drop the gradients of the masters, except gradients that another optimizer has yet to step on.

        `parameters`: drop only the gradients of the masters among these. None: of all masters.
        """
        still_needed: set[int] = set()
        for partner in self.flags.partners:
            if partner.state is not OptState.READY:
                still_needed.update(map(id, partner.groups.parameters()))
        chosen = self.groups.placed.keys() if parameters is None else map(id, parameters)
        for key in chosen:
            if key in self.groups.placed and key not in still_needed:
                self.groups.placed[key][1].grad = None

    # ---- step(closure) -----------------------------------------------------------------------------------------------

    def _step_after_closure(
        self, closure: Callable[[], Any], original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the closure, then take or skip the step without one.

        Whether to skip must be known before the optimizer's own step begins, and a step in parts would call the closure
        for each part. Raises OptimizerError for an optimizer that may call the closure later or several times.
        """
        if not evaluates_closure_first(original):
            raise OptimizerError(
                f"step(closure) of {type(self.reference()).__name__} does not work with a dynamic loss scale: this"
                " optimizer may call the closure at any time, and whether to skip the step must be known before. Call"
                " step() without a closure, pass a static loss_scale to initialize, or use a bfloat16 level (O4, O5)."
            )
        with torch.enable_grad():  # as torch's own steps do
            loss = closure()
        args, kwargs = _replace_closure(None, args, kwargs)
        self._step_once(original, args, kwargs)
        return loss

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call a closure in the middle of a step, with casts on and the weights that the step has made so far. Then
        unscale the gradients and update the scalers.
        """
        with self._switch.region(Mode.BY_LISTS):
            self.copy_masters_to_parameters()
            loss = closure()
        self._masters.copy_from_parameters(warns=True)
        self._gradients.unscale(self.flags)
        self._scale_updates.update_without_step(self.flags.found_inf)
        return loss


def _find_dynamic_flag(found_inf: dict[LossScaler, Tensor]) -> Tensor:
    """Return the flag for an optimizer that skips on the device: 0-dim float32. At least one scaler is dynamic."""
    dynamic: Tensor | None = None
    for scaler, flag in found_inf.items():
        if scaler.is_dynamic:
            dynamic = either(dynamic, flag)
    assert dynamic is not None
    return dynamic


def _replace_closure(
    closure: Callable[[], Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a `step` with `closure` in place of the one in them."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (closure, *args[1:]), kwargs


def _find_inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers in attributes of this one that share a parameter with it, as in SAM and Lookahead. Leave
    out optimizers that are bound themselves.
    """
    own = _ids_of(optimizer)
    inner_optimizers: list[Optimizer] = []
    for inner in vars(optimizer).values():
        if not isinstance(inner, Optimizer) or hasattr(inner, "_amp_stash"):
            continue
        if inner.param_groups is optimizer.param_groups or not own.isdisjoint(_ids_of(inner)):
            inner_optimizers.append(inner)
    return inner_optimizers


def _ids_of(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _delete(target: Any, name: str) -> None:
    vars(target).pop(name, None)


def _restore(target: Any, binding: OptimizerBinding, name: str, was_instance_attribute: bool) -> None:
    """Remove the replacement of a method. If something, such as an LR scheduler, has wrapped it since, leave it: once
    the binding is undone, the replacement only calls the original.
    """
    current = vars(target).get(name)
    if not isinstance(current, types.MethodType) or vars(current.__func__).get("_amp_stash") is not binding:
        return
    if was_instance_attribute:
        setattr(target, name, current.__func__.__wrapped__)  # type: ignore[attr-defined]
    else:
        delattr(target, name)


def _masters_exist() -> None:
    """Do nothing. Apex scripts call this to create masters before they load saved ones."""
