"""Atomic writes: a file is written whole, or stays as it was, unless `write_file` can only overwrite it in place."""

import contextlib
import errno
import os
import shutil
import stat
import sys
from pathlib import Path

_NO_RENAME = frozenset({errno.EACCES, errno.EPERM, errno.EBUSY, errno.EXDEV, errno.EROFS})
"""The errors of `_replace` if only the file may be written, and not its folder, or if the file is a mount point."""


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file, text in UTF-8. Raises OSError with the path.

    Writes a temporary file in the same folder and renames it, so the old file survives a full disk or a killed process.
    If only the file may be written, and not its folder, the file is overwritten in place. A link stays a link, and its
    target is written. Anything but a regular file, such as a pipe, is written to directly. Content for /dev/stdout
    goes to the stdout of the process, even if that is a file.
    """
    data = content
    if isinstance(content, str):
        # the text may contain names of files, which need not be UTF-8
        data = content.encode(errors="backslashreplace")
    assert isinstance(data, bytes)
    try:
        if _write_directly(path, data):
            return
        target = Path(os.path.realpath(path))
        existed = target.exists()
        if existed:
            # raises an error if the file may not be written; renaming would replace such a file nevertheless
            with target.open("ab"):
                pass
        try:
            _replace(target, data, existed)
        except OSError as error:
            if not existed or error.errno not in _NO_RENAME:
                raise
            target.write_bytes(data)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise the OSError that `write_file` would raise, as far as that is known in advance. Changes no file."""
    try:
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            # see whether a file can be made in the folder
            _make_temporary(Path(os.path.realpath(path)).parent).unlink()
            return
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if stat.S_ISREG(mode):
            with Path(path).open("ab"):
                pass
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None


def _write_directly(path: str | os.PathLike[str], data: bytes) -> bool:
    """Write to a path that is no regular file, or to which stdout or stderr goes. Return False for any other path."""
    try:
        # `stat` of `path`, not of its real path: /dev/stdout may lead to a pipe, whose real path names no file
        status = os.stat(path)
    except FileNotFoundError:
        return False
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            is_stream = os.path.samestat(os.fstat(descriptor), status)
        except OSError:  # the stream is closed
            continue
        if is_stream:
            if stream is not None:
                stream.flush()
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)
            return True
    if stat.S_ISREG(status.st_mode):
        return False
    Path(path).write_bytes(data)
    return True


def _replace(target: Path, data: bytes, existed: bool) -> None:
    """Write a new file beside `target`, and rename it to `target`."""
    temporary = _make_temporary(target.parent)
    try:
        temporary.write_bytes(data)
        if existed:
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):  # after the renaming, it is gone
            temporary.unlink()


def _make_temporary(folder: Path) -> Path:
    """Create an empty file with a new name in a folder."""
    temporary = folder / f".amp-patch-{os.getpid()}-{os.urandom(4).hex()}.part"
    # O_EXCL refuses an existing file or link, which another user may have put there
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    return temporary
