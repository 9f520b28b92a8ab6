"""Shows messages to the user. `warn` gives a Python warning.

All other messages go to the logger "amp_patch". A handler of this module shows them on stdout, because scripts and log
scrapers look for Apex's messages there. If the user has a handler for the console, such as `logging.basicConfig` adds,
only the user's handler shows them, so that no line appears twice.

`apex.amp` of the stand-in for Apex prints messages instead of logging them, as Apex did.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from .errors import ArgumentTypeError

logger = logging.getLogger("amp_patch")


class _StdoutHandler(logging.StreamHandler[Any]):
    """Writes records to sys.stdout, unless another handler writes them to stdout or stderr.

    It looks up sys.stdout for each record, because a notebook or a test may replace it.
    """

    def __init__(self) -> None:
        # not the `__init__` of StreamHandler, which would keep the present sys.stdout as an attribute
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(message)s"))

    @property
    def stream(self) -> Any:
        return sys.stdout

    @stream.setter
    def stream(self, value: Any) -> None:
        pass

    def emit(self, record: logging.LogRecord) -> None:
        if not any(_is_console(handler) and record.levelno >= handler.level for handler in _other_handlers()):
            super().emit(record)


def _is_console(handler: logging.Handler) -> bool:
    """Return whether a handler writes to stdout or stderr, also through a console of rich."""
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    stream = getattr(handler, "stream", None) or getattr(getattr(handler, "console", None), "file", None)
    return stream is not None and any(stream is console for console in streams)


def _other_handlers() -> Iterator[logging.Handler]:
    """Yield the handlers of the package's logger and of its parents, except the package's own handler."""
    current: logging.Logger | None = logger
    while current is not None:
        for handler in current.handlers:
            if handler is not _handler:
                yield handler
        if not current.propagate:
            return
        current = current.parent


_handler = _StdoutHandler()
_shown_once: set[str] = set()  # the messages that `say_once` has shown
_is_printing = False
_verbosity = 0


def set_verbosity(verbosity: int, *, is_printing: bool = False) -> None:
    """Show the package's messages on stdout if `verbosity` is above 0, else leave them to the user's logging handlers.

    With `is_printing` and a verbosity above 0, messages are printed, and no logging handler gets them; only
    `log_warning` still goes to the logger. Raises ArgumentTypeError if `verbosity` is not a whole number.
    """
    global _is_printing, _verbosity
    if not isinstance(verbosity, int):
        raise ArgumentTypeError(
            f"verbosity={verbosity!r} is not a whole number: pass 0 for no messages on stdout, 1 for the usual ones, or"
            " 2 for the parameters of each overflow too"
        )
    _is_printing, _verbosity = is_printing and verbosity > 0, verbosity
    if verbosity > 0 and not is_printing:
        logger.addHandler(_handler)
        logger.setLevel(logging.INFO)
    else:
        logger.removeHandler(_handler)


def reports_parameters() -> bool:
    """Return whether messages about skipped steps name the parameters whose gradients overflowed.

    They do with a verbosity above 1, unless messages are printed. Steps with a loss scale then wait for the device.
    """
    return _verbosity > 1 and not _is_printing


def say(message: str, *args: object) -> None:
    """Log a line at level INFO, or print it (see `set_verbosity`). In a distributed run, only rank 0 does so."""
    if not find_rank():
        say_on_every_rank(message, *args)


def say_once(message: str) -> None:
    """Log or print a line as `say` does, but only until this process has shown it once."""
    if message not in _shown_once:
        # while the logger drops messages of this level, the message does not count as shown
        if _is_printing or logger.isEnabledFor(logging.INFO):
            _shown_once.add(message)
        say("%s", message)


def log_warning(message: str, *args: object) -> None:
    """Log a line at level WARNING. In a distributed run, only rank 0 does so."""
    if not find_rank():
        logger.warning(message, *args)


def say_on_every_rank(message: str, *args: object) -> None:
    """Log or print a line as `say` does, but on every rank."""
    if _is_printing:
        print(message % args)
    else:
        logger.info(message, *args)


def warn(message: str) -> None:
    """Issue a Python warning at the line that called the package. In a distributed run, it names the rank."""
    rank = find_rank()
    if rank is not None:
        message = f"rank {rank}: {message}"
    warnings.warn(message, stacklevel=_find_stacklevel())


def find_rank() -> int | None:
    """Return the rank of this process, from its process group or launcher. None if these tell of no other process."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return distributed.get_rank()
    # before the script makes its process group, the environment variables of the launcher tell
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and int(size) > 1:
        return int(rank)
    return None


def _find_stacklevel() -> int:
    """Return the `stacklevel` with which a warning points at the code that called the package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "amp_patch",
        "contextlib",
        "torch",
    ):
        level, frame = level + 1, frame.f_back
    return level
