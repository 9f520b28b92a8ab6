"""`Switch`: whether the casts of a session act, in the process and in the thread that asks, and which way.

Patches are process-wide; a region in which they act otherwise belongs to the thread that opened it. The hot path reads
two plain attributes; only while some thread has a region open does anybody look at thread-local state.
"""

import contextlib
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

from ..interrupts import is_running
from . import compiling
from .compiling import is_dynamo_compiling


class Mode(Enum):
    """How casts act in a region."""

    OFF = "as plain torch"
    BY_LISTS = "as the op lists say"
    LOW = "every listed op in the low dtype"
    FLOAT32 = "every listed op in float32"


_MODES = {mode.name: mode for mode in Mode}


class Region(contextlib.ContextDecorator):
    """Where a mode holds in one thread; a `with` block opens and closes it.

    Attributes:
        mode: how casts act in it.
        owner: by which `leave_module` finds it.
        frame: of the call that it lasts as long as: once that is over, however it ended, the region is stale. None for
            one that lasts until it is left.
    """

    def __init__(
        self, switch: "Switch", mode: Mode, owner: object = None, frame: types.FrameType | None = None
    ) -> None:
        self.mode = mode
        self.owner = owner
        self.frame = frame
        self._switch = switch

    def __enter__(self) -> None:
        if is_dynamo_compiling():
            compiling.tell_of_break()
        self._switch.add(self)

    def __exit__(self, *error: object) -> None:
        self._switch.leave(self)


class _OfThread(threading.local):
    """What each thread has of its own: its open regions, innermost last."""

    def __init__(self) -> None:
        self.regions: list[Region] = []


class Switch:
    """On after `turn_on`, until `turn_off` or a fork; `region(Mode.OFF)` turns the casts of one thread off for
    a while.
    """

    __slots__ = ("__weakref__", "_get_name", "_local", "_lock", "_open", "on", "regions")

    def __init__(self) -> None:
        self.on = False
        self.regions = 0  # open regions of all threads
        self._open: list[Region] = []  # the same, in the order in which they were opened
        self._local = _OfThread()
        self._lock = threading.RLock()
        self._get_name = compiling.assume_constant(_name_getter(weakref.ref(self)))
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
        for region in reversed(self._local.regions):
            self.leave(region)

    def is_on_here(self) -> bool:
        """Tell whether casts act in this thread now."""
        return self.mode_here() is not Mode.OFF

    def mode_here(self) -> Mode:
        """Return how casts act in this thread now."""
        if not self.on:
            return Mode.OFF
        if not self.regions:
            return Mode.BY_LISTS
        if is_dynamo_compiling():  # which can trace no thread-locals
            return _MODES[self._get_name()]
        return self._find_mode()

    def _find_mode(self) -> Mode:
        regions = self._local.regions
        if regions and regions[-1].frame is not None:
            self._leave_stale()
        if regions:
            return regions[-1].mode
        # The autograd engine's own threads run backward code of whoever called backward(); they follow the region that
        # was opened last.
        if isinstance(threading.current_thread(), threading._DummyThread):
            with self._lock:
                if self._open:
                    return self._open[-1].mode
        return Mode.BY_LISTS

    def region(self, mode: Mode) -> Region:
        """Return a block in which the casts of this thread act as `mode` says. Nests, and survives exceptions."""
        return Region(self, mode)

    def enter(self, mode: Mode, owner: object = None, frame: types.FrameType | None = None) -> Region:
        """Open a region and return what `leave` needs to close it; for hooks, which are no `with` blocks.

        It is closed for them if the call whose frame they give ends without `leave`.
        """
        region = Region(self, mode, owner, frame)
        self._leave_stale()
        self.add(region)
        return region

    def enter_module(self, mode: Mode, owner: object) -> bool:
        """Open a region for the forward of a module, and tell whether casts act in it. Called by a forward pre-hook;
        `leave_module` closes it.
        """
        if is_dynamo_compiling():
            compiling.tell_of_break()
        with self._lock:  # no more of this does Dynamo trace: it leaves the call to Python
            is_on = self.is_on_here()
            if self.on:
                # the frame is that of the whole forward, however it ends, which calls the hook, which calls this
                self.enter(mode if is_on else Mode.OFF, owner, sys._getframe(2))
            return is_on

    def leave_module(self, owner: object) -> None:
        """Close the innermost region of an owner that is open in this thread, if there is one."""
        with self._lock:
            for region in reversed(self._local.regions):
                if region.owner is owner:
                    self.leave(region)
                    return

    def leave(self, region: Region) -> None:
        """Close a region, in the thread that opened it. Generators may close theirs in any order. Harmless twice."""
        try:
            self._remove(region)
        except BaseException:  # an interrupt
            self._remove(region)
            raise

    def _remove(self, region: Region) -> None:
        regions = self._local.regions
        if region in regions:
            regions.remove(region)
        innermost = Mode.BY_LISTS
        if regions:
            innermost = regions[-1].mode
        compiling.show_region(innermost._name_)
        with self._lock:
            if region in self._open:
                self._open.remove(region)
            self.regions = len(self._open)

    def _leave_stale(self) -> None:
        """Close what an interrupt left open: `torch.nn.Module` calls no hooks after one."""
        regions = self._local.regions
        while regions and (frame := regions[-1].frame) is not None and not is_running(frame):
            self.leave(regions[-1])

    def add(self, region: Region) -> None:
        """Open a region in this thread, inside of those that are open there."""
        self._local.regions.append(region)
        compiling.show_region(region.mode._name_)
        with self._lock:
            self._open.append(region)
            self.regions = len(self._open)


_switches: "weakref.WeakSet[Switch]" = weakref.WeakSet()
"""Those of this process."""


def _name_getter(reference: "weakref.ref[Switch]") -> Callable[[], str]:
    """Return a function that gives the name of the mode in this thread, and does not keep the switch alive."""

    def get_name() -> str:
        switch = reference()
        if switch is None:
            return Mode.OFF.name
        return switch._find_mode().name

    return get_name


def _silence_in_child() -> None:
    for switch in _switches:
        switch.on = False
        switch._lock = threading.RLock()  # the parent may have held it at the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_silence_in_child)
