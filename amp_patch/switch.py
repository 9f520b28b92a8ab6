"""`Switch`: whether the casts of a session act, in the process and in the thread that asks, and which way.

Patches are process-wide; a region in which they act otherwise belongs to the thread that opened it. The hot path reads
two plain attributes; only while some thread has a region open does anybody look at thread-local state.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch._guards import TracingContext


class Mode(Enum):
    """How casts act in a region."""

    OFF = "as plain torch"
    BY_LISTS = "as the op lists say"
    LOW = "every listed op in the low dtype"
    FLOAT32 = "every listed op in float32"


Region = tuple[Mode, object]
"""How casts act in it, and what tells it from others of the same mode."""


class Switch:
    """On after `turn_on`, until `turn_off` or a fork; `region(Mode.OFF)` turns the casts of one thread off for
    a while.
    """

    __slots__ = ("__weakref__", "_get_name", "_local", "_lock", "_open", "_traced", "on", "regions")

    def __init__(self) -> None:
        self.on = False
        self.regions = 0  # open regions of all threads
        self._open: list[Region] = []  # the same, in the order in which they were opened
        self._traced: list[Mode] = []  # those that torch.compile enters and leaves while it traces
        self._local = threading.local()
        self._lock = threading.Lock()
        self._get_name = _make_constant_for_dynamo(weakref.ref(self))
        _switches.add(self)

    def __deepcopy__(self, memo: Any) -> "Switch":
        return self  # a copied model is under the same session

    def __reduce__(self) -> tuple[type["Switch"], tuple[()]]:
        return Switch, ()  # a saved one is under none

    def turn_on(self) -> None:
        """Let the casts act."""
        self.on = True

    def turn_off(self) -> None:
        """Make every wrapper of this session call straight through, for good: also those that cannot be taken out."""
        self.on = False

    def is_on_here(self) -> bool:
        """Tell whether casts act in this thread now."""
        return self.mode_here() is not Mode.OFF

    def mode_here(self) -> Mode:
        """Return how casts act in this thread now."""
        if not self.on:
            return Mode.OFF
        if self._traced:
            return self._traced[-1]
        if not self.regions:
            return Mode.BY_LISTS
        if torch.compiler.is_dynamo_compiling():
            return _MODES[self._get_name()]
        return self._find_mode()

    def _find_mode(self) -> Mode:
        context = TracingContext.try_get()
        if context is not None and context in _regions_in_graphs:
            return _regions_in_graphs[context][-1]
        regions: list[Region] = getattr(self._local, "regions", [])
        if regions:
            return regions[-1][0]
        # The autograd engine's own threads run backward code of whoever called backward(); they follow the region that
        # was opened last.
        if isinstance(threading.current_thread(), threading._DummyThread):
            with self._lock:
                return self._open[-1][0] if self._open else Mode.BY_LISTS
        return Mode.BY_LISTS

    @contextlib.contextmanager
    def region(self, mode: Mode) -> Iterator[None]:
        """Let the casts of this thread act as `mode` says inside the block. Nests, and survives exceptions."""
        entry = self.enter(mode)
        try:
            yield
        finally:
            self.leave(entry)

    def enter(self, mode: Mode) -> Region:
        """Open a region and return what `leave` needs to close it; for hooks, which are no `with` blocks."""
        regions: list[Region] | None = getattr(self._local, "regions", None)
        if regions is None:
            regions = self._local.regions = []
        entry = (mode, object())
        regions.append(entry)
        _show_to_dynamo(mode)
        with self._lock:
            self._open.append(entry)
            self.regions = len(self._open)
        return entry

    def leave(self, entry: Region) -> None:
        """Close a region, in the thread that opened it. Generators may close theirs in any order."""
        regions = self._local.regions
        regions.remove(entry)
        _show_to_dynamo(regions[-1][0] if regions else Mode.BY_LISTS)
        with self._lock:
            self._open.remove(entry)
            self.regions = len(self._open)

    def enter_traced(self, mode: Mode) -> None:
        """The same while Dynamo traces: it follows plain lists and numbers, and neither locks nor thread-local
        state.
        """
        self._traced.append(mode)
        self.regions += 1
        enter_in_graph(mode.name)

    def leave_traced(self) -> None:
        """Close what `enter_traced` opened."""
        leave_in_graph()
        self._traced.pop()
        self.regions -= 1


_MODES = {mode.name: mode for mode in Mode}

# Code that is compiled inside a region must not run outside of it, nor the other way round. Dynamo can neither follow
# how a thread's region is found nor guards patched Tensor methods. But it guards the autocast state of the thread, for
# every kind of device. The state of one that torch lists and no longer runs on says which region is open.

_SIGNS = {Mode.OFF: torch.float64, Mode.LOW: torch.float16, Mode.FLOAT32: torch.float32}


def _find_idle_device() -> tuple[str, torch.dtype] | None:
    """Return a device type that torch has an autocast state for and nobody can use, and its autocast dtype; None if
    torch lists none any more.
    """
    for name in ("ipu", "maia"):
        with contextlib.suppress(RuntimeError):
            return name, torch.get_autocast_dtype(name)
    return None


_IDLE_DEVICE = _find_idle_device()


def _show_to_dynamo(mode: Mode) -> None:
    if _IDLE_DEVICE is not None:
        name, usual = _IDLE_DEVICE
        torch.set_autocast_dtype(name, _SIGNS.get(mode, usual))
        torch.set_autocast_enabled(name, mode in _SIGNS)


def _make_constant_for_dynamo(reference: "weakref.ref[Switch]") -> Callable[[], str]:
    """Return a function that Dynamo calls while it traces, instead of tracing it: the name of the mode in this
    thread.
    """

    def get_name() -> str:
        switch = reference()
        return Mode.OFF.name if switch is None else switch._find_mode().name

    get_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, which would import Dynamo
    return get_name


# Dynamo writes calls of these two into its graph. What then traces the graph on (AOTAutograd) runs the ops through the
# patched functions once more, and `@` for the first time, and must find the regions open that were open when Dynamo met
# them. They are those of one compilation.

_regions_in_graphs: WeakKeyDictionary[TracingContext, list[Mode]] = WeakKeyDictionary()


def enter_in_graph(name: str) -> None:
    """Open a region in the graph that is being compiled.

    Does nothing where a graph is run as it is, as the debugging backend "eager" does.
    """
    context = TracingContext.try_get()
    if context is not None:
        _regions_in_graphs.setdefault(context, []).append(Mode[name])
        for switch in _switches:
            switch.regions += 1


def leave_in_graph() -> None:
    """Close the region opened last."""
    context = TracingContext.try_get()
    if context is not None and context in _regions_in_graphs:
        _regions_in_graphs[context].pop()
        if not _regions_in_graphs[context]:
            del _regions_in_graphs[context]
        for switch in _switches:
            switch.regions -= 1


_switches: WeakSet[Switch] = WeakSet()


def _silence_in_child() -> None:
    for switch in _switches:
        switch.on = False
        switch._lock = threading.Lock()  # the parent may have held it at the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_silence_in_child)
