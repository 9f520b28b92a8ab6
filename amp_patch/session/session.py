"""`Session`: one policy in force, and everything that was changed for it.

Opening a session binds models and optimizers and installs patches on one ExitStack; whatever goes wrong on the way, and
`close` at the end, undoes it all in reverse.
"""

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..casting import (
    DeferredOps,
    OpCasts,
    Registration,
    Switch,
    WeightCache,
    compiling,
    plan_patches,
    plan_reload_patch,
)
from ..config import OpLists, Policy, load_oplists
from ..errors import ArgumentTypeError, OptimizerError, PolicyError, SessionError
from ..patching import Patcher, references
from ..reporting import find_stacklevel
from ..torch_private import get_own_children, get_own_parameters
from ..training import (
    BackwardPasses,
    GradientSet,
    Masters,
    ModelBinding,
    OptimizerBinding,
    StepHook,
    asking_before,
    loss_scaler,
    plan_gradient_patches,
)


@dataclass(frozen=True, slots=True)
class Stats:
    """What a session is and has done.

    Counts of parameters are numbers of elements of the bound models; `steps` and `steps_skipped` add up all optimizers;
    `loss_scales` holds the scale of each scaler, in order.
    """

    opt_level: str | None
    low_dtype: torch.dtype | None
    names_patched: int
    parameters_low: int
    parameters_float32: int
    steps: int
    steps_skipped: int
    loss_scales: tuple[float, ...]


