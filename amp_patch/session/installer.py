"""`Installer`: installs and removes the patches of a session."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..casting import DeferredOps, Float32Products, OpCasts, Registration, Switch, WeightCache, compiling, op_patches
from ..config import OpLists, Policy
from ..dtypes import LOW_DTYPES
from ..interrupts import UndoStack
from ..patching import Patch, Patcher, references
from ..reporting import warn
from ..torch_private import remove_step_hook
from ..training import StepHook, install_property
from . import torch_patches
from .bindings import Bindings
from .checkpoints import patch_helpers


class Installer:
    """The patches of a session.

    Args:
        casts: makes the replacements of listed ops. None at a level that patches no ops.
        products: makes the replacements of products (matrix products, convolutions, attention) that are computed in
            float32. None if no products are.
        oplists: the lists, or None at a level without lists.
        registered: functions that the user registered, with their rules.

    Attributes:
        deferred: listed ops of packages that are not imported yet, or None.
        patcher: the patches of ops, and of the functions around them (`torch_patches.plan_with_ops`).
    """

    def __init__(
        self,
        policy: Policy,
        casts: OpCasts | None,
        products: Float32Products | None,
        oplists: OpLists | None,
        cache: WeightCache | None,
        registered: Sequence[Registration],
        bindings: Bindings,
    ) -> None:
        self._model_dtype = policy.cast_model_type if policy.cast_model_type in LOW_DTYPES else None
        self._has_masters = bool(policy.master_weights)
        self._handles_gradients = self._has_masters or policy.loss_scale != 1.0
        self._casts = casts
        self._products = products
        self._oplists = oplists
        self._cache = cache
        self._bindings = bindings
        self.deferred: DeferredOps | None = None
        self.patcher = Patcher()
        self._registered = tuple(registered)
        self._module_patcher = Patcher()  # patches that `is_patched` and `stats` do not count
        self._lock = threading.RLock()  # imports may make patches, in any thread
        self._patches_ops = casts is not None or products is not None

    def install(self, undo: UndoStack) -> None:
        """Install everything that the policy needs. `undo` removes it, also after an error."""
        if not (self._patches_ops or self._handles_gradients or self._model_dtype is not None):
            return
        planned: list[Patch] = []
        if self._patches_ops:
            planned = self._plan_ops()
            compiling.prime()
            undo.callback(compiling.forget_compiled_code)
            # with the tag, torch's on-disk cache does not reuse code that was compiled under other patches
            tag = ["amp_patch"]
            if self._casts is not None and self._oplists is not None:
                tag += [self._oplists.digest, str(self._casts.low)]
            if self._products is not None:
                tag += ["products", str(self._products.low), str(self._products.max_scores)]
            compiling.tag_cache_key(":".join(tag), undo)
        # the removal is registered before the first patch, so that an interrupt leaves no patch behind
        undo.callback(self._remove)
        self.patcher.install(planned)
        if self._cache is not None:
            _add_step_hook(StepHook(self._cache.mark_updated), undo)
        if self._casts is not None and self._oplists is not None:
            overridden = [(known.owner, known.name) for known in self._registered]
            deferred = DeferredOps(self._oplists, overridden, self._casts, self.patcher, self._lock)
            if deferred:
                undo.callback(deferred.close)
                self.deferred = deferred
        if self._handles_gradients:
            install_property(self._bindings.resolve_steps, undo)
        if self._model_dtype is not None:
            self._module_patcher.install(list(torch_patches.plan_for_models(self._model_dtype, self._module_patcher)))
        if self._handles_gradients or self._model_dtype is not None:
            patches = torch_patches.plan_for_gradients(self._bindings, with_scales=self._handles_gradients)
            self._module_patcher.install(list(patches))
        if self._has_masters:
            _add_step_hook(StepHook(self._bindings.masters.mark_updated, marks_bound=False), undo)
        patch_helpers(self._bindings, self._module_patcher, self._lock, undo)
        if self.deferred is not None:
            self.deferred.open()
        # after all patches, because references are redirected to the replacements
        self.redirect(self._bindings.models(), with_modules=True)
        if self._bindings.regions is not None:
            _add_step_hook(self._bindings.on_step, undo)
            self._bindings.regions.watch(undo)
        if self._patches_ops:
            self._turn_on()

    def _turn_on(self) -> None:
        compiling.forget_compiled_code()
        # this comes last: until now, every replacement has called its original
        for switch in self._switches():
            switch.turn_on()

    def _switches(self) -> list[Switch]:
        """Return the switches of the casts and of the products."""
        parts = [part.switch for part in (self._casts, self._products) if part is not None]
        return [switch for switch in parts if isinstance(switch, Switch)]

    def _plan_ops(self) -> list[Patch]:
        """Return the patches of listed ops and registrations, of products on no list, and of functions around ops."""
        planned: list[Patch] = []
        if self._casts is not None and self._oplists is not None:
            planned += op_patches.plan_ops(self._oplists, self._registered, self._casts)
        if self._products is not None:
            planned += self._products.plan_unlisted({(id(patch.owner), patch.name) for patch in planned})
        around_ops = torch_patches.plan_with_ops(self._casts, self._oplists, self._cache, self.patcher)
        return [*op_patches.with_second_places(planned), *around_ops]

    def patch_ops_again(self) -> None:
        """Install the patches of ops again, after they were undone, and switch them on."""
        with self._lock:
            self.patcher.install(self._plan_ops())
        self.redirect(self._bindings.models(), with_modules=True)
        self._turn_on()

    def remove_patches_of_ops(self) -> None:
        """Undo the patches of ops, and redirect references to replacements back to the originals."""
        with self._lock:
            references.undo([self.patcher], self._bindings.models())

    def redirect(self, models: Iterable[nn.Module], *, with_modules: bool) -> None:
        """Redirect references to patched functions to their replacements, in models and (`with_modules`) in all
        imported modules. Warn of references that cannot be written.
        """
        with self._lock:
            patchers = (self.patcher, self._module_patcher)
            functions = [(patcher, references.functions_of(patcher)) for patcher in patchers]
            unreplaced = references.redirect(functions, models, with_modules=with_modules)
        if unreplaced:
            warn(references.describe_unreplaced(unreplaced))

    def _remove(self) -> None:
        for switch in self._switches():
            switch.turn_off()
        with self._lock:
            for part in (self._casts, self._products):
                if part is not None:
                    part.drop_replacements()
            # this also redirects references that were made during the session
            references.undo([self.patcher, self._module_patcher], self._bindings.models())


def _add_step_hook(hook: Callable[[Optimizer, Any, Any], None], undo: UndoStack) -> None:
    undo.callback(remove_step_hook, None, hook)  # before the hook is there, so that an interrupt leaves none behind
    register_optimizer_step_post_hook(hook)
