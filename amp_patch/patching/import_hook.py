"""`ImportWatch`: calls a function once certain modules are imported."""

import functools
import threading
import types
from collections.abc import Callable, Iterable
from weakref import WeakSet

import wrapt


class ImportWatch:
    """Calls `on_import(name)` after the first import of each watched module, until it is closed.

    The call is made in the importing thread. It is repeated when another watch begins to watch a module that is
    imported already.

    The hooks are post-import hooks of wrapt. wrapt cannot remove a hook before the module is imported. So all watches
    share one hook for each module name. The hook refers to no watch, so it keeps none alive.
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

    def notify(self, name: str) -> None:
        """Call `on_import` if this watch watches the module `name`, which was imported."""
        if name in self._names:
            self._on_import(name)


_lock = threading.Lock()
_hooked: set[str] = set()  # names of the modules for which wrapt has our hook
_watches: WeakSet[ImportWatch] = WeakSet()


def _hook(name: str) -> None:
    """Let wrapt call `_notify_watches` at the next import of a module, or at once if it is imported already."""
    with _lock:
        if name in _hooked:
            return
        _hooked.add(name)
    try:
        wrapt.register_post_import_hook(functools.partial(_notify_watches, name), name)
    except BaseException:
        # after an interrupt, wrapt may not have the hook, so let the next call register it again
        _hooked.discard(name)
        raise


def _notify_watches(name: str, _: types.ModuleType) -> None:
    """The hook of a module: notify all watches that it was imported. wrapt calls a hook once."""
    with _lock:
        _hooked.discard(name)
    for watch in list(_watches):
        watch.notify(name)
