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
from weakref import WeakSet

from . import compiling
from .compiling import is_dynamo_compiling


class Mode(Enum):
    """How casts act in a region."""

    OFF = "as plain torch"
    BY_LISTS = "as the op lists say"
    LOW = "every listed op in the low dtype"
    FLOAT32 = "every listed op in float32"


Region = tuple[Mode, object, int]
"""How casts act in it, what tells it from others of the same mode, and the thread that opened it."""


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
        self._lock = threading.RLock()
        self._get_name = compiling.assume_constant(_name_getter(weakref.ref(self)))
        _switches.add(self)
        compiling.count_regions(self)

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
        if is_dynamo_compiling():
            return _MODES[self._get_name()]
        return self._find_mode()

    def _find_mode(self) -> Mode:
        name = compiling.find_region_in_graph()
        if name is not None:
            return _MODES[name]
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
        entry = (mode, object(), threading.get_ident())
        regions.append(entry)
        compiling.show_region(mode.name)
        with self._lock:
            self._open.append(entry)
            self.regions = len(self._open)
        return entry

    def leave(self, entry: Region) -> None:
        """Close a region, in the thread that opened it. Generators may close theirs in any order."""
        regions = self._local.regions
        regions.remove(entry)
        compiling.show_region((regions[-1][0] if regions else Mode.BY_LISTS).name)
        with self._lock:
            self._open.remove(entry)
            self.regions = len(self._open)

    def count_regions_here(self) -> int:
        """Return how many regions are open in this thread: what `leave_down_to` takes."""
        return len(getattr(self._local, "regions", ()))

    def leave_down_to(self, count: int) -> None:
        """Close the regions of this thread but for the first `count`, also those that an interrupt left half-open."""
        regions: list[Region] = getattr(self._local, "regions", [])
        thread = threading.get_ident()
        if len(regions) <= count and sum(entry[2] == thread for entry in self._open) == len(regions):
            return
        del regions[count:]
        compiling.show_region((regions[-1][0] if regions else Mode.BY_LISTS).name)
        with self._lock:
            self._open[:] = [entry for entry in self._open if entry[2] != thread or entry in regions]
            self.regions = len(self._open)

    def enter_traced(self, mode: Mode) -> None:
        """The same while Dynamo traces: it follows plain lists and numbers, and neither locks nor thread-local
        state.
        """
        self._traced.append(mode)
        self.regions += 1
        compiling.enter_in_graph(mode.name)

    def leave_traced(self) -> None:
        """Close what `enter_traced` opened."""
        compiling.leave_in_graph()
        self._traced.pop()
        self.regions -= 1


_MODES = {mode.name: mode for mode in Mode}


def _name_getter(reference: "weakref.ref[Switch]") -> Callable[[], str]:
    """Return a function that gives the name of the mode in this thread, and does not keep the switch alive."""

    def get_name() -> str:
        switch = reference()
        return Mode.OFF.name if switch is None else switch._find_mode().name

    return get_name


_switches: WeakSet[Switch] = WeakSet()


def _silence_in_child() -> None:
    for switch in _switches:
        switch.on = False
        switch._lock = threading.RLock()  # the parent may have held it at the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_silence_in_child)
