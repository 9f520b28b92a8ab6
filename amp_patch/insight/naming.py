"""Names modules, parameters and buffers, and keeps a stack of the modules that are running."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ..torch_dispatch import get_current_node
from .sites import find_recomputed


class _RunningModules(threading.local):
    """The modules that run in a thread, the innermost last, each with its name."""

    def __init__(self) -> None:
        self.modules: list[tuple[nn.Module, str]] = []


class ModuleStack:
    """The modules whose `forward` is running in each thread. Two global hooks keep the stack.

    Args:
        get_models: returns the models whose modules have names. With several models, a name begins with
            the prefix of its model: see `find_prefixes`.
    """

    def __init__(self, get_models: Callable[[], list[nn.Module]]) -> None:
        self._get_models = get_models
        self._names = dict(name_modules(get_models()))
        self._local = _RunningModules()
        self._handles: list[RemovableHandle] = []

    def open(self) -> None:
        """Register the hooks."""
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def close(self) -> None:
        """Remove the hooks. A second call does nothing."""
        for handle in self._handles:
            handle.remove()

    def here(self) -> str:
        """Return the name of the innermost module that is running in this thread.

        It is "" outside of all modules, and for a single model itself.
        """
        running = self._find_running()
        return running[-1][1] if running else ""

    def find_name(self, module: object) -> str | None:
        """Return the name of a module of the models; None for another object."""
        known = self._names.get(id(module))
        return known[1] if known is not None and known[0] is module else None

    def module_here(self) -> nn.Module | None:
        """Return the innermost module that is running in this thread; None outside of all modules."""
        running = self._find_running()
        return running[-1][0] if running else None

    def names_of_same_class(self) -> list[str]:
        """Return the names of all modules of the same class as the innermost one that is running in this thread."""
        here = type(self.module_here())
        return [name for module, name in self._names.values() if type(module) is here]

    def modules_here(self) -> list[nn.Module]:
        """Return the modules that are running in this thread, innermost first."""
        return [module for module, _ in reversed(self._find_running())]

    def _entered(self) -> list[tuple[nn.Module, str]]:
        """Return the modules that the hooks have entered in this thread, innermost last, each with its name."""
        return self._local.modules

    def _find_running(self) -> list[tuple[nn.Module, str]]:
        """Return the running modules, innermost last, each with its name.

        If a script passes a method of a module to a checkpoint, the backward pass runs the method again, and torch
        calls no hook of the module. Then the list holds only this module, or a submodule that the method calls.
        """
        running = self._entered()
        if not running and get_current_node() is not None:
            known = self._names.get(id(find_recomputed()))
            if known is not None:
                return [known]
        return running

    def _enter(self, module: nn.Module, args: Any) -> None:
        running = self._entered()
        if not running and id(module) not in self._names:  # models may have been added
            self._names = dict(name_modules(self._get_models()))
        running.append((module, self._name(module, running)))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        running = self._entered()
        # after a KeyboardInterrupt, torch calls no hook, so modules inside this one may still be on the stack
        while running and running.pop()[0] is not module:
            pass

    def _name(self, module: nn.Module, running: list[tuple[nn.Module, str]]) -> str:
        known = self._names.get(id(module))
        if known is not None:
            return known[1]
        if running:  # a replica or a copy: name it by the attribute that holds it in the running module
            outer, name = running[-1]
            for key, child in outer.named_children():
                if child is module:
                    return join_names(name, key)
        return f"({type(module).__name__})"


def name_tensors(models: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield (qualified name, tensor) for each parameter and buffer, followed by its gradient if it has one."""
    for module, prefix in dict(name_modules(list(models))).values():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            full = join_names(prefix, name)
            yield full, tensor
            if tensor.is_leaf and tensor.grad is not None:
                yield f"the gradient of {full}", tensor.grad


def find_prefixes(models: list[nn.Module]) -> tuple[str, ...]:
    """Return a prefix for the module names of each model: its class, or "Net[1]" if several models have that class.

    The number is the position of the model in `models`. Return an empty tuple for a single model.
    """
    if len(models) < 2:
        return ()
    kinds = [type(model).__name__ for model in models]
    return tuple(f"{kind}[{number}]" if kinds.count(kind) > 1 else kind for number, kind in enumerate(kinds))


def name_modules(models: list[nn.Module]) -> Iterator[tuple[int, tuple[nn.Module, str]]]:
    """Yield (id of the module, (the module, its name)) for each module of the models."""
    prefixes = find_prefixes(models) or ("",) * len(models)
    for prefix, model in zip(prefixes, models, strict=True):
        for name, module in model.named_modules():
            yield id(module), (module, join_names(prefix, name))


def join_names(*parts: str) -> str:
    """Return the parts that are not empty, joined by dots."""
    return ".".join(filter(None, parts))
