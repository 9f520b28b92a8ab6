"""`guard`: an audit hook that refuses changes to files of the user.

A repeated run of a script writes to a folder of its own: the module `redirect` redirects its writes there. Only files
in this folder and in shared folders, such as caches, may change. If another file is about to change, a write was not
redirected, so the hook raises an error first. Python's own functions report to audit hooks the paths that they open or
change; compiled code of packages may not.
"""

import os
import stat
import sys
from collections.abc import Callable
from os import getcwd, lstat, readlink  # the originals: `redirect` replaces the attributes of os later
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
"""For each audit event, the positions of the changed paths among its arguments.

Events of `shutil` are left out: its functions call `open` and functions of `os`, which have events of their own.
"""


class NotRedirectedError(AmpError, PermissionError):
    """A repeated run of a script was about to change a file outside of the folder of the run."""


class _InForce:
    """The state of the audit hook. Python cannot remove a hook: it is added once, and is idle while `view` is None."""

    view: View | None = None
    has_hook = False


def guard(view: View) -> Callable[[], None]:
    """From now on, raise NotRedirectedError when a file outside of the folder of a run, and not in a shared folder, is
    about to change. Call the result to end this.
    """
    before = _InForce.view
    _InForce.view = view
    if not _InForce.has_hook:
        _InForce.has_hook = True
        sys.addaudithook(_check_event)

    def end() -> None:
        _InForce.view = before

    return end


def _check_event(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook: check each path that an event opens for writing or changes."""
    view = _InForce.view
    if view is None:  # the redirection has been undone
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & WRITE_FLAGS:
            _check_path(view, event, path)
        return
    for position in _PATHS.get(event, ()):
        _check_path(view, event, arguments[position])


def _check_path(view: View, event: str, path: Any) -> None:
    """Raise NotRedirectedError if a path that is about to change was not redirected."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return  # the descriptor of an open file
    text = os.fsdecode(path)
    if event == "sqlite3.connect":
        if text in ("", ":memory:"):
            return
        if text.startswith("file:"):
            text, _, query = unquote(text[5:]).partition("?")
            # a database that is opened read-only, or is in memory
            if "mode=ro" in query or "mode=memory" in query or text in ("", ":memory:"):
                return
    whole = os.path.normpath(os.path.join(getcwd(), text))
    # try the path as given and without links: a shared folder may be a link, or a link may lead into a shared folder
    if not view.is_shared(whole) and not view.is_shared(_resolve_links(whole)) and not _is_special(whole):
        raise NotRedirectedError(
            f"{event} would change {text!r}, and this run of the script keeps what it writes in {view.root}: write with"
            " open() or the functions of os, or give the command --in-place"
        )


def _resolve_links(path: str) -> str:
    """Return an absolute path without links. os.path.realpath would call replaced functions."""
    done, parts = "", path.split(os.sep)[:0:-1]  # the parts that are not resolved yet, the next one last
    for _ in range(1000):  # not for ever, because links may form a loop
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
    """Return whether a path is a device, a pipe or a socket."""
    try:
        mode = lstat(path).st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISBLK(mode)
