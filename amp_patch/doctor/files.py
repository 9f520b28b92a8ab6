"""Which files to read, and which of them run under amp because a script that uses amp imports them."""

import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from . import (  # noqa: F401 - the modules enter their rules
    backward_checks,
    checkpoint_checks,
    import_checks,
    native_amp_checks,
    setup_checks,
    step_checks,
)
from .context import Context
from .coverage import Coverage
from .documents import Document, read_document
from .edits import apply
from .findings import Finding, sort_key
from .levels import expect
from .rules import RETIRED, RULES, Selection
from .script import Script

_SKIPPED = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages"})
_SUFFIXES = (".py", ".ipynb")
_MAX_FIXES = 200  # of one file; each leaves less to mend


def find_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files among `paths`, and the scripts and notebooks below the directories, each once and in order.

    Hidden directories, virtual environments and build output are passed over; links to directories are not followed.
    """
    found: dict[Path, None] = {}
    for path in paths:
        for file in _code_files(path) if path.is_dir() else [path]:
            found.setdefault(file)
    return list(found)


def _code_files(directory: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if _is_of_interest(Path(here, name)))
        yield from (path for name in sorted(files) if name.endswith(_SUFFIXES) and (path := Path(here, name)).is_file())


def _is_of_interest(folder: Path) -> bool:
    return not folder.name.startswith(".") and folder.name not in _SKIPPED and not (folder / "pyvenv.cfg").exists()


class Project:
    """Files that are read together: those without a call of `initialize` are judged by the calls in the others.

    Nothing of them is run or imported.
    """

    def __init__(self, files: Sequence[Path], coverage: Coverage) -> None:
        self._coverage = coverage
        self.unreadable: list[Finding] = []
        self.documents: dict[str, Document] = {}
        self.scripts: dict[str, Script] = {}
        for file in files:
            document: Document | None = None
            try:
                document = read_document(file)
                self.scripts[str(file)] = Script(str(file), document.text)
                self.documents[str(file)] = document
                for number, fault in document.faults:
                    finding = _unparsed(file, "cell", fault, number, fault.lineno or 1)
                    self.unreadable.append(replace(finding, advice="The other cells are checked."))
            except SyntaxError as error:
                cell, line = document.place(document.text, error.lineno or 1) if document else (None, error.lineno or 1)
                self.unreadable.append(_unparsed(file, "file", error, cell, line))
            except (ValueError, LookupError, AttributeError) as error:
                self.unreadable.append(unreadable(str(file), f"is not Python source: {error}"))
            except (RecursionError, MemoryError):
                self.unreadable.append(unreadable(str(file), "is nested too deeply to be parsed"))
            except OSError as error:
                self.unreadable.append(unreadable(str(file), f"cannot be read: {error.strerror or error}"))
        scripts = list(self.scripts.values())
        self._under_amp = {script.path for script in reached_scripts(scripts)}
        callers = [script for script in scripts if script.initializations]
        self._shared = expect(callers or [script for script in scripts if script.uses_amp])

    @property
    def uses_amp(self) -> bool:
        """Whether any file runs under amp."""
        return bool(self._under_amp)

    def diagnose(self, script: Script, selection: Selection) -> list[Finding]:
        """Return the findings in a script, one of the project's or an edited one, by place."""
        expected = expect([script]) if script.initializations else self._shared
        context = Context(script, expected, script.path in self._under_amp or script.uses_amp, self._coverage)
        try:
            return sorted(dict.fromkeys(self._findings(context, selection)), key=sort_key)
        except RecursionError:
            return [unreadable(script.path, "holds an expression that is nested too deeply to be judged")]

    def _findings(self, context: Context, selection: Selection) -> Iterator[Finding]:
        """Yield the findings of every rule in one script, but for those that a comment silences."""
        script, document = context.script, self.documents[context.script.path]
        for rule in RULES.values():
            if rule.find is None or not selection.has(rule.code) or not (rule.is_for_all or context.runs_under_amp):
                continue
            for fault in rule.find(context):
                if not script.is_ignored(rule.code, fault.node):
                    line, column = script.place(fault.node)
                    cell, line = document.place(script.text, line)
                    found = fault.severity, fault.message, fault.advice
                    edits = fault.edits if document.is_writable else ()
                    yield Finding(rule.code, *found, script.path, line, column, cell, edits)
        for line, codes in script.ignored.items() if selection.has("AMP002") else ():
            for code in sorted(codes - RULES.keys() - RETIRED.keys() - {"*"}):
                cell, line = document.place(script.text, line)
                message, advice = f"{code!r} in an ignore comment is no code of a rule", "`--list` shows the codes."
                yield Finding("AMP002", "note", message, advice, script.path, line, 1, cell)

    def fix(self, script: Script, selection: Selection) -> tuple[Script, int]:
        """Return a script with its findings mended, one after the other, as far as they can be, and their number."""
        for count in range(_MAX_FIXES):
            edited = (self._edited(script, finding) for finding in self.diagnose(script, selection) if finding.edits)
            mended = next((one for one in edited if one is not None), None)
            if mended is None:
                return script, count
            script = mended
        return script, _MAX_FIXES

    def _edited(self, script: Script, finding: Finding) -> Script | None:
        """Return a script with the edits of a finding made; None if that is no Python, or no file of the kind."""
        text = apply(script.text, finding.edits)
        try:
            self.documents[script.path].encode(text)
            return Script(script.path, text) if text != script.text else None
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def unreadable(shown: str, reason: str) -> Finding:
    """Return the finding for a file that gives nothing to check."""
    advice = "Give Python 3 source in the encoding it declares (UTF-8 if it declares none), or a notebook."
    return Finding("AMP001", "error", f"this file {reason}", advice, shown, 1, 1)


def _unparsed(file: Path, what: str, error: SyntaxError, cell: int | None, line: int) -> Finding:
    """Return the finding for a file, or a cell of one, that is no Python."""
    version = ".".join(platform.python_version_tuple()[:2])
    message = f"this {what} cannot be parsed as Python {version}: {error.msg}"
    found = replace(unreadable(str(file), ""), message=message, cell=cell)
    return replace(found, line=max(line, 1), column=max(error.offset or 1, 1))


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
