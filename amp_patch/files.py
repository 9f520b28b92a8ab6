"""Output files: each is written whole, or stays as it was before."""

import contextlib
import os
import shutil
from pathlib import Path


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file in UTF-8. It is written beside its place and renamed, so that after a full disk or a killed process
    the old file is still there, whole.

    What is no regular file, such as /dev/stdout or a pipe, is written to as it is; a link stays one. Raises OSError,
    which names the path.
    """
    place = Path(os.path.realpath(path))
    data = content.encode() if isinstance(content, str) else content
    beside = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        if place.exists() and not place.is_file():
            place.write_bytes(data)
            return
        _check_writable(place)
        beside.write_bytes(data)
        if place.exists():
            shutil.copymode(place, beside)
        os.replace(beside, place)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
    finally:
        with contextlib.suppress(OSError):  # of a file system that is read-only: the error above says so
            beside.unlink()


def _check_writable(place: Path) -> None:
    """Raise PermissionError for a file that may not be written, which renaming would replace all the same."""
    if place.exists():
        with place.open("ab"):
            pass
