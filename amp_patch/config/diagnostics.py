"""Where the faults of a file go: the first one is raised, or all of them are collected."""

import logging
from collections.abc import Mapping
from types import TracebackType

from ..errors import OpListError

_log = logging.getLogger(__name__)

Place = tuple[str | None, int | None, int | None]
"""Path, line and column; None where there is none."""


class Diagnostics:
    """`with diagnostics:` encloses what one fault spoils.

    An error leaves the block; when collecting it is kept instead, and what follows the block runs.

    Args:
        is_collecting: keep errors and warnings, instead of raising the first error and logging the warnings.
    """

    def __init__(self, is_collecting: bool = False) -> None:
        self.is_collecting = is_collecting
        self._errors: dict[str, Place] = {}  # by message: a broken file may be reached along several ways
        self._warnings: dict[str, Place] = {}

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not (self.is_collecting and isinstance(error, OpListError)):
            return False
        self._errors[str(error)] = (error.path, error.line, error.column)
        return True

    def warn(self, text: str, path: str, line: int, column: int) -> None:
        """Log, or keep, what is no fault but has no effect."""
        if self.is_collecting:
            self._warnings[f"{path}:{line}:{column}: warning: {text}"] = (path, line, column)
        else:
            _log.warning("%s:%d:%d: %s", path, line, column, text)

    @property
    def errors(self) -> list[str]:
        """The messages of the errors, sorted by place."""
        return _sort_by_place(self._errors)

    @property
    def warnings(self) -> list[str]:
        """The kept warnings, sorted by place."""
        return _sort_by_place(self._warnings)


def _sort_by_place(messages: Mapping[str, Place]) -> list[str]:
    """Return messages by line and column, the files in the order of their first message."""
    files = list(dict.fromkeys(path for path, _, _ in messages.values()))

    def place(message: str) -> tuple[int, int, int]:
        path, line, column = messages[message]
        return files.index(path), line or 0, column or 0

    return sorted(messages, key=place)
