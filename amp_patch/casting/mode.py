"""`Switch`: whether the casts of a session act, in the process and in the thread that asks, and which way.

Patches are process-wide; a region in which they act otherwise belongs to the thread that opened it. The hot path reads
two plain attributes; only while some thread has a region open does anybody look at thread-local state.
"""

import contextlib
import os
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, NamedTuple

from ..interrupts import is_running
from . import compiling
from .compiling import is_dynamo_compiling


class Mode(Enum):
    """How casts act in a region."""

    OFF = "as plain torch"
    BY_LISTS = "as the op lists say"
    LOW = "every listed op in the low dtype"
    FLOAT32 = "every listed op in float32"


class Region(NamedTuple):
    """Where a mode holds.

    Attributes:
        mode: how casts act in it.
        owner: what tells it from others of the same mode.
        frame: of the call that it lasts as long as: once that is over, however it ended, the region is stale. None for
            one that lasts until it is left.
    """

    mode: Mode
    owner: object
    frame: types.FrameType | None


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
        compiling.switches.add(self)

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
        for region in reversed(self._regions_here()):
            self.leave(region)

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
        self._leave_stale()
        if regions := self._regions_here():
            return regions[-1].mode
        # The autograd engine's own threads run backward code of whoever called backward(); they follow the region that
        # was opened last.
        if isinstance(threading.current_thread(), threading._DummyThread):
            with self._lock:
                return self._open[-1].mode if self._open else Mode.BY_LISTS
        return Mode.BY_LISTS

    @contextlib.contextmanager
    def region(self, mode: Mode) -> Iterator[None]:
        """Let the casts of this thread act as `mode` says inside the block. Nests, and survives exceptions."""
        region = Region(mode, object(), None)
        try:
            try:
                self._add(region)
                yield
            finally:
                self.leave(region)
        finally:  # twice: an interrupt may come before the first one has begun
            self.leave(region)

    def enter(self, mode: Mode, owner: object = None, frame: types.FrameType | None = None) -> Region:
        """Open a region and return what `leave` needs to close it; for hooks, which are no `with` blocks.

        It is closed for them if the call whose frame they give ends without `leave`.
        """
        region = Region(mode, object() if owner is None else owner, frame)
        self._leave_stale()
        self._add(region)
        return region

    def leave(self, region: Region) -> None:
        """Close a region, in the thread that opened it. Generators may close theirs in any order. Harmless twice."""
        try:
            self._remove(region)
        except BaseException:  # an interrupt
            self._remove(region)
            raise

    def find_region(self, owner: object) -> Region | None:
        """Return the innermost region of an owner that is open in this thread."""
        for region in reversed(self._regions_here()):
            if region.owner is owner:
                return region
        return None

    def _regions_here(self) -> list[Region]:
        """Return the open regions of this thread, innermost last."""
        regions: list[Region] | None = getattr(self._local, "regions", None)
        if regions is None:
            regions = self._local.regions = []
        return regions

    def _leave_stale(self) -> None:
        """Close what an interrupt left open: `torch.nn.Module` calls no hooks after one."""
        regions = self._regions_here()
        while regions and (frame := regions[-1].frame) is not None and not is_running(frame):
            self.leave(regions[-1])

    def _add(self, region: Region) -> None:
        self._regions_here().append(region)
        compiling.show_region(region.mode.name)
        with self._lock:
            self._open.append(region)
            self.regions = len(self._open)

    def _remove(self, region: Region) -> None:
        regions = self._regions_here()
        if region in regions:
            regions.remove(region)
        compiling.show_region((regions[-1].mode if regions else Mode.BY_LISTS).name)
        with self._lock:
            if region in self._open:
                self._open.remove(region)
            self.regions = len(self._open)

    def enter_traced(self, mode: Mode) -> None:
        """`enter` for Dynamo, which cannot trace locks or thread-locals."""
        self._traced.append(mode)
        self.regions += 1
        compiling.enter_in_graph(mode.name)

    def enter_run(self, name: str, frame: types.FrameType) -> None:
        """`enter` in a graph of Dynamo that runs as it is, for the call of that frame."""
        if self.on:
            self.enter(_MODES[name], _IN_GRAPH, frame)

    def leave_run(self) -> None:
        """Close what `enter_run` opened."""
        if (region := self.find_region(_IN_GRAPH)) is not None:
            self.leave(region)

    def leave_traced(self) -> None:
        """Close what `enter_traced` opened."""
        compiling.leave_in_graph()
        self._traced.pop()
        self.regions -= 1


_IN_GRAPH = object()
_MODES = {mode.name: mode for mode in Mode}


def _name_getter(reference: "weakref.ref[Switch]") -> Callable[[], str]:
    """Return a function that gives the name of the mode in this thread, and does not keep the switch alive."""

    def get_name() -> str:
        switch = reference()
        return Mode.OFF.name if switch is None else switch._find_mode().name

    return get_name


def _silence_in_child() -> None:
    for switch in compiling.switches:
        switch.on = False
        switch._lock = threading.RLock()  # the parent may have held it at the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_silence_in_child)
