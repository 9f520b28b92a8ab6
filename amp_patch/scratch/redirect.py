"""`redirect`: makes this process, and the processes that it forks, write to the folder of a run.

A command such as `amp-patch compare` runs a script several times. Each of these runs has a folder of its own.
"""

import contextlib
import errno
import io
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .guard import guard
from .libraries import PATH_FUNCTIONS, PathFunction, wrap
from .system import Redirected
from .view import View, make_folders

_TEMPORARY = "temp"
"""The name of the folder for temporary files, in the folder of a run.

It has no layers (see `view`), so other programs find its files under their real paths.
"""

_WITH_ORIGINALS = frozenset({"posix", "_io", "_frozen_importlib", "_frozen_importlib_external"})
"""Modules of Python that keep the original functions, because the import system calls the originals."""

_SETS_OF_FUNCTIONS = ("supports_dir_fd", "supports_effective_ids", "supports_fd", "supports_follow_symlinks")
"""Attributes of `os` that hold sets of functions, such as those that take a descriptor in place of a path."""


class _Replacement:
    """The replacement of a built-in function. As a class attribute it is not bound to instances, like a builtin.

    OSErrors name the path as the script sees it. If a disk is full, the error names the real path in the folder of the
    run, because this is on the full disk.
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
                    setattr(error, name, self._view.to_script_path(path))
            raise

    def __reduce__(self) -> str:
        # pickle stores it as the name of a global, as it stores the original
        return str(self.__name__)

    def __repr__(self) -> str:
        return f"<function {self.__module__}.{self.__name__}>"


def redirect(root: str, shared: list[str], inductor_cache: str) -> Callable[[], None]:
    """Redirect the writes of this process to the folder `root`, except writes to shared folders.

    Reads find the files in `root` first. Temporary files go to `root`, too. A write that bypasses the redirection
    raises NotRedirectedError if Python reports it to audit hooks.

    Args:
        root: the folder of the run.
        shared: folders in which the script reads and writes the real files.
        inductor_cache: the folder for the cache of torch.compile.

    Returns the function that undoes the redirection.
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
        open_file = _Replacement(redirected.open_file, io.open, "io", view)
        open_code = _Replacement(redirected.open_code, io.open_code, "io", view)
        _swap_references([*replacements.values(), open_file, open_code], undo)
        for name in _SETS_OF_FUNCTIONS:
            # a replacement must be in the same sets as its original, because code asks `os.stat in os.supports_fd`
            functions: set[Any] = getattr(os, name)
            added = {replacement for replacement in replacements.values() if replacement.__wrapped__ in functions}
            functions |= added
            undo.callback(functions.difference_update, added)
        _watch_imports(view, undo)
        undo.callback(guard(view))
        # all is redirected without an error, so leaving the `with` must undo nothing
        on_error.pop_all()
    return undo.close


def _set_temporary(folder: str, undo: contextlib.ExitStack) -> None:
    """Make `tempfile`, and programs that read TMPDIR, put temporary files into a folder."""
    make_folders(folder)
    _set_variable("TMPDIR", folder, undo)
    if "tempfile" in sys.modules:
        # after its first use, tempfile does not look at the variable again
        _swap(sys.modules["tempfile"], "tempdir", folder, undo)


def _set_variable(name: str, value: str, undo: contextlib.ExitStack) -> None:
    """Set an environment variable. `undo` restores its value, or deletes a variable that was not set."""
    before = os.environ.get(name)
    if before is None:
        undo.callback(os.environ.pop, name, None)
    else:
        undo.callback(os.environ.__setitem__, name, before)
    os.environ[name] = value


def _swap(owner: Any, name: str, value: Any, undo: contextlib.ExitStack) -> None:
    """Set an attribute. `undo` restores its value, or deletes an attribute that the owner did not have itself."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def _swap_references(replacements: Sequence[Any], undo: contextlib.ExitStack) -> None:
    """Replace functions in the globals of imported modules, and in default arguments of tempfile."""
    by_original = {id(replacement.__wrapped__): replacement for replacement in replacements}
    for owner in list(_find_holders()):
        for name, held in list(vars(owner).items()):
            if id(held) in by_original:
                _swap(owner, name, by_original[id(held)], undo)
    closer = getattr(sys.modules.get("tempfile"), "_TemporaryFileCloser", None)
    if closer is None:
        return
    for function in vars(closer).values():
        defaults = getattr(function, "__defaults__", None)
        if defaults:  # such as `unlink=os.unlink`
            redirected = tuple(by_original.get(id(value), value) for value in defaults)
            _swap_defaults(function, redirected, undo)


def _swap_defaults(function: Any, defaults: tuple[Any, ...], undo: contextlib.ExitStack) -> None:
    undo.callback(setattr, function, "__defaults__", function.__defaults__)
    function.__defaults__ = defaults


def _find_holders() -> Iterator[Any]:
    """Yield the imported modules, except modules that need the original functions."""
    for name, module in list(sys.modules.items()):
        needs_originals = name in _WITH_ORIGINALS or name.startswith(f"{__package__}.")
        if isinstance(getattr(module, "__dict__", None), dict) and not needs_originals:
            yield module


def _watch_imports(view: View, undo: contextlib.ExitStack) -> None:
    """Replace the functions of `PATH_FUNCTIONS`: at once in packages that are imported already, in others after their
    import.

    Does nothing without wrapt.
    """
    try:
        import wrapt
    except ImportError:  # the script has started the Python of another environment, without wrapt
        return
    # wrapt keeps a hook until its package is imported, which may be after `undo`; then the hook must do nothing
    undone = threading.Event()
    undo.callback(undone.set)

    def make_hook(find_functions: Callable[[], list[PathFunction]]) -> Callable[[object], None]:
        def replace_functions(_: object) -> None:
            if not undone.is_set():
                for path_function in find_functions():
                    _replace_path_function(path_function, view, undo)

        return replace_functions

    for package, find_functions in PATH_FUNCTIONS.items():
        wrapt.register_post_import_hook(make_hook(find_functions), package)


def _replace_path_function(path_function: PathFunction, view: View, undo: contextlib.ExitStack) -> None:
    """Replace a function that takes a path by a wrapper that passes it the redirected path."""
    original = getattr(path_function.owner, path_function.name)
    replacement: Any = wrap(path_function, original, view)
    if not isinstance(path_function.owner, type):
        _swap(path_function.owner, path_function.name, replacement, undo)
        _swap_references([replacement], undo)
        return
    # as a class attribute, a builtin is not bound to instances, while the wrapper, a Python function, would be
    if isinstance(original, types.BuiltinFunctionType):
        replacement = staticmethod(replacement)
    _swap(path_function.owner, path_function.name, replacement, undo)
