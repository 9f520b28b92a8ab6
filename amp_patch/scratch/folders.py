"""`Folders`: the folders that the runs of a command write to, as the process of the command makes and tidies them."""

import contextlib
import getpass
import os
import re
import shutil
import site
import sys
import sysconfig
import tempfile
from collections import Counter

from ..tables import count_of

OUTSIDE = "elsewhere"
"""The name of the folder, in the folder of a run, for files from outside of the command's working directory."""

_CACHE_VARIABLES = (
    "CUDA_CACHE_PATH",
    "HF_DATASETS_CACHE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "MPLCONFIGDIR",
    "NUMBA_CACHE_DIR",
    "PYTHONPYCACHEPREFIX",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_HOME",
    "TRANSFORMERS_CACHE",
    "TRITON_CACHE_DIR",
    "XDG_CACHE_HOME",
)
_CACHES_AT_HOME = (".cache", ".config/matplotlib", ".keras", ".matplotlib", ".nv", ".triton")
_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"

_SHOWN = 8  # the largest number of files and folders of a run that `describe` names
_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def find_shared() -> list[str]:
    """Return the folders that are not redirected: caches, and the folders of Python and of installed packages.

    A folder that contains the working directory is left out, because the script's own files are in it.
    """
    folders = [os.environ[name] for name in _CACHE_VARIABLES if os.environ.get(name)]
    folders += [os.path.join(os.path.expanduser("~"), name) for name in _CACHES_AT_HOME]
    folders += [os.path.join(sys.prefix, "share"), *site.getsitepackages(), site.getusersitepackages()]
    folders += [sysconfig.get_path("stdlib"), find_inductor_cache()]
    here = os.path.realpath(os.curdir) + os.sep
    absolute = dict.fromkeys(map(os.path.abspath, folders))  # each once, in order
    return [folder for folder in absolute if not here.startswith(os.path.realpath(folder) + os.sep)]


def find_inductor_cache() -> str:
    """Return the cache folder of torch.compile: from the environment, or in the folder for temporary files."""
    chosen = os.environ.get(_INDUCTOR)
    if chosen:
        return chosen
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user has no entry in the password database, as in some containers
        user = f"uid_{os.getuid()}"
    # the name that torch uses by default
    return os.path.join(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


class Folders:
    """The folders of the runs of one command. A run replaces the folder of an earlier run of the same name.

    Args:
        command: the name of the command. It is part of the name of the folder around the folders of the runs.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._top = ""  # the folder around the folders of the runs; "" while there is none
        self._kept: list[str] = []  # the folders of runs whose files are kept

    def begin(self, name: str) -> str:
        """Make an empty folder for a run, and return its path."""
        if not self._top:
            self._top = os.path.realpath(tempfile.mkdtemp(prefix=f"amp-patch-{self._command}-"))
        root = os.path.join(self._top, re.sub(r"[^\w.+-]+", "-", name))
        shutil.rmtree(root, ignore_errors=True)
        os.mkdir(root)
        return root

    def end(self, root: str, *, keep: bool) -> None:
        """Keep the files that the run wrote, if `keep` is True and there are any. Else remove the folder.

        Files of the command's working directory move to the top of the folder, and other files to the folder `OUTSIDE`
        in it. Temporary files are removed.
        """
        if keep and os.path.isdir(os.path.join(root, "files")):
            _leave_files(root)
        else:
            shutil.rmtree(root, ignore_errors=True)
        # an earlier run of the same name had the same folder
        if root in self._kept:
            self._kept.remove(root)
        if os.path.isdir(root):
            self._kept.append(root)
        if not self._kept:
            with contextlib.suppress(OSError):
                os.rmdir(self._top)
            self._top = ""

    def describe(self) -> list[str]:
        """Return lines that name the kept files and their folder. Returns no lines if there are none."""
        lines, count, size = [], 0, 0
        for root in self._kept:
            files = sorted(_find_files(root))
            lines.append(f"  {os.path.basename(root)}: {_list_files(files)}")
            count += len(files)
            size += sum(os.lstat(os.path.join(root, name)).st_size for name in files)
        if not lines:
            return []
        return [
            f"the runs wrote {count_of(count, 'file')} ({_format_size(size)}) to {self._top}, not over yours:",
            *lines,
        ]


def _leave_files(root: str) -> None:
    """Turn the folder of a run, which holds layers and marks (see `view`), into a folder with the files of the run."""
    # what was written to the working directory becomes the folder `root`, so `root` gets another name first
    layers = root + ".part"
    os.rename(root, layers)
    files = os.path.join(layers, "files")
    _prune(files)
    working_directory = files + os.path.realpath(os.curdir)
    if os.path.isdir(working_directory):
        os.rename(working_directory, root)
    _prune(files)
    if os.path.isdir(files):
        os.makedirs(root, exist_ok=True)
        outside = os.path.join(root, OUTSIDE)
        # the script may have made a folder of that name
        while os.path.lexists(outside):
            outside += "_"
        os.rename(files, outside)
    shutil.rmtree(layers, ignore_errors=True)


def _list_files(files: list[str]) -> str:
    """Return the names of the files at the top of a folder, and of its folders, with the number of files in each.

    `files` are paths relative to the folder.
    """
    counts = Counter(name.partition(os.sep)[0] + os.sep for name in files if os.sep in name)
    names = [name for name in files if os.sep not in name]
    names += [f"{name} ({count_of(count, 'file')})" for name, count in counts.items()]
    if len(names) > _SHOWN:
        names[_SHOWN - 1 :] = [f"and {len(names) - _SHOWN + 1} more"]
    return ", ".join(names)


def _find_files(root: str) -> list[str]:
    """Return the paths of all files in a folder and below it, relative to it. Links to folders count as files."""
    return [
        os.path.relpath(os.path.join(folder, name), root)
        for folder, folders, names in os.walk(root)
        for name in [*names, *(child for child in folders if os.path.islink(os.path.join(folder, child)))]
    ]


def _prune(folder: str) -> None:
    """Remove a folder, and the folders in it, where they hold no files."""
    for path, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def _format_size(size: float) -> str:
    """Return a number of bytes with a unit."""
    unit = 0
    # from 999.5 on, three digits would show 1e+03
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size /= 1000
        unit += 1
    return f"{size:.3g} {_UNITS[unit]}"
