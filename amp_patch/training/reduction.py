"""Gradients that no pass has reduced yet: which a parallel wrapper leaves local, and what `fully_shard` holds whole."""

from collections.abc import Callable, Collection, Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from ..errors import ModelError
from ..reporting import warn
from ..torch_distributed import get_reduced_dtypes, get_unsharded_gradients
from .unscaling import change_scale_

_NAMES = {torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16", torch.float32: "float"}


class LocalGradients:
    """The `DistributedDataParallel` modules of a session's models, and whether they reduce what comes next.

    A module reduces the gradients of a backward pass if its flag `require_backward_grad_sync` was set in the forward,
    under gradients; `no_sync` and some training loops clear it. A subclass that reduces by itself says so by a method
    `leaves_gradients_local`, whose answer None means torch's rule.

    Attributes:
        ids: of the parameters whose gradients are local, as of the last backward pass.
        scale: the loss scale that these gradients carry, 0-dim; None: 1.
    """

    def __init__(self) -> None:
        self._reduces: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self._prepared: WeakSet[Any] = WeakSet()  # to reduce in the backward pass to come
        self._has_modules = False
        self.ids: set[int] = set()
        self.scale: Tensor | None = None

    def on_forward(self, module: DistributedDataParallel) -> None:
        """Note what a module does with the gradients of the forward that begins.

        Raises ModelError for one that would reduce nothing, since its model has been cast since it was made.
        """
        if not torch.is_grad_enabled():
            return
        if module not in self._reduces and _is_stale(module):
            raise ModelError(
                f"this {type(module).__name__} was made before its model was cast, so it would not reduce the gradients"
                " of the cast parameters: call initialize first, then wrap the model"
            )
        self._has_modules = True
        if module.require_backward_grad_sync:
            self._prepared.add(module)
        self._reduces[module] = module in self._prepared

    def end_pass(self, scale: Tensor | None) -> None:
        """Note, at the end of a backward pass, whose gradients stay local, and the loss scale that they carry.

        Until then a module reduces if any of its forwards said so.
        """
        self.scale = scale
        self.ids = set()
        if not self._has_modules:
            return
        self._prepared.clear()
        for module, is_reducing in self._reduces.items():
            is_local = not is_reducing
            own_rule = getattr(module, "leaves_gradients_local", None)
            if own_rule is not None and (answer := own_rule()) is not None:
                is_local = answer
            if is_local:
                self.ids.update(map(id, module.parameters()))

    def find(self, get_parameters: Callable[[], Iterable[Tensor]]) -> set[int]:
        """Return which of some parameters have local gradients, by id."""
        return self.ids.intersection(map(id, get_parameters())) if self.ids else set()

    def warn_of_stale(self) -> None:
        """Warn of modules that reduce nothing from now on, since their models have been cast back."""
        for module in list(self._reduces):
            if _is_stale(module):
                warn(
                    f"a {type(module).__name__} made under amp no longer reduces gradients, because its model is in"
                    " float32 again: wrap the model once more"
                )


class UnshardedSums:
    """What `fully_shard` keeps of passes under `set_requires_gradient_sync(False)`: whole gradients outside of `.grad`,
    which carry the loss scale of those passes until one is reduced.

    Args:
        modules: the collection of those that it has taken, read anew at each change of scale.
    """

    def __init__(self, modules: Collection[Module]) -> None:
        self._modules = modules
        self._scale: Tensor | None = None

    def carry(self, scale: Tensor | None) -> None:
        """Have the sums carry the scale of the pass that begins: 0-dim; None: 1."""
        before, self._scale = self._scale, scale
        if before is scale or not self._modules:
            return
        sums = [gradient for module in self._modules for gradient in get_unsharded_gradients(module)]
        change_scale_(sums, before, scale)


def _is_stale(module: DistributedDataParallel) -> bool:
    """Tell whether parameters are of other dtypes than those the module was made for: it hooks what they were."""
    reduced = get_reduced_dtypes(module)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return bool(reduced) and not {_NAMES.get(one.dtype, "") for one in parameters} - {""} <= reduced
