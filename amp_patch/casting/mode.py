"""`Switch`: says whether the casts of a session are active in the calling thread, and in which mode.

Patches are process-wide. A region belongs to the thread that opened it. Each patched op reads two plain attributes,
`on` and `regions`. It reads thread-local state only while some thread has a region open.
"""

import contextlib
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Protocol

from ..interrupts import is_running
from ..torch_private import get_autocast_depth
from . import compiling
from .compiling import is_dynamo_compiling


class Mode(Enum):
    """How ops cast their arguments in a region."""

    OFF = "as plain torch"
    BY_LISTS = "as the op lists say"
    LOW = "whitelisted and blacklisted ops in the low dtype, other ops as the op lists say"
    FLOAT32 = "whitelisted and blacklisted ops in float32, other ops as the op lists say"


_MODES = {mode.name: mode for mode in Mode}


class AutocastRegions(Protocol):
    """The regions of `torch.autocast` in which a switch is active. `Autocast` implements this."""

    def is_here(self) -> bool:
        """Return whether this thread is in such a region."""

    def pause(self) -> bool:
        """Disable autocast in this thread, if this is such a region. Return whether it is."""

    def resume(self) -> None:
        """Enable autocast again."""


class Region(contextlib.ContextDecorator):
    """The part of one thread's run in which a mode applies: from `open` to `close`, or a `with` block.

    Args:
        owner: identifies the region for `Switch.close_for_module`.
        frame: the frame of a call. Once that call is over, also by an exception, the region is *stale*, and must be
            closed. None for a region that lasts until `close`.
        pauses: if the mode is FLOAT32, disable autocast while the region is open, so that torch casts no unlisted op.
        is_active: whether casts are active where the region opens. Blocks of torch.autocast inside the region decide
            for themselves.

    Attributes:
        depth: the number of blocks of torch.autocast around the region.
        has_paused: whether the region has disabled autocast, which was enabled before.
    """

    def __init__(
        self,
        switch: "Switch",
        mode: Mode,
        *,
        owner: object = None,
        frame: types.FrameType | None = None,
        pauses: bool = True,
        is_active: bool = True,
    ) -> None:
        self.mode = mode
        self.owner = owner
        self.frame = frame
        self.pauses = pauses
        self.is_active = is_active
        self.depth = 0
        self.has_paused = False
        self._switch = switch

    def open(self) -> None:
        """Open the region in this thread, inside the regions that are open there."""
        if is_dynamo_compiling():
            compiling.warn_of_break()
        autocast = self._switch.autocast
        if autocast is not None and self.pauses and self.mode is Mode.FLOAT32:
            self.has_paused = autocast.pause()
        self._switch._push(self)

    def close(self) -> None:
        """Close the region, in the thread that opened it. Harmless twice.

        It need not be the innermost region, because a generator may leave its `with` block at any time.
        """
        try:
            self._switch._remove(self)
        except BaseException:  # an interrupt, after which the removal has to be completed
            self._switch._remove(self)
            raise

    __enter__ = open

    def __exit__(self, *error: object) -> None:
        self.close()


class _ThreadRegions(threading.local):
    """The open regions of each thread, innermost last."""

    def __init__(self) -> None:
        self.regions: list[Region] = []


