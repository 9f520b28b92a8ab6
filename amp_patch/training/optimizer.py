"""One optimizer, as a session changes it: float32 masters in its groups, and a `step` that skips after an overflow.

`step`, `zero_grad` and `add_param_group` are replaced once, when the optimizer is bound, by methods of the instance.
Nothing is patched in the training loop: a skip is a flag that `step` reads.
"""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..casting import Switch, WeightCache
from ..interrupts import UndoStack
from ..torch_private import STEP_POST_HOOKS, put_first, remove_step_hook
from .attributes import Attributes
from .decisions import Decisions
from .fused_skip import DeviceSkip, PushHook
from .ledger import Ledger
from .ledgers import Ledgers
from .masters import Masters, OptimizerMasters, Pair
from .stepper import Stepper
from .steps import Steps
from .unscaling import fold_


class OptimizerBinding:
    """One optimizer in a session. It is also what `optimizer._amp_stash` holds.

    Args:
        optimizer: any torch.optim.Optimizer; held weakly.
        masters: where the session keeps its masters.
        use_masters: give every 16-bit parameter of the optimizer a float32 master.
        switch: turned off while the optimizer steps.
        cache: the weight cache, or None.
        decisions: updates the loss scales.
        ledgers: of the session.
        get_names: names for parameters, for messages.
        on_new_parameters: called after the optimizer got more parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        masters: Masters,
        use_masters: bool,
        switch: Switch,
        cache: WeightCache | None,
        decisions: Decisions,
        ledgers: Ledgers,
        get_names: Callable[[Iterable[Tensor]], list[str]],
        on_new_parameters: Callable[[], None],
    ) -> None:
        self.reference = weakref.ref(optimizer)
        self._masters = OptimizerMasters(masters, self.reference, use_masters=use_masters)
        self._cache = cache
        self._get_names = get_names
        self._on_new_parameters = on_new_parameters
        self.cached: list[Tensor] = []  # every parameter whose cached copy this optimizer keeps alive
        self._undo = UndoStack()
        self._attributes = Attributes(self, self._undo)
        self.steps = Steps(decisions.scalers, self.find_nonfinite_gradients, self._tell_skipped)
        self.ledger = Ledger(self._masters.read if use_masters else self._masters.find)
        self._ledgers = ledgers
        self.stepper = Stepper(
            self.reference,
            self.ledger,
            ledgers,
            self._masters,
            self.steps,
            switch,
            decisions,
        )

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, or None once it is gone."""
        return self.reference()

    def parameters(self) -> list[Tensor]:
        """Return what the optimizer steps on: masters where there are masters. Read from its groups each time."""
        optimizer = self.optimizer
        if optimizer is None:
            return []
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def model_parameters(self) -> Iterator[Tensor]:
        """Yield the model's parameters: those the masters stand for, not the masters."""
        return map(self._masters.parameter_of, self.parameters())

    # ---- binding -----------------------------------------------------------------------------------------------------

    def bind(self, float32_data: dict[int, Tensor]) -> None:
        """Put masters into the groups and replace the methods.

        `float32_data` holds parameters' values from before they were cast, by id.
        """
        optimizer: Any = self.optimizer
        self.stepper.is_bound = True
        self._undo.callback(lambda: self._masters.restore(self.optimizer))
        for group in optimizer.param_groups:
            self._adopt(optimizer, group, float32_data)
        fold_(self._masters.pairs(), None, None)
        inner_optimizers = _find_inner_optimizers(optimizer)
        self.stepper.device_skip = None if inner_optimizers else DeviceSkip(optimizer, optimizer.step)
        replaced = {"step": self.stepper.step, "zero_grad": self._zero_grad, "add_param_group": self._add_param_group}
        for name, method in replaced.items():
            self._attributes.replace(optimizer, name, method)
        for inner in inner_optimizers:
            for group in inner.param_groups:
                self._adopt(inner, group, float32_data)
            self._attributes.replace(inner, "step", self.stepper.step)
        if self._masters.use_masters:
            hook = PushHook(self.stepper.push)
            self._undo.callback(_remove_step_hook, self.reference, hook)
            put_first(optimizer.register_step_post_hook(hook), STEP_POST_HOOKS, optimizer)
        self.attach("_amp_stash", self)
        self.attach("step_was_skipped", False)
        self.attach("_lazy_init_maybe_master_weights", _masters_exist)

    def attach(self, name: str, value: Any) -> None:
        """Set an attribute of the optimizer, until the binding is undone.

        A later value takes the place of an earlier one.
        """
        self._attributes.attach(self.optimizer, name, value)

    def undo(self) -> None:
        """Give the optimizer its own methods and the model's parameters back, state and all. Harmless twice."""
        if self.stepper.is_bound and self.optimizer is not None:
            self.steps.resolve()
        self.stepper.is_bound = False
        self._undo.close()

    def _adopt(self, optimizer: Optimizer, group: dict[str, Any], float32_data: dict[int, Tensor]) -> None:
        """Put masters into a group, and cache the others: the other parameters."""
        self._masters.place(optimizer, group, float32_data)
        if self._cache is not None:
            self.cached.extend(group["params"])
            self._cache.own(group["params"])

    def pairs(self) -> Collection[Pair]:
        """Return each 16-bit parameter with its master."""
        return self._masters.pairs()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Have the optimizer step and zero its gradients as plain torch does, inside the block."""
        self.stepper.is_bound = False
        try:
            yield
        finally:
            self.stepper.is_bound = True

    def presented(self) -> contextlib.AbstractContextManager[None]:
        """Have the optimizer show the model's parameters instead of their masters inside a block."""
        optimizer = self.optimizer
        return contextlib.nullcontext() if optimizer is None else self._masters.presented(optimizer)

    def push_masters(self) -> None:
        """Copy the masters of this optimizer to their parameters."""
        self._masters.push()

    # ---- the replaced methods ----------------------------------------------------------------------------------------

    def find_nonfinite_gradients(self) -> list[str]:
        """Return the names of the parameters whose gradients hold inf or NaN. Waits for the device, once for each."""
        return self._get_names(self.ledger.find_nonfinite())

    def _tell_skipped(self, is_skip: bool) -> None:
        optimizer = self.reference()
        if optimizer is not None:
            vars(optimizer)["step_was_skipped"] = is_skip  # a class may have a read-only property of that name

    def _zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.stepper.is_bound:
            self._ledgers.abandon(self.ledger)
            for parameter, _ in self._masters.pairs():
                parameter.grad = None
        return original(*args, **kwargs)

    def _add_param_group(self, original: Callable[..., Any], group: dict[str, Any]) -> Any:
        if not self.stepper.is_bound:
            return original(group)
        if isinstance(group, dict) and self._masters.pairs():
            given = group.get("params")
            given = [given] if isinstance(given, Tensor) else given
            known = {id(parameter) for parameter in self.model_parameters()}
            if isinstance(given, (list, tuple)) and any(id(parameter) in known for parameter in given):
                raise ValueError("some parameters appear in more than one parameter group")
        self._ledgers.make_true()
        result = original(group)
        optimizer: Any = self.optimizer
        self._adopt(optimizer, optimizer.param_groups[-1], {})
        self._on_new_parameters()
        return result


def _find_inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that this one steps in its stead, as SAM and Lookahead do: those it holds that share a
    parameter with it.
    """
    own = _ids_of(optimizer)
    found: list[Optimizer] = []
    for inner in vars(optimizer).values():
        if not isinstance(inner, Optimizer) or hasattr(inner, "_amp_stash"):
            continue
        if inner.param_groups is optimizer.param_groups or not own.isdisjoint(_ids_of(inner)):
            found.append(inner)
    return found


def _ids_of(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _remove_step_hook(reference: "weakref.ref[Optimizer]", hook: PushHook) -> None:
    optimizer = reference()
    if optimizer is not None:
        remove_step_hook(hook, optimizer)


def _masters_exist() -> None:
    """What scripts call to have Apex make its masters before they restore saved ones.

    Here they exist from the start.
    """
