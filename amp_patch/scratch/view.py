"""`View`: the file system as a repeated run of a script sees it: the files that this run has written, and behind them
the files from before the run.

It works like overlayfs. Files that the run writes go to the folder `files` (the *upper layer*), under the paths that
the script used: the script's `/data/log.txt` is `files/data/log.txt`. Files from before the run (the *lower layer*) are
only read. Before the run changes such a file, the file is copied to the upper layer. If the run removes one, a *mark*
in the folder `gone` hides the file, with everything below its path. Layers and marks are on disk, where the processes
of a run share them. *Shared folders*, such as caches, have no layers: they are read and written in place.

Three kinds of paths occur. A *script's path* is what the script passes to a function: it may be relative, and contain
links. A *located path* is absolute, with links resolved, in the file system as the script sees it. The *path to read*
or *to write* is where the file really is.
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
from io import BufferedWriter, FileIO  # by name: `redirect` replaces attributes of io and os later
from os import access, chmod, getcwd, link, lstat, mkdir, readlink, symlink, unlink, utime
from os import close as _close_descriptor
from os import listdir as _listdir
from os import open as _open_descriptor
from os import stat as _stat
from typing import Any, NamedTuple

PathLike = int | str | bytes | os.PathLike[str] | os.PathLike[bytes]

_SYSTEM = ("/dev", "/proc", "/sys")
_MAX_LINKS = 40  # in one path, as on Linux
_CHUNK = 2**24
_TICK = 100_000_000  # 100 ms in nanoseconds; many file systems keep times to about 10 ms
_PART = re.compile(r"[^/]+")


class Location(NamedTuple):
    """The file that a script's path means.

    Attributes:
        path: the located path. Links may remain in it in a shared folder, or at its end (see `locate`).
        direct: the path by which the original functions reach the file in the lower layer or in a shared folder: the
            script's own path if it leads there without redirection, else an absolute path.
        is_shared: whether the file is in a shared folder, which is not redirected, or in the folder of the run itself.
    """

    path: str
    direct: Any
    is_shared: bool


class View:
    """Maps a script's paths to the paths to read and to write.

    Args:
        root: the path of the folder of this run, which contains the upper layer and the marks.
        shared: absolute paths of shared folders. Folders such as /dev are always shared.
    """

    def __init__(self, root: str, shared: Sequence[str] = ()) -> None:
        self.root = os.path.realpath(root)
        self.files = os.path.join(self.root, "files")
        self._gone = os.path.join(self.root, "gone")
        self._part_folder = os.path.join(self.root, "parts")  # for copies that are not complete yet
        self._marks: frozenset[str] = frozenset()  # the names in the folder `gone`, as they were last listed
        self._listed_at = 0  # the mtime of that folder when it was last listed; 0: list it again at the next use
        outside = {*_SYSTEM, *shared, *map(os.path.realpath, shared)}
        self._shared = tuple(folder + os.sep for folder in outside)

    # ---- names -------------------------------------------------------------------------------------------------------

    def to_script_path(self, path: str) -> str:
        """Return the path by which the script names a file of the upper layer. Return any other path as it is."""
        if path == self.files:
            return os.sep
        if path.startswith(self.files + os.sep):
            return path[len(self.files) :]
        return path

    def getcwd(self) -> str:
        """Return the working directory as the script sees it."""
        return self.to_script_path(getcwd())

    def is_shared(self, path: str) -> bool:
        """Return whether a normalized absolute path is in a shared folder, or in the folder of the run itself."""
        as_folder = path + os.sep  # so that /data does not seem to be in /dat, and a folder is in itself
        return as_folder.startswith(self._shared) or as_folder.startswith(self.root + os.sep)

    def locate(self, path: Any, dir_fd: int | None = None, *, follow: bool = True) -> Location:
        """Return the location of a script's path.

        Args:
            dir_fd: the open folder to which a relative path is relative; None for the working directory.
            follow: follow a link at the end of the path.
        """
        text = os.fsdecode(path)
        if not text:
            return Location(text, path, True)  # no file has this path, as the original function finds out
        is_valid_outside = dir_fd is None  # whether the script's path means the same to the original functions
        # for a path outside of the upper layer, `to_script_path` returns the same object: `is` tests this below
        if not os.path.isabs(text):
            folder = getcwd() if dir_fd is None else self.path_of(dir_fd)
            is_valid_outside = is_valid_outside and self.to_script_path(folder) is folder
            text = os.path.join(self.to_script_path(folder), text)
        elif self.to_script_path(text) is not text:
            text, is_valid_outside = self.to_script_path(text), False
        normalized = os.path.normpath(text)
        if self.is_shared(normalized):
            return Location(normalized, path if is_valid_outside else text, True)
        located, has_only_lower_links = self._resolve(text, follow)
        direct = path if is_valid_outside and has_only_lower_links else located
        return Location(located, direct, self.is_shared(located))

    def path_of(self, descriptor: int) -> str:
        """Return the path of an open folder, as the script sees it."""
        if sys.platform == "darwin":
            import fcntl

            buffer = fcntl.fcntl(descriptor, 50, bytes(1024))  # F_GETPATH
            return self.to_script_path(os.fsdecode(buffer.partition(b"\0")[0]))
        return self.to_script_path(readlink(f"/proc/self/fd/{descriptor}"))

    def _resolve(self, text: str, follow: bool) -> tuple[str, bool]:
        """Return the located path of an absolute path, and whether all links on the way are in the lower layer."""
        parts = _PART.findall(text)[::-1]  # the parts that are not resolved yet, the next one last
        resolved, links, has_only_lower_links = "", 0, True
        # Whether the upper layer may have something at `resolved`. If it lacks a folder, it has nothing below this
        # folder, so no look-up is needed there.
        may_be_in_upper = True
        while parts:
            part = parts.pop()
            if part == ".":
                continue
            if part == "..":
                self.check_folder(resolved or os.sep, text)
                resolved, may_be_in_upper = os.path.dirname(resolved).rstrip(os.sep), True
                continue
            resolved += os.sep + part
            # a slash at the end of a path means the folder behind a link, whatever `follow` says
            if not parts and not follow and not text.endswith(os.sep):
                break
            target, may_be_in_upper = self._read_link(resolved, may_be_in_upper)
            if target is None:
                continue
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), text)
            has_only_lower_links = has_only_lower_links and not may_be_in_upper
            # the target takes the place of the link: relative to its folder, or from the root
            resolved = os.path.dirname(resolved).rstrip(os.sep)
            if os.path.isabs(target):
                target, resolved = self.to_script_path(target), ""
            may_be_in_upper = True
            parts += _PART.findall(target)[::-1]
        return resolved or os.sep, has_only_lower_links

    def _read_link(self, path: str, may_be_in_upper: bool) -> tuple[str | None, bool]:
        """Return the target of a link, or None for anything else, and whether the upper layer has something there."""
        if may_be_in_upper:
            try:
                return readlink(self.files + path), True
            except OSError as error:
                if error.errno == errno.EINVAL:  # the upper layer has a file or folder there that is not a link
                    return None, True
        if not self.is_hidden(path):
            with contextlib.suppress(OSError):
                return readlink(path), False
        return None, False

    # ---- reading -----------------------------------------------------------------------------------------------------

    def upper(self, path: str) -> str:
        """Return where the upper layer has, or would have, the file of a located path."""
        return self.files + path

    def is_written(self, path: str) -> bool:
        """Return whether the upper layer has a file or folder at a located path."""
        return lexists(self.files + path)

    def is_hidden(self, path: str) -> bool:
        """Return whether this run has removed the lower layer's file at a located path, or a folder around it."""
        marks = self._find_marks()
        while marks:  # without marks, do not hash the path
            if _mark_of(path) in marks:
                return True
            if path == os.sep:
                break
            path = os.path.dirname(path)
        return False

    def sees_lower(self, path: str) -> bool:
        """Return whether the lower layer has a file or folder at a located path that this run has not removed."""
        return lexists(path) and not self.is_hidden(path)

    def exists(self, path: str) -> bool:
        """Return whether the script sees a file or folder at a located path."""
        return self.is_written(path) or self.sees_lower(path)

    def is_changed(self, folder: str) -> bool:
        """Return whether this run may have added or removed names in the folder at a located path."""
        return self.is_written(folder) or bool(self._find_marks())

    def find(self, path: str) -> str | None:
        """Return the path to read for a located path, or None if there is nothing."""
        if self.is_written(path):
            return self.files + path
        if self.sees_lower(path):
            return path
        return None

    def list_names(self, path: str) -> list[str]:
        """Return the names in the folder at a located path: [] if nothing is there. Raises OSError for a file."""
        names: dict[str, None] = {}
        if self.sees_lower(path):
            names = dict.fromkeys(_listdir(path))
            marks = self._find_marks()
            if marks:
                names = {name: None for name in names if _mark_of(os.path.join(path, name)) not in marks}
        if self.is_written(path):
            names |= dict.fromkeys(_listdir(self.files + path))
        return list(names)

    def path_to_read(self, path: Any, dir_fd: int | None = None, *, follow: bool = True) -> Any:
        """Return the path to read for a script's path.

        Raises FileNotFoundError for a file that this run has removed. Otherwise does not check whether the file exists.
        """
        location = self.locate(path, dir_fd, follow=follow)
        if location.is_shared:
            return location.direct
        if self.is_written(location.path):
            return self.files + location.path
        if self.is_hidden(location.path):
            raise make_error(errno.ENOENT, path)
        return location.direct

    # ---- writing -----------------------------------------------------------------------------------------------------

    def path_to_write(
        self,
        path: Any,
        dir_fd: int | None = None,
        *,
        follow: bool = True,
        with_content: bool = True,
        is_new: bool = False,
    ) -> Any:
        """Return the path to write for a script's path.

        Copies a file of the lower layer to the upper layer, unless the upper layer has it already. Devices, pipes and
        sockets of the lower layer, and files in shared folders, are written where they are.

        Args:
            with_content: copy the content of the file. If False, the copy is empty, but has the file's mode and times.
            is_new: raise FileExistsError if the script sees a file at the path. Shared folders are not checked.
        """
        location = self.locate(path, dir_fd, follow=follow and not is_new)
        if location.is_shared:
            return location.direct
        if is_new and self.exists(location.path):
            raise make_error(errno.EEXIST, path)
        if not self.is_written(location.path) and self.sees_lower(location.path) and is_special(location.path):
            return location.direct
        return self.copy_up(location.path, path, with_content=with_content)

    def prepare_folder_of(self, path: str, given: Any) -> str:
        """Return the path to write for a located path, and make its folder in the upper layer.

        Raises OSError if the folder does not exist, or may not be written to. `given` is the path to name in errors.
        """
        parent = os.path.dirname(path)
        if not access(self.check_folder(parent, given), os.W_OK):
            raise make_error(errno.EACCES, given)
        make_folders(self.files + parent)
        return self.files + path

    def check_folder(self, path: str, given: Any) -> str:
        """Return the path to read for the folder at a located path. Raises the system's error if there is no folder."""
        folder = self.find(path)
        if folder is None:
            parent = os.path.dirname(path)
            if parent != path:
                self.check_folder(parent, given)  # raises ENOTDIR if a part of the path is a file
            raise make_error(errno.ENOENT, given)
        if not stat.S_ISDIR(_stat(folder).st_mode):
            raise make_error(errno.ENOTDIR, given)
        return folder

    def copy_up(self, path: str, given: Any, *, with_content: bool = True) -> str:
        """Copy the lower layer's file at a located path to the upper layer, if there is one. Return the path to write.

        A file that is in the upper layer already stays. Of a folder, only the folder itself is made. Raises OSError for
        a device, a pipe or a socket, and where a new file cannot be made. `given` is the path to name in errors.
        """
        if self.is_written(path):
            return self.files + path
        if not self.sees_lower(path):
            return self.prepare_folder_of(path, given)
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
        """Copy the lower layer's files at and below a located path, and return the path to write."""
        upper = self.copy_up(path, given)
        if stat.S_ISDIR(lstat(upper).st_mode):
            for name in self.list_names(path):
                self.copy_tree(os.path.join(path, name), given)
        return upper

    def _copy(self, source: str, target: str, with_content: bool) -> None:
        """Copy a file. If another process has copied the file meanwhile, keep that copy: it may be changed already."""
        make_folders(self._part_folder)
        part = os.path.join(self._part_folder, f"{os.getpid()}-{threading.get_ident()}")
        with BufferedWriter(FileIO(part, "w")) as copy:
            if with_content:
                with FileIO(source) as original:
                    while chunk := original.read(_CHUNK):
                        copy.write(chunk)
        about = _stat(source)
        chmod(part, stat.S_IMODE(about.st_mode))
        utime(part, ns=(about.st_atime_ns, about.st_mtime_ns))
        with contextlib.suppress(FileExistsError):
            # `link` raises an error if the target exists; a rename would replace the copy of another process
            link(part, target)
        unlink(part)

    def hide(self, path: str) -> None:
        """Hide the lower layer's file at a located path from the script, with everything below the path."""
        if self.sees_lower(path):
            make_folders(self._gone)
            mark = os.path.join(self._gone, _mark_of(path))
            _close_descriptor(_open_descriptor(mark, os.O_CREAT | os.O_WRONLY, 0o600))
            self._listed_at = 0

    def _find_marks(self) -> frozenset[str]:
        """Return the marks of all removed files. Lists the folder again if this or another process has changed it."""
        try:
            changed_at = lstat(self._gone).st_mtime_ns
        except FileNotFoundError:
            return frozenset()
        if changed_at != self._listed_at:
            # A mark that is added right after the last one may leave the folder's time as it is. So if the last change
            # was a moment ago, list the folder again at the next use.
            is_settled = time.time_ns() - changed_at > _TICK
            self._marks = frozenset(_listdir(self._gone))
            self._listed_at = changed_at if is_settled else 0
        return self._marks


