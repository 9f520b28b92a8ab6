"""What becomes of the faults of a file: the first one is raised, or all of them are collected."""

import logging
import re
from collections.abc import Iterable
from types import TracebackType

from ..errors import OpListError

_log = logging.getLogger(__name__)
_POSITION = re.compile(r"(.*?):(\d+):(\d+): ", re.DOTALL)


class Faults:
    """`with faults:` encloses what a single fault spoils. The error leaves the block, or, when collecting, ends it and
    is kept.

    Attributes:
        found: the messages of the errors, each once, as keys.
        warnings: what was passed to `warn`.
    """

    def __init__(self, is_collecting: bool = False) -> None:
        self.is_collecting = is_collecting
        self.found: dict[str, None] = {}  # a broken file may be reached along several ways
        self.warnings: list[str] = []

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not (self.is_collecting and isinstance(error, OpListError)):
            return False
        self.found[str(error)] = None
        return True

    def warn(self, position: str, text: str) -> None:
        """Say what is no fault but has no effect: to the log, or into `warnings`."""
        if self.is_collecting:
            self.warnings.append(f"{position}: warning: {text}")
        else:
            _log.warning("%s: %s", position, text)

    def sort(self) -> None:
        """Order both by position."""
        self.found = dict.fromkeys(_sort_by_position(self.found))
        self.warnings = _sort_by_position(self.warnings)


def _sort_by_position(messages: Iterable[str]) -> list[str]:
    """Return messages that start with `file:line:column:` by line and column, the files in the order of their first
    message.
    """
    files: dict[str, int] = {}

    def position(message: str) -> tuple[int, int, int]:
        match = _POSITION.match(message)
        path, line, column = match.groups() if match else ("", "0", "0")
        return files.setdefault(path, len(files)), int(line), int(column)

    return sorted(messages, key=position)
