"""`ImportWatch`: calls a function whenever certain modules are imported."""

import functools
import threading
import types
from collections.abc import Callable, Iterable
from weakref import WeakSet

import wrapt


class ImportWatch:
    """Calls `on_import(name)` after each import of a watched module, in the importing thread, until it is closed.

    wrapt cannot remove a hook, and keeps it until the module is imported. So all watches share one hook for each module
    name. The hook refers to no watch, so a watch that is closed, or that nothing else refers to, is freed.
    """

    def __init__(self, on_import: Callable[[str], None]) -> None:
        self._on_import = on_import
        self._names: set[str] = set()

    def watch(self, names: Iterable[str]) -> None:
        """Watch modules, whether they exist or not. For modules imported already, `on_import` is called at once."""
        names = set(names) - self._names
        self._names |= names
        _watches.add(self)
        for name in sorted(names):
            _hook(name)

    def close(self) -> None:
        """Stop watching. A second call does nothing."""
        _watches.discard(self)
        self._names.clear()

    def pass_on(self, name: str) -> None:
        """Call `on_import` if this watch watches the module."""
        if name in self._names:
            self._on_import(name)


_lock = threading.Lock()
_hooked: set[str] = set()  # names of modules whose hook wrapt has
_watches: WeakSet[ImportWatch] = WeakSet()


def _hook(name: str) -> None:
    """Let wrapt call `_pass_on` at the next import of a module, or at once if it is imported already."""
    with _lock:
        if name in _hooked:
            return
        _hooked.add(name)
    try:
        wrapt.register_post_import_hook(functools.partial(_pass_on, name), name)
    except BaseException:
        # after an interrupt, wrapt may not have the hook, so let the next call register it again
        _hooked.discard(name)
        raise


def _pass_on(name: str, _: types.ModuleType) -> None:
    """The hook of a module: tell all watches that it was imported. wrapt drops the hook after the call."""
    with _lock:
        _hooked.discard(name)
    for watch in list(_watches):
        watch.pass_on(name)
