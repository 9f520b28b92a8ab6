"""`Installer`: puts the patches of one session in, and takes them out."""

import threading
from collections.abc import Iterable, Sequence

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..casting import DeferredOps, OpCasts, Products, Registration, Switch, WeightCache, compiling, op_patches
from ..config import OpLists, Policy
from ..dtypes import LOW_DTYPES
from ..interrupts import UndoStack
from ..patching import Patch, Patcher, references
from ..reporting import warn
from ..torch_private import remove_step_hook
from ..training import LocalGradients, StepHook, gradient_patches
from . import torch_patches
from .bindings import Bindings
from .checkpoints import CheckpointHelpers


class Installer:
    """The patches of one session.

    Args:
        policy: of the session.
        casts, oplists: of a level that casts at ops; None at others.
        products: what computes products in float32, or None.
        cache: the weight cache, or None.
        registered: functions that the user registered.
        bindings: the models, optimizers and masters that the patches serve.
    """

    def __init__(
        self,
        policy: Policy,
        casts: OpCasts | None,
        products: Products | None,
        oplists: OpLists | None,
        cache: WeightCache | None,
        registered: Sequence[Registration],
        bindings: Bindings,
    ) -> None:
        self._casts_model = policy.cast_model_type in LOW_DTYPES
        self._scales = bool(policy.master_weights) or policy.loss_scale != 1.0
        self._casts = casts
        self._products = products
        self._oplists = oplists
        self._cache = cache
        self._registered = tuple(registered)
        self._bindings = bindings
        self.local = LocalGradients()
        self.patcher = Patcher()
        self._module_patcher = Patcher()  # apart from the ops, which is what users ask about
        self._lock = threading.RLock()  # held while the patchers are at work: packages are imported in any thread

    def install(self, undo: UndoStack) -> None:
        """Put everything in. `undo` takes it out, also where this fails half-way."""
        if not (self._patches_ops or self._scales or self._casts_model):
            return
        late = None
        if self._patches_ops:
            late = self._install_ops(undo)
        else:
            undo.callback(self._take_out)
        if self._scales:
            gradient_patches.resolve_before_reading(self._bindings.resolve_steps, undo)
        self._module_patcher.install(list(torch_patches.plan(self._parts(late), with_ops=False)))
        if self._scales:
            _add_step_hook(StepHook.for_masters(self._bindings.masters.mark_updated), undo)
        helpers = CheckpointHelpers(self._bindings, self._module_patcher, self._lock)
        undo.callback(helpers.close)
        helpers.open()
        if late is not None:
            late.open()
        self.redirect(self._bindings.models(), with_modules=True)
        if self._patches_ops:
            compiling.forget_compiled_code()
            for switch in self._switches():
                switch.turn_on()

    @property
    def _patches_ops(self) -> bool:
        return self._casts is not None or self._products is not None

    def _switches(self) -> list[Switch]:
        return [part.switch for part in (self._casts, self._products) if part is not None]

    def _plan_ops(self) -> list[Patch]:
        """Return the patches of listed ops and registrations, of other products, and of what surrounds the ops."""
        planned: list[Patch] = []
        if self._casts is not None and self._oplists is not None:
            planned += op_patches.plan_ops(self._oplists, self._registered, self._casts)
        if self._products is not None:
            planned += self._products.plan_unlisted({(id(patch.owner), patch.name) for patch in planned})
        return [*op_patches.with_second_places(planned), *torch_patches.plan(self._parts(None), with_ops=True)]

    def _install_ops(self, undo: UndoStack) -> DeferredOps | None:
        """Put in what replaces ops, and return those whose packages are not imported yet."""
        planned = self._plan_ops()
        compiling.prime()
        undo.callback(compiling.forget_compiled_code)
        compiling.tag_cache_key(self._describe_code(), undo)
        undo.callback(self._take_out)
        self.patcher.install(planned)
        if self._cache is not None:
            _add_step_hook(StepHook(self._cache.mark_updated), undo)
        if self._casts is None or self._oplists is None:
            return None
        overridden = [(owner, name) for owner, name, _ in self._registered]
        late = DeferredOps(self._oplists, overridden, self._casts, self.patcher, self._lock)
        if not late:
            return None
        undo.callback(late.close)
        return late

    def _describe_code(self) -> str:
        """Return what tells the code that is compiled under these patches from code under others."""
        parts = ["amp_patch"]
        if self._casts is not None and self._oplists is not None:
            parts += [self._oplists.digest, str(self._casts.low)]
        if self._products is not None:
            parts += ["products", str(self._products.low)]
        return ":".join(parts)

    def _parts(self, late: DeferredOps | None) -> torch_patches.Parts:
        return torch_patches.Parts(
            casts=self._casts,
            patches_ops=self._patches_ops,
            oplists=self._oplists,
            cache=self._cache,
            patcher=self.patcher,
            masters=self._bindings.masters,
            local=self.local,
            decisions=self._bindings.decisions,
            scales=self._scales,
            casts_model=self._casts_model,
            on_zero_grad=self._bindings.on_zero_grad,
            fold_gradients=self._bindings.fold_gradients,
            has_deferred_ops=late is not None,
            on_reload=(lambda name: None) if late is None else late.look_again,
        )

    def redirect(self, models: Iterable[nn.Module], *, with_modules: bool) -> None:
        """Have what refers to patched functions refer to their replacements: in models, and in imported modules."""
        with self._lock:
            patchers = (self.patcher, self._module_patcher)
            functions = [(patcher, references.functions_of(patcher)) for patcher in patchers]
            stuck = references.redirect(functions, models, with_modules=with_modules)
        if stuck:
            warn(references.describe_stuck(stuck))

    def _take_out(self) -> None:
        for switch in self._switches():
            switch.turn_off()
        with self._lock:
            references.undo([self.patcher, self._module_patcher], self._bindings.models())


def _add_step_hook(hook: StepHook, undo: UndoStack) -> None:
    undo.callback(remove_step_hook, hook)
    register_optimizer_step_post_hook(hook)
