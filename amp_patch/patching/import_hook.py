"""Being told of imports: one hook for each module name in the process, however many sessions ask."""

import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterable
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

        For one that is imported already, `tell` is called at once.
        """
        names = set(names) - self._names
        self._names |= names
        _watches.add(self)
        for name in sorted(names):
            if _is_being_imported(name):
                importlib.import_module(name)  # waits for the thread that imports it: a hook would come too early
            try:
                with _lock:
                    is_hooked = name in _hooked
                    _hooked.add(name)
                if not is_hooked:
                    wrapt.register_post_import_hook(functools.partial(_pass_on, name), name)
            except BaseException:
                _hooked.discard(name)  # an interrupt: wrapt may know nothing of it, and is asked again
                raise

    def close(self) -> None:
        """Hear nothing any more. Harmless twice."""
        _watches.discard(self)
        self._names.clear()

    def hear(self, name: str) -> None:
        """Pass it on if the module is watched."""
        if name in self._names:
            self._tell(name)


def _is_being_imported(name: str) -> bool:
    """Tell whether a module is there and its body is still running, maybe in another thread."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


_lock = threading.Lock()
_hooked: set[str] = set()  # names whose hook wrapt has, and will call
_watches: WeakSet[ImportWatch] = WeakSet()


def _pass_on(name: str, _: types.ModuleType) -> None:
    with _lock:
        _hooked.discard(name)
    for watch in list(_watches):
        watch.hear(name)
