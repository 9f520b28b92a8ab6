"""What torch.distributed.checkpoint's helpers (`get_state_dict`, `set_state_dict`) are shown of a session's optimizers.

They find the names of what an optimizer steps on by looking it up among the model's parameters, where masters are not;
and they take a step of length 0 to have an optimizer make its state, which is none of the steps that are counted.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..patching import ImportWatch, Patch, Patcher
from ..torch_distributed import GET_OPTIM_STATE_DICT, LOAD_OPTIM_STATE_DICT, STATE_DICT_MODULE, init_optim_state
from ..training import OptimizerBinding
from .bindings import Bindings


class CheckpointHelpers:
    """Patches the helpers as soon as they are imported, until it is closed. `lock` is held meanwhile."""

    def __init__(self, bindings: Bindings, patcher: Patcher, lock: contextlib.AbstractContextManager[Any]) -> None:
        self._bindings = bindings
        self._patcher = patcher
        self._lock = lock
        self._process_id = os.getpid()
        self._watch = ImportWatch(self._patch)

    def open(self) -> None:
        """Patch the helpers, or wait until they are imported."""
        self._watch.add([STATE_DICT_MODULE])

    def close(self) -> None:
        """Patch nothing any more. Harmless twice."""
        self._watch.close()

    def _patch(self, name: str) -> None:
        module, makers = sys.modules[name], {GET_OPTIM_STATE_DICT: self._get, LOAD_OPTIM_STATE_DICT: self._load}
        if os.getpid() != self._process_id or not all(hasattr(module, function) for function in makers):
            return
        with self._lock:
            self._patcher.install([Patch(module, function, maker) for function, maker in makers.items()])

    def _bindings_of(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[OptimizerBinding]:
        found = [self._bindings.find_optimizer(optimizer) for optimizer in optimizers]
        return [binding for binding in found if binding is not None]

    def _get(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_optim_state_dict(model: Any, optimizers: Any, info: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for binding in self._bindings_of(optimizers):
                    stack.enter_context(binding.paused())
                    init_optim_state(binding.optimizer)
                    stack.enter_context(binding.groups.presented())
                return original(model, optimizers, info)

        return get_optim_state_dict

    def _load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load_optim_state_dict(model: Any, optimizers: Any, state_dict: Any, info: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for binding in self._bindings_of(optimizers):
                    stack.enter_context(binding.paused())
                    _name_masters(binding, info.fqn_param_mapping)
                    _name_masters(binding, info.shared_params_mapping)
                return original(model, optimizers, state_dict, info)

        return load_optim_state_dict


def _name_masters(binding: OptimizerBinding, mapping: dict[Any, Any]) -> None:
    """Replace parameters by their masters in a mapping to names and back, so that states are loaded in float32."""
    for parameter, master in binding.groups.placed.values():
        names = mapping.get(parameter)
        if names is None:
            continue
        mapping[master] = names
        for name in names:
            if mapping.get(name) is parameter:
                mapping[name] = master
