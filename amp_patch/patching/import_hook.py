"""Being told of imports: one hook for each module name in the process, however many sessions ask."""

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from typing import Any
from weakref import WeakSet

import wrapt


class ImportWatch:
    """Calls `tell(name)` whenever one of the watched modules has been imported, in the thread that imported it, until
    it is closed.

    wrapt keeps a hook until its module is imported. What it keeps here refers to no watch, and a watch that nobody
    holds hears nothing.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._names: set[str] = set()

    def add(self, names: Iterable[str]) -> None:
        """Watch these modules, whether they exist or not.

        For one that is imported already, `tell` is called at once; for one whose body still runs, when that has ended.
        Waits for no import, which may itself be waiting for the caller.
        """
        names = set(names) - self._names
        self._names |= names
        _watches.add(self)
        for name in sorted(names):
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if getattr(spec, "_initializing", False) and type(spec) in (ModuleSpec, _SpecUnderWay):
                spec.__class__ = _SpecUnderWay
                if getattr(spec, "_initializing", False):
                    continue  # else it has ended in between
            _hook(name)

    def close(self) -> None:
        """Hear nothing any more. Harmless twice."""
        _watches.discard(self)
        self._names.clear()

    def hear(self, name: str) -> None:
        """Pass it on if the module is watched."""
        if name in self._names:
            self._tell(name)


class _SpecUnderWay(ModuleSpec):
    """The spec of a module whose import has begun: importlib writes to it when that ends, or fails."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            _hook(self.name)


_lock = threading.Lock()
_hooked: set[str] = set()  # names whose hook wrapt has, and will call
_watches: WeakSet[ImportWatch] = WeakSet()


def _hook(name: str) -> None:
    """Have wrapt tell of the next import of a module; of one that is imported already, at once."""
    with _lock:
        if name in _hooked:
            return
        _hooked.add(name)
    try:
        wrapt.register_post_import_hook(functools.partial(_pass_on, name), name)
    except BaseException:
        _hooked.discard(name)  # an interrupt: wrapt may know nothing of it, and is asked again
        raise


def _pass_on(name: str, _: types.ModuleType) -> None:
    with _lock:
        _hooked.discard(name)
    for watch in list(_watches):
        watch.hear(name)
