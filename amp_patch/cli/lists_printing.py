"""Functions that several tasks of `amp-patch lists` use for their output."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import config
from ..tables import Table, align

LIST = "a shipped list or the path of a list file"
"""The help text of an argument that names a list."""

LEAST = 20
"""A cell that is shortened keeps at least this number of characters."""

_INTERNAL = ("is_optional", "is_warning")
"""Fields of dataclasses that JSON leaves out."""


def location(entry: "config.op_lists.OpEntry | config.ModuleRule") -> str:
    """Return `file:line` of an entry. The file of a shipped list is shown without its folder."""
    path = entry.path
    if Path(path).parent == config.shipped.lists_dir():
        path = Path(path).name
    return f"{path}:{entry.line}"


def bounds(entry: "config.op_lists.OpEntry") -> str:
    """Return the bounds of an entry on the version of torch, such as `since 2.12, until 2.14`."""
    given = (("since", entry.since), ("until", entry.until))
    return ", ".join(f"{bound} {version}" for bound, version in given if version)


def as_data(value: Any) -> dict[str, Any]:
    """Return a dataclass, such as an entry or an explanation, as a dictionary for JSON, without `_INTERNAL` fields."""
    return asdict(value, dict_factory=lambda fields: {name: item for name, item in fields if name not in _INTERNAL})


def module_as_data(rule: "config.ModuleRule") -> dict[str, Any]:
    """Return a module rule for JSON."""
    return {name: getattr(rule, name) for name in ("chooser", "run", "why", "path", "line", "column")}


def fit_rows(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Return rows as lines with aligned columns. Cells are shortened, the longest first, until the lines have at most
    `width` characters, or no cell can be shortened. With None as the width, no cell is shortened.
    """
    if not rows or width is None:
        return align(rows)
    columns = [str(number) for number in range(len(rows[0]))]
    table = Table(columns, rows, len(columns), dict.fromkeys(columns, LEAST))
    table.shorten(width)
    return align(table.rows())


def print_json(data: Mapping[str, object]) -> None:
    """Print data as JSON."""
    print(json.dumps(data, indent=2))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines, one after another."""
    for line in lines:
        print(line)