@functools.lru_cache(maxsize=4096)
def _mark_of(path: str) -> str:
    """Return the name of the mark that hides a located path."""
    return hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest()


def make_error(number: int, path: Any) -> OSError:
    """Return the error that the system raises for a path."""
    return OSError(number, os.strerror(number), path if isinstance(path, int) else os.fspath(path))


def is_special(path: str) -> bool:
    """Return whether a path is a device, a pipe or a socket."""
    mode = lstat(path).st_mode
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))


def lexists(path: str) -> bool:
    """Like os.path.lexists, which would call the replacement of os.lstat."""
    try:
        lstat(path)
    except (OSError, ValueError):
        return False
    return True


def make_folders(path: str) -> None:
    """Make a folder and the folders above it, where nothing exists. os.makedirs would call the replacement of mkdir."""
    if lexists(path):
        return
    make_folders(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):
        mkdir(path)


class FolderEntry:
    """Stands in for os.DirEntry in the result of `scandir`.

    Args:
        path, name: the attributes of an os.DirEntry.
        located: the located path of the entry.
    """

    def __init__(self, path: Any, name: Any, located: str) -> None:
        self.name = name
        self.path = path
        self._located = located

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def inode(self) -> int:
        """Return the inode number."""
        return os.lstat(self._located).st_ino

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the result of os.stat for the path."""
        return os.stat(self._located, follow_symlinks=follow_symlinks)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether the entry is a folder."""
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether the entry is a regular file."""
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        """Return whether the entry is a link."""
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        """Return False. Junctions exist on Windows, where files are not redirected."""
        return False

    def _is(self, kind: Any, follow_symlinks: bool) -> bool:
        try:
            return bool(kind(self.stat(follow_symlinks=follow_symlinks).st_mode))
        except FileNotFoundError:
            return False


class Listing:
    """Stands in for the result of os.scandir: an iterator that can be closed."""

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
