"""`ImportWatch`: calls a function whenever certain modules are imported."""

import functools
import threading
import types
from collections.abc import Callable, Iterable
from weakref import WeakSet

import wrapt


class ImportWatch:
    """Calls `tell(name)` whenever one of the watched modules has been imported, in the thread that imported it, until
    it is closed.

    wrapt keeps a hook until its module is imported, so there is one for each module name, however many watches there
    are. It refers to no watch, and keeps none alive.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._names: set[str] = set()

    def add(self, names: Iterable[str]) -> None:
        """Watch these modules, whether they exist or not. For those imported already, `tell` is called at once."""
        names = set(names) - self._names
        self._names |= names
        _watches.add(self)
        for name in sorted(names):
            _hook(name)

    def close(self) -> None:
        """Stop watching. Harmless twice."""
        _watches.discard(self)
        self._names.clear()

    def pass_on(self, name: str) -> None:
        """Call `tell` if the module is one of those that are watched."""
        if name in self._names:
            self._tell(name)


_lock = threading.Lock()
_hooked: set[str] = set()  # names whose hook wrapt has, and will call
_watches: WeakSet[ImportWatch] = WeakSet()


def _hook(name: str) -> None:
    """Have wrapt call `_pass_on` at the next import of a module, or at once if it is imported already."""
    with _lock:
        if name in _hooked:
            return
        _hooked.add(name)
    try:
        wrapt.register_post_import_hook(functools.partial(_pass_on, name), name)
    except BaseException:
        _hooked.discard(name)  # an interrupt: wrapt may not have the hook, so the next call registers it again
        raise


def _pass_on(name: str, _: types.ModuleType) -> None:
    with _lock:
        _hooked.discard(name)
    for watch in list(_watches):
        watch.pass_on(name)
