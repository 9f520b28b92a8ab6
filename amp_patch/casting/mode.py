"""`Switch`: says whether patched ops cast their arguments in the calling thread, and in which mode.

Patches replace torch's functions for the whole process. But each thread can change how its own calls of them cast: in
a *region*, such as an `amp.disable_casts()` block, or a call of a module that has a rule of its own.

A patched op reads two plain attributes of its switch in each call: `on` and, if it is on, `regions`. It looks up the
regions of its own thread, which is slower, only while some thread has a region open.
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
    """How patched ops cast their arguments. The low dtype is the session's 16-bit dtype."""

    OFF = "no op casts, as in plain torch"
    BY_LISTS = "as the op lists say"
    LOW = "whitelisted and blacklisted ops in the low dtype, other ops as the op lists say"
    FLOAT32 = "whitelisted and blacklisted ops in float32, other ops as the op lists say"


_MODE_OF_NAME = {mode.name: mode for mode in Mode}


class AutocastRegions(Protocol):
    """The torch.autocast blocks to which a session limits its casts. `autocast.Autocast` implements this."""

    def is_here(self) -> bool:
        """Return whether this thread is in a block in which the session casts."""

    def pause(self) -> bool:
        """In a block in which the session casts, disable torch.autocast in this thread, and return True. Elsewhere,
        return False.
        """

    def resume(self) -> None:
        """Enable torch.autocast in this thread again."""


