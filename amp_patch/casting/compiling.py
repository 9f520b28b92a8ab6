"""Makes patches work with torch.compile.

* At its first use, Dynamo builds tables of torch's functions, and takes what names such as `torch.exp` refer to at that
  time. So `prime` builds the tables before patches are installed.
* Dynamo compiles a function again if a patched function of torch changes, but not if a patched Tensor method changes.
  So `forget_compiled_code` drops compiled code whenever patches change.
* The on-disk cache finds code by its graph, which may look the same with and without casts. So `tag_cache_key` adds a
  tag to its keys.
"""

import contextlib
import sys
from collections.abc import Callable

import torch
from torch import set_autocast_dtype, set_autocast_enabled

from ..interrupts import UndoStack
from ..reporting import logger
from ..torch_private import (
    DYNAMO,
    IDLE_DEVICE_TYPES,
    build_dynamo_tables,
    build_function_tables,
    force_setting,
    get_forced_setting,
    get_tracing_state,
    has_proxies,
    is_autocast_state_guarded,
    is_tracing_graph,
    mark_constant,
    pass_keys_through,
    peek_interpreter_stack,
    set_keys,
)

is_at_work = is_tracing_graph
"""Returns whether Dynamo is tracing in this thread. Also True in a function that Dynamo calls instead of tracing it."""

is_compiling, is_dynamo_compiling = torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling
"""`is_compiling` returns whether this code is being compiled or exported, `is_dynamo_compiling` whether Dynamo traces
this very code."""


def is_traced() -> bool:
    """Return whether a tracer, a compiler or an exporter records this code."""
    return is_dynamo_compiling() or bool(get_tracing_state()) or is_compiling() or has_proxies()


def is_eager_autograd() -> bool:
    """Return whether gradients are enabled, and no function transform, torch.jit tracer or compiler is active."""
    if is_dynamo_compiling() or not torch.is_grad_enabled():
        return False
    return peek_interpreter_stack() is None and not get_tracing_state() and not is_compiling()


def prime() -> None:
    """Make torch build its tables of functions, including Dynamo's, while every name holds torch's own function."""
    torch.overrides.get_overridable_functions()
    build_function_tables()
    build_dynamo_tables()


def is_dynamo_imported() -> bool:
    """Return whether Dynamo has been imported. Before its import, which takes seconds, no code is compiled."""
    return DYNAMO in sys.modules


def run_eagerly() -> Callable[[], object]:
    """From now on, run compiled functions uncompiled. Return a function that ends this."""
    stance = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


def forget_compiled_code() -> None:
    """Drop the code that torch.compile has made in this process, because it would keep the casts of earlier patches."""
    if is_dynamo_imported():
        torch.compiler.reset()


def tag_cache_key(tag: str, undo: UndoStack) -> None:
    """Until `undo` is closed, keep compiled code apart by `tag` in the on-disk caches, if this torch supports it."""
    config = getattr(torch.compiler, "config", None)
    if config is not None and hasattr(config, "cache_key_tag"):
        undo.callback(force_setting, config, "cache_key_tag", get_forced_setting(config, "cache_key_tag"))
        force_setting(config, "cache_key_tag", f"{config.cache_key_tag}|{tag}")


# ---- regions in compiled code ----------------------------------------------------------------------------------------

# Code that was compiled inside a region (`mode.Region`) must not run outside it, and code from outside not inside. So
# Dynamo must guard the mode of the thread: check it before it runs compiled code. It cannot guard our own state, but it
# guards the autocast state of the thread for every device type. So we store the mode in the autocast state of an idle
# device type, one that torch still lists, but no longer runs on: its autocast is enabled in a region, with a dtype that
# stands for the mode (except BY_LISTS). Dynamo of torch 2.6 does not guard the state of idle device types, but guards
# the dispatch keys of the thread. So in torch 2.6, two dispatch keys that nothing else uses stand for the mode.

_DTYPES_OF_MODES = {"OFF": torch.float64, "LOW": torch.float16, "FLOAT32": torch.float32}
_KEYS_OF_MODES = {"OFF": (True, False), "LOW": (False, True), "FLOAT32": (True, True)}


def _find_idle_device() -> tuple[str, torch.dtype] | None:
    """Return a device type for which torch has an autocast state but no kernels, and its autocast dtype. Return None if
    torch lists no such type any more, or if Dynamo does not guard its state.
    """
    for name in IDLE_DEVICE_TYPES:
        with contextlib.suppress(RuntimeError):
            usual_dtype = torch.get_autocast_dtype(name)
            return (name, usual_dtype) if is_autocast_state_guarded(name) else None
    return None


_IDLE_DEVICE = _find_idle_device()
if _IDLE_DEVICE is None:
    pass_keys_through()


def show_region(mode_name: str) -> None:
    """Store the name of this thread's mode where Dynamo guards it, so that code which Dynamo compiles now runs in this
    mode only. "BY_LISTS" clears the state, as outside of regions.

    Dynamo skips a function that names no module of torch and has no tensors. So the body must not say
    `torch.set_autocast_dtype`: Dynamo would trace the body, and find that it changes guarded state.
    """
    if _IDLE_DEVICE is None:
        set_keys(*_KEYS_OF_MODES.get(mode_name, (False, False)))
    else:
        name, usual_dtype = _IDLE_DEVICE
        set_autocast_dtype(name, _DTYPES_OF_MODES.get(mode_name, usual_dtype))
        set_autocast_enabled(name, mode_name in _DTYPES_OF_MODES)


def assume_constant(function: Callable[[], str]) -> Callable[[], str]:
    """Make Dynamo call `function` while it traces, instead of tracing it, and treat the result as a constant."""
    mark_constant(function)
    return function


def _warn_of_break() -> str:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        logger.warning(
            "torch.compile breaks its graph at module rules, at functions with a rule of their own and at"
            " amp.disable_casts(): the code inside is compiled by itself. fullgraph=True raises an error there."
        )
    return ""  # Dynamo needs a constant


_has_warned = False

warn_of_break = assume_constant(_warn_of_break)
"""Warns, once in a process, that Dynamo's graph breaks at regions. Dynamo calls it while it traces."""
