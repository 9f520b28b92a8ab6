"""Patches torch.distributed.checkpoint's helpers (`get_state_dict`, `set_state_dict`) for optimizers with masters.

The helpers look for the tensors of an optimizer among the model's parameters, and would not find masters there. If an
optimizer has no state yet, they call its `step()` with a learning rate of 0, so that it creates one. That step must not
be counted.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from ..interrupts import UndoStack
from ..patching import ImportWatch, Patch, Patcher
from ..torch_distributed import GET_OPTIM_STATE_DICT, LOAD_OPTIM_STATE_DICT, STATE_DICT_MODULE, init_optim_state
from ..training import OptimizerBinding
from .bindings import Bindings


def patch_helpers(
    bindings: Bindings, patcher: Patcher, lock: contextlib.AbstractContextManager[Any], undo: UndoStack
) -> None:
    """Patch the helpers as soon as they are imported, until `undo` is closed. Holds `lock` while patching."""
    process_id = os.getpid()
    makers: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
        GET_OPTIM_STATE_DICT: lambda original: _show_parameters(original, bindings),
        LOAD_OPTIM_STATE_DICT: lambda original: _load_into_masters(original, bindings),
    }

    def patch(name: str) -> None:
        module = sys.modules[name]
        # a forked process inherits the watch, but its changes must not reach the session of the parent
        if os.getpid() == process_id and all(hasattr(module, function) for function in makers):
            with lock:
                patcher.install([Patch(module, function, maker) for function, maker in makers.items()])

    watch = ImportWatch(patch)
    undo.callback(watch.close)
    watch.watch([STATE_DICT_MODULE])


def _show_parameters(original: Callable[..., Any], bindings: Bindings) -> Callable[..., Any]:
    """Return a helper that reads the states of optimizers. While it runs, they hold parameters in place of masters."""

    def get_optim_state_dict(model: Any, optimizers: Any, info: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for binding in _find_bindings(bindings, optimizers):
                stack.enter_context(binding.paused())
                init_optim_state(binding.optimizer)
                stack.enter_context(binding.groups.without_masters())
            return original(model, optimizers, info)

    return get_optim_state_dict


def _load_into_masters(original: Callable[..., Any], bindings: Bindings) -> Callable[..., Any]:
    """Return a helper that loads optimizer state into the state of masters."""

    def load_optim_state_dict(model: Any, optimizers: Any, state_dict: Any, info: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for binding in _find_bindings(bindings, optimizers):
                stack.enter_context(binding.paused())
                _name_masters(binding, info.fqn_param_mapping)
                _name_masters(binding, info.shared_params_mapping)
            return original(model, optimizers, state_dict, info)

    return load_optim_state_dict


def _find_bindings(bindings: Bindings, optimizers: Sequence[Optimizer]) -> list[OptimizerBinding]:
    bound = [bindings.find_optimizer(optimizer) for optimizer in optimizers]
    return [binding for binding in bound if binding is not None]


def _name_masters(binding: OptimizerBinding, mapping: dict[Any, Any]) -> None:
    """Give masters the names of their parameters in a helper's mapping.

    So the helper loads states in the masters' dtype. The mapping has entries in both directions: `{parameter:
    {"fc.weight"}, "fc.weight": parameter}`.
    """
    for parameter, master in binding.groups.placed.values():
        names = mapping.get(parameter)
        if names is None:
            continue
        mapping[master] = names
        for name in names:
            if mapping.get(name) is parameter:
                mapping[name] = master
