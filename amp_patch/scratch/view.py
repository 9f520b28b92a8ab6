"""`View`: the files that a rerun of a script sees: those that it wrote itself, over those that were there before.

What it writes is in `files`, below the path that the script has given. What was there and has been removed has a mark
in `gone`; a mark also hides everything below its path. Both are folders, so that all processes of a run see the same.
"""

import contextlib
import errno
import functools
import hashlib
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from io import BufferedWriter, FileIO  # this module and its neighbours keep the functions that are replaced later
from os import access, chmod, getcwd, link, lstat, mkdir, readlink, symlink, unlink, utime
from os import close as _close_descriptor
from os import listdir as _listdir
from os import open as _open_descriptor
from os import stat as _stat
from typing import Any, NamedTuple

PathLike = int | str | bytes | os.PathLike[str] | os.PathLike[bytes]

_SYSTEM = ("/dev", "/proc", "/sys")
_MOST_LINKS = 40  # as Linux
_CHUNK = 2**24
_TICK = 100_000_000  # nanoseconds: file systems tell times to 10 ms or less
_PART = re.compile(r"[^/]+")


class Place(NamedTuple):
    """What a script's path stands for.

    Attributes:
        path: the absolute path, without links.
        given: what reads it outside of `files`: the script's own path where that leads there.
        is_shared: every run writes there as it always does.
    """

    path: str
    given: Any
    is_shared: bool


