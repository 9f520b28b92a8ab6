"""Which files to read, and which of them run under amp because a script that uses amp imports them."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath

from .context import Context
from .coverage import Coverage
from .diagnoses import diagnose
from .findings import Finding, sort_key
from .levels import Expected, expect
from .script import Script, read_script, unreadable

_SKIPPED = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages"})


def find_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files among `paths`, and the `.py` files below the directories among them, each once and in order.

    Hidden directories, virtual environments and build output are passed over; links to directories are not followed.
    """
    found: dict[Path, None] = {}
    for path in paths:
        for file in _python_files(path) if path.is_dir() else [path]:
            found.setdefault(file)
    return list(found)


def _python_files(directory: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if _is_of_interest(Path(here, name)))
        yield from (path for name in sorted(files) if name.endswith(".py") and (path := Path(here, name)).is_file())


def _is_of_interest(folder: Path) -> bool:
    return not folder.name.startswith(".") and folder.name not in _SKIPPED and not (folder / "pyvenv.cfg").exists()


def diagnose_files(files: Sequence[Path], coverage: Coverage) -> list[Finding]:
    """Return the findings in these files, by place. Nothing of them is run or imported."""
    read = [read_script(file, str(file)) for file in files]
    scripts = [script for script in read if isinstance(script, Script)]
    findings = [finding for finding in read if isinstance(finding, Finding)]
    under_amp = reached_scripts(scripts)
    callers = [script for script in scripts if script.initializations]
    shared = expect(callers or [script for script in scripts if script.uses_amp])
    for script in scripts:
        expected: Expected = expect([script]) if script.initializations else shared
        findings.extend(_diagnose_one(Context(script, expected, script in under_amp, coverage)))
    return sorted(dict.fromkeys(findings), key=sort_key)


def _diagnose_one(context: Context) -> list[Finding]:
    try:
        return list(diagnose(context))
    except RecursionError:
        return [unreadable(context.script.path, "holds an expression that is nested too deeply to be judged")]


def reached_scripts(scripts: Sequence[Script]) -> list[Script]:
    """Return the scripts that use amp, and those among `scripts` that these import, directly or through others."""
    reached = [script for script in scripts if script.uses_amp]
    for script in reached:
        wanted = {name for imported in script.imported_modules for name in _absolute(imported, script.path)}
        reached.extend(other for other in scripts if other not in reached and _module_names(other.path) & wanted)
    return reached


def _absolute(imported: str, path: str) -> Iterator[str]:
    """Yield the name of an imported module as the importing file may mean it.

    Relative names are resolved by the folders around the file.
    """
    name = imported.lstrip(".")
    level = len(imported) - len(name)
    if level == 0:
        yield name
        return
    folders = _folders(path)
    yield ".".join([*folders[: len(folders) - level + 1], *([name] if name else [])])


def _module_names(path: str) -> frozenset[str]:
    """Return every name a file could be imported by.

    For `project/models/net.py` these are `net`, `models.net` and `project.models.net`.
    """
    stem = PurePath(path).stem
    parts = _folders(path) + ([] if stem == "__init__" else [stem])
    return frozenset(".".join(parts[start:]) for start in range(len(parts)))


def _folders(path: str) -> list[str]:
    return [part for part in PurePath(path).parent.parts if part not in (os.sep, ".", "..")]