class Switch:
    """Says whether the casts of a session are active, and how. It is on from `turn_on` to `turn_off`. In the child of a
    fork, it is off.

    Every region opens with `Region.open` and closes with `Region.close`. `open_for_module` and `close_for_module` find
    the region for the call of a module. `close_stale` closes regions that an interrupt left open.

    Args:
        autocast: outside of our own regions, casts are active only in these regions. None: they are active everywhere.

    Attributes:
        on: whether casts may be active at all.
        regions: the number of open regions of all threads, plus 1 with `autocast`. At 0, all threads cast by the lists.
    """

    __slots__ = ("__weakref__", "_get_name", "_local", "_lock", "_open", "autocast", "on", "regions")

    def __init__(self, autocast: AutocastRegions | None = None) -> None:
        self.autocast = autocast
        self.on = False
        self.regions = 0 if autocast is None else 1
        self._open: list[Region] = []  # of all threads, in the order in which they were opened
        self._local = _ThreadRegions()
        self._lock = threading.RLock()
        self._get_name = compiling.assume_constant(_name_getter(weakref.ref(self)))
        _switches[:] = [*(reference for reference in _switches if reference() is not None), weakref.ref(self)]

    def __deepcopy__(self, memo: Any) -> "Switch":
        return self  # a copied model belongs to the same session

    def __reduce__(self) -> tuple[type["Switch"], tuple[()]]:
        return Switch, ()  # a loaded model belongs to no session: its switch is off

    def turn_on(self) -> None:
        """Make casts active."""
        self.on = True

    def turn_off(self) -> None:
        """Make every wrapper of this session call its original from now on, also wrappers that cannot be removed.

        Closes the regions of this thread. Does not enable autocast again, because the blocks of torch.autocast around
        the regions may be over.
        """
        self.on = False
        for region in reversed(self._local.regions):
            region.has_paused = False
            region.close()

    # ---- questions ---------------------------------------------------------------------------------------------------

    def has_regions(self) -> bool:
        """Return whether some thread has a region open."""
        return bool(self._open)

    def is_on_here(self) -> bool:
        """Return whether casts are active in this thread now."""
        return self.mode_here() is not Mode.OFF

    def mode_here(self) -> Mode:
        """Return how casts act in this thread now."""
        if not self.on:
            return Mode.OFF
        if not self.regions:
            return Mode.BY_LISTS
        if is_dynamo_compiling():  # Dynamo cannot trace thread-locals
            return _MODES[self._get_name()]
        if not self._open:
            return self._mode_outside()
        return self._find_mode()

    def _mode_outside(self) -> Mode:
        """Return how casts act in this thread outside all regions."""
        return Mode.BY_LISTS if self.autocast is None or self.autocast.is_here() else Mode.OFF

    def _find_mode(self) -> Mode:
        """Return how casts act in this thread, by the open regions of all threads."""
        innermost = self._find_innermost()
        if innermost is not None:
            return innermost.mode if self._is_in_force(innermost) else Mode.OFF
        # A thread of the autograd engine runs backward code for the thread that called backward(), which is not known.
        # Use the region that was opened last.
        if isinstance(threading.current_thread(), threading._DummyThread):
            with self._lock:
                if self._open:
                    return self._open[-1].mode
        return self._mode_outside()

    def _find_innermost(self) -> Region | None:
        """Return the innermost region of this thread that is not stale."""
        regions = self._local.regions
        if regions and regions[-1].frame is not None:
            self.close_stale()
        return regions[-1] if regions else None

    def _is_in_force(self, region: Region) -> bool:
        """Return whether a region applies here. In a block `autocast(enabled=False)` inside the region, it does not."""
        if self.autocast is None or self.autocast.is_here():
            return True
        # autocast is disabled here: by the region itself, which has paused it, or by a block inside the region
        return region.is_active and region.depth == get_autocast_depth()

    def region_here(self) -> Mode | None:
        """Return the mode of the innermost region of this thread, or None outside of all regions."""
        innermost = self._find_innermost()
        return None if innermost is None else innermost.mode

    def is_in(self, mode: Mode) -> bool:
        """Return whether the innermost region of this thread has this mode."""
        innermost = self._find_innermost()
        return innermost is not None and innermost.mode is mode

    def is_autocast_here(self) -> bool:
        """Return whether torch.autocast is enabled in this thread, or paused by a region."""
        if self.autocast is None or self.autocast.is_here():
            return self.autocast is not None
        depth = get_autocast_depth()
        return any(region.has_paused and region.depth == depth for region in self._local.regions)

    # ---- regions -----------------------------------------------------------------------------------------------------

    def region(self, mode: Mode, *, pauses: bool = True) -> Region:
        """Return a region, not yet open, in which the casts of this thread act as `mode` says. See `Region`."""
        return Region(self, mode, pauses=pauses)

    @contextlib.contextmanager
    def outside_regions(self) -> Iterator[None]:
        """Context manager: inside the block, no region is open in this thread but those that the block opens."""
        regions = self._local.regions
        self._local.regions = []
        self._hide(regions)
        try:
            yield
        finally:
            self._local.regions = regions
            with self._lock:
                self._open += regions
                self.regions = len(self._open) + (self.autocast is not None)

    def _hide(self, regions: list[Region]) -> None:
        with self._lock:
            self._open = [region for region in self._open if region not in regions]
            self.regions = len(self._open) + (self.autocast is not None)

    def open_for_module(self, mode: Mode, owner: object, frame: types.FrameType | None = None) -> bool:
        """Open a region for the forward of a module: in the given mode, or without casts if the outer region has none.

        Return whether to cast the inputs: casts are active, and the region changes the mode. Return False if the region
        for this call is open already.

        Args:
            owner: identifies the region for `close_for_module`.
            frame: the frame of the forward's call. By default the caller's caller: torch's frame of the module call, if
                a forward pre-hook calls this.
        """
        if is_dynamo_compiling():
            compiling.warn_of_break()
        with self._lock:  # Dynamo stops tracing here, and leaves the rest of this call to Python
            is_active = self.is_on_here()
            if not self.on:
                return False
            self.close_stale()
            regions = self._local.regions
            outer = regions[-1].mode if regions else None
            if outer is Mode.OFF:
                mode = Mode.OFF
            if frame is None:
                frame = sys._getframe(2)
            for region in regions:
                if region.owner is owner and region.frame is frame:
                    return False  # `RegionHooks.catch_up` or `join` has opened it before torch called the pre-hook
            is_change = outer is not mode
            Region(self, mode, owner=owner, frame=frame, pauses=is_change, is_active=is_active).open()
            return is_active and is_change

    def close_for_module(self, owner: object, frame: types.FrameType | None = None) -> None:
        """Close the innermost region of an owner in this thread, if there is one. With `frame`, close it only if it is
        the region of that call.
        """
        with self._lock:
            for region in reversed(self._local.regions):
                if region.owner is owner:
                    if frame is None or region.frame is frame:
                        region.close()
                    return

    def close_stale(self) -> None:
        """Close regions that an interrupt left open: after an interrupt, `torch.nn.Module` calls no forward hooks.

        A takeover calls this whenever a block of torch.autocast begins. If as many blocks are open now as when the
        region was opened, they are the same blocks, and closing the region enables autocast in them again. If not,
        these blocks are over, and have restored autocast themselves.
        """
        regions = self._local.regions
        while regions and (frame := regions[-1].frame) is not None and not is_running(frame):
            if regions[-1].has_paused and get_autocast_depth() != regions[-1].depth:
                regions[-1].has_paused = False
            regions[-1].close()

    def _push(self, region: Region) -> None:
        """Make a region the innermost region of this thread. Only `Region.open` calls this."""
        if self.autocast is not None:
            region.depth = get_autocast_depth()
        self._local.regions.append(region)
        with self._lock:  # Dynamo stops tracing here: in autograd functions, it would fail at the next lines
            self._open.append(region)
            self.regions = len(self._open) + (self.autocast is not None)
        compiling.show_region(region.mode._name_)

    def _remove(self, region: Region) -> None:
        """Remove a region from this thread, if it is there. Only `Region.close` calls this."""
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
            self.regions = len(self._open) + (self.autocast is not None)


_switches: "list[weakref.ref[Switch]]" = []
"""The switches of this process. Not a WeakSet: that runs Python code when a switch is freed, and a Ctrl-C during this
code would be lost."""


def _name_getter(reference: "weakref.ref[Switch]") -> Callable[[], str]:
    """Return a function that returns the name of the mode in this thread, and that does not keep the switch alive."""

    def get_name() -> str:
        switch = reference()
        if switch is None:
            return Mode.OFF.name
        return switch._find_mode().name

    return get_name


def _turn_off_in_child() -> None:
    """Turn off all switches in a forked child. A session ends at a fork."""
    for reference in _switches:
        switch = reference()
        if switch is not None:
            switch.on = False
            switch._lock = threading.RLock()  # the parent may have held it at the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turn_off_in_child)