class View:
    """Says for each path where it is read, and where it is written.

    Args:
        root: the folder of this run, absolute.
        shared: folders that every run writes to as it always does: caches, and those of the command itself.
    """

    def __init__(self, root: str, shared: Sequence[str] = ()) -> None:
        self.root = os.path.realpath(root)
        self.files = os.path.join(self.root, "files")
        self._gone = os.path.join(self.root, "gone")
        self._parts = os.path.join(self.root, "parts")
        self._marks: frozenset[str] = frozenset()
        self._marked_at = 0  # when `gone` had last changed as they were listed; 0: list them again
        outside = {*_SYSTEM, *shared, *map(os.path.realpath, shared)}
        self._shared = tuple(folder + os.sep for folder in outside)

    # ---- names -------------------------------------------------------------------------------------------------------

    def strip(self, path: str) -> str:
        """Return the path that the script has given for one inside of `files`; any other as it is."""
        if path == self.files:
            return os.sep
        if path.startswith(self.files + os.sep):
            return path[len(self.files) :]
        return path

    def getcwd(self) -> str:
        """Return the working directory as the script knows it."""
        return self.strip(getcwd())

    def is_shared(self, path: str) -> bool:
        """Tell whether an absolute path is in a folder that is not redirected; all of this run's folder is one."""
        whole = path + os.sep
        return whole.startswith(self._shared) or whole.startswith(self.root + os.sep)

    def locate(self, path: Any, dir_fd: int | None = None, *, follow: bool = True) -> Place:
        """Return what a script's path stands for; without `follow`, a link at its end is not followed."""
        text = os.fsdecode(path)
        if not text:
            return Place(text, path, True)  # there is no such file
        is_plain = dir_fd is None
        if not os.path.isabs(text):
            folder = getcwd() if dir_fd is None else self.path_of(dir_fd)
            is_plain = is_plain and self.strip(folder) is folder
            text = os.path.join(self.strip(folder), text)
        elif self.strip(text) is not text:
            text, is_plain = self.strip(text), False
        whole = os.path.normpath(text)
        if self.is_shared(whole):
            return Place(whole, path if is_plain else text, True)
        found, is_real = self._resolve(text, follow)
        return Place(found, path if is_plain and is_real else found, self.is_shared(found))

    def path_of(self, descriptor: int) -> str:
        """Return the path of an open folder, as the script knows it."""
        if sys.platform == "darwin":
            import fcntl

            found = fcntl.fcntl(descriptor, 50, bytes(1024))  # F_GETPATH
            return self.strip(os.fsdecode(found.partition(b"\0")[0]))
        return self.strip(readlink(f"/proc/self/fd/{descriptor}"))

    def _resolve(self, text: str, follow: bool) -> tuple[str, bool]:
        """Return an absolute path without links, and whether it follows no link that this run has made."""
        parts = _PART.findall(text)[::-1]
        done, links, is_real = "", 0, True
        is_above = True  # whether this run may have written at `done`
        while parts:
            part = parts.pop()
            if part == ".":
                continue
            if part == "..":
                self.check_folder(done or os.sep, text)
                done, is_above = os.path.dirname(done).rstrip(os.sep), True
                continue
            done += os.sep + part
            if not parts and not follow and not text.endswith(os.sep):
                break
            target, is_above = self._read_link(done, is_above)
            if target is None:
                continue
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), text)
            is_real = is_real and not is_above
            done = os.path.dirname(done).rstrip(os.sep)
            if os.path.isabs(target):
                target, done = self.strip(target), ""
            is_above = True
            parts += _PART.findall(target)[::-1]
        return done or os.sep, is_real

    def _read_link(self, path: str, is_above: bool) -> tuple[str | None, bool]:
        """Return where a link leads, None for what is none, and whether this run wrote it, or what is at its path."""
        if is_above:
            try:
                return readlink(self.files + path), True
            except OSError as error:
                if error.errno == errno.EINVAL:  # this run wrote it, and it is no link
                    return None, True
        if not self.is_hidden(path):
            with contextlib.suppress(OSError):
                return readlink(path), False
        return None, False

    # ---- what there is -----------------------------------------------------------------------------------------------

    def upper(self, path: str) -> str:
        """Return where this run writes a located path."""
        return self.files + path

    def is_written(self, path: str) -> bool:
        """Tell whether this run has written a located path."""
        return is_there(self.files + path)

    def is_hidden(self, path: str) -> bool:
        """Tell whether what was at a located path before is gone, with it or with a folder that held it."""
        marks = self._find_marks()
        while marks:
            if _mark_of(path) in marks:
                return True
            if path == os.sep:
                break
            path = os.path.dirname(path)
        return False

    def is_lower(self, path: str) -> bool:
        """Tell whether a located path was there before, and still is for this run."""
        return is_there(path) and not self.is_hidden(path)

    def exists(self, path: str) -> bool:
        """Tell whether there is something at a located path."""
        return self.is_written(path) or self.is_lower(path)

    def is_changed(self, folder: str) -> bool:
        """Tell whether this run may have changed which names there are in a located folder."""
        return self.is_written(folder) or bool(self._find_marks())

    def find(self, path: str) -> str | None:
        """Return where a located path is read; None if there is nothing."""
        if self.is_written(path):
            return self.files + path
        if self.is_lower(path):
            return path
        return None

    def list_names(self, path: str) -> list[str]:
        """Return the names in a located folder. Raises OSError if there is none."""
        names: dict[str, None] = {}
        if self.is_lower(path):
            names = dict.fromkeys(_listdir(path))
            marks = self._find_marks()
            if marks:
                names = {name: None for name in names if _mark_of(os.path.join(path, name)) not in marks}
        if self.is_written(path):
            names |= dict.fromkeys(_listdir(self.files + path))
        return list(names)

    # ---- writing -----------------------------------------------------------------------------------------------------

    def read(self, path: Any, dir_fd: int | None = None, *, follow: bool = True) -> Any:
        """Return where a script's path is read. Raises FileNotFoundError for what this run has removed."""
        place = self.locate(path, dir_fd, follow=follow)
        if place.is_shared:
            return place.given
        if self.is_written(place.path):
            return self.files + place.path
        if self.is_hidden(place.path):
            raise make_error(errno.ENOENT, path)
        return place.given

    def write(
        self,
        path: Any,
        dir_fd: int | None = None,
        *,
        follow: bool = True,
        with_content: bool = True,
        is_new: bool = False,
    ) -> Any:
        """Return where a script's path is written: a copy of what was there before, or of its mode alone.

        Raises FileExistsError for what `is_new` and is there.
        """
        place = self.locate(path, dir_fd, follow=follow and not is_new)
        if place.is_shared:
            return place.given
        if is_new and self.exists(place.path):
            raise make_error(errno.EEXIST, path)
        if not self.is_written(place.path) and self.is_lower(place.path) and is_special(place.path):
            return place.given
        return self.copy_up(place.path, path, with_content=with_content)

    def prepare(self, path: str, given: Any) -> str:
        """Return where a located path is written, in a folder that is there now. Raises the error that a script gets
        for a folder that is absent, or may not be written.
        """
        parent = os.path.dirname(path)
        if not access(self.check_folder(parent, given), os.W_OK):
            raise make_error(errno.EACCES, given)
        make_folders(self.files + parent)
        return self.files + path

    def check_folder(self, path: str, given: Any) -> str:
        """Return where a located folder is read. Raises the error that a script gets where there is none."""
        found = self.find(path)
        if found is None:
            above = os.path.dirname(path)
            if above != path:
                self.check_folder(above, given)
            raise make_error(errno.ENOENT, given)
        if not stat.S_ISDIR(_stat(found).st_mode):
            raise make_error(errno.ENOTDIR, given)
        return found

    def copy_up(self, path: str, given: Any, *, with_content: bool = True) -> str:
        """Return where a located path is written; what was there before is copied first."""
        if self.is_written(path):
            return self.files + path
        if not self.is_lower(path):
            return self.prepare(path, given)
        upper, mode = self.files + path, lstat(path).st_mode
        if is_special(path):
            raise make_error(errno.EPERM, given)
        make_folders(os.path.dirname(upper))
        if stat.S_ISDIR(mode):
            make_folders(upper)
        elif stat.S_ISLNK(mode):
            symlink(readlink(path), upper)
        else:
            self._copy(path, upper, with_content)
        return upper

    def copy_tree(self, path: str, given: PathLike) -> str:
        """Copy what was there before at a located path, and below it, and return where it is now."""
        upper = self.copy_up(path, given)
        if stat.S_ISDIR(lstat(upper).st_mode):
            for name in self.list_names(path):
                self.copy_tree(os.path.join(path, name), given)
        return upper

    def _copy(self, source: str, target: str, with_content: bool) -> None:
        """Copy a file. Where several processes do, the first copy counts: that one may be written to already."""
        make_folders(self._parts)
        part = os.path.join(self._parts, f"{os.getpid()}-{threading.get_ident()}")
        with BufferedWriter(FileIO(part, "w")) as copy:
            if with_content:
                with FileIO(source) as original:
                    while chunk := original.read(_CHUNK):
                        copy.write(chunk)
        about = _stat(source)
        chmod(part, stat.S_IMODE(about.st_mode))
        utime(part, ns=(about.st_atime_ns, about.st_mtime_ns))
        with contextlib.suppress(FileExistsError):
            link(part, target)
        unlink(part)

    def hide(self, path: str) -> None:
        """Have what was at a located path before be gone for this run."""
        if self.is_lower(path):
            make_folders(self._gone)
            mark = os.path.join(self._gone, _mark_of(path))
            _close_descriptor(_open_descriptor(mark, os.O_CREAT | os.O_WRONLY, 0o600))
            self._marked_at = 0

    def _find_marks(self) -> frozenset[str]:
        """Return the marks of what is gone, which other processes make as well."""
        try:
            changed_at = lstat(self._gone).st_mtime_ns
        except FileNotFoundError:
            return frozenset()
        if changed_at != self._marked_at:
            is_settled = time.time_ns() - changed_at > _TICK  # else one more mark may not change the time
            self._marks = frozenset(_listdir(self._gone))
            self._marked_at = changed_at if is_settled else 0
        return self._marks


