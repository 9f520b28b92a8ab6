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
        was_there = place.exists()
        if was_there and not place.is_file():
            place.write_bytes(data)
            return
        if was_there:
            with place.open("ab"):  # renaming would replace a file that may not be written
                pass
        beside.write_bytes(data)
        if was_there:
            shutil.copymode(place, beside)
        os.replace(beside, place)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
    finally:
        with contextlib.suppress(OSError):  # of a file system that is read-only: the error above says so
            beside.unlink()
