"""What the user is told: the package's logger, and a handler that shows it on stdout, where scripts and log scrapers
look for Apex's messages.

The stand-in for Apex prints instead, as Apex did: a script that configures logging must not lose the lines it looks
for, or get them twice.
"""

import logging
import os
import sys
import warnings
from typing import Any

import torch

logger = logging.getLogger("amp_patch")


class _StdoutHandler(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10 takes no argument here
    """Writes to whatever sys.stdout is at the moment of writing."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(message)s"))

    @property
    def stream(self) -> Any:
        return sys.stdout

    @stream.setter
    def stream(self, value: Any) -> None:
        pass


_handler = _StdoutHandler()


_is_printing = False


def set_verbosity(verbosity: int, *, is_printing: bool = False) -> None:
    """Show the package's messages on stdout (verbosity above 0) or leave them to the user's own logging handlers (0).

    With `is_printing` they are shown by `print`, and no logging handler sees them.
    """
    global _is_printing
    _is_printing = is_printing and verbosity > 0
    if verbosity > 0 and not is_printing:
        logger.addHandler(_handler)
        logger.setLevel(logging.INFO)
    else:
        logger.removeHandler(_handler)


def say(message: str, *args: object) -> None:
    """Give one informational line, in a distributed run on rank 0 only."""
    if not find_rank():
        say_on_every_rank(message, *args)


def say_on_every_rank(message: str, *args: object) -> None:
    """Give one informational line, whatever the rank."""
    if _is_printing:
        print(message % args)
    else:
        logger.info(message, *args)


def warn(message: str) -> None:
    """Warn of something wrong, at the line that called the package; in a distributed run the rank is named."""
    rank = find_rank()
    warnings.warn(message if rank is None else f"rank {rank}: {message}", stacklevel=_find_stacklevel())


def find_rank() -> int | None:
    """Return the rank of this process among several, or None: of its process group, or as its launcher says."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return distributed.get_rank()
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return int(rank) if rank.isdecimal() and size.isdecimal() and int(size) > 1 else None


def _find_stacklevel() -> int:
    """Return the `stacklevel` with which `warnings.warn`, called by the caller of this function, points at the code
    that called the package.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "amp_patch",
        "contextlib",
    ):
        level, frame = level + 1, frame.f_back
    return level