class Region(contextlib.ContextDecorator):
    """The part of one thread's run in which a mode applies: from `open` to `close`, or a `with` block.

    Args:
        owner: the object that opens the region for a call of a module; `Switch.close_for_module` looks for it.
        frame: the Python frame of that call. When the call is over and the region is still open, as after a Ctrl-C, the
            region is *stale*: `Switch.close_stale` closes it. None for a region that lasts until `close`.
        pauses_autocast: if the mode is FLOAT32, disable torch.autocast while the region is open, so that torch does not
            cast the arguments of ops that no list names.
        was_active: False for the region of a called module if ops do not cast their arguments where it is called.

    Attributes:
        autocast_depth: the number of torch.autocast blocks around the region; 0 in a session that casts everywhere.
        has_paused_autocast: whether the region has disabled torch.autocast. `close` enables it again.
    """

    def __init__(
        self,
        switch: "Switch",
        mode: Mode,
        *,
        owner: object = None,
        frame: types.FrameType | None = None,
        pauses_autocast: bool = True,
        was_active: bool = True,
    ) -> None:
        self.mode = mode
        self.owner = owner
        self.frame = frame
        self.pauses_autocast = pauses_autocast
        self.was_active = was_active
        self.autocast_depth = 0
        self.has_paused_autocast = False
        self._switch = switch

    def open(self) -> None:
        """Open the region in this thread. It becomes the innermost region of the thread."""
        if is_dynamo_compiling():
            compiling.warn_of_break()
        autocast = self._switch.autocast
        if autocast is not None and self.pauses_autocast and self.mode is Mode.FLOAT32:
            self.has_paused_autocast = autocast.pause()
        self._switch._push(self)

    def close(self) -> None:
        """Close the region, in the thread that opened it. A second call does nothing.

        It need not be the innermost region, because a generator may leave its `with` block at any time.
        """
        try:
            self._switch._remove(self)
        except BaseException:  # a Ctrl-C during `_remove`: complete the removal
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
    """Says whether patched ops cast their arguments, and how. It is on from `turn_on` to `turn_off`. In the child of a
    fork, it is off.

    Outside all regions, ops cast as the op lists say. Inside a region, they cast in the mode of the innermost region of
    the calling thread.

    Args:
        autocast: ops cast only in these torch.autocast blocks. None: they cast everywhere.

    Attributes:
        on: whether any op may cast.
        regions: the number of open regions of all threads. With `autocast` it is 1 more, so never 0. While it is 0 and
            the switch is on, ops cast as the op lists say in every thread, and need not call `mode_here`.
    """

    __slots__ = ("__weakref__", "_get_mode_name", "_local", "_lock", "_open", "autocast", "on", "regions")

    def __init__(self, autocast: AutocastRegions | None = None) -> None:
        self.autocast = autocast
        self.on = False
        self.regions = 0 if autocast is None else 1
        self._open: list[Region] = []  # the open regions of all threads, the last opened one at the end
        self._local = _ThreadRegions()
        self._lock = threading.RLock()
        self._get_mode_name = compiling.assume_constant(_make_mode_name_getter(weakref.ref(self)))
        _switches[:] = [*(reference for reference in _switches if reference() is not None), weakref.ref(self)]

    def __deepcopy__(self, memo: Any) -> "Switch":
        return self  # a copied model belongs to the same session

    def __reduce__(self) -> tuple[type["Switch"], tuple[()]]:
        return Switch, ()  # a loaded model belongs to no session: its switch is off

    def turn_on(self) -> None:
        """Let ops cast from now on."""
        self.on = True

    def turn_off(self) -> None:
        """Let no op cast from now on, and close the regions of this thread.

        Closing a region here does not enable torch.autocast again, because the torch.autocast block in which the region
        was opened may be over.
        """
        self.on = False
        for region in reversed(self._local.regions):
            region.has_paused_autocast = False
            region.close()

    # ---- questions ---------------------------------------------------------------------------------------------------

    def has_regions(self) -> bool:
        """Return whether some thread has a region open."""
        return bool(self._open)

    def is_on_here(self) -> bool:
        """Return whether ops cast their arguments in this thread now."""
        return self.mode_here() is not Mode.OFF

    def mode_here(self) -> Mode:
        """Return how ops cast in this thread now."""
        if not self.on:
            return Mode.OFF
        if not self.regions:
            return Mode.BY_LISTS
        if is_dynamo_compiling():  # Dynamo cannot trace thread-locals: it calls `_get_mode_name` while it traces
            return _MODE_OF_NAME[self._get_mode_name()]
        if not self._open:
            return self._mode_outside()
        return self._find_mode()

    def _mode_outside(self) -> Mode:
        """Return how ops cast in this thread outside all regions."""
        return Mode.BY_LISTS if self.autocast is None or self.autocast.is_here() else Mode.OFF

    def _find_mode(self) -> Mode:
        """Return how ops cast in this thread while the switch is on, inside or outside of regions."""
        innermost = self._find_innermost()
        if innermost is not None:
            return innermost.mode if self._is_in_force(innermost) else Mode.OFF
        # A thread of the autograd engine (a dummy thread, because Python did not start it) has no regions of its own.
        # The regions of the thread that called backward() should apply, but torch does not tell which thread that was.
        # So the region that was opened last in any thread applies.
        if isinstance(threading.current_thread(), threading._DummyThread):
            with self._lock:
                if self._open:
                    return self._open[-1].mode
        return self._mode_outside()

    def _find_innermost(self) -> Region | None:
        """Return the innermost region of this thread that is not stale, or None."""
        regions = self._local.regions
        if regions and regions[-1].frame is not None:
            self.close_stale()
        return regions[-1] if regions else None

    def _is_in_force(self, region: Region) -> bool:
        """Return whether the mode of a region applies here.

        With `autocast`, a region also applies only where torch.autocast is on, with the session's dtype, or where the
        region was opened. So it does not apply in a block inside of it that has `enabled=False` or another dtype.
        """
        if self.autocast is None or self.autocast.is_here():
            return True
        # Autocast is off, or has another dtype. The region itself may have paused it. So its mode applies in the block
        # in which it was opened.
        return region.was_active and region.autocast_depth == get_autocast_depth()

    def region_here(self) -> Mode | None:
        """Return the mode of the innermost region of this thread, or None outside of all regions."""
        innermost = self._find_innermost()
        return None if innermost is None else innermost.mode

    def is_in(self, mode: Mode) -> bool:
        """Return whether the innermost region of this thread has this mode."""
        innermost = self._find_innermost()
        return innermost is not None and innermost.mode is mode

    def is_autocast_here(self) -> bool:
        """Return whether this thread is in one of the blocks of `autocast`, even if a region has paused it. Without
        `autocast`, return False.
        """
        if self.autocast is None or self.autocast.is_here():
            return self.autocast is not None
        depth = get_autocast_depth()
        return any(region.has_paused_autocast and region.autocast_depth == depth for region in self._local.regions)

    # ---- regions -----------------------------------------------------------------------------------------------------

    def region(self, mode: Mode, *, pauses_autocast: bool = True) -> Region:
        """Return a region of this mode that is not open yet. See `Region` for the arguments."""
        return Region(self, mode, pauses_autocast=pauses_autocast)

    @contextlib.contextmanager
    def outside_regions(self) -> Iterator[None]:
        """Context manager: while the block runs, this thread behaves as if its regions were closed.

        But if a region has paused torch.autocast, autocast stays paused.
        """
        regions = self._local.regions
        self._local.regions = []
        with self._lock:
            self._open = [region for region in self._open if region not in regions]
            self._count_regions()
        try:
            yield
        finally:
            self._local.regions = regions
            with self._lock:
                self._open += regions
                self._count_regions()

    def open_for_module(self, mode: Mode, owner: object, frame: types.FrameType | None = None) -> bool:
        """Open a region for the forward of a module: in the given mode, or in OFF if the region around it is OFF.

        Opens none while the switch is off, or if this call of the module has its region already. Returns whether the
        caller must cast the inputs of the module: only if ops are cast here, and the region is new and changes the
        mode.

        Args:
            owner: the object that will call `close_for_module`.
            frame: the frame of the module's call. By default the caller of the caller: torch's `Module._call_impl`, if
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
                    # A session that opens while the module is called has opened the region before the pre-hook runs.
                    return False
            is_change = outer is not mode
            Region(self, mode, owner=owner, frame=frame, pauses_autocast=is_change, was_active=is_active).open()
            return is_active and is_change

    def close_for_module(self, owner: object, frame: types.FrameType | None = None) -> None:
        """Close the innermost region that `owner` has opened in this thread, if there is one. With `frame`, close it
        only if it belongs to the call with that frame.
        """
        with self._lock:
            for region in reversed(self._local.regions):
                if region.owner is owner:
                    if frame is None or region.frame is frame:
                        region.close()
                    return

    def close_stale(self) -> None:
        """Close the innermost regions whose calls are over. A Ctrl-C leaves them open, because `torch.nn.Module` then
        calls no forward hook, which would close them.

        If a stale region has paused torch.autocast, enable it again only in the block in which the region was opened.
        If the number of open blocks has changed, that block is over, and has restored torch.autocast itself. A session
        that casts in torch.autocast blocks calls this whenever a block begins, so that a new block is not taken for the
        old one.
        """
        regions = self._local.regions
        while regions and (frame := regions[-1].frame) is not None and not is_running(frame):
            if regions[-1].has_paused_autocast and get_autocast_depth() != regions[-1].autocast_depth:
                regions[-1].has_paused_autocast = False
            regions[-1].close()

    def _push(self, region: Region) -> None:
        """Make a region the innermost region of this thread. Only `Region.open` calls this."""
        if self.autocast is not None:
            region.autocast_depth = get_autocast_depth()
        self._local.regions.append(region)
        with self._lock:  # Dynamo cannot trace locks, so its graph ends before the next lines
            self._open.append(region)
            self._count_regions()
        compiling.show_region(region.mode._name_)

    def _remove(self, region: Region) -> None:
        """Remove a region from this thread, if it is there. Only `Region.close` calls this."""
        regions = self._local.regions
        if region in regions:
            regions.remove(region)
            if region.has_paused_autocast and self.autocast is not None:
                self.autocast.resume()
        innermost = Mode.BY_LISTS
        if regions:
            innermost = regions[-1].mode
        compiling.show_region(innermost._name_)
        with self._lock:
            if region in self._open:
                self._open.remove(region)
            self._count_regions()

    def _count_regions(self) -> None:
        """Set `regions`. The caller holds the lock."""
        self.regions = len(self._open) + (self.autocast is not None)


_switches: "list[weakref.ref[Switch]]" = []
"""The switches of this process. Not a WeakSet: that runs Python code when a switch is freed, and a Ctrl-C during this
code would be lost."""


def _make_mode_name_getter(reference: "weakref.ref[Switch]") -> Callable[[], str]:
    """Return a function that returns the name of the mode in this thread, such as "LOW". It does not keep the switch
    alive, because Dynamo's compiled code may hold the function for long.
    """

    def get_mode_name() -> str:
        switch = reference()
        if switch is None:
            return Mode.OFF.name
        return switch._find_mode().name

    return get_mode_name


def _turn_off_in_child() -> None:
    """Turn off all switches in a forked child, because a session does not continue there."""
    for reference in _switches:
        switch = reference()
        if switch is not None:
            switch.on = False
            switch._lock = threading.RLock()  # the parent may have held it at the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turn_off_in_child)
