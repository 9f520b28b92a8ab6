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
from ..training import MasterHook, StepHook, gradient_patches
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

    Attributes:
        casts_model: whether the parameters of models are cast.
        has_masters: whether 16-bit parameters have masters.
        scales: whether there are masters or a loss scale.
        deferred: listed ops of packages that are not imported yet, or None.
        patcher: the patches of ops.
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
        self.casts_model = policy.cast_model_type in LOW_DTYPES
        self.has_masters = bool(policy.master_weights)
        self.scales = self.has_masters or policy.loss_scale != 1.0
        self.casts = casts
        self.products = products
        self.oplists = oplists
        self.cache = cache
        self.bindings = bindings
        self.deferred: DeferredOps | None = None
        self.patcher = Patcher()
        self._registered = tuple(registered)
        self._module_patcher = Patcher()  # apart from the ops, which is what users ask about
        self._lock = threading.RLock()  # held while the patchers are at work: packages are imported in any thread

    @property
    def patches_ops(self) -> bool:
        """Whether ops are patched, be it for casts or for how products are computed."""
        return self.casts is not None or self.products is not None

    def install(self, undo: UndoStack) -> None:
        """Put everything in. `undo` takes it out, also where this fails half-way."""
        if not (self.patches_ops or self.scales or self.casts_model):
            return
        if self.patches_ops:
            planned = self._plan_ops()
            compiling.prime()
            undo.callback(compiling.forget_compiled_code)
            # what tells the code that is compiled under these patches from code under others
            tag = ["amp_patch"]
            if self.casts is not None and self.oplists is not None:
                tag += [self.oplists.digest, str(self.casts.low)]
            if self.products is not None:
                tag += ["products", str(self.products.low), str(self.products.longest_attention)]
            compiling.tag_cache_key(":".join(tag), undo)
            undo.callback(self._take_out)
            self.patcher.install(planned)
            if self.cache is not None:
                _add_step_hook(StepHook(self.cache.mark_updated), undo)
            if self.casts is not None and self.oplists is not None:
                overridden = [(owner, name) for owner, name, _ in self._registered]
                deferred = DeferredOps(self.oplists, overridden, self.casts, self.patcher, self._lock)
                if deferred:
                    undo.callback(deferred.close)
                    self.deferred = deferred
        else:
            undo.callback(self._take_out)

        if self.scales:
            gradient_patches.resolve_before_reading(self.bindings.resolve_steps, undo)
        self._module_patcher.install(list(torch_patches.plan(self, with_ops=False)))
        if self.has_masters:
            _add_step_hook(MasterHook(self.bindings.masters.mark_updated), undo)
        helpers = CheckpointHelpers(self.bindings, self._module_patcher, self._lock)
        undo.callback(helpers.close)
        helpers.open()

        if self.deferred is not None:
            self.deferred.open()
        self.redirect(self.bindings.models(), with_modules=True)
        if self.patches_ops:
            compiling.forget_compiled_code()
            for switch in self._switches():
                switch.turn_on()

    def _switches(self) -> list[Switch]:
        parts = [part.switch for part in (self.casts, self.products) if part is not None]
        return [switch for switch in parts if isinstance(switch, Switch)]

    def _plan_ops(self) -> list[Patch]:
        """Return the patches of listed ops and registrations, of other products, and of what surrounds the ops."""
        planned: list[Patch] = []
        if self.casts is not None and self.oplists is not None:
            planned += op_patches.plan_ops(self.oplists, self._registered, self.casts)
        if self.products is not None:
            planned += self.products.plan_unlisted({(id(patch.owner), patch.name) for patch in planned})
        return [*op_patches.with_second_places(planned), *torch_patches.plan(self, with_ops=True)]

    def patch_ops_again(self) -> None:
        """Put the patches of ops back in after `patcher.undo()`, and let them act."""
        with self._lock:
            self.patcher.install(self._plan_ops())
        self.redirect(self.bindings.models(), with_modules=True)
        compiling.forget_compiled_code()
        for switch in self._switches():
            switch.turn_on()

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
            for part in (self.casts, self.products):
                if part is not None:
                    part.let_go()
            references.undo([self.patcher, self._module_patcher], self.bindings.models())


def _add_step_hook(hook: StepHook, undo: UndoStack) -> None:
    undo.callback(remove_step_hook, hook)
    register_optimizer_step_post_hook(hook)
