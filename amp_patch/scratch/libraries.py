"""Functions of packages that open files in compiled code, and wrappers that redirect the paths through a `View`."""

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from .view import View

READ, WRITE, UPDATE, MAP = "read", "write", "update", "map"


class PathFunction(NamedTuple):
    """A function that takes a path.

    Attributes:
        owner: the module or class that has the function.
        name: the name of the function there.
        position: the position of the path among the arguments. In a method, the instance is argument 0.
        keyword: the name of this argument.
        how: how the file is used: READ, WRITE (it is written whole), UPDATE (it is read and written) or MAP. A mapped
            file is updated if the argument `shared`, which follows the path, is True; else it is read.
    """

    owner: Any
    name: str
    position: int
    keyword: str
    how: str


def _of_torch() -> list[PathFunction]:
    from .. import torch_private

    return [PathFunction(*fields) for fields in torch_private.PATH_FUNCTIONS]


def _of_safetensors() -> list[PathFunction]:
    package = importlib.import_module("safetensors")
    return [
        PathFunction(package, "serialize_file", 1, "filename", WRITE),
        PathFunction(package, "safe_open", 0, "filename", READ),
    ]


def _of_tokenizers() -> list[PathFunction]:
    tokenizer = importlib.import_module("tokenizers").Tokenizer
    return [PathFunction(tokenizer, "save", 1, "path", WRITE), PathFunction(tokenizer, "from_file", 0, "path", READ)]


def _of_sqlite() -> list[PathFunction]:
    return [PathFunction(importlib.import_module("sqlite3"), "connect", 0, "database", UPDATE)]


PATH_FUNCTIONS: dict[str, Callable[[], list[PathFunction]]] = {
    "torch": _of_torch,
    "safetensors": _of_safetensors,
    "tokenizers": _of_tokenizers,
    "sqlite3": _of_sqlite,
}
"""For each package, a function that returns the package's path functions. Called after the package is imported."""

_SQLITE_SUFFIXES = ("-journal", "-wal", "-shm")
"""The suffixes of the files that SQLite keeps beside a database."""


def wrap(path_function: PathFunction, original: Callable[..., Any], view: View) -> Callable[..., Any]:
    """Return a function that calls `original` with the redirected path in place of the path that it is given."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        how = path_function.how
        if how == MAP:
            argument_after_path = args[path_function.position + 1 : path_function.position + 2]
            is_written_back = kwargs.get("shared", argument_after_path == (True,))
            how = UPDATE if is_written_back else READ
        if len(args) > path_function.position:
            path = _redirect_path(view, args[path_function.position], how, kwargs.get("uri"))
            args = (*args[: path_function.position], path, *args[path_function.position + 1 :])
        elif path_function.keyword in kwargs:
            kwargs[path_function.keyword] = _redirect_path(view, kwargs[path_function.keyword], how, kwargs.get("uri"))
        return original(*args, **kwargs)

    return call


def _redirect_path(view: View, path: Any, how: str, is_uri: object) -> Any:
    """Return the redirected path, or the redirected URI of a database. A value that names no file is returned as it is.

    `is_uri` is the argument `uri` of sqlite3.connect.
    """
    if not isinstance(path, (str, bytes, os.PathLike)) or path in ("", ":memory:"):
        return path  # an open file, or a database in memory
    if how == READ:
        return view.path_to_read(path)
    if how == WRITE:
        return view.path_to_write(path, with_content=False)
    if is_uri and isinstance(path, str) and path.startswith("file:"):
        name, _, query = path[5:].partition("?")
        # `file:///folder/name` means `/folder/name`: the name of a host would be between the second and third slash
        name = unquote(name[2:] if name.startswith("///") else name)
        if "mode=memory" in query or name in ("", ":memory:"):
            return path
        return f"file:{quote(os.fspath(_path_to_update(view, name)))}?{query}"
    return _path_to_update(view, path)


def _path_to_update(view: View, path: Any) -> Any:
    """Return the path to write for a file that is updated, such as a database: see `View.path_to_write`."""
    # SQLite finds the files beside a database by the database's name, so copy them, too
    for suffix in _SQLITE_SUFFIXES:
        file_beside = os.fsdecode(path) + suffix
        location = view.locate(file_beside)
        if not location.is_shared and view.sees_lower(location.path):
            view.path_to_write(file_beside)
    return view.path_to_write(path)
