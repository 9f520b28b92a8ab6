"""`Folders`: the folders that the runs of a command write to. Used by the command, not by the runs."""

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

REST = "elsewhere"
"""The folder, in the folder of a run, for files that the script wrote outside of its working directory."""

_CACHES = (
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

_SHOWN = 8  # how many files and folders of a run `describe` names
_UNITS = ("bytes", "kB", "MB", "GB")


def find_shared() -> list[str]:
    """Return the folders that are not redirected: caches, and folders of Python's packages.

    A folder around the working directory is left out, because the user's files are in it.
    """
    folders = [os.environ[name] for name in _CACHES if os.environ.get(name)]
    folders += [os.path.join(os.path.expanduser("~"), name) for name in _CACHES_AT_HOME]
    folders += [os.path.join(sys.prefix, "share"), *site.getsitepackages(), site.getusersitepackages()]
    folders += [sysconfig.get_path("stdlib"), find_inductor_cache()]
    here = os.path.realpath(os.curdir) + os.sep
    whole = dict.fromkeys(map(os.path.abspath, folders))
    return [folder for folder in whole if not here.startswith(os.path.realpath(folder) + os.sep)]


def find_inductor_cache() -> str:
    """Return the cache folder of torch.compile: from the environment, or in the folder for temporary files."""
    chosen = os.environ.get(_INDUCTOR)
    if chosen:
        return chosen
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    # the name that torch gives it
    return os.path.join(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


class Folders:
    """A folder for each run, by name. A run replaces an earlier run of the same name.

    Args:
        command: part of the name of the folder around them.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._top = ""
        self._kept: list[str] = []

    def begin(self, name: str) -> str:
        """Return an empty folder for a run."""
        if not self._top:
            self._top = os.path.realpath(tempfile.mkdtemp(prefix=f"amp-patch-{self._command}-"))
        root = os.path.join(self._top, re.sub(r"[^\w.+-]+", "-", name))
        shutil.rmtree(root, ignore_errors=True)
        os.mkdir(root)
        return root

    def end(self, root: str, *, keep: bool) -> None:
        """Keep only the files that a run wrote: those in the working directory move to the top of its folder."""
        for name in ("gone", "parts", "temp"):
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)
        files = os.path.join(root, "files")
        if keep and os.path.isdir(files):
            _prune(files)
            here = files + os.path.realpath(os.curdir)
            # the working directory's files become the folder itself, so everything moves out of it first
            beside = root + ".part"
            os.rename(root, beside)
            here, files = here.replace(root, beside, 1), files.replace(root, beside, 1)
            if os.path.isdir(here):
                os.rename(here, root)
            _prune(files)
            if os.path.isdir(files):
                os.makedirs(root, exist_ok=True)
                rest = os.path.join(root, REST)
                # the script may have made a folder of that name
                while os.path.lexists(rest):
                    rest += "_"
                os.rename(files, rest)
            shutil.rmtree(beside, ignore_errors=True)
        else:
            shutil.rmtree(root, ignore_errors=True)
        # from an earlier run of the same name
        if root in self._kept:
            self._kept.remove(root)
        if os.path.isdir(root):
            self._kept.append(root)
        if not self._kept:
            with contextlib.suppress(OSError):
                os.rmdir(self._top)
            self._top = ""

    def describe(self) -> list[str]:
        """Return lines that name the files and their folder; no lines if no run wrote any."""
        lines, count, size = [], 0, 0
        for root in self._kept:
            files = sorted(_find_files(root))
            lines.append(f"  {os.path.basename(root)}: {_name(files)}")
            count += len(files)
            size += sum(os.lstat(os.path.join(root, name)).st_size for name in files)
        if not lines:
            return []
        return [
            f"the runs wrote {count_of(count, 'file')} ({_format_size(size)}) to {self._top}, not over yours:",
            *lines,
        ]


def _name(files: list[str]) -> str:
    """Return the names of files, and of folders with the number of files in each."""
    counts = Counter(name.partition(os.sep)[0] + os.sep for name in files if os.sep in name)
    names = [name for name in files if os.sep not in name]
    names += [f"{name} ({count_of(count, 'file')})" for name, count in counts.items()]
    if len(names) > _SHOWN:
        names[_SHOWN - 1 :] = [f"and {len(names) - _SHOWN + 1} more"]
    return ", ".join(names)


def _find_files(root: str) -> list[str]:
    return [
        os.path.relpath(os.path.join(folder, name), root)
        for folder, folders, names in os.walk(root)
        for name in [*names, *(child for child in folders if os.path.islink(os.path.join(folder, child)))]
    ]


def _prune(folder: str) -> None:
    """Remove folders without files."""
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
