"""`Redirected`: replacements of functions of `os` and `io` that take or return paths.

Most call the original function with the path that a `View` returns: the path to read, or the path to write. `view`
explains located paths, the lower layer and marks.
"""

import contextlib
import errno
import io
import os
import stat
from collections.abc import Callable
from typing import Any

from .view import FolderEntry, Listing, Location, View, make_error

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Redirected:
    """Has a method for each replaced function of `os`, with the same name and arguments.

    `open_file` replaces the built-in `open`, and `open_code` replaces `io.open_code`.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._os = {name: getattr(os, name) for name in FUNCTIONS if hasattr(os, name)}
        self._open_file = io.open
        self._open_code = io.open_code

    def originals(self) -> dict[str, Callable[..., Any]]:
        """Return the original functions of `os` by name. A function that the operating system lacks is left out."""
        return dict(self._os)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def stat(self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        if not isinstance(path, int):
            path = self._view.path_to_read(path, dir_fd, follow=follow_symlinks)
        status: os.stat_result = self._os["stat"](path, follow_symlinks=follow_symlinks)
        return status

    def lstat(self, path: Any, *, dir_fd: int | None = None) -> os.stat_result:
        status: os.stat_result = self._os["lstat"](self._view.path_to_read(path, dir_fd, follow=False))
        return status

    def access(self, path: Any, mode: int, *, dir_fd: int | None = None, **options: Any) -> bool:
        with contextlib.suppress(OSError):
            if not isinstance(path, int):
                path = self._view.path_to_read(path, dir_fd, follow=options.get("follow_symlinks", True))
            return bool(self._os["access"](path, mode, **options))
        return False

    def readlink(self, path: Any, *, dir_fd: int | None = None) -> Any:
        return _as_type(os.fsdecode(self._os["readlink"](self._view.path_to_read(path, dir_fd, follow=False))), path)

    def getxattr(self, path: Any, attribute: Any, *, follow_symlinks: bool = True) -> Any:
        return self._os["getxattr"](
            self._path_to_read(path, follow_symlinks), attribute, follow_symlinks=follow_symlinks
        )

    def listxattr(self, path: Any = None, *, follow_symlinks: bool = True) -> Any:
        return self._os["listxattr"](
            self._path_to_read("." if path is None else path, follow_symlinks), follow_symlinks=follow_symlinks
        )

    def statvfs(self, path: Any) -> Any:
        return self._os["statvfs"](self._path_to_read(path, True))

    def listdir(self, path: Any = None) -> list[Any]:
        given = "." if path is None else path
        folder = self._find_merged(given)
        if folder is None:
            names: list[Any] = self._os["listdir"](given if isinstance(given, int) else self._view.locate(given).direct)
            return names
        return [_as_type(name, given) for name in self._list(folder, given)]

    def scandir(self, path: Any = None) -> Any:
        given = "." if path is None else path
        folder = self._find_merged(given)
        if folder is None:
            return self._os["scandir"](given if isinstance(given, int) else self._view.locate(given).direct)
        prefix: Any = "" if isinstance(given, int) else os.fspath(given)
        entries = []
        for name in self._list(folder, given):
            shown = _as_type(name, prefix)
            entries.append(FolderEntry(os.path.join(prefix, shown), shown, os.path.join(folder, name)))
        return Listing(iter(entries))

    def getcwd(self) -> str:
        return self._view.getcwd()

    def getcwdb(self) -> bytes:
        return os.fsencode(self._view.getcwd())

    def chdir(self, path: Any) -> None:
        if not isinstance(path, int):
            location = self._view.locate(path)
            # Go to the folder of the lower layer if there is one: programs that the script starts may not be
            # redirected, and look for the user's files there.
            is_real = location.is_shared or self._view.sees_lower(location.path)
            path = location.direct if is_real else self._view.path_to_read(path)
        self._os["chdir"](path)

    def _path_to_read(self, path: Any, follow: bool) -> Any:
        if isinstance(path, int):
            return path
        return self._view.path_to_read(path, follow=follow)

    def _find_merged(self, path: Any) -> str | None:
        """Return the located path of a folder, for `_list`. None means that the original function can list it."""
        if isinstance(path, int):
            folder = self._view.path_of(path)
            if self._view.is_shared(folder):
                return None
        else:
            location = self._view.locate(path)
            if location.is_shared:
                return None
            folder = location.path
        return folder if self._view.is_changed(folder) else None

    def _list(self, folder: str, given: Any) -> list[str]:
        """Return the names that the script sees in the folder at a located path. Errors name the path `given`."""
        existing = self._view.find(folder)
        if existing is None:
            raise make_error(errno.ENOENT, given)
        if not stat.S_ISDIR(self._os["stat"](existing).st_mode):
            raise make_error(errno.ENOTDIR, given)
        return self._view.list_names(folder)

    # ---- opening -----------------------------------------------------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        follow = not flags & getattr(os, "O_NOFOLLOW", 0)
        if not flags & WRITE_FLAGS:
            path = self._view.path_to_read(path, dir_fd, follow=follow)
        else:
            is_new = bool(flags & os.O_EXCL and flags & os.O_CREAT)
            if not is_new:
                self._check_mode(path, dir_fd)
            path = self._view.path_to_write(
                path, dir_fd, follow=follow, with_content=not flags & os.O_TRUNC, is_new=is_new
            )
        descriptor: int = self._os["open"](path, flags, mode)
        return descriptor

    def open_file(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Callable[[str, int], int] | None = None,
    ) -> Any:
        path = file
        if not isinstance(file, int) and isinstance(mode, str):
            if not set(mode) & set("wax+"):
                path = self._view.path_to_read(file)
            else:
                is_new = "x" in mode
                if not is_new:
                    self._check_mode(file, None)
                path = self._view.path_to_write(file, with_content="w" not in mode, is_new=is_new)
        opened = self._open_file(path, mode, buffering, encoding, errors, newline, closefd, opener)
        if path is not file:
            lowest = getattr(opened, "buffer", opened)
            raw: Any = getattr(lowest, "raw", lowest)
            # the attribute `name` must be the path that the script passed, not the path that was opened
            raw.name = os.fspath(file)
        return opened

    def open_code(self, path: str) -> Any:
        return self._open_code(self._view.path_to_read(path))

    def _check_mode(self, path: Any, dir_fd: int | None) -> None:
        """Raise PermissionError for a file of the lower layer that may not be written.

        The run could write to its own copy of the file, but without redirection the script would get this error.
        """
        location = self._view.locate(path, dir_fd)
        if location.is_shared or self._view.is_written(location.path) or not self._view.sees_lower(location.path):
            return
        if not self._os["access"](location.path, os.W_OK):
            raise make_error(errno.EACCES, path)

    # ---- making and removing -----------------------------------------------------------------------------------------

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._os["mkdir"](self._view.path_to_write(path, dir_fd, follow=False, is_new=True), mode)

    def mkfifo(self, path: Any, mode: int = 0o666, *, dir_fd: int | None = None) -> None:
        self._os["mkfifo"](self._view.path_to_write(path, dir_fd, follow=False, is_new=True), mode)

    def mknod(self, path: Any, mode: int = 0o600, device: int = 0, *, dir_fd: int | None = None) -> None:
        self._os["mknod"](self._view.path_to_write(path, dir_fd, follow=False, is_new=True), mode, device)

    def symlink(self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        self._os["symlink"](src, self._view.path_to_write(dst, dir_fd, follow=False, is_new=True), target_is_directory)

    def link(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        # on Linux, os.link usually does not follow a link at the end of the path, even with `follow_symlinks`
        source = self._path_to_change(src, src_dir_fd, follow=False)
        self._os["link"](source, self._view.path_to_write(dst, dst_dir_fd, follow=False, is_new=True))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        location = self._view.locate(path, dir_fd, follow=False)
        if location.is_shared:
            self._os["unlink"](location.direct)
            return
        self._remove(location, path, "unlink")

    def remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        self.unlink(path, dir_fd=dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        location = self._view.locate(path, dir_fd, follow=False)
        if location.is_shared:
            self._os["rmdir"](location.direct)
            return
        folder = self._view.find(location.path)
        is_folder = folder is not None and stat.S_ISDIR(self._os["lstat"](folder).st_mode)
        if is_folder and self._view.list_names(location.path):
            raise make_error(errno.ENOTEMPTY, path)
        self._remove(location, path, "rmdir")

    def _remove(self, location: Location, given: Any, how: str) -> None:
        """Remove a file or folder from the script's view. `how` is the name of the function: "unlink" or "rmdir"."""
        view = self._view
        view.prepare_folder_of(location.path, given)  # raises an error if its folder may not be written
        existing = view.find(location.path)
        if existing is None:
            raise make_error(errno.ENOENT, given)
        is_folder = stat.S_ISDIR(self._os["lstat"](existing).st_mode)
        if is_folder is not (how == "rmdir"):
            raise make_error(errno.EISDIR if is_folder else errno.ENOTDIR, given)
        if view.is_written(location.path):
            self._os[how](view.upper(location.path))
        view.hide(location.path)

    # ---- moving ------------------------------------------------------------------------------------------------------

    def rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        view = self._view
        source = view.locate(src, src_dir_fd, follow=False)
        target = view.locate(dst, dst_dir_fd, follow=False)
        is_folder = False
        if source.is_shared:
            moved = source.direct
        else:
            existing = view.find(source.path)
            if existing is None:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), src, None, dst)
            if source.path == target.path:
                return
            is_folder = stat.S_ISDIR(self._os["lstat"](existing).st_mode)
            view.prepare_folder_of(source.path, src)
            # the lower layer must not change, so its files are copied, and the copy is moved
            moved = view.copy_tree(source.path, src)
        if target.is_shared:
            self._os["replace"](moved, target.direct)
        else:
            self._check_target(target.path, is_folder, dst)
            self._os["replace"](moved, view.prepare_folder_of(target.path, dst))
            # a mark hides the file of the lower layer at the target; if it is a folder, also everything in it
            view.hide(target.path)
        if not source.is_shared:
            view.hide(source.path)

    def replace(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        self.rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def _check_target(self, path: str, is_folder: bool, given: Any) -> None:
        """Raise the system's error if a rename cannot replace the file or folder at the target."""
        existing = self._view.find(path)
        if existing is None:
            return
        is_target_folder = stat.S_ISDIR(self._os["lstat"](existing).st_mode)
        if is_target_folder and not is_folder:
            raise make_error(errno.EISDIR, given)
        if is_folder and not is_target_folder:
            raise make_error(errno.ENOTDIR, given)
        if is_target_folder and self._view.list_names(path):
            raise make_error(errno.ENOTEMPTY, given)

    # ---- changing ----------------------------------------------------------------------------------------------------

    def truncate(self, path: Any, length: int) -> None:
        if not isinstance(path, int):
            self._check_mode(path, None)
        self._os["truncate"](self._path_to_change(path), length)

    def chmod(self, path: Any, mode: int, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> None:
        self._os["chmod"](self._path_to_change(path, dir_fd, follow_symlinks), mode, follow_symlinks=follow_symlinks)

    def chown(self, path: Any, uid: int, gid: int, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> None:
        self._os["chown"](
            self._path_to_change(path, dir_fd, follow_symlinks), uid, gid, follow_symlinks=follow_symlinks
        )

    def lchown(self, path: Any, uid: int, gid: int) -> None:
        self._os["lchown"](self._path_to_change(path, follow=False), uid, gid)

    def utime(
        self, path: Any, times: Any = None, *, dir_fd: int | None = None, follow_symlinks: bool = True, **ns: Any
    ) -> None:
        if times is not None:
            ns["times"] = times
        self._os["utime"](self._path_to_change(path, dir_fd, follow_symlinks), **ns, follow_symlinks=follow_symlinks)

    def setxattr(self, path: Any, attribute: Any, value: Any, flags: int = 0, *, follow_symlinks: bool = True) -> None:
        changed = self._path_to_change(path, follow=follow_symlinks)
        self._os["setxattr"](changed, attribute, value, flags, follow_symlinks=follow_symlinks)

    def removexattr(self, path: Any, attribute: Any, *, follow_symlinks: bool = True) -> None:
        self._os["removexattr"](
            self._path_to_change(path, follow=follow_symlinks), attribute, follow_symlinks=follow_symlinks
        )

    def _path_to_change(self, path: Any, dir_fd: int | None = None, follow: bool = True) -> Any:
        """Return the path to write in order to change an existing file. A file descriptor is returned as it is."""
        if isinstance(path, int):
            return path
        self._view.path_to_read(path, dir_fd, follow=follow)  # raises FileNotFoundError for a removed file
        return self._view.path_to_write(path, dir_fd, follow=follow)


FUNCTIONS = tuple(
    name
    for name in vars(Redirected)
    if not name.startswith("_") and name not in ("originals", "open_file", "open_code")
)
"""The names of the functions of `os` to replace."""


def _as_type(name: str, path: Any) -> Any:
    """Return a name as bytes if the path is bytes."""
    if isinstance(path, bytes):
        return os.fsencode(name)
    return name
