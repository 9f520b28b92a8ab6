"""Living beside torch.compile: tables built before the patches go in, and compiled code forgotten when they come or go.

Dynamo guards patched functions but not patched Tensor methods, its rule tables are built from names at first use, and
the on-disk cache keys on graphs that look the same with and without casts. So: build the tables first, forget compiled
code at each change, and tag the cache key.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from ..interrupts import UndoStack
from ..torch_private import (
    DYNAMO,
    IDLE_DEVICE_TYPES,
    TracingContext,
    build_dynamo_tables,
    build_function_tables,
    is_autocast_state_guarded,
    mark_constant,
    pass_keys_through,
    set_keys,
)

is_compiling, is_dynamo_compiling = torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling
"""Whether this code is being compiled or exported in any way, and whether Dynamo is tracing it."""


def prime() -> None:
    """Have torch build its tables of functions now, Dynamo's among them, while every name is torch's own."""
    torch.overrides.get_overridable_functions()
    build_function_tables()
    build_dynamo_tables()


def run_eagerly() -> Callable[[], object]:
    """Have what is compiled run as it was written, until what is returned is called."""
    stance = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


def write_into_graphs(*functions: Callable[..., None]) -> None:
    """Have Dynamo write calls of these functions into its graphs, and nobody remove them for having no result."""
    for function in functions:
        torch.compiler.allow_in_graph(function)
        torch.fx.node.has_side_effect(function)


def forget_compiled_code() -> None:
    """Drop what torch.compile has compiled in this process; it no longer knows which casts are in force."""
    if DYNAMO in sys.modules:
        torch.compiler.reset()


def tag_cache_key(tag: str, undo: UndoStack) -> None:
    """Make the on-disk compile caches of a patched process differ from those of any other, until it is undone.

    Without `cache_key_tag` in torch, do nothing.
    """
    config = getattr(torch.compiler, "config", None)
    if config is not None and hasattr(config, "cache_key_tag"):
        before = config.cache_key_tag
        undo.callback(setattr, config, "cache_key_tag", before)
        config.cache_key_tag = f"{before}|{tag}"


# ---- regions in compiled code ----------------------------------------------------------------------------------------

# Code that is compiled inside a region must not run outside of it, nor the other way round. Dynamo can neither follow
# how a thread's region is found nor guards patched Tensor methods. But it guards the autocast state of the thread, for
# every kind of device. The state of one that torch lists and no longer runs on says which region is open. Dynamo of
# torch 2.6 does not guard it, but the dispatch keys of the thread: there, two that nobody uses say it.

_SIGNS = {"OFF": torch.float64, "LOW": torch.float16, "FLOAT32": torch.float32}
_KEYS = {"OFF": (True, False), "LOW": (False, True), "FLOAT32": (True, True)}


def _find_idle_device() -> tuple[str, torch.dtype] | None:
    """Return a device type that torch has an autocast state for and nobody can use, and its autocast dtype; None if
    torch lists none any more, or Dynamo does not guard it.
    """
    for name in IDLE_DEVICE_TYPES:
        with contextlib.suppress(RuntimeError):
            usual = torch.get_autocast_dtype(name)
            return (name, usual) if is_autocast_state_guarded(name) else None
    return None


_IDLE_DEVICE = _find_idle_device()
if _IDLE_DEVICE is None:
    pass_keys_through()


def show_region(mode_name: str) -> None:
    """Have Dynamo guard what it compiles in this thread from now on by the mode of that name."""
    if _IDLE_DEVICE is None:
        set_keys(*_KEYS.get(mode_name, (False, False)))
    else:
        name, usual = _IDLE_DEVICE
        torch.set_autocast_dtype(name, _SIGNS.get(mode_name, usual))
        torch.set_autocast_enabled(name, mode_name in _SIGNS)


def assume_constant(function: Callable[[], str]) -> Callable[[], str]:
    """Have Dynamo call `function` while it traces, instead of tracing it, and take the result for a constant."""
    mark_constant(function)
    return function


# Dynamo writes calls of `enter_in_graph` and `leave_in_graph` into its graph. What then traces the graph on
# (AOTAutograd) runs the ops through the patched functions once more, and `@` for the first time, and must find the
# regions open that were open when Dynamo met them. They are those of one compilation.

_regions_in_graphs: WeakKeyDictionary[TracingContext, list[str]] = WeakKeyDictionary()

switches: "WeakSet[Any]" = WeakSet()
"""Those of this process, each of which has to know of the regions in graphs."""


def enter_in_graph(name: str) -> None:
    """Open a region, by the name of its mode, in the graph that is being compiled; or for the ops of a graph that runs
    as it is, through the patched functions, as the debugging backend "eager" has it.
    """
    context = TracingContext.try_get()
    if context is None:
        for switch in switches:
            switch.enter_run(name, sys._getframe(1))
        return
    _regions_in_graphs.setdefault(context, []).append(name)
    for switch in switches:
        switch.regions += 1


def leave_in_graph() -> None:
    """Close the region opened last."""
    context = TracingContext.try_get()
    if context is None:
        for switch in switches:
            switch.leave_run()
    elif context in _regions_in_graphs:
        _regions_in_graphs[context].pop()
        if not _regions_in_graphs[context]:
            del _regions_in_graphs[context]
        for switch in switches:
            switch.regions -= 1


def _write_regions() -> str:
    write_into_graphs(enter_in_graph, leave_in_graph)
    return ""


write_regions_into_graphs = assume_constant(_write_regions)
"""Have Dynamo write regions into its graphs; also while it traces. Imports Dynamo, which takes long without it."""


def find_region_in_graph() -> str | None:
    """Return the mode of the region that is open in the graph that is being compiled, by name."""
    context = TracingContext.try_get()
    return None if context is None or context not in _regions_in_graphs else _regions_in_graphs[context][-1]
