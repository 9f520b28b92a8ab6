"""`View`: the file system as a rerun of a script sees it: its own files over the files from before the run.

It works like overlayfs. Files of the run are in the folder `files` (the upper layer), under the paths that the script
used. Files from before (the lower layer) are only read; those that the run removed have a mark in the folder `gone`,
which also hides everything below their path. Both are folders on disk, so that all processes of a run see the same.
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
from io import BufferedWriter, FileIO  # by name: `redirect` replaces the attributes of io and os later
from os import access, chmod, getcwd, link, lstat, mkdir, readlink, symlink, unlink, utime
from os import close as _close_descriptor
from os import listdir as _listdir
from os import open as _open_descriptor
from os import stat as _stat
from typing import Any, NamedTuple

PathLike = int | str | bytes | os.PathLike[str] | os.PathLike[bytes]

_SYSTEM = ("/dev", "/proc", "/sys")
_MOST_LINKS = 40  # in one path, as on Linux
_CHUNK = 2**24
_TICK = 100_000_000  # nanoseconds; file systems resolve times to 10 ms or better
_PART = re.compile(r"[^/]+")


class Location(NamedTuple):
    """The file that a path of a script names.

    Attributes:
        path: the absolute path, without links.
        given: the path to use outside of `files`: the script's own, unless it only has a meaning in the view.
        is_shared: the file is in a folder that is not redirected.
    """

    path: str
    given: Any
    is_shared: bool


class View:
    """Maps the paths of a script to the files to read and to write.

    Args:
        root: the folder of this run, absolute.
        shared: folders that are not redirected: caches, and folders of the command itself.
    """

    def __init__(self, root: str, shared: Sequence[str] = ()) -> None:
        self.root = os.path.realpath(root)
        self.files = os.path.join(self.root, "files")
        self._gone = os.path.join(self.root, "gone")
        self._parts = os.path.join(self.root, "parts")
        self._marks: frozenset[str] = frozenset()
        self._marked_at = 0  # the mtime of `gone` when the marks were listed; 0: list them again
        outside = {*_SYSTEM, *shared, *map(os.path.realpath, shared)}
        self._shared = tuple(folder + os.sep for folder in outside)

    # ---- names -------------------------------------------------------------------------------------------------------

    def strip(self, path: str) -> str:
        """Return the script's path of a file in `files`; other paths as they are."""
        if path == self.files:
            return os.sep
        if path.startswith(self.files + os.sep):
            return path[len(self.files) :]
        return path

    def getcwd(self) -> str:
        """Return the script's path of the working directory."""
        return self.strip(getcwd())

    def is_shared(self, path: str) -> bool:
        """Return whether an absolute path is in a folder that is not redirected, such as the run's own."""
        whole = path + os.sep
        return whole.startswith(self._shared) or whole.startswith(self.root + os.sep)

    def locate(self, path: Any, dir_fd: int | None = None, *, follow: bool = True) -> Location:
        """Return the location of a script's path. Without `follow`, a link at its end is not followed."""
        text = os.fsdecode(path)
        if not text:
            return Location(text, path, True)  # the system raises FileNotFoundError for it
        is_plain = dir_fd is None
        if not os.path.isabs(text):
            folder = getcwd() if dir_fd is None else self.path_of(dir_fd)
            is_plain = is_plain and self.strip(folder) is folder
            text = os.path.join(self.strip(folder), text)
        elif self.strip(text) is not text:
            text, is_plain = self.strip(text), False
        whole = os.path.normpath(text)
        if self.is_shared(whole):
            return Location(whole, path if is_plain else text, True)
        resolved, is_real = self._resolve(text, follow)
        return Location(resolved, path if is_plain and is_real else resolved, self.is_shared(resolved))

    def path_of(self, descriptor: int) -> str:
        """Return the script's path of an open folder."""
        if sys.platform == "darwin":
            import fcntl

            buffer = fcntl.fcntl(descriptor, 50, bytes(1024))  # F_GETPATH
            return self.strip(os.fsdecode(buffer.partition(b"\0")[0]))
        return self.strip(readlink(f"/proc/self/fd/{descriptor}"))

    def _resolve(self, text: str, follow: bool) -> tuple[str, bool]:
        """Return an absolute path without links, and whether none of these was made by this run."""
        parts = _PART.findall(text)[::-1]
        done, links, is_real = "", 0, True
        is_above = True  # this run may have written at `done`
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
        """Return the target of a link, None if it is no link, and whether the upper layer has something at the path."""
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

    # ---- reading -----------------------------------------------------------------------------------------------------

    def upper(self, path: str) -> str:
        """Return the path in the upper layer of a located path."""
        return self.files + path

    def is_written(self, path: str) -> bool:
        """Return whether this run has written a located path."""
        return is_there(self.files + path)

    def is_hidden(self, path: str) -> bool:
        """Return whether the file from before at a located path was removed, or a folder around it."""
        marks = self._find_marks()
        while marks:  # nearly always there are none, and no path is hashed
            if _mark_of(path) in marks:
                return True
            if path == os.sep:
                break
            path = os.path.dirname(path)
        return False

    def is_lower(self, path: str) -> bool:
        """Return whether the run sees the file from before at a located path."""
        return is_there(path) and not self.is_hidden(path)

    def exists(self, path: str) -> bool:
        """Return whether the run sees anything at a located path."""
        return self.is_written(path) or self.is_lower(path)

    def is_changed(self, folder: str) -> bool:
        """Return whether this run may have changed the names in a located folder."""
        return self.is_written(folder) or bool(self._find_marks())

    def find(self, path: str) -> str | None:
        """Return the path to read for a located path, or None if there is nothing."""
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
        """Return the path to read for a script's path. Raises FileNotFoundError if this run has removed it."""
        location = self.locate(path, dir_fd, follow=follow)
        if location.is_shared:
            return location.given
        if self.is_written(location.path):
            return self.files + location.path
        if self.is_hidden(location.path):
            raise make_error(errno.ENOENT, path)
        return location.given

    def write(
        self,
        path: Any,
        dir_fd: int | None = None,
        *,
        follow: bool = True,
        with_content: bool = True,
        is_new: bool = False,
    ) -> Any:
        """Return the path to write for a script's path. A file from before is copied there first.

        Args:
            with_content: False copies only its mode.
            is_new: raise FileExistsError if there is anything.
        """
        location = self.locate(path, dir_fd, follow=follow and not is_new)
        if location.is_shared:
            return location.given
        if is_new and self.exists(location.path):
            raise make_error(errno.EEXIST, path)
        if not self.is_written(location.path) and self.is_lower(location.path) and is_special(location.path):
            return location.given
        return self.copy_up(location.path, path, with_content=with_content)

    def prepare(self, path: str, given: Any) -> str:
        """Return the path to write for a located path, and make its folder.

        Raises the error that a script gets for a folder that does not exist or may not be written.
        """
        parent = os.path.dirname(path)
        if not access(self.check_folder(parent, given), os.W_OK):
            raise make_error(errno.EACCES, given)
        make_folders(self.files + parent)
        return self.files + path

    def check_folder(self, path: str, given: Any) -> str:
        """Return the path to read for a located folder. Raises the error that a script gets if there is none."""
        folder = self.find(path)
        if folder is None:
            above = os.path.dirname(path)
            if above != path:
                self.check_folder(above, given)
            raise make_error(errno.ENOENT, given)
        if not stat.S_ISDIR(_stat(folder).st_mode):
            raise make_error(errno.ENOTDIR, given)
        return folder

    def copy_up(self, path: str, given: Any, *, with_content: bool = True) -> str:
        """Return the path to write for a located path, and copy the file from before there first."""
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
        """Copy the files from before at and below a located path, and return the path to write."""
        upper = self.copy_up(path, given)
        if stat.S_ISDIR(lstat(upper).st_mode):
            for name in self.list_names(path):
                self.copy_tree(os.path.join(path, name), given)
        return upper

    def _copy(self, source: str, target: str, with_content: bool) -> None:
        """Copy a file. If several processes do, the first copy stays: it may have been written to already."""
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
            link(part, target)  # not rename, which would replace the copy of another process
        unlink(part)

    def hide(self, path: str) -> None:
        """Remove the file from before at a located path from the view."""
        if self.is_lower(path):
            make_folders(self._gone)
            mark = os.path.join(self._gone, _mark_of(path))
            _close_descriptor(_open_descriptor(mark, os.O_CREAT | os.O_WRONLY, 0o600))
            self._marked_at = 0

    def _find_marks(self) -> frozenset[str]:
        """Return the marks of removed files. Other processes make some, too."""
        try:
            changed_at = lstat(self._gone).st_mtime_ns
        except FileNotFoundError:
            return frozenset()
        if changed_at != self._marked_at:
            is_settled = time.time_ns() - changed_at > _TICK  # otherwise, another mark may not change the time
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
    """Return whether a path is a device, a pipe or a socket, which has no content to copy."""
    mode = lstat(path).st_mode
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))


def is_there(path: str) -> bool:
    """os.path.lexists, without calling the replacement of os.lstat."""
    try:
        lstat(path)
    except (OSError, ValueError):
        return False
    return True


def make_folders(path: str) -> None:
    """os.makedirs with exist_ok, without calling the replacement of os.mkdir."""
    if is_there(path):
        return
    make_folders(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):
        mkdir(path)


class FolderEntry:
    """The os.DirEntry of a name in a folder of a `View`."""

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
        """Return False: junctions exist on Windows only."""
        return False

    def _is(self, kind: Any, follow_symlinks: bool) -> bool:
        try:
            return bool(kind(self.stat(follow_symlinks=follow_symlinks).st_mode))
        except FileNotFoundError:
            return False


class Listing:
    """The result of os.scandir: an iterator that can be closed."""

    def __init__(self, entries: Iterator[FolderEntry]) -> None:
        self._entries = entries

    def __iter__(self) -> "Listing":
        return self

    def __next__(self) -> FolderEntry:
        return next(self._entries)

    def __enter__(self) -> "Listing":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration."""
        self._entries = iter(())
