"""`Switch`: whether the casts of a session act, in the process and in the thread that asks.

Patches are process-wide, a region without casts belongs to the thread that opened it. The hot path reads two plain attributes; only while some
thread has a region open does anybody look at thread-local state.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet


class Switch:
    """On after `turn_on`, until `turn_off` or a fork; `region(False)` turns the casts of one thread off for a while."""

    __slots__ = ("__weakref__", "_local", "_lock", "_open", "on", "regions")

    def __init__(self) -> None:
        self.on = False
        self.regions = 0  # open regions of all threads
        self._open: list[tuple[bool, object]] = []  # the same, in the order in which they were opened
        self._local = threading.local()
        self._lock = threading.Lock()
        _switches.add(self)

    def turn_on(self) -> None:
        """Let the casts act."""
        self.on = True

    def turn_off(self) -> None:
        """Make every wrapper of this session call straight through, for good: also those that cannot be taken out."""
        self.on = False

    def is_on_here(self) -> bool:
        """Tell whether casts act in this thread now."""
        if not self.on:
            return False
        values: list[bool] = getattr(self._local, "values", [])
        if values:
            return values[-1]
        # The autograd engine's own threads run backward code of whoever called backward(); they follow the region that was opened last.
        if isinstance(threading.current_thread(), threading._DummyThread):
            with self._lock:
                return self._open[-1][0] if self._open else True
        return True

    @contextmanager
    def region(self, on: bool) -> Iterator[None]:
        """Turn the casts of this thread off (or on again) inside the block. Nests, and survives exceptions."""
        values: list[bool] | None = getattr(self._local, "values", None)
        if values is None:
            values = self._local.values = []
        entry = (on, object())
        values.append(on)
        with self._lock:
            self._open.append(entry)
            self.regions = len(self._open)
        try:
            yield
        finally:
            values.pop()
            with self._lock:
                self._open.remove(entry)
                self.regions = len(self._open)


_switches: WeakSet[Switch] = WeakSet()


def _silence_in_child() -> None:
    for switch in _switches:
        switch.on = False
        switch._lock = threading.Lock()  # the parent may have held it at the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_silence_in_child)