@functools.lru_cache(maxsize=4096)
def _mark_of(path: str) -> str:
    """Return the name of the mark of a path."""
    return hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest()


def make_error(number: int, path: Any) -> OSError:
    """Return the error that the system raises for a path."""
    return OSError(number, os.strerror(number), path if isinstance(path, int) else os.fspath(path))


def is_special(path: str) -> bool:
    """Tell whether a path is a device, a pipe or a socket: it has no content that could be kept."""
    mode = lstat(path).st_mode
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))


def is_there(path: str) -> bool:
    """os.path.lexists, which asks os.lstat, and so whatever has replaced that."""
    try:
        lstat(path)
    except (OSError, ValueError):
        return False
    return True


def make_folders(path: str) -> None:
    """os.makedirs for what may be there, without os.mkdir as it is now."""
    if is_there(path):
        return
    make_folders(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):
        mkdir(path)


class Entry:
    """What os.scandir gives for a name in a folder, found by the functions of a `View`."""

    def __init__(self, path: Any, name: Any, whole: str) -> None:
        self.name = name
        self.path = path
        self._whole = whole

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def inode(self) -> int:
        """The inode number."""
        return os.lstat(self._whole).st_ino

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """As os.stat of the path."""
        return os.stat(self._whole, follow_symlinks=follow_symlinks)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """As os.path.isdir."""
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """As os.path.isfile."""
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        """As os.path.islink."""
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        """False: there are none but on Windows."""
        return False

    def _is(self, kind: Any, follow_symlinks: bool) -> bool:
        try:
            return bool(kind(self.stat(follow_symlinks=follow_symlinks).st_mode))
        except FileNotFoundError:
            return False


class Listing:
    """What os.scandir returns: an iterator that can be closed."""

    def __init__(self, entries: Iterator[Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> "Listing":
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> "Listing":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give no more entries."""
        self._entries = iter(())
