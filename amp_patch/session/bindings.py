"""`Bindings`: the models and optimizers of a session."""

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..casting import Switch, WeightCache
from ..config import ModuleRule, Policy, levels
from ..dtypes import LOW_DTYPES, is_opaque
from ..errors import OptimizerError, did_you_mean
from ..reporting import warn
from ..tables import count_of
from ..training import (
    GradientSums,
    Masters,
    ModelBinding,
    OptimizerBinding,
    OptState,
    OverflowFlags,
    RuleRegions,
    ScaleUpdates,
    StochasticRounding,
)


class Bindings:
    """Binds and releases models and optimizers.

    To bind a model is to hook it, and to cast it at levels that cast models (`ModelBinding`). To bind an optimizer is
    to give it masters, at levels with masters, and to replace its `step`, `zero_grad` and `add_param_group`
    (`OptimizerBinding`).

    Args:
        rules: the module rules of the session's lists.
        sharded: the modules that `fully_shard` has sharded.
        find_root: see `Session.find_root`.

    Attributes:
        regions: applies module rules at a level that patches functions. None without rules, at a float32 level, and at
            a level that casts models: there, `ModelBinding` applies the rules.
        rounding: rounds the states of optimizers to bfloat16; None if they stay float32.
    """

    def __init__(
        self,
        policy: Policy,
        rules: Sequence[ModuleRule],
        switch: Switch,
        cache: WeightCache | None,
        scale_updates: ScaleUpdates,
        sharded: Collection[nn.Module],
        find_root: Callable[[nn.Module], nn.Module] | None,
    ) -> None:
        self._policy = policy
        self._rules = rules
        self._switch = switch
        self._binds_at_calls = find_root is not None
        self.regions: RuleRegions | None = None
        if rules and policy.low_dtype is not None and policy.patch_torch_functions:
            self.regions = RuleRegions(rules, switch, policy.low_dtype, find_root)
        self._cache = cache
        self.masters = Masters()
        self.rounding = StochasticRounding() if policy.optimizer_state_type is torch.bfloat16 else None
        self._awaits_step = False  # whether `on_step` still has to warn of unused rules, at the next step
        self._models: list[ModelBinding] = []
        self._optimizers: list[OptimizerBinding] = []
        # for each binding, the call that is made when its model or optimizer is freed
        self._finalizers: dict[object, weakref.finalize[..., Any]] = {}
        self.gradients = GradientSums(bool(policy.master_weights), scale_updates, sharded)

    def models(self) -> list[nn.Module]:
        """Return the bound models that are still alive."""
        return [model for binding in self._models if (model := binding.model) is not None]

    def find_rule(self, module: nn.Module) -> ModuleRule | None:
        """Return the module rule that decides how a module runs, or None."""
        if self.regions is not None:
            return self.regions.find(module)
        for binding in self._models:
            if module in binding.rules:
                return binding.rules[module]
        return None

    def optimizers(self) -> list[OptimizerBinding]:
        """Return the bindings of the optimizers that are still alive."""
        return [binding for binding in self._optimizers if binding.optimizer is not None]

    def find_optimizer(self, optimizer: Optimizer) -> OptimizerBinding | None:
        """Return the binding of an optimizer, or None if the optimizer was not passed to `initialize`."""
        for binding in self._optimizers:
            if binding.reference() is optimizer:
                return binding
        return None

    def get_optimizer(self, optimizer: Optimizer) -> OptimizerBinding:
        """Return the binding of an optimizer. Raises OptimizerError if it was not passed to `initialize`."""
        binding = self.find_optimizer(optimizer)
        if binding is not None:
            return binding
        raise OptimizerError(
            f"this {type(optimizer).__name__} was not passed to initialize (or was copied since): pass it there before"
            " scale_loss"
        )

    def warn_of_unused_rules(self) -> None:
        """Warn of each module rule that matches no module, unless it may still match a module that the script calls."""
        used = {rule for binding in self._models for rule in binding.used_rules}
        if self.regions is not None:
            used |= self.regions.used
        for rule in self._rules:
            if rule not in used and not self._may_still_match(rule):
                place = f"{rule.path}:{rule.line}:{rule.column}"
                problem = f"the rule for {rule.chooser!r} matches no module of the models, so it has no effect"
                warn(f"{place}: {problem}. {self._describe_names(rule)}")

    def _may_still_match(self, rule: ModuleRule) -> bool:
        """Return whether a rule may still match a module that is in no model, such as a criterion.

        Only a rule for a class can. When the first step ends, the script has usually called all such modules.
        """
        return self._awaits_step and self.regions is not None and rule.pattern is None

    def on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Optimizer hook: after the first step, warn of unused rules."""
        if self._awaits_step:
            self._awaits_step = False
            self.warn_of_unused_rules()

    def _describe_names(self, rule: ModuleRule) -> str:
        """Return the advice for an unused rule, such as "Write a name as in named_modules() of the model, without the
        name of its variable. Did you mean 'layer1'?".
        """
        names, kinds = set(), set()
        for model in self.models():
            for name, module in model.named_modules():
                names.add(name)
                kinds.add(f"{type(module).__module__}.{type(module).__qualname__}")
        if rule.pattern is None:
            return f"Write the class of one of their modules.{did_you_mean(rule.chooser, kinds)}"

        names.discard("")
        hint = did_you_mean(rule.chooser, names)
        # the name may begin with the variable of the model, as in `net.layer1`: try it without its first parts
        ending = rule.chooser.partition(".")[2]
        while ending:
            if ending in names:
                hint = f" Did you mean {ending!r}?"
                break
            ending = ending.partition(".")[2]
        holder = "the model, without the name of its variable"
        if self._binds_at_calls:
            holder = "the module that the script calls"
        return f"Write a name as in named_modules() of {holder}.{hint}"

    # ---- binding and letting go --------------------------------------------------------------------------------------

    def bind(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], float32_data: dict[int, Tensor]
    ) -> None:
        """Bind models and optimizers. Fills `float32_data` with the values of tensors from before their cast, by id."""
        for model in models:
            rules = self._rules if self.regions is None else ()
            binding = ModelBinding(model, self._policy, self.masters, self._cache, rules)
            self._models.append(binding)
            binding.bind(float32_data)
            if self.regions is not None:
                binding.apply_rules(self.regions)
            self._watch(binding, model, self._connect_flags)
        if models and not self._binds_at_calls:
            self._awaits_step = self.regions is not None and bool(optimizers or self._optimizers)
            self.warn_of_unused_rules()
        self.gradients.flush()  # unscale gradients, because a new optimizer may share parameters with a bound one
        added = []
        for optimizer in optimizers:
            added.append(
                OptimizerBinding(
                    optimizer,
                    masters=self.masters,
                    use_masters=bool(self._policy.master_weights),
                    split_masters=bool(self._policy.split_masters),
                    rounding=self.rounding,
                    switch=self._switch,
                    cache=self._cache,
                    gradients=self.gradients,
                    get_names=self.names_of,
                    on_new_parameters=self._on_new_parameters,
                )
            )
        self._optimizers = [*self._optimizers, *added]
        self._connect_flags()
        for optimizer_binding, optimizer in zip(added, optimizers, strict=True):
            optimizer_binding.bind(float32_data)
            self._watch(optimizer_binding, optimizer, self.forget_optimizer, weakref.ref(optimizer_binding))
        self.masters.return_gradients()
        for optimizer_binding in added:
            if optimizer_binding.groups.has_gradients():
                optimizer_binding.flags.state = OptState.UNCHECKED
        self._warn_of_lost_updates(added)

    def _warn_of_lost_updates(self, added: Sequence[OptimizerBinding]) -> None:
        """Warn, in one message, of the 16-bit weights of new optimizers (`_find_low_weights`)."""
        weights: list[Tensor] = []
        names: list[str] = []
        for binding in added:
            low = _find_low_weights(binding)
            if low:
                weights += low
                names.append(type(binding.optimizer).__name__)
        if not weights:
            return
        remedy = "Call .float() on their model"
        if not self._policy.as_level().keeps_small_updates:
            with_masters = [level.name for level in levels.read_levels() if level.has_masters]
            remedy = f"Use {' or '.join(with_masters)}, which keep float32 masters"
        shown = ", ".join(self.names_of(weights[:3])) + (", ..." if len(weights) > 3 else "")
        warn(
            f"small updates of {count_of(len(weights), 'weight')} in 16 bits ({shown}) will be lost:"
            f" {' and '.join(names)} steps on them without float32 masters. {remedy}."
        )

    def _watch(self, binding: object, target: Any, method: Callable[..., None], *args: Any) -> None:
        """Call `method(*args)` when `target`, the model or optimizer of a binding, is freed. `method` is a method of
        this object, and does not keep it alive.
        """
        finalizer = weakref.finalize(target, _call_if_alive, weakref.WeakMethod(method), *args)
        # the end of the process releases everything anyway
        finalizer.atexit = False
        self._finalizers[binding] = finalizer

    def _on_new_parameters(self) -> None:
        """Adapt to new parameters of an optimizer. They may belong to modules that were added to a model."""
        for binding in self._models:
            binding.hook_new_modules()
        self._connect_flags()

    def _connect_flags(self) -> None:
        """Give `gradients` the overflow flags of all optimizers and the parameters of all models. Optimizers that share
        a parameter become partners: an overflow in it concerns all of them.

        `gradients` holds parameters strongly, because `torch.utils.swap_tensors` refuses tensors with weak references.
        """
        # a new list, because a caller may be iterating over the previous one
        self.gradients.all_flags = [binding.flags for binding in self._optimizers]
        model_parameters = {}
        for model_binding in self._models:
            for parameter in model_binding.parameters():
                if parameter.is_leaf:  # inside functional_call, the model holds other tensors, with graphs
                    model_parameters[id(parameter)] = parameter
        self.gradients.model_parameters = list(model_parameters.values())
        holders: dict[int, list[OverflowFlags]] = {}
        for binding in self.optimizers():
            binding.flags.partners = []
            for parameter in binding.groups.model_parameters():
                holders.setdefault(id(parameter), []).append(binding.flags)
        for sharing in holders.values():
            for flags in sharing:
                for partner in sharing:
                    if partner is not flags and partner not in flags.partners:
                        flags.partners.append(partner)

    def bind_more(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        finish: Callable[[Sequence[nn.Module]], None],
    ) -> None:
        """Bind optimizers, and models that are not bound yet. Then call `finish` with these models. After an exception,
        also one of `finish`, these models and the optimizers are not bound.
        """
        self.prune()
        known_models, known_optimizers = list(self._models), list(self._optimizers)
        float32_data: dict[int, Tensor] = {}
        try:
            bound = self.models()
            added = [model for model in models if model not in bound]
            self.bind(added, optimizers, float32_data)
            finish(added)
            float32_data.clear()
        except BaseException:
            self._release(
                [binding for binding in self._models if binding not in known_models],
                [binding for binding in self._optimizers if binding not in known_optimizers],
            )
            raise

    def flush(self) -> None:
        """Prepare for `release`: unscale all gradients, or drop them if an error left them half unscaled. Then copy the
        script's edits of parameters to their masters.
        """
        self.gradients.close()
        self.masters.return_gradients()
        self.masters.copy_from_parameters(warns=True)

    def release(self) -> None:
        """Undo all bindings."""
        self._release(self._models, self._optimizers)
        if self.regions is not None:
            self.regions.remove_all()
        self.masters.clear()
        if self._cache is not None:
            self._cache.disown_all()

    def _release(self, models: Sequence[ModelBinding], optimizers: Sequence[OptimizerBinding]) -> None:
        models, optimizers = list(models), list(optimizers)
        for optimizer_binding in reversed(optimizers):
            optimizer_binding.undo()
        for model_binding in reversed(models):
            model_binding.undo()
        for released in (*models, *optimizers):
            finalizer = self._finalizers.pop(released, None)
            if finalizer is not None:
                finalizer.detach()
        self._optimizers = [binding for binding in self._optimizers if binding not in optimizers]
        self._models = [binding for binding in self._models if binding not in models]
        self._connect_flags()

    def prune(self) -> None:
        """Forget models that were freed, and masters whose parameter no live model or optimizer holds."""
        for binding in self._models:
            if binding.model is None:
                self._finalizers.pop(binding, None)
        self._models = [binding for binding in self._models if binding.model is not None]
        held: set[int] = set()
        for model in self.models():
            held.update(map(id, model.parameters()))
            held.update(map(id, model.buffers()))
        for optimizer_binding in self.optimizers():
            held.update(map(id, optimizer_binding.groups.model_parameters()))
        self.masters.keep_only(held)

    def forget_optimizer(self, reference: "weakref.ref[OptimizerBinding]") -> None:
        """Forget the binding of an optimizer that was freed, and cached weights that no other optimizer holds."""
        binding = reference()
        if binding is None:
            return
        self._finalizers.pop(binding, None)
        if binding in self._optimizers:
            self._optimizers.remove(binding)
            self._connect_flags()
        if self._cache is not None:
            remaining = [weight for left in self._optimizers for weight in left.groups.parameters()]
            self._cache.keep_only(remaining)

    # ---- queries about all -------------------------------------------------------------------------------------------

    def names_of(self, parameters: Iterable[Tensor]) -> list[str]:
        """Return the qualified names of parameters, masters and buffers; `parameter of shape (...)` for others."""
        names: dict[int, str] = {}
        for model in self.models():
            for name, buffer in model.named_buffers():
                names[id(buffer)] = name
            for name, parameter in model.named_parameters():
                names[id(parameter)] = name
                master = self.masters.get(parameter)
                if master is not None:
                    names[id(master)] = name
        return [names.get(id(parameter), f"parameter of shape {tuple(parameter.shape)}") for parameter in parameters]

    def resolve_steps(self, optimizer: Optimizer) -> None:
        """Find out which steps of an optimizer so far were skipped, and log them. Waits for the device."""
        binding = self.find_optimizer(optimizer)
        if binding is not None:
            binding.step_log.resolve()

    def on_zero_grad(self, module: nn.Module) -> None:
        """Record `module.zero_grad()` for each optimizer all of whose parameters belong to the module."""
        zeroed = {id(parameter) for parameter in module.parameters()}
        for binding in self.optimizers():
            if all(id(parameter) in zeroed for parameter in binding.groups.model_parameters()):
                self.gradients.mark_zeroed(binding.flags)


def _find_low_weights(binding: OptimizerBinding) -> list[Tensor]:
    """Return the trained 16-bit weights of an optimizer that have no master. Quantized weights do not count.

    The result is empty unless the optimizer's `step` is a method of torch.optim, which rounds each update to the dtype
    of the weight. Other optimizers may keep masters of their own, or round stochastically.
    """
    step = getattr(type(binding.optimizer), "step", None)
    if not getattr(step, "__module__", "").startswith("torch.optim."):
        return []
    return [
        weight
        for weight in binding.groups.parameters()
        if weight.requires_grad and weight.dtype in LOW_DTYPES and not is_opaque(weight)
    ]


def _call_if_alive(reference: "weakref.WeakMethod[Callable[..., None]]", *args: Any) -> None:
    """Call a method, unless its object was freed."""
    method = reference()
    if method is not None:
        method(*args)
