"""Atomic writes: a file is written whole, or stays as it was."""

import contextlib
import errno
import os
import shutil
from pathlib import Path

_NO_RENAME = frozenset({errno.EACCES, errno.EPERM, errno.EBUSY, errno.EXDEV})
"""Errors of renaming if the file may be written but its folder may not, or the file is a mount point."""


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file in UTF-8. A temporary file beside it is written and renamed, so the old file survives a full disk or
    a killed process. If the folder may not be written, the file is overwritten in place.

    Anything but a regular file, such as /dev/stdout or a pipe, is written to directly. A link stays a link. Raises
    OSError with the path.
    """
    place = Path(os.path.realpath(path))
    data = content
    if isinstance(content, str):
        data = content.encode(errors="backslashreplace")  # file names may be no UTF-8
    assert isinstance(data, bytes)
    try:
        was_there = place.exists()
        if was_there and not place.is_file():
            place.write_bytes(data)
            return
        if was_there:
            with place.open("ab"):  # renaming would replace a file that may not be written
                pass
        try:
            _replace(place, data, was_there)
        except OSError as error:
            if not was_there or error.errno not in _NO_RENAME:
                raise
            place.write_bytes(data)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise the OSError that `write_file` would raise, as far as it can be known before. Changes nothing."""
    place = Path(os.path.realpath(path))
    try:
        with contextlib.suppress(FileNotFoundError):
            if place.lstat() and place.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if place.is_file():
                with place.open("ab"):
                    pass
            return
        _make_beside(place.parent).unlink()
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None


def _replace(place: Path, data: bytes, was_there: bool) -> None:
    """Write a new file beside `place`, and rename it to `place`."""
    beside = _make_beside(place.parent)
    try:
        beside.write_bytes(data)
        if was_there:
            shutil.copymode(place, beside)
        os.replace(beside, place)
    finally:
        with contextlib.suppress(OSError):  # it was renamed
            beside.unlink()


def _make_beside(folder: Path) -> Path:
    """Create an empty file with a short new name. O_EXCL follows no link."""
    beside = folder / f".amp-patch-{os.getpid()}-{os.urandom(4).hex()}.part"
    os.close(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    return beside
