"""Where in a script something runs: in which module, and called from which line."""

import functools
import inspect
import linecache
import os
import re
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ..torch_dispatch import find_backward, get_current_node

_TORCH = f"{Path(torch.__file__).parent}/"
_OURS = f"{Path(__file__).parent.parent}/"
_BY: dict[str, str | None] = {  # None: the user's
    f"{_TORCH}optim/": "optimizer",
    f"{_TORCH}amp/grad_scaler.py": "amp",
    f"{_OURS}insight/": "",
    f"{_OURS}casting/": "cast",
    f"{_OURS}training/model_hooks.py": "border",
    f"{_OURS}training/gradient_patches.py": "",  # of wrappers that call models
    f"{_OURS}apex/optimizers/": "optimizer",
    f"{_OURS}apex/updates.py": "optimizer",
    f"{_OURS}apex/amp/": "amp",
    f"{_OURS}apex/": "",  # layers
    f"{_OURS}native/": "",  # what it tells of runs below the script's own calls
    _OURS: "amp",
    _TORCH: "",
}
_CHECKPOINT = f"{_TORCH}utils/checkpoint.py"
_LOW_DTYPE = re.compile(r"half\b|float16|get_autocast", re.IGNORECASE)  # bfloat16, HalfTensor, get_autocast_dtype
_RECOMPUTES = (_CHECKPOINT, f"{_TORCH}autograd/")
"""What calls a forward again: torch's checkpoints, and those that scripts write as functions of autograd."""
_LIBRARIES = ("<", str(Path(threading.__file__).parent) + "/contextlib.py", "importlib")


class Site(NamedTuple):
    """The innermost line of the user's code, and what of amp_patch or torch is between it and the op: "" (nothing that
    matters), "cast", "border" (casts of what goes into a module), "amp" (scales, gradients, masters) or "optimizer".
    """

    place: str
    by: str


def find_site() -> Site:
    """Return where the code that is running was called from; without a place outside of any script, as in the threads
    of autograd.
    """
    found = ""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        by = _find_by(frame.f_code.co_filename)
        if by is None:
            return Site(_describe_line(frame.f_code.co_filename, frame.f_lineno), found)
        if by and (found in ("", "cast") or by == "optimizer"):
            found = by
        frame = frame.f_back
    return Site("", found)


def names_dtype() -> bool:
    """Tell whether the line that `find_site` names has a 16-bit dtype in it, as in `.half()`; other lines cast to the
    dtype of a tensor.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if _find_by(frame.f_code.co_filename) is None:
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
            return _LOW_DTYPE.search(line) is not None
        frame = frame.f_back
    return True


def _describe_line(file: str, line: int) -> str:
    """Return `train.py:6`, or as IPython writes it, `Cell In[6], line 6`."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        named = shell.compile.format_code_name(file)
        if named is not None:
            return f"{' '.join(named)}, line {line}"
    return f"{os.path.basename(file)}:{line}"


def is_backward_of_user(node: Any) -> bool:
    """Tell whether a node of the backward pass runs a `backward` that the user has written."""
    backward = find_backward(node)
    code = None if backward is None else getattr(inspect.unwrap(backward), "__code__", None)
    return code is not None and _find_by(code.co_filename) is None


def is_under_checkpoint() -> bool:
    """Tell whether torch.utils.checkpoint runs a forward again, if what runs is called by autograd."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CHECKPOINT:
        frame = frame.f_back
    return frame is not None


def find_recomputed() -> nn.Module | None:
    """Return the module of which a checkpoint runs a method again, or a closure over it: no hook is called for it.

    It is that of the outermost call below the checkpoint.
    """
    found: nn.Module | None = None
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not _calls_forward(frame.f_code):
        found = _find_module(frame) or found
        frame = frame.f_back
    return None if frame is None else found


def _calls_forward(code: types.CodeType) -> bool:
    """Tell whether code is torch's that calls a forward again, or a `backward` that may."""
    is_of_forward = code.co_name == "apply" and code.co_varnames[:1] == ("cls",)
    return code.co_filename.startswith(_RECOMPUTES) and not is_of_forward


