"""One optimizer, as a session changes it: float32 masters in its groups, and a `step` that skips after an overflow.

`step`, `zero_grad` and `add_param_group` are replaced once, when the optimizer is bound, by methods of the instance.
Nothing is patched in the training loop: a skip is a flag that `step` reads.
"""

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..casting import Mode, Switch, WeightCache
from ..dtypes import LOW_DTYPES, is_opaque
from ..errors import OptimizerError
from ..torch_private import mark_step_called
from .fused_skip import DeviceSkip, skip_by
from .gradients import GradientSet
from .loss_scaler import LossScaler, OverflowCheck
from .masters import Masters, Pair
from .steps import StepOutcome, StepOutcomes


class OptimizerBinding:
    """One optimizer in a session. It is also what `optimizer._amp_stash` holds.

    Args:
        optimizer: any torch.optim.Optimizer; held weakly.
        masters: where the session keeps its masters.
        use_masters: give every 16-bit parameter of the optimizer a float32 master.
        switch: turned off while the optimizer steps.
        links: the links to mark, or None.
        scalers: the scalers of the session, to name them in messages and to know whether a step may be skipped.
        get_names: names for parameters, for messages.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        masters: Masters,
        use_masters: bool,
        switch: Switch,
        links: WeightCache | None,
        scalers: Sequence[LossScaler],
        get_names: Callable[[Iterable[Tensor]], list[str]],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._masters = masters
        self._use_masters = use_masters
        self._switch = switch
        self._links = links
        self._scalers = scalers
        self._get_names = get_names
        self._pairs: dict[int, Pair] = {}  # by the master's id
        self.linked: list[Tensor] = []  # every parameter whose link this optimizer keeps alive
        self._checks: list[OverflowCheck] = []
        self._device_skip: DeviceSkip | None = None
        self._is_bound = False
        self._is_stepping = False
        self._undo = contextlib.ExitStack()
        self.outcomes = StepOutcomes(scalers, self._find_culprits, self._tell_skipped)
        self.gradients = GradientSet(self._plain_parameters, self._pairs.values)

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, or None once it is gone."""
        return self._optimizer()

    def parameters(self) -> Iterator[Tensor]:
        """Yield what the optimizer steps on: masters where there are masters."""
        optimizer = self.optimizer
        if optimizer is not None:
            for group in optimizer.param_groups:
                yield from group["params"]

    def model_parameters(self) -> Iterator[Tensor]:
        """Yield the model's parameters: those the masters stand for, not the masters."""
        for parameter in self.parameters():
            yield self._pairs[id(parameter)][0] if id(parameter) in self._pairs else parameter

    def _plain_parameters(self) -> Iterator[Tensor]:
        return (parameter for parameter in self.parameters() if id(parameter) not in self._pairs)

    # ---- binding -----------------------------------------------------------------------------------------------------

    def bind(self, float32_data: dict[int, Tensor]) -> None:
        """Put masters into the groups and replace the methods.

        `float32_data` holds parameters' values from before they were cast, by id.
        """
        optimizer: Any = self.optimizer
        self._is_bound = True
        self._undo.callback(self._restore_groups)
        for group in optimizer.param_groups:
            self._adopt(optimizer, group, float32_data)
        if any(parameter.grad is not None for parameter, _ in self._pairs.values()):
            self.gradients.settle()
        inner_optimizers = _find_inner_optimizers(optimizer)
        self._device_skip = None if inner_optimizers else DeviceSkip(optimizer, optimizer.step)
        for name, method in (
            ("step", self._step),
            ("zero_grad", self._zero_grad),
            ("add_param_group", self._add_param_group),
        ):
            self._replace(optimizer, name, method)
        for inner in inner_optimizers:
            for group in inner.param_groups:
                self._adopt(inner, group, float32_data)
            self._replace(inner, "step", self._step)
        self.attach("_amp_stash", self)
        self.attach("step_was_skipped", False)
        self.attach("_lazy_init_maybe_master_weights", _masters_exist)

    def attach(self, name: str, value: Any) -> None:
        """Set an attribute of the optimizer, until the binding is undone.

        A later value takes the place of an earlier one.
        """
        setattr(self.optimizer, name, value)
        self._undo.callback(_delete_attribute, self._optimizer, name)

    def undo(self) -> None:
        """Give the optimizer its own methods and the model's parameters back, state and all. Harmless twice."""
        if self._is_bound and self.optimizer is not None:
            self.gradients.settle()
            self.outcomes.settle()
        self._is_bound = False
        self._undo.close()

    def _replace(self, optimizer: Optimizer, name: str, method: Callable[..., Any]) -> None:
        original = getattr(optimizer, name)
        had_own = name in vars(optimizer)

        @functools.wraps(original)
        def replacement(self_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return method(original, *args, **kwargs)

        vars(replacement)["_amp_stash"] = self  # how undo knows it again, without holding what holds the optimizer
        setattr(optimizer, name, types.MethodType(replacement, optimizer))
        self._undo.callback(_restore_method, weakref.ref(optimizer), self, name, had_own)

    def _adopt(self, optimizer: Optimizer, group: dict[str, Any], float32_data: dict[int, Tensor]) -> None:
        """Put a master in the place of each 16-bit parameter of a group, with the state it had, and own the others'
        links.

        Without masters, the state of parameters that were cast is cast with them.
        """
        for index, parameter in enumerate(group["params"]):
            if parameter.dtype not in LOW_DTYPES or is_opaque(parameter):
                continue
            if not self._use_masters:
                if id(parameter) in float32_data:
                    _cast_state(optimizer, parameter, parameter.dtype)
                    self._undo.callback(_cast_state, optimizer, parameter, torch.float32)
                continue
            master = self._masters.get(parameter)  # another optimizer of the session may have made it
            if master is None:
                data = float32_data.get(id(parameter))
                master = torch.nn.Parameter(
                    parameter.detach().float() if data is None else data, requires_grad=parameter.requires_grad
                )
            self._pairs[id(master)] = (parameter, master)
            self._masters.add(parameter, master)
            group["params"][index] = master
            if parameter in optimizer.state:
                optimizer.state[master] = optimizer.state.pop(parameter)
        if self._links is not None:
            self.linked.extend(group["params"])
            self._links.own(group["params"])

    def _restore_groups(self) -> None:
        optimizer: Any = self.optimizer
        if optimizer is not None:
            for group in optimizer.param_groups:
                for index, master in enumerate(group["params"]):
                    if id(master) in self._pairs:
                        parameter, _ = self._pairs[id(master)]
                        group["params"][index] = parameter
                        if master in optimizer.state:
                            optimizer.state[parameter] = optimizer.state.pop(master)
        self._pairs.clear()

    # ---- what a pass of scale_loss tells -----------------------------------------------------------------------------

    def add_check(self, check: OverflowCheck) -> None:
        """Let the next step be skipped if `check` finds an overflow in the pass that begins."""
        check.is_open = True
        self._checks.append(check)
        self.gradients.owe(check)

    def drop_check(self, check: OverflowCheck) -> None:
        """Forget `check`: its pass has failed."""
        self._checks = [other for other in self._checks if other is not check]
        self.gradients.forgive(check)

    def awaits(self, check: OverflowCheck) -> bool:
        """Tell whether the next step will look at `check`."""
        return any(other is check for other in self._checks)

    def close_checks(self) -> None:
        """Say that the passes are over, so that decisions may take their checks into account."""
        for check in self._checks:
            check.is_open = False

    def abandon_window(self) -> None:
        """The gradients were zeroed: whether they had overflowed is a matter of the loss scale now, and no longer of
        the next step.
        """
        for check in self._checks:
            if not self.gradients.owes(check):
                check.scaler.decide()
        self._checks = [check for check in self._checks if self.gradients.owes(check)]

    def abandon_window_if_empty(self) -> None:
        """The same, if there are no gradients: they were set to None one by one."""
        if self._checks and self.gradients.is_empty():
            self.abandon_window()

    def is_next_step_skipped(self) -> bool:
        """Tell whether `step()`, called now, would be skipped.

        Waits for the device, once for each pass under a dynamic scale.
        """
        return any(check.scaler.is_dynamic and check.is_overflow() for check in self._checks)

    def push_masters(self) -> None:
        """Copy the masters of this optimizer to their parameters."""
        if not self._pairs:
            return
        self._masters.push(self._pairs.values())

    # ---- the replaced methods ----------------------------------------------------------------------------------------

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._is_bound or self._is_stepping:
            return original(*args, **kwargs)
        args, kwargs = self._prepare_closure(args, kwargs)
        self._masters.pull()
        self.gradients.unscale()
        checks, self._checks = self._checks, []
        try:
            self._is_stepping = True
            return self._step_or_skip(checks, original, args, kwargs)
        finally:
            self._is_stepping = False
            self.gradients.resume()
            if (
                self.gradients.is_in_block and checks
            ):  # a step in the middle of a pass: the rest of the pass is for the next step
                self.add_check(OverflowCheck(checks[-1].scaler, checks[-1].found_inf.device))

    def _step_or_skip(
        self,
        checks: Sequence[OverflowCheck],
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if not checks:
            result = self._take_step(None, original, args, kwargs)
            self.outcomes.add_taken()
            self.gradients.drop()
            return result
        optimizer: Any = self.optimizer
        for check in checks:
            check.scaler.decide()
        outcome = StepOutcome(checks)
        flag = None
        if not outcome.is_known() and self._device_skip is not None and self._device_skip.is_possible(optimizer):
            flag = outcome.get_flag()
        result = None
        if flag is None and outcome.find_overflowed(is_dynamic=True):
            mark_step_called(optimizer)
        else:
            result = self._take_step(flag, original, args, kwargs)
        try:
            self.outcomes.add(outcome)
        finally:
            self.gradients.drop()
        return result

    def _take_step(
        self, flag: Tensor | None, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        region = self._switch.enter(Mode.OFF)  # not as a `with` block, which costs more
        try:
            result = (
                original(*args, **kwargs) if flag is None else skip_by(flag, self.optimizer, original, args, kwargs)
            )
        finally:
            self._switch.leave(region)
        self.push_masters()
        return result

    def _prepare_closure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        closure = kwargs.get("closure", args[0] if args else None)
        if closure is None or not callable(closure):
            return args, kwargs
        if any(scaler.is_dynamic for scaler in self._scalers):
            raise OptimizerError(
                "step(closure) does not work with a dynamic loss scale: whether to skip must be known before the"
                " optimizer calls the closure. Call step() without a closure, or give initialize a static loss_scale,"
                " or use a bfloat16 level (O4, O5)."
            )

        def evaluate() -> Any:
            with self._switch.region(Mode.BY_LISTS):
                self.push_masters()
                loss = closure()
            self.gradients.settle()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluate}
        return (evaluate, *args[1:]), kwargs

    def _find_culprits(self) -> list[str]:
        return self._get_names(self.gradients.find_nonfinite())

    def _tell_skipped(self, is_skip: bool) -> None:
        optimizer = self.optimizer
        if optimizer is not None:
            optimizer.step_was_skipped = is_skip  # type: ignore[attr-defined]

    def _zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_bound:
            self.abandon_window()
            for parameter, _ in self._pairs.values():
                parameter.grad = None
        return original(*args, **kwargs)

    def _add_param_group(self, original: Callable[..., Any], group: dict[str, Any]) -> Any:
        if not self._is_bound:
            return original(group)
        if isinstance(group, dict) and self._pairs:
            given = group.get("params")
            given = [given] if isinstance(given, Tensor) else given
            known = {id(parameter) for parameter, _ in self._pairs.values()}
            if isinstance(given, (list, tuple)) and any(id(parameter) in known for parameter in given):
                raise ValueError("some parameters appear in more than one parameter group")
        result = original(group)
        optimizer: Any = self.optimizer
        self._adopt(optimizer, optimizer.param_groups[-1], {})
        return result


def _find_inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that this one steps in its stead, as SAM and Lookahead do: those it holds that share a
    parameter with it.
    """
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [
        inner
        for inner in vars(optimizer).values()
        if isinstance(inner, Optimizer)
        and not hasattr(inner, "_amp_stash")
        and (
            inner.param_groups is optimizer.param_groups
            or any(id(p) in own for group in inner.param_groups for p in group["params"])
        )
    ]


def _cast_state(optimizer: Optimizer, parameter: Tensor, dtype: torch.dtype) -> None:
    """Cast a parameter's state as torch does when it loads one: all floating tensors but the step count."""
    for name, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.is_floating_point() and name != "step":
            optimizer.state[parameter][name] = value.to(dtype)


def _masters_exist() -> None:
    """What scripts call to have Apex make its masters before they restore saved ones.

    Here they exist from the start.
    """


def _delete_attribute(reference: Callable[[], Any], name: str) -> None:
    optimizer = reference()
    if optimizer is not None:
        vars(optimizer).pop(name, None)


def _restore_method(reference: "weakref.ref[Optimizer]", binding: OptimizerBinding, name: str, had_own: bool) -> None:
    """Take our method off the instance, unless somebody (an LR scheduler) has wrapped it since: then it stays, and
    calls straight through.
    """
    optimizer = reference()
    current = None if optimizer is None else vars(optimizer).get(name)
    if not isinstance(current, types.MethodType) or vars(current.__func__).get("_amp_stash") is not binding:
        return
    if had_own:
        setattr(optimizer, name, current.__func__.__wrapped__)  # type: ignore[attr-defined]
    else:
        delattr(optimizer, name)
