"""`Project`: files that are read together, and the findings of the rules in them."""

import io
import os
import platform
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from . import (  # noqa: F401 - registers their rules
    checkpoint_checks,
    import_checks,
    loss_checks,
    precision_checks,
    region_checks,
    setup_checks,
)
from .documents import Document
from .rules import RULES, Finding, Selection
from .script import Script, expect

_SKIPPED = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages"})
_SUFFIXES = (".py", ".ipynb")
_IGNORE = re.compile(r"#\s*amp-patch:\s*ignore(?:\[([^\]]*)\])?")
_LOOKED_AT = re.compile(r"amp|apex|autocast|backward\(|half|float16|[bf]p?16")
_EVERY_CODE = "*"


def find_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files among `paths`, and the scripts and notebooks below the directories, each once and in order.

    Hidden directories, virtual environments and build output are passed over; links to directories are not followed.
    """
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        for here, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if _is_of_interest(Path(here, name)))
            for name in sorted(names):
                file = Path(here, name)
                if name.endswith(_SUFFIXES) and file.is_file():
                    files.append(file)
    return list(dict.fromkeys(files))


def _is_of_interest(folder: Path) -> bool:
    return not folder.name.startswith(".") and folder.name not in _SKIPPED and not (folder / "pyvenv.cfg").exists()


class Project:
    """Files that are read together, and neither run nor imported.

    The calls of `initialize` in any of them apply to the files without one.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._documents: list[tuple[Script, Document]] = []
        self._unreadable: list[Finding] = []
        for file in files:
            self._read(file)
        self._scripts = [script for script, _ in self._documents]
        users = [script for script in self._scripts if script.uses_amp]
        together = expect(users)
        for script in self._scripts:
            script.expected = together
        for script in users:
            # its own calls count, and not the calls in other files
            if script.initializations:
                script.expected = expect([script])

    @property
    def uses_amp(self) -> bool:
        """Whether any file calls amp."""
        return any(script.uses_amp for script in self._scripts)

    def _read(self, file: Path) -> None:
        shown, document = str(file), None
        try:
            document = Document(file)
            self._documents.append((Script(shown, document.text), document))
        except SyntaxError as error:
            self._unreadable.append(_unparsed(shown, error))
        except OSError as error:
            self._unreadable.append(_unreadable(shown, f"cannot be read: {error.strerror}"))
        except (ValueError, LookupError, RecursionError, MemoryError) as error:
            self._unreadable.append(_unreadable(shown, f"is not Python source: {error}"))
        if document is not None:
            for cell, fault in document.faults:
                self._unreadable.append(_unparsed(shown, fault, cell))

    def diagnose(self, selection: Selection) -> list[Finding]:
        """Return the findings in all files, in order."""
        findings = [finding for finding in self._unreadable if selection.has(finding.code)]
        for script, document in self._documents:
            # most files of a folder have nothing that a rule looks at
            if not _LOOKED_AT.search(script.text):
                continue
            try:
                findings += dict.fromkeys(self._findings(script, document, selection))
            except RecursionError:
                findings.append(_unreadable(script.path, "holds an expression that is nested too deeply to be judged"))
        return sorted(findings, key=_sort_key)

    def _findings(self, script: Script, document: Document, selection: Selection) -> Iterator[Finding]:
        """Yield the findings of all rules in a script, without the ones that a comment silences."""
        ignored = _read_ignore_comments(script.text)
        for rule in RULES.values():
            if rule.find is None or not selection.has(rule.code):
                continue
            for fault in rule.find(script):
                line, column = script.location_of(fault.node)
                # the comment may be on any line of an expression that has several
                last = getattr(fault.node, "end_lineno", line)
                codes = set[str]().union(*(ignored.get(number, ()) for number in range(line, last + 1)))
                if rule.code not in codes and _EVERY_CODE not in codes:
                    cell, line = document.cell_of(line)
                    yield Finding(rule.code, *fault[1:], script.path, line, column, cell)


def _sort_key(finding: Finding) -> tuple[str, int, int, int, str]:
    return finding.path or "", finding.cell or 0, finding.line or 0, finding.column or 0, finding.code


def _unreadable(shown: str, reason: str) -> Finding:
    """Return the finding for a file that cannot be checked."""
    advice = "Give Python 3 source in the encoding it declares (UTF-8 if it declares none), or a notebook."
    return Finding("AMP001", "error", f"this file {reason}", advice, shown, 1, 1)


def _unparsed(shown: str, error: SyntaxError, cell: int | None = None) -> Finding:
    """Return the finding for a file, or a cell of a notebook, that cannot be parsed."""
    part, advice = "file", "Check that it is Python 3."
    if cell is not None:
        part, advice = "cell", "The other cells are checked."
    version = ".".join(platform.python_version_tuple()[:2])
    message = f"this {part} cannot be parsed as Python {version}: {error.msg}"
    line, column = max(error.lineno or 1, 1), max(error.offset or 1, 1)
    return Finding("AMP001", "error", message, advice, shown, line, column, cell)


def _read_ignore_comments(text: str) -> dict[int, set[str]]:
    """Return the codes that `# amp-patch: ignore[CODE, ...]` names, by line; a comment without codes means all."""
    codes: dict[int, set[str]] = {}
    if not _IGNORE.search(text):
        return codes
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            comment = _IGNORE.search(token.string)
            if token.type != tokenize.COMMENT or comment is None:
                continue
            if comment[1] is None:
                codes[token.start[0]] = {_EVERY_CODE}
            else:
                codes[token.start[0]] = set(re.split(r"[,\s]+", comment[1]))
    except (tokenize.TokenError, SyntaxError):
        pass  # the few sources that only ast accepts have no comments worth reading
    return codes