def _find_module(frame: types.FrameType) -> nn.Module | None:
    """Return the module that a call is of: its first argument, its `self`, or the only one that it knows."""
    known, code = frame.f_locals, frame.f_code
    for name in (*code.co_varnames[: min(1, code.co_argcount)], "self"):
        module = known.get(name)
        if isinstance(module, nn.Module):
            return module
    modules = {id(one): one for one in known.values() if isinstance(one, nn.Module)}
    return next(iter(modules.values())) if len(modules) == 1 else None


@functools.cache
def _find_by(file: str) -> str | None:
    """Return what code in a file is, None for the user's own; a process has some hundreds of files."""
    for folder, by in _BY.items():
        if file.startswith(folder):
            return by
    if file.startswith(_LIBRARIES) and not file.startswith("<ipython-input-"):
        return ""
    return None


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.modules: list[tuple[nn.Module, str]] = []


class ModuleStack:
    """The modules whose `forward` is running, in each thread, by two hooks on all modules.

    Args:
        get_models: returns those whose modules have names; of several, each name begins with that of its model.
    """

    def __init__(self, get_models: Callable[[], list[nn.Module]]) -> None:
        self._get_models = get_models
        self._names = dict(name_modules(get_models()))
        self._local = _OfThread()
        self._handles: list[RemovableHandle] = []

    def open(self) -> None:
        """Register the hooks."""
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def close(self) -> None:
        """Remove the hooks. Harmless twice."""
        for handle in self._handles:
            handle.remove()

    def here(self) -> str:
        """Return the name of the innermost module that is running in this thread, "" outside of all."""
        running = self._find_running()
        return running[-1][1] if running else ""

    def module_here(self) -> nn.Module | None:
        """Return that module."""
        running = self._find_running()
        return running[-1][0] if running else None

    def names_of_like(self) -> list[str]:
        """Return the names of all modules of the class of the innermost that is running in this thread."""
        here = type(self.module_here())
        return [name for module, name in self._names.values() if type(module) is here]

    def modules_here(self) -> list[nn.Module]:
        """Return the modules that are running in this thread, innermost first."""
        return [module for module, _ in reversed(self._find_running())]

    def _running(self) -> list[tuple[nn.Module, str]]:
        return self._local.modules

    def _find_running(self) -> list[tuple[nn.Module, str]]:
        """Return what is running; where a checkpoint runs a part of a module again, that module."""
        running = self._running()
        if not running and get_current_node() is not None:
            known = self._names.get(id(find_recomputed()))
            if known is not None:
                return [known]
        return running

    def _enter(self, module: nn.Module, args: Any) -> None:
        running = self._running()
        if not running and id(module) not in self._names:  # perhaps there are more models by now
            self._names = dict(name_modules(self._get_models()))
        running.append((module, self._name(module, running)))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        running = self._running()
        while running and running.pop()[0] is not module:  # a forward that raised before its hooks were on
            pass

    def _name(self, module: nn.Module, running: list[tuple[nn.Module, str]]) -> str:
        known = self._names.get(id(module))
        if known is not None:
            return known[1]
        if running:  # of a replica or a copy: by what it is to the module that calls it
            outer, name = running[-1]
            for key, child in outer.named_children():
                if child is module:
                    return join_names(name, key)
        return f"({type(module).__name__})"


def name_tensors(models: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of models, each under the name of its module and its own, and gradients."""
    for module, prefix in dict(name_modules(list(models))).values():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            full = join_names(prefix, name)
            yield full, tensor
            if tensor.is_leaf and tensor.grad is not None:
                yield f"the gradient of {full}", tensor.grad


def find_prefixes(models: list[nn.Module]) -> tuple[str, ...]:
    """Return what the names of the modules of each model begin with: its class, and its number where several models are
    of that class; nothing for a model alone.
    """
    if len(models) < 2:
        return ()
    kinds = [type(model).__name__ for model in models]
    return tuple(f"{kind}[{number}]" if kinds.count(kind) > 1 else kind for number, kind in enumerate(kinds))


def name_modules(models: list[nn.Module]) -> Iterator[tuple[int, tuple[nn.Module, str]]]:
    """Yield the id of each module of models, and the module and its name."""
    prefixes = find_prefixes(models) or ("",) * len(models)
    for prefix, model in zip(prefixes, models, strict=True):
        for name, module in model.named_modules():
            yield id(module), (module, join_names(prefix, name))


def join_names(*parts: str) -> str:
    """Return the name of what is below another, of which one may be empty."""
    return ".".join(filter(None, parts))
