"""`guard`: an audit hook that refuses to change files from before the run, as a second line of defence.

Python reports each path that any function opens or changes to audit hooks. After redirection, such a path is in the
folder of the run, or in a shared one. Any other path was not redirected.
"""

import os
import stat
import sys
from collections.abc import Callable
from os import getcwd, lstat, readlink  # by name: `redirect` replaces the attributes of os later
from typing import Any
from urllib.parse import unquote

from ..errors import AmpError
from .system import WRITE_FLAGS
from .view import View

_PATHS: dict[str, tuple[int, ...]] = {
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.link": (1,),
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.removexattr": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.setxattr": (0,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.utime": (0,),
    "sqlite3.connect": (0,),
}
"""The positions of changed paths among the arguments of each event. Events of `shutil` precede other events."""


class NotRedirectedError(AmpError, PermissionError):
    """A rerun of a script would have changed a file outside of its own folder."""


class _InForce:
    """State for the hook, which cannot be removed."""

    view: View | None = None
    has_hook = False


def guard(view: View) -> Callable[[], None]:
    """Refuse changes outside of the folders of a view. Call the result to end this."""
    before = _InForce.view
    _InForce.view = view
    if not _InForce.has_hook:
        _InForce.has_hook = True
        sys.addaudithook(_check_event)

    def end() -> None:
        _InForce.view = before

    return end


def _check_event(event: str, arguments: tuple[Any, ...]) -> None:
    view = _InForce.view
    if view is None:  # no run is in progress, but the hook stays
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & WRITE_FLAGS:
            _check(view, event, path)
        return
    for number in _PATHS.get(event, ()):
        _check(view, event, arguments[number])


def _check(view: View, event: str, path: Any) -> None:
    """Raise NotRedirectedError for a path outside of the folders of the view."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return  # the descriptor of an open file
    text = os.fsdecode(path)
    if event == "sqlite3.connect":
        if text in ("", ":memory:"):
            return
        if text.startswith("file:"):
            text, _, query = unquote(text[5:]).partition("?")
            # read only, or in memory
            if "mode=ro" in query or "mode=memory" in query or text in ("", ":memory:"):
                return
    whole = os.path.normpath(os.path.join(getcwd(), text))
    # a link may lead to a shared folder, and a shared folder may be named through one
    if not view.is_shared(whole) and not view.is_shared(_real(whole)) and not _is_special(whole):
        raise NotRedirectedError(
            f"{event} would change {text!r}, and this run of the script keeps what it writes in {view.root}: write by"
            " open() or the functions of os, or give the command --in-place"
        )


def _real(path: str) -> str:
    """Return a path without links. os.path.realpath would call replaced functions."""
    done, parts = "", path.split(os.sep)[:0:-1]
    for _ in range(1000):
        if not parts:
            break
        part = parts.pop()
        if part == "..":
            done = os.path.dirname(done)
            continue
        try:
            target = readlink(f"{done}{os.sep}{part}")
        except OSError:
            done += os.sep + part
            continue
        if os.path.isabs(target):
            done = ""
        parts += [step for step in target.split(os.sep)[::-1] if step not in ("", ".")]
    return done or os.sep


def _is_special(path: str) -> bool:
    try:
        mode = lstat(path).st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISBLK(mode)