class Session:
    """One policy, the models and optimizers it was applied to, the scalers, and the patches."""

    def __init__(
        self,
        policy: Policy,
        device_type: str,
        num_losses: int,
        *,
        registered: Sequence[Registration] = (),
        has_models: bool = True,
    ) -> None:
        self.policy = policy
        self.device_type = device_type
        self.has_models = has_models  # without models it lasts until it is closed, not until they are gone
        self.process_id = os.getpid()
        self._registered = tuple(registered)
        self.scalers: list[loss_scaler.LossScaler] = []
        self.switch = Switch()
        self.patcher = Patcher()
        self._module_patcher = Patcher()  # apart from the ops, which is what users ask about
        self._patching = (
            threading.RLock()
        )  # held while the patchers are at work: ops of packages imported late come from any thread
        self.oplists: OpLists | None = None
        self.casts: OpCasts | None = None
        self._links: WeightCache | None = None
        self._masters = Masters()
        self._models: list[ModelBinding] = []
        self._optimizers: list[OptimizerBinding] = []
        self._undo = contextlib.ExitStack()
        self._passes = BackwardPasses(self.bindings, GradientSet(self._parameters_outside, lambda: ()), self._end_pass)
        if policy.lists:
            self.oplists = load_oplists(policy.lists)
            if not policy.patch_torch_functions and not self.oplists.modules:
                raise PolicyError(
                    f"lists={', '.join(policy.lists)}: {policy.opt_level} patches no functions, so only the `modules`"
                    " of a list have an effect, and there are none in these; use O1 or O4"
                )
        if policy.patch_torch_functions and policy.patch_torch_functions_type is not None:
            self._links = WeightCache(policy.patch_torch_functions_type, device_type)
            self.casts = OpCasts(self.switch, policy.patch_torch_functions_type, device_type, self._links)
        self.add_scalers(num_losses)

    # ---- opening and closing -----------------------------------------------------------------------------------------

    def open(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Apply the policy.

        Raises before anything is changed where it can tell, and leaves nothing half-changed where it cannot.
        """
        float32_data: dict[int, Tensor] = {}
        with contextlib.ExitStack() as undo:
            undo.callback(self._forget)
            self._bind(models, optimizers, float32_data)
            if self.casts is not None or self.policy.master_weights or self.policy.loss_scale != 1.0:
                self._install_patches(undo)
            self._undo = undo.pop_all()
        float32_data.clear()

    def adopt(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Bring more models and optimizers under the policy."""
        self._prune()
        known_models, known_optimizers = list(self._models), list(self._optimizers)
        float32_data: dict[int, Tensor] = {}
        try:
            added = [model for model in models if not any(model is binding.model for binding in self._models)]
            self._bind(added, optimizers, float32_data)
            self._bind_to_replacements(added, with_modules=False)
            float32_data.clear()
        except BaseException:
            self._release(
                [b for b in self._models if b not in known_models],
                [b for b in self._optimizers if b not in known_optimizers],
            )
            raise

    def close(self) -> None:
        """Undo everything: patches, hooks, casts, masters, replaced methods. Harmless twice."""
        self._undo.close()

    def _bind(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], float32_data: dict[int, Tensor]
    ) -> None:
        """Bind all.

        `float32_data` is where models leave their values from before the cast, for masters, and for undoing until it is
        cleared.
        """
        rules = () if self.oplists is None else self.oplists.modules
        unused = dict.fromkeys(rules)
        for model in models:
            binding = ModelBinding(model, self.policy, self._masters, self._links, rules, self.switch)
            self._models.append(binding)
            binding.bind(float32_data)
            unused = {rule: None for rule in unused if rule not in binding.used_rules}
        for rule in unused if models else ():
            place = f"{rule.path}:{rule.line}:{rule.column}"
            warnings.warn(
                f"{place}: the rule for {rule.chooser!r} chooses no module of the models", stacklevel=find_stacklevel()
            )
        for optimizer in optimizers:
            stepper = OptimizerBinding(
                optimizer,
                masters=self._masters,
                use_masters=bool(self.policy.master_weights),
                switch=self.switch,
                links=self._links,
                scalers=self.scalers,
                get_names=self.names_of,
            )
            self._optimizers.append(stepper)
            stepper.bind(float32_data)
            weakref.finalize(optimizer, _forget_optimizer, weakref.ref(self), stepper).atexit = False

    def _forget(self) -> None:
        self._release(self._models, self._optimizers)
        self._masters = Masters()
        if self._links is not None:
            self._links.disown_all()

    def _release(self, models: Sequence[ModelBinding], optimizers: Sequence[OptimizerBinding]) -> None:
        models, optimizers = list(models), list(optimizers)
        for stepper in reversed(optimizers):
            stepper.undo()
        for binding in reversed(models):
            binding.undo()
        self._optimizers = [stepper for stepper in self._optimizers if stepper not in optimizers]
        self._models = [binding for binding in self._models if binding not in models]

    def _install_patches(self, undo: contextlib.ExitStack) -> None:
        if self.casts is None:
            undo.callback(self._take_patches_out)
        else:
            self._patch_ops(undo)
        if self.policy.master_weights or self.policy.loss_scale != 1.0:
            self._patch_around_ops(undo)
        self._bind_to_replacements(self.models(), with_modules=True)
        if self.casts is not None:
            compiling.forget_compiled_code()
            self.switch.turn_on()

    def _patch_ops(self, undo: contextlib.ExitStack) -> None:
        assert self.casts is not None and self.oplists is not None
        patches = list(plan_patches(self.oplists, self._registered, self.casts, self._links, self.patcher))
        compiling.prime()
        undo.callback(compiling.forget_compiled_code)
        undo.enter_context(compiling.cache_key(f"amp_patch:{self.oplists.digest}:{self.casts.low}"))
        undo.callback(self._take_patches_out)
        self.patcher.install(patches)
        if self._links is not None:
            hook = register_optimizer_step_post_hook(StepHook(self._links.mark_updated))
            undo.callback(hook.remove)
        late = DeferredOps(
            self.oplists,
            [(owner, name) for owner, name, _ in self._registered],
            self.casts,
            self.patcher,
            self._patching,
        )
        if late:
            undo.callback(late.close)
            self._module_patcher.install([plan_reload_patch(late.look_again)])
            late.open()

    def _patch_around_ops(self, undo: contextlib.ExitStack) -> None:
        undo.enter_context(asking_before(self._settle_outcomes))
        self._module_patcher.install(plan_gradient_patches(self._masters, self._tell_zeroed))
        hook = register_optimizer_step_post_hook(StepHook(self._masters.mark_updated))
        undo.callback(hook.remove)

    def _bind_to_replacements(self, models: Iterable[nn.Module], *, with_modules: bool) -> None:
        with self._patching:
            functions = [
                (patcher, references.functions_of(patcher)) for patcher in (self.patcher, self._module_patcher)
            ]
            stuck = references.redirect(functions, models, with_modules=with_modules)
        if stuck:
            warnings.warn(references.describe_stuck(stuck), stacklevel=find_stacklevel())

    def _take_patches_out(self) -> None:
        self.switch.turn_off()
        with self._patching:
            references.undo([self.patcher, self._module_patcher], self.models())

    def _settle_outcomes(self, optimizer: Optimizer) -> None:
        for binding in self._optimizers:
            if binding.optimizer is optimizer:
                binding.outcomes.settle()

    def _tell_zeroed(self, module: nn.Module) -> None:
        """`model.zero_grad()` ends an accumulation window of every optimizer whose parameters it covers."""
        zeroed = {id(parameter) for parameter in module.parameters()}
        for binding in self.bindings():
            if all(id(parameter) in zeroed for parameter in binding.model_parameters()):
                binding.abandon_window()

    # ---- what it holds -----------------------------------------------------------------------------------------------

    def models(self) -> list[nn.Module]:
        """Return the bound models that are still alive."""
        return [model for binding in self._models if (model := binding.model) is not None]

    def bindings(self) -> list[OptimizerBinding]:
        """Return the bindings of the optimizers that are still alive."""
        return [binding for binding in self._optimizers if binding.optimizer is not None]

    def binding_of(self, optimizer: Optimizer) -> OptimizerBinding:
        """Return the binding of an optimizer; raises OptimizerError for one that initialize has not seen."""
        for binding in self._optimizers:
            if binding.optimizer is optimizer:
                return binding
        raise OptimizerError(
            f"this {type(optimizer).__name__} was not passed to initialize (or was copied since): pass it there before"
            " scale_loss"
        )

    def add_scalers(self, num_losses: int) -> None:
        """Have at least `num_losses` scalers."""
        policy = self.policy
        while len(self.scalers) < num_losses:
            scaler = loss_scaler.LossScaler(
                policy.loss_scale if policy.loss_scale != "dynamic" else "dynamic",  # type: ignore[arg-type]
                min_loss_scale=policy.min_loss_scale,
                max_loss_scale=policy.max_loss_scale,
            )
            self.scalers.append(scaler)

    def names_of(self, parameters: Iterable[Tensor]) -> list[str]:
        """Return the qualified names of parameters (or masters) in the bound models; `parameter of shape (...)` for any
        other.
        """
        names: dict[int, str] = {}
        for model in self.models():
            for name, parameter in model.named_parameters():
                names[id(parameter)] = name
                master = self._masters.get(parameter)
                if master is not None:
                    names[id(master)] = name
        return [names.get(id(parameter), f"parameter of shape {tuple(parameter.shape)}") for parameter in parameters]

    def _parameters_outside(self) -> list[Tensor]:
        """Trainable parameters of the bound models that no bound optimizer steps on: their gradients are
        unscaled too.
        """
        owned = {id(parameter) for binding in self._optimizers for parameter in binding.parameters()}
        found: dict[int, Tensor] = {}
        modules: list[nn.Module] = self.models()
        seen: set[int] = set()
        while modules:  # nn.Module.parameters() takes five times as long, twice in every pass
            module = modules.pop()
            if id(module) not in seen:
                seen.add(id(module))
                found.update(
                    (id(parameter), parameter)
                    for parameter in get_own_parameters(module).values()
                    if parameter is not None
                )
                modules.extend(child for child in get_own_children(module).values() if child is not None)
        return [
            parameter for key, parameter in found.items() if key not in owned and self._masters.get(parameter) is None
        ]

    def refresh(self) -> None:
        """Invalidate the low copies of weights, and copy masters to their parameters."""
        if self._links is not None:
            self._links.invalidate_all()
        self._masters.push()

    def forget_optimizer(self, binding: OptimizerBinding) -> None:
        """Drop what was kept for an optimizer that is gone."""
        if binding in self._optimizers:
            self._optimizers.remove(binding)
        if self._links is not None:
            still_owned = {id(parameter) for other in self._optimizers for parameter in other.parameters()}
            self._links.disown(parameter for parameter in binding.linked if id(parameter) not in still_owned)

    def _prune(self) -> None:
        """Let go of the parameters and masters of models and optimizers that are gone."""
        self._models = [binding for binding in self._models if binding.model is not None]
        held = {id(parameter) for model in self.models() for parameter in model.parameters()}
        held.update(id(parameter) for binding in self.bindings() for parameter in binding.model_parameters())
        self._masters.keep_only(held)

    def stats(self) -> Stats:
        """Return what `amp.stats()` returns. Waits for the device."""
        low = full = 0
        for parameter in {id(p): p for model in self.models() for p in model.parameters()}.values():
            low += parameter.numel() if parameter.dtype in (torch.float16, torch.bfloat16) else 0
            full += parameter.numel() if parameter.dtype is torch.float32 else 0
        return Stats(
            opt_level=self.policy.opt_level,
            low_dtype=self.policy.low_dtype,
            names_patched=len(self.patcher),
            parameters_low=low,
            parameters_float32=full,
            steps=sum(binding.outcomes.steps for binding in self._optimizers),
            steps_skipped=sum(binding.outcomes.steps_skipped for binding in self._optimizers),
            loss_scales=tuple(scaler.loss_scale() for scaler in self.scalers),
        )

    # ---- scaling -----------------------------------------------------------------------------------------------------

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], loss_id: int, delay_unscale: bool
    ) -> contextlib.AbstractContextManager[Tensor]:
        """See `amp_patch.scale_loss`."""
        if not isinstance(loss, Tensor):
            raise ArgumentTypeError(f"scale_loss takes the loss as a tensor, not {type(loss).__name__}")
        if loss.device.type != self.device_type:
            raise SessionError(
                f"the loss is on {loss.device.type}, but the models were on {self.device_type} when initialize was"
                " called: move the model to its device first, then call initialize"
            )
        bindings = [self.binding_of(optimizer) for optimizer in optimizers]
        return self._passes.scale_loss(loss, bindings, self.scaler(loss_id), delay_unscale)

    def _end_pass(self) -> None:
        if self._links is not None:
            self._links.invalidate_all()

    def scaler(self, loss_id: int) -> loss_scaler.LossScaler:
        """Return a loss scaler by its number; raises IndexError if there is none."""
        try:
            return self.scalers[loss_id]
        except IndexError:
            raise IndexError(
                f"loss_id {loss_id} is out of range for {len(self.scalers)} loss scalers: pass num_losses to initialize"
            ) from None


def _forget_optimizer(reference: "weakref.ref[Session]", binding: OptimizerBinding) -> None:
    session = reference()
    if session is not None:
        session.forget_optimizer(binding)
