"""Functions of packages that open paths in compiled code, and wrappers that give them the paths of a `View`."""

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from .view import View

READ, WRITE, UPDATE, MAP = "read", "write", "update", "map"


class Taker(NamedTuple):
    """A function that takes a path.

    Attributes:
        owner: the module or class that has it.
        name: its name there.
        position: the position of the path among its arguments; of a method, the instance is argument 0.
        keyword: the path's name as an argument.
        how: READ, WRITE (the whole file), UPDATE, or MAP, which is UPDATE if the next argument is true, else READ.
    """

    owner: Any
    name: str
    position: int
    keyword: str
    how: str


def _of_torch() -> list[Taker]:
    from .. import torch_private

    return [Taker(*fields) for fields in torch_private.PATH_TAKERS]


def _of_safetensors() -> list[Taker]:
    package = importlib.import_module("safetensors")
    return [
        Taker(package, "serialize_file", 1, "filename", WRITE),
        Taker(package, "safe_open", 0, "filename", READ),
    ]


def _of_tokenizers() -> list[Taker]:
    tokenizer = importlib.import_module("tokenizers").Tokenizer
    return [Taker(tokenizer, "save", 1, "path", WRITE), Taker(tokenizer, "from_file", 0, "path", READ)]


def _of_sqlite() -> list[Taker]:
    return [Taker(importlib.import_module("sqlite3"), "connect", 0, "database", UPDATE)]


TAKERS: dict[str, Callable[[], list[Taker]]] = {
    "torch": _of_torch,
    "safetensors": _of_safetensors,
    "tokenizers": _of_tokenizers,
    "sqlite3": _of_sqlite,
}
"""By the package whose import defines them."""

_BESIDE = ("-journal", "-wal", "-shm")  # suffixes of files that SQLite keeps beside a database


def wrap(taker: Taker, original: Callable[..., Any], view: View) -> Callable[..., Any]:
    """Return a function that calls `original` with the redirected path."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        how = taker.how
        if how == MAP:
            is_shared = kwargs.get("shared", args[taker.position + 1 : taker.position + 2] == (True,))
            how = UPDATE if is_shared else READ
        if len(args) > taker.position:
            path = _redirect_path(view, args[taker.position], how, kwargs.get("uri"))
            args = (*args[: taker.position], path, *args[taker.position + 1 :])
        elif taker.keyword in kwargs:
            kwargs[taker.keyword] = _redirect_path(view, kwargs[taker.keyword], how, kwargs.get("uri"))
        return original(*args, **kwargs)

    return call


def _redirect_path(view: View, path: Any, how: str, is_uri: object) -> Any:
    if not isinstance(path, (str, bytes, os.PathLike)) or path in ("", ":memory:"):
        return path  # an open file
    if how == READ:
        return view.read(path)
    if how == WRITE:
        return view.write(path, with_content=False)
    if is_uri and isinstance(path, str) and path.startswith("file:"):
        name, _, query = path[5:].partition("?")
        # file:///folder/name: the host between the second and third slash is empty
        name = unquote(name[2:] if name.startswith("///") else name)
        if "mode=memory" in query or name in ("", ":memory:"):
            return path
        return f"file:{quote(os.fspath(_update(view, name)))}?{query}"
    return _update(view, path)


def _update(view: View, path: Any) -> Any:
    # SQLite finds these by the name of the database, so they must move with it
    for suffix in _BESIDE:
        beside = os.fsdecode(path) + suffix
        location = view.locate(beside)
        if not location.is_shared and view.is_lower(location.path):
            view.write(beside)
    return view.write(path)
