"""Keeps track of gradients that are not reduced over the ranks yet, under DistributedDataParallel and `fully_shard`."""

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

# how the reducer of DistributedDataParallel spells dtypes
_REDUCER_NAMES = {torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16", torch.float32: "float"}


class LocalGradients:
    """Knows which gradients `DistributedDataParallel` modules have not reduced yet.

    torch's rule: a module reduces the gradients of a backward pass if its flag `require_backward_grad_sync` was set in
    the forward pass, with gradients enabled. `no_sync` and some training loops clear the flag. A subclass with a rule
    of its own has a method `leaves_gradients_local`, which returns None if torch's rule holds.

    Attributes:
        ids: the ids of the parameters whose gradients the last backward pass left unreduced.
        scale: the loss scale that these gradients are multiplied by, 0-dim. None means 1.
    """

    def __init__(self) -> None:
        # for each module: whether it reduces gradients in the backward pass that follows its last forward pass
        self._reduces: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self._prepared: WeakSet[Any] = WeakSet()  # modules that will reduce in the next backward pass
        self._has_modules = False
        self.ids: set[int] = set()
        self.scale: Tensor | None = None

    def on_forward(self, module: DistributedDataParallel) -> None:
        """Record, as a forward pass begins, whether the module will reduce its gradients.

        Raises ModelError for a module that was made before its model was cast, because it would not reduce the
        gradients of cast parameters.
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
        """Record, after a backward pass, which gradients are not reduced, and the loss scale they are multiplied by.

        A module reduces if its flag was set in any forward pass since the backward pass before this one.
        """
        self.scale = scale
        self.ids = set()
        if not self._has_modules:
            return
        self._prepared.clear()
        for module, is_reducing in self._reduces.items():
            is_local = not is_reducing
            leaves_local = getattr(module, "leaves_gradients_local", None)
            if leaves_local is not None and (answer := leaves_local()) is not None:
                is_local = answer
            if is_local:
                self.ids.update(map(id, module.parameters()))

    def find_ids(self, get_parameters: Callable[[], Iterable[Tensor]]) -> set[int]:
        """Return the ids of the parameters that `get_parameters` returns and whose gradients are not reduced."""
        # `get_parameters` is a function, because in the usual case, without unreduced gradients, no list is needed
        return self.ids.intersection(map(id, get_parameters())) if self.ids else set()

    def warn_of_stale(self) -> None:
        """Warn about modules that no longer reduce gradients, because their models were cast back."""
        for module in list(self._reduces):
            if _is_stale(module):
                warn(
                    f"a {type(module).__name__} made under amp no longer reduces gradients, because its model is in"
                    " float32 again: wrap the model once more"
                )


class UnshardedSums:
    """Unsharded gradients that `fully_shard` keeps outside of `.grad` under `set_requires_gradient_sync(False)`.

    They stay multiplied by the loss scale until a backward pass reduces them.
    """

    def __init__(self, modules: Collection[Module]) -> None:
        self._modules = modules
        self._scale: Tensor | None = None

    def rescale_to(self, scale: Tensor | None) -> None:
        """Multiply the sums by the scale of the next backward pass (0-dim; None: 1) instead of their present scale."""
        before, self._scale = self._scale, scale
        if before is scale or not self._modules:
            return
        sums = [gradient for module in self._modules for gradient in get_unsharded_gradients(module)]
        change_scale_(sums, before, scale)


def _is_stale(module: DistributedDataParallel) -> bool:
    """Return whether some parameter has a dtype that none had when the module was made: the model was cast since."""
    reduced = get_reduced_dtypes(module)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    dtypes = {_REDUCER_NAMES.get(parameter.dtype, "") for parameter in parameters} - {""}
    return bool(reduced) and not dtypes <= reduced
