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
from typing import Any, Protocol

from ..interrupts import is_running
from ..torch_private import get_autocast_depth
from . import compiling
from .compiling import is_dynamo_compiling


class Mode(Enum):
    """How casts act in a region."""

    OFF = "as plain torch"
    BY_LISTS = "as the op lists say"
    LOW = "every listed op in the low dtype"
    FLOAT32 = "every listed op in float32"


_MODES = {mode.name: mode for mode in Mode}


class Regions(Protocol):
    """The regions of `torch.autocast` that a switch follows; see `Autocast`."""

    def is_here(self) -> bool:
        """Tell whether this thread is in one."""

    def pause(self) -> bool:
        """Disable autocast in this thread, and tell whether there is something to `resume`."""

    def resume(self) -> None:
        """Enable autocast again."""


class Region(contextlib.ContextDecorator):
    """Where a mode holds in one thread; a `with` block opens and closes it.

    Attributes:
        mode: how casts act in it.
        owner: by which `leave_module` finds it.
        frame: of the call that it lasts as long as: once that is over, however it ended, the region is stale. None for
            one that lasts until it is left.
        acts: whether casts act where it is opened. Blocks of torch.autocast inside of it decide for themselves.
        depth: the number of such blocks around it.
        has_paused: autocast was in force and is disabled for its length.
    """

    def __init__(
        self,
        switch: "Switch",
        mode: Mode,
        owner: object = None,
        frame: types.FrameType | None = None,
        *,
        acts: bool = True,
    ) -> None:
        self.mode = mode
        self.owner = owner
        self.frame = frame
        self.acts = acts
        self.depth = 0
        self.has_paused = False
        self._switch = switch

    def __enter__(self) -> None:
        if is_dynamo_compiling():
            compiling.tell_of_break()
        self._switch.pause(self)
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

    Args:
        autocast: where casts act while no region is open; None: everywhere.
    """

    __slots__ = ("__weakref__", "_get_name", "_local", "_lock", "_open", "autocast", "on", "regions")

    def __init__(self, autocast: Regions | None = None) -> None:
        self.autocast = autocast
        self.on = False
        self.regions = 0 if autocast is None else 1  # open regions of all threads, and those of autocast as one
        self._open: list[Region] = []  # the same, in the order in which they were opened
        self._local = _OfThread()
        self._lock = threading.RLock()
        self._get_name = compiling.assume_constant(_name_getter(weakref.ref(self)))
        _switches[:] = [*(one for one in _switches if one() is not None), weakref.ref(self)]

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
            region.has_paused = False
            self.leave(region)

    def has_regions(self) -> bool:
        """Tell whether some thread has a region open."""
        return bool(self._open)

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
        if not self._open:
            return self._mode_outside()
        return self._find_mode()

    def _mode_outside(self) -> Mode:
        """Return how casts act in this thread outside of all regions."""
        return Mode.BY_LISTS if self.autocast is None or self.autocast.is_here() else Mode.OFF

    def _find_mode(self) -> Mode:
        regions = self._local.regions
        if regions and regions[-1].frame is not None:
            self.leave_stale()
        if regions:
            return regions[-1].mode if self._is_in_force(regions[-1]) else Mode.OFF
        # The autograd engine's own threads run backward code of whoever called backward(); they follow the region that
        # was opened last.
        if isinstance(threading.current_thread(), threading._DummyThread):
            with self._lock:
                if self._open:
                    return self._open[-1].mode
        return self._mode_outside()

    def _is_in_force(self, region: Region) -> bool:
        """Tell whether the innermost region acts. It does not in a block of `autocast(enabled=False)` inside of it."""
        if self.autocast is None or self.autocast.is_here():
            return True
        return region.acts and region.depth == get_autocast_depth()

    def region(self, mode: Mode) -> Region:
        """Return a block in which the casts of this thread act as `mode` says. Nests, and survives exceptions."""
        return Region(self, mode)

    def pause(self, region: Region) -> None:
        """In a region of float32, keep autocast from casting what is on no list of ours."""
        region.has_paused = region.mode is Mode.FLOAT32 and self.autocast is not None and self.autocast.pause()

    def enter(self, mode: Mode, owner: object = None) -> Region:
        """Open a region and return what `leave` needs to close it; for what is no `with` block. Leaves autocast be."""
        region = Region(self, mode, owner)
        self.leave_stale()
        self.add(region)
        return region

    def enter_module(self, mode: Mode, owner: object, frame: types.FrameType | None = None) -> bool:
        """Open a region for the forward of a module, and tell whether its inputs are to be cast: they are where casts
        act, and act otherwise than around it. Called by a forward pre-hook; `leave_module` closes it. `frame`: what
        calls the forward, if that is not what calls the hook.
        """
        if is_dynamo_compiling():
            compiling.tell_of_break()
        with self._lock:  # no more of this does Dynamo trace: it leaves the call to Python
            is_on = self.is_on_here()
            if self.on:
                self.leave_stale()
                regions = self._local.regions
                around = regions[-1].mode if regions else None
                if around is Mode.OFF:
                    mode = Mode.OFF
                # the frame is that of the whole forward, however it ends, which calls the hook, which calls this
                frame = frame or sys._getframe(2)
                for region in regions:
                    if region.owner is owner and region.frame is frame:
                        return False  # opened before torch came to this hook
                region = Region(self, mode, owner, frame, acts=is_on)
                if around is mode:
                    is_on = False
                else:
                    self.pause(region)
                self.add(region)
            return is_on

    def is_autocast_here(self) -> bool:
        """Tell whether torch.autocast is in force in this thread, or held back by a region of float32."""
        if self.autocast is None or self.autocast.is_here():
            return self.autocast is not None
        depth = get_autocast_depth()
        return any(region.has_paused and region.depth == depth for region in self._local.regions)

    def is_in(self, mode: Mode) -> bool:
        """Tell whether the innermost region of this thread has a mode."""
        regions = self._local.regions
        if regions and regions[-1].frame is not None:
            self.leave_stale()
        return bool(regions) and regions[-1].mode is mode

    def leave_module(self, owner: object, frame: types.FrameType | None = None) -> None:
        """Close the innermost region of an owner that is open in this thread, if there is one, and if it lasts as long
        as the call of `frame`, where that is given.
        """
        with self._lock:
            for region in reversed(self._local.regions):
                if region.owner is owner:
                    if frame is not None and region.frame is not frame:
                        return
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
            if region.has_paused and self.autocast is not None:
                self.autocast.resume()
        innermost = Mode.BY_LISTS
        if regions:
            innermost = regions[-1].mode
        compiling.show_region(innermost._name_)
        with self._lock:
            if region in self._open:
                self._open.remove(region)
            self._count()

    def leave_stale(self) -> None:
        """Close what an interrupt left open: `torch.nn.Module` calls no hooks after one.

        Called where a block of torch.autocast begins, too. So as many blocks as there were around a region are the same
        blocks, and autocast is enabled in them again; else they are over, and have put their own state back.
        """
        regions = self._local.regions
        while regions and (frame := regions[-1].frame) is not None and not is_running(frame):
            if regions[-1].has_paused and get_autocast_depth() != regions[-1].depth:
                regions[-1].has_paused = False
            self.leave(regions[-1])

    def add(self, region: Region) -> None:
        """Open a region in this thread, inside of those that are open there."""
        if self.autocast is not None:
            region.depth = get_autocast_depth()
        self._local.regions.append(region)
        with self._lock:  # no more of this does Dynamo trace, which fails in autograd functions at what comes after
            self._open.append(region)
            self._count()
        compiling.show_region(region.mode._name_)

    def _count(self) -> None:
        self.regions = len(self._open) + (self.autocast is not None)


_switches: "list[weakref.ref[Switch]]" = []
"""Those of this process. A WeakSet would run code of Python's as each is freed: Ctrl-C in there is lost."""


def _name_getter(reference: "weakref.ref[Switch]") -> Callable[[], str]:
    """Return a function that gives the name of the mode in this thread, and does not keep the switch alive."""

    def get_name() -> str:
        switch = reference()
        if switch is None:
            return Mode.OFF.name
        return switch._find_mode().name

    return get_name


def _silence_in_child() -> None:
    for reference in _switches:
        switch = reference()
        if switch is not None:
            switch.on = False
            switch._lock = threading.RLock()  # the parent may have held it at the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_silence_in_child)
