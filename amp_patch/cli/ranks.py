"""`Ranks`: a command that a launcher starts once for each rank, as in `torchrun -m amp_patch trace train.py`.

Each of these processes runs the script for its own rank. They share a folder, one for each machine. The first rank of
the machine reads the recordings of all of them and prints the result; the others print nothing.
"""

import argparse
import contextlib
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from ..errors import SessionError

_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 30.0
"""How long the first rank waits for the others after one of them has failed or finished the search."""

_RUN = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


class Ranks:
    """The ranks of this machine. `here` and `count` are their own numbers, from 0."""

    def __init__(self, here: int, count: int) -> None:
        self.here = here
        self.count = count
        # the same for all ranks of one launch on one machine, and for no others
        name = "\n".join([str(os.getppid()), *(os.environ.get(variable, "") for variable in _RUN)])
        digest = hashlib.sha256(name.encode()).hexdigest()
        self.folder = Path(tempfile.gettempdir(), f"amp-patch-ranks-{digest[:16]}")

    @property
    def is_first(self) -> bool:
        """Whether this process prints the result."""
        return self.here == 0

    @contextlib.contextmanager
    def meet(self) -> Iterator[str]:
        """Yield the shared folder, which the first rank removes. Raises SessionError if another user owns it."""
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        # the name can be guessed, so another user may have made the folder
        status = self.folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or (hasattr(os, "getuid") and status.st_uid != os.getuid()):
            raise SessionError(f"{self.folder} is not a folder of yours; remove it")
        try:
            yield str(self.folder)
        finally:
            if self.is_first:
                shutil.rmtree(self.folder, ignore_errors=True)

    def leave(self, code: int) -> NoReturn:
        """End this process, which is not the first, and leave the exit code of its script to the first."""
        with contextlib.suppress(FileNotFoundError):  # the first has removed the folder
            file = self.folder / f"ended-{self.here}.part"
            # renamed when it is complete, because the first rank reads it at any time
            file.write_text(str(code), encoding="utf-8")
            file.replace(file.with_suffix(""))
        sys.exit(0)

    def find_code(self) -> int:
        """Return the first exit code other than 0 of the other ranks so far, or 0."""
        codes = (self._code_of(rank) for rank in range(1, self.count))
        return next((code for code in codes if code), 0)

    def wait(self, *, is_over: bool) -> None:
        """Wait until the scripts of the other ranks have ended; if it is over, not much longer."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while any(self._code_of(rank) is None for rank in range(1, self.count)):
            if (is_over or self.find_code()) and time.monotonic() > end:
                return
            time.sleep(_POLL_SECONDS)

    def _code_of(self, rank: int) -> int | None:
        try:
            return int((self.folder / f"ended-{rank}").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None


def find_ranks() -> Ranks | None:
    """Return the ranks of this machine if a launcher has started one process for each, else None."""
    given = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        value = os.environ.get(name, "")
        if not value.isdecimal():
            return None
        given[name] = int(value)
    if given["WORLD_SIZE"] < 2:
        return None
    return Ranks(given["LOCAL_RANK"], given["LOCAL_WORLD_SIZE"])


def refuse_ranks(parser: argparse.ArgumentParser, command: str) -> None:
    """Report a usage error if a launcher started a command for each rank that runs the script several times."""
    ranks = find_ranks()
    if ranks is None:
        return
    if not ranks.is_first:
        # only the first rank prints the error
        sys.exit(2)
    parser.error(
        f"{command} runs the script several times, and a launcher has started it for each rank; start the launcher"
        f" inside: {parser.prog} -m torch.distributed.run -- --nproc-per-node {ranks.count} SCRIPT"
    )


def name_for_node(path: Path) -> Path:
    """Return the file to write on this machine: its name contains the number of the machine, except of the first."""
    node = os.environ.get("GROUP_RANK", "")
    if find_ranks() is None or not node.isdecimal() or node == "0":
        return path
    return path.with_suffix(f".node{node}{path.suffix}")
