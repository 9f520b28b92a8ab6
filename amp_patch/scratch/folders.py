"""`Folders`: the folders that the runs of a command write to. The command uses it, and not the runs themselves."""

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
"""The name of the folder, in the folder of a run, for files that the script wrote outside of its working directory."""

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
_UNITS = ("bytes", "kB", "MB", "GB")


def find_shared() -> list[str]:
    """Return the folders that are not redirected: caches, and the folders of installed packages.

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
    except (KeyError, OSError):
        user = str(os.getuid())
    # the name that torch uses by default
    return os.path.join(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


class Folders:
    """The folders of the runs of one command. A run replaces the folder of an earlier run of the same name.

    Args:
        command: the name of the command, which becomes part of the name of the folder around all of them.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._top = ""  # the folder around the folders of the runs; "" while there is none
        self._kept: list[str] = []  # the folders of runs that wrote files

    def begin(self, name: str) -> str:
        """Return an empty folder for a run."""
        if not self._top:
            self._top = os.path.realpath(tempfile.mkdtemp(prefix=f"amp-patch-{self._command}-"))
        root = os.path.join(self._top, re.sub(r"[^\w.+-]+", "-", name))
        shutil.rmtree(root, ignore_errors=True)
        os.mkdir(root)
        return root

    def end(self, root: str, *, keep: bool) -> None:
        """Turn the folder of a run into one with only the files that the run wrote, or remove it.

        Files that the script wrote to its working directory are then at the top of the folder, files that it wrote
        elsewhere in the folder `OUTSIDE`. The folder is removed without `keep`, or if there are no files.
        """
        for name in ("gone", "parts", "temp"):
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)
        files = os.path.join(root, "files")
        if keep and os.path.isdir(files):
            _prune(files)
            in_working_directory = files + os.path.realpath(os.curdir)
            # The files of the working directory become the folder of the run, so that folder is renamed first.
            renamed = root + ".part"
            os.rename(root, renamed)
            in_working_directory = in_working_directory.replace(root, renamed, 1)
            files = files.replace(root, renamed, 1)
            if os.path.isdir(in_working_directory):
                os.rename(in_working_directory, root)
            _prune(files)
            if os.path.isdir(files):
                os.makedirs(root, exist_ok=True)
                outside = os.path.join(root, OUTSIDE)
                # the script may have made a folder of that name
                while os.path.lexists(outside):
                    outside += "_"
                os.rename(files, outside)
            shutil.rmtree(renamed, ignore_errors=True)
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


def _list_files(files: list[str]) -> str:
    """Return the names of files, and of the folders among them with the number of files in each."""
    counts = Counter(name.partition(os.sep)[0] + os.sep for name in files if os.sep in name)
    names = [name for name in files if os.sep not in name]
    names += [f"{name} ({count_of(count, 'file')})" for name, count in counts.items()]
    if len(names) > _SHOWN:
        names[_SHOWN - 1 :] = [f"and {len(names) - _SHOWN + 1} more"]
    return ", ".join(names)


def _find_files(root: str) -> list[str]:
    """Return the paths of all files below a folder, relative to it. Links to folders count as files."""
    return [
        os.path.relpath(os.path.join(folder, name), root)
        for folder, folders, names in os.walk(root)
        for name in [*names, *(child for child in folders if os.path.islink(os.path.join(folder, child)))]
    ]


def _prune(folder: str) -> None:
    """Remove a folder and the folders below it, as far as there are no files in them."""
    for path, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def _format_size(size: float) -> str:
    """Return a number of bytes with a unit."""
    unit = 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size /= 1000
        unit += 1
    return f"{size:.3g} {_UNITS[unit]}"
