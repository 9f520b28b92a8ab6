"""The table `[tool.amp-patch.doctor]` of the nearest `pyproject.toml` that has one."""

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import MissingExtraError, SettingsError, did_you_mean
from .rules import Selection


@dataclass(frozen=True, slots=True)
class Settings:
    """What a table says.

    Attributes:
        root: where its file lies.
        select, ignore: prefixes of codes, as `Selection` takes them.
        exclude: files and folders to leave out, as shell patterns of paths from `root`, or of names.
        per_file_ignores: more prefixes to ignore, by such a pattern.
    """

    root: Path
    select: tuple[str, ...] = ("AMP",)
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    per_file_ignores: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def excludes(self, path: Path) -> bool:
        """Tell whether a file, or a folder that it is in, is left out."""
        return any(self._matches(path, pattern) for pattern in self.exclude)

    def selection_for(self, path: Path, select: tuple[str, ...], ignore: tuple[str, ...]) -> Selection:
        """Return which rules a file is judged by; what the command line gives stands in place of the table's."""
        more = [
            code for pattern, codes in self.per_file_ignores.items() if self._matches(path, pattern) for code in codes
        ]
        return Selection(select or self.select, (*(ignore or self.ignore), *more))

    def _matches(self, path: Path, pattern: str) -> bool:
        resolved = path.resolve()
        inside = resolved.relative_to(self.root) if resolved.is_relative_to(self.root) else Path(resolved.name)
        steps = [inside, *inside.parents][:-1]
        return any(fnmatch(str(step), pattern.rstrip("/")) or fnmatch(step.name, pattern.rstrip("/")) for step in steps)


def settings_for(path: Path) -> Settings:
    """Return the settings of the nearest file above a script, or the defaults; raises SettingsError for a bad table."""
    resolved = path.resolve()
    return _settings_in(resolved if resolved.is_dir() else resolved.parent)


@cache
def _settings_in(folder: Path) -> Settings:
    file = folder / "pyproject.toml"
    table = _read(file) if file.is_file() else None
    if table is not None:
        return _parse(file, table)
    return Settings(folder) if folder.parent == folder else _settings_in(folder.parent)


def _read(file: Path) -> dict[str, Any] | None:
    """Return the doctor's table, or None for a file without one."""
    data = file.read_bytes()
    if b"amp-patch" not in data:
        return None
    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError:
        raise MissingExtraError(f"{file}: Python 3.10 reads TOML by the package tomli: pip install tomli") from None
    try:
        table: dict[str, Any] = toml.loads(data.decode())
    except toml.TOMLDecodeError as error:
        raise SettingsError(f"{file}: {error}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file} is not UTF-8, as TOML is: {error}; save it as UTF-8") from None
    for name in ("tool", "tool.amp-patch", "tool.amp-patch.doctor"):
        value = table.get(name.rpartition(".")[2])
        if value is None:
            return None
        if not isinstance(value, dict):
            raise SettingsError(f"{file}: {name} is {value!r}, and must be a table")
        table = value
    return table


def _parse(file: Path, table: dict[str, Any]) -> Settings:
    where, known = f"{file}: [tool.amp-patch.doctor]", ("select", "ignore", "exclude", "per-file-ignores")
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise SettingsError(f"{where} has no key {key!r} ({', '.join(known)}).{did_you_mean(key, known)}")
        is_table = key == "per-file-ignores"
        lists = value.values() if is_table and isinstance(value, dict) else [value]
        if isinstance(value, dict) is not is_table or not all(map(_is_strings, lists)):
            wanted = "a table of lists of codes, by pattern" if is_table else "a list of strings"
            raise SettingsError(f"{where} {key} is {value!r}, and must be {wanted}")
        values[key.replace("-", "_")] = {name: tuple(one) for name, one in value.items()} if is_table else tuple(value)
    settings = Settings(file.parent, **values)
    try:
        Selection(settings.select, (*settings.ignore, *sum(settings.per_file_ignores.values(), ())))
    except SettingsError as error:
        raise SettingsError(f"{where} {error}") from None
    return settings


def _is_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)
