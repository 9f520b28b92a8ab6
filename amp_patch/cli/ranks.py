"""`Ranks`: lets the processes of a command work together if a launcher starts the command for each rank, as in
`torchrun -m amp_patch trace train.py`.

Each of these processes runs the script for its own rank. The ranks of one machine share a folder. The first rank of the
machine reads the recordings of all its ranks, and prints the result; the commands of the other ranks print none.
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
"""How long the first rank waits before it gives up on ranks that may hang (see `Ranks.wait`)."""

_LAUNCH_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


class Ranks:
    """The ranks of one launch on this machine.

    Args:
        local_rank: the number of this process among them, from 0.
        count: the number of ranks on this machine.
    """

    def __init__(self, local_rank: int, count: int) -> None:
        self.local_rank = local_rank
        self.count = count
        # The ranks of one launch on this machine have the same parent process and the same variables, so they all
        # compute the same name for their folder. A launch with another parent has another folder.
        name = "\n".join([str(os.getppid()), *(os.environ.get(variable, "") for variable in _LAUNCH_VARIABLES)])
        digest = hashlib.sha256(name.encode()).hexdigest()
        self.folder = Path(tempfile.gettempdir(), f"amp-patch-ranks-{digest[:16]}")

    @property
    def is_first(self) -> bool:
        """Whether this process is the first rank of its machine, which prints the result."""
        return self.local_rank == 0

    @contextlib.contextmanager
    def meet(self) -> Iterator[str]:
        """Context manager: make the shared folder unless it exists. At the end, the first rank removes it.

        Yields the path of the folder. Raises SessionError if that path is a file, a link, or another user's folder.
        """
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        # another user can guess the name, and make the folder in order to read or change the recordings
        status = self.folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or (hasattr(os, "getuid") and status.st_uid != os.getuid()):
            raise SessionError(f"{self.folder} is not a folder of yours; remove it")
        try:
            yield str(self.folder)
        finally:
            if self.is_first:
                shutil.rmtree(self.folder, ignore_errors=True)

    def leave(self, code: int) -> NoReturn:
        """Write the exit code of the script to a file for the first rank, and end this process with 0."""
        with contextlib.suppress(FileNotFoundError):  # the first rank no longer waits, and has removed the folder
            file = self.folder / f"ended-{self.local_rank}.part"
            # written under another name first, because the first rank may read it at any time
            file.write_text(str(code), encoding="utf-8")
            file.replace(file.with_suffix(""))
        sys.exit(0)

    def find_code(self) -> int:
        """Return the exit code of the lowest rank, from 1 on, whose script has failed. 0 if none has."""
        codes = (self._code_of(rank) for rank in range(1, self.count))
        return next((code for code in codes if code), 0)

    def wait(self, *, is_over: bool) -> None:
        """Wait until the scripts of the other ranks have ended.

        Once `_PATIENCE_SECONDS` have passed, give up if `is_over`, or if one of these scripts has failed.

        Args:
            is_over: this rank has ended its script early, or another rank has failed, so that scripts may hang.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while any(self._code_of(rank) is None for rank in range(1, self.count)):
            if (is_over or self.find_code()) and time.monotonic() > deadline:
                return
            time.sleep(_POLL_SECONDS)

    def _code_of(self, rank: int) -> int | None:
        """Return the exit code of a rank's script, or None if the rank has not written it yet (see `leave`)."""
        try:
            return int((self.folder / f"ended-{rank}").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None


def find_ranks() -> Ranks | None:
    """Return the ranks of this machine if a launcher has started several processes, one for each rank, else None."""
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        value = os.environ.get(name, "")
        if not value.isdecimal():
            return None
        numbers[name] = int(value)
    if numbers["WORLD_SIZE"] < 2:
        return None
    return Ranks(numbers["LOCAL_RANK"], numbers["LOCAL_WORLD_SIZE"])


def refuse_ranks(parser: argparse.ArgumentParser, command: str) -> None:
    """Exit with a usage error if a launcher has started this process for one of several ranks, because `command` runs
    the script several times. Only the first rank of each machine prints the error.
    """
    ranks = find_ranks()
    if ranks is None:
        return
    if not ranks.is_first:
        sys.exit(2)
    parser.error(
        f"{command} runs the script several times, and a launcher has started it for each rank; start the launcher"
        f" inside: {parser.prog} -m torch.distributed.run -- --nproc-per-node {ranks.count} SCRIPT"
    )


def name_for_node(path: Path) -> Path:
    """Return `path`; on all machines of a launch but the first, with the number of the machine before the suffix."""
    node = os.environ.get("GROUP_RANK", "")
    if find_ranks() is None or not node.isdecimal() or node == "0":
        return path
    return path.with_suffix(f".node{node}{path.suffix}")
