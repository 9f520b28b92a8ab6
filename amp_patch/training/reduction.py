"""Which gradients a parallel wrapper leaves local, and so which must not be folded into masters yet."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel


class LocalGradients:
    """The `DistributedDataParallel` modules of a session's models, and whether they reduce what comes next.

    A module reduces the gradients of a backward pass if its flag `require_backward_grad_sync` was set in the forward,
    under gradients; `no_sync` and some training loops clear it. A subclass that reduces by itself says so by a method
    `leaves_gradients_local`, whose answer None means torch's rule.
    """

    def __init__(self) -> None:
        self._reduces: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

    def on_forward(self, module: DistributedDataParallel) -> None:
        """Note what a module does with the gradients of the forward that begins."""
        if torch.is_grad_enabled():
            self._reduces[module] = bool(module.require_backward_grad_sync)

    def parameter_ids(self) -> set[int]:
        """Return the ids of the parameters whose gradients stay local."""
        found: set[int] = set()
        if len(self._reduces) == 0:
            return found
        for module, is_reducing in self._reduces.items():
            answer = getattr(module, "leaves_gradients_local", lambda: None)()
            if not is_reducing if answer is None else answer:
                found.update(map(id, module.parameters()))
        return found
