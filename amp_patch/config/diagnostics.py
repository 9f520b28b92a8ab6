"""Where the faults of a file go: the first one is raised, or all of them are collected."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

from ..errors import OpListError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of a file, or a warning; its text is `path:line:column: message`.

    Attributes:
        path, line, column: the place; None where there is none.
    """

    message: str
    path: str | None
    line: int | None
    column: int | None
    is_warning: bool = False

    def __str__(self) -> str:
        told = f"warning: {self.message}" if self.is_warning else self.message
        return told if self.path is None else f"{self.path}:{self.line}:{self.column}: {told}"


class Diagnostics:
    """`with diagnostics:` encloses what one fault spoils.

    An error leaves the block; when collecting it is stored instead, and what follows the block runs.

    Args:
        is_collecting: store errors and warnings, instead of raising the first error and logging the warnings.
    """

    def __init__(self, is_collecting: bool = False) -> None:
        self.is_collecting = is_collecting
        self.has_warned = False
        self._found: dict[Finding, None] = {}  # once each: a broken file may be reached along several ways

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not (self.is_collecting and isinstance(error, OpListError)):
            return False
        self._found[Finding(error.message, error.path, error.line, error.column)] = None
        return True

    def warn(self, text: str, path: str, line: int, column: int) -> None:
        """Log, or collect, what is no fault but has no effect."""
        self.has_warned = True
        if self.is_collecting:
            self._found[Finding(text, path, line, column, is_warning=True)] = None
        else:
            _log.warning("%s:%d:%d: %s", path, line, column, text)

    @property
    def errors(self) -> list[Finding]:
        """The faults, sorted by place."""
        return _sort_by_place(one for one in self._found if not one.is_warning)

    @property
    def warnings(self) -> list[Finding]:
        """The collected warnings, sorted by place."""
        return _sort_by_place(one for one in self._found if one.is_warning)


def _sort_by_place(found: Iterable[Finding]) -> list[Finding]:
    """Return findings by line and column, the files in the order of their first."""
    listed = list(found)
    files = list(dict.fromkeys(one.path for one in listed))
    return sorted(listed, key=lambda one: (files.index(one.path), one.line or 0, one.column or 0))
