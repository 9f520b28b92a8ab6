"""`redirect`: makes this process, and the processes that it forks, write to the folder of a run."""

import contextlib
import errno
import io
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .guard import guard
from .libraries import TAKERS, Taker, wrap
from .system import Redirected
from .view import View, make_folders

_TEMPORARY = "temp"
"""The folder, in the folder of a run, for files of `tempfile`. They are new, and other programs find them there."""

_OF_SYSTEM = frozenset({"posix", "_io", "_frozen_importlib", "_frozen_importlib_external"})
"""Modules that keep the original functions: imports use them."""

_CAPABLE = ("supports_dir_fd", "supports_effective_ids", "supports_fd", "supports_follow_symlinks")


class _Replacement:
    """Replaces a built-in function. Like one, it is not bound to instances of a class that has it as an attribute.

    Errors name the script's path, except if the disk is full: that is the disk with the folder of the run.
    """

    def __init__(self, function: Callable[..., Any], original: Any, module: str, view: View) -> None:
        self.__wrapped__ = original
        self.__name__ = self.__qualname__ = original.__name__
        self.__module__ = module
        self.__doc__ = original.__doc__
        self._function = function
        self._view = view

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._function(*args, **kwargs)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            for name in ("filename", "filename2"):
                path = getattr(error, name)
                if isinstance(path, str):
                    setattr(error, name, self._view.strip(path))
            raise

    def __reduce__(self) -> str:
        return str(self.__name__)

    def __repr__(self) -> str:
        return f"<function {self.__module__}.{self.__name__}>"


def redirect(root: str, shared: list[str], inductor_cache: str) -> Callable[[], None]:
    """Redirect all writes to the folder `root`, except writes to shared folders. Call the result to undo it.

    Reads see the files in `root` first. Temporary files go there, too, except for the cache of torch.compile, which
    is `inductor_cache`. A write that is not redirected raises NotRedirectedError, if Python reports it.
    """
    view = View(root, shared)
    make_folders(view.root)
    undo = contextlib.ExitStack()
    with contextlib.ExitStack() as on_error:
        on_error.push(undo)
        _set_temporary(os.path.join(view.root, _TEMPORARY), undo)
        _set_variable("TORCHINDUCTOR_CACHE_DIR", inductor_cache, undo)
        redirected = Redirected(view)
        replacements = {}
        for name, original in redirected.originals().items():
            replacements[name] = _Replacement(getattr(redirected, name), original, "os", view)
            _swap(os, name, replacements[name], undo)
        opened = _Replacement(redirected.open_file, io.open, "io", view)
        code = _Replacement(redirected.open_code, io.open_code, "io", view)
        _swap_references([*replacements.values(), opened, code], undo)
        for name in _CAPABLE:
            # callers ask whether a function is in these sets, such as `os.stat in os.supports_fd`
            functions: set[Any] = getattr(os, name)
            more = {replacement for replacement in replacements.values() if replacement.__wrapped__ in functions}
            functions |= more
            undo.callback(functions.difference_update, more)
        _watch_imports(view, undo)
        undo.callback(guard(view))
        # everything is redirected, so nothing is undone here
        on_error.pop_all()
    return undo.close


def _set_temporary(folder: str, undo: contextlib.ExitStack) -> None:
    """Let `tempfile`, and other programs, make temporary files in a folder."""
    make_folders(folder)
    _set_variable("TMPDIR", folder, undo)
    if "tempfile" in sys.modules:
        # tempfile keeps the folder that it found at its first use
        _swap(sys.modules["tempfile"], "tempdir", folder, undo)


def _set_variable(name: str, value: str, undo: contextlib.ExitStack) -> None:
    before = os.environ.get(name)
    if before is None:
        undo.callback(os.environ.pop, name, None)
    else:
        undo.callback(os.environ.__setitem__, name, before)
    os.environ[name] = value


def _swap(owner: Any, name: str, value: Any, undo: contextlib.ExitStack) -> None:
    """Set an attribute. `undo` restores it, or deletes it."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def _swap_references(replacements: Sequence[Any], undo: contextlib.ExitStack) -> None:
    """Replace functions in every module that has imported them by name."""
    by_original = {id(replacement.__wrapped__): replacement for replacement in replacements}
    for owner in list(_find_holders()):
        for name, held in list(vars(owner).items()):
            if id(held) in by_original:
                _swap(owner, name, by_original[id(held)], undo)
    closer = getattr(sys.modules.get("tempfile"), "_TemporaryFileCloser", None)
    for function in vars(closer).values() if closer is not None else ():
        defaults = getattr(function, "__defaults__", None)
        if defaults:  # os.unlink among them
            own = tuple(by_original.get(id(value), value) for value in defaults)
            _swap_default(function, own, undo)


def _swap_default(function: Any, defaults: tuple[Any, ...], undo: contextlib.ExitStack) -> None:
    undo.callback(setattr, function, "__defaults__", function.__defaults__)
    function.__defaults__ = defaults


def _find_holders() -> Iterator[Any]:
    for name, module in list(sys.modules.items()):
        is_own = name in _OF_SYSTEM or name.startswith(f"{__package__}.")
        if isinstance(getattr(module, "__dict__", None), dict) and not is_own:
            yield module


def _watch_imports(view: View, undo: contextlib.ExitStack) -> None:
    """Replace functions of packages that open paths in compiled code, now or after their import."""
    try:
        import wrapt
    except ImportError:  # in a Python of another installation that the script has started
        return
    is_over: list[bool] = []
    undo.callback(is_over.append, True)

    def make_hook(find: Callable[[], list[Taker]]) -> Callable[[object], None]:
        def tell(_: object) -> None:
            if not is_over:
                for taker in find():
                    _give(taker, view, undo)

        return tell

    for package, find in TAKERS.items():
        wrapt.register_post_import_hook(make_hook(find), package)


def _give(taker: Taker, view: View, undo: contextlib.ExitStack) -> None:
    original = getattr(taker.owner, taker.name)
    replacement: Any = wrap(taker, original, view)
    if not isinstance(taker.owner, type):
        _swap(taker.owner, taker.name, replacement, undo)
        _swap_references([replacement], undo)
        return
    if isinstance(original, types.BuiltinFunctionType):  # a builtin in a class is not bound to instances
        replacement = staticmethod(replacement)
    _swap(taker.owner, taker.name, replacement, undo)
