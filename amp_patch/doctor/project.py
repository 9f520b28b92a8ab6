"""`Project`: the files that one run of the doctor reads, and the findings in them."""

import io
import os
import platform
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from . import (  # noqa: F401 - registers their rules
    checkpoint_checks,
    gradient_checks,
    import_checks,
    loss_checks,
    precision_checks,
    region_checks,
    scaler_checks,
    setup_checks,
    update_checks,
    value_checks,
)
from .documents import Document
from .rules import RULES, Finding, Selection
from .script import Script, expect

_SKIPPED = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages"})
_SUFFIXES = (".py", ".ipynb")
_IGNORE = re.compile(r"#\s*amp-patch:\s*ignore(?:\[([^\]]*)\])?")
_WORDS = r"amp|apex|autocast|backward|scale_loss|(?i:scaler)|[hH]alf|float16|[bf]p?16|16-true"
_MAY_HAVE_FAULTS = re.compile("|".join([_WORDS, *sorted(import_checks.EXTENSIONS)]))
"""A script without any of these words has no fault that a rule finds."""

_EVERY_CODE = "*"
"""Stands for all codes, after `# amp-patch: ignore` without a code."""


def find_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files among `paths`, and the scripts and notebooks in the directories among them, each once.

    In these directories, skips hidden directories, virtual environments and build output, and follows no links to
    directories.
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
    unique: dict[str, Path] = {}
    for file in files:
        unique.setdefault(os.path.realpath(file), file)
    return list(unique.values())


def _is_of_interest(folder: Path) -> bool:
    return not folder.name.startswith(".") and folder.name not in _SKIPPED and not (folder / "pyvenv.cfg").exists()


class Project:
    """Files that are read together, and neither run nor imported.

    A file with calls of `initialize` is judged by the opt_level and the loss scale of these calls. A file without such
    calls may be imported by any other file, so it is judged by the calls in all files (see `Script.expected`).
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._documents: list[tuple[Script, Document]] = []
        self._unreadable: list[Finding] = []
        for file in files:
            self._read(file)
        self._scripts = [script for script, _ in self._documents]
        amp_users = [script for script in self._scripts if script.uses_amp]
        expected_of_all = expect(amp_users)
        for script in self._scripts:
            script.expected = expected_of_all
        for script in amp_users:
            # only its own calls apply to a file that has any
            if script.initializations:
                script.expected = expect([script])

    @property
    def uses_amp(self) -> bool:
        """Whether any file calls a function of amp."""
        return any(script.uses_amp for script in self._scripts)

    def _read(self, file: Path) -> None:
        """Add a file to the scripts, and a finding for each part of it that cannot be read or parsed."""
        shown, document = str(file), None
        try:
            document = Document(file)
            self._documents.append((Script(shown, document.text), document))
        except SyntaxError as error:
            self._unreadable.append(_unparsed(shown, error))
        except OSError as error:
            advice = "Name a file that exists and that you may read."
            self._unreadable.append(_unreadable(shown, f"cannot be read: {error.strerror}", advice))
        except (RecursionError, MemoryError):
            self._unreadable.append(_too_deep(shown))
        except (ValueError, LookupError) as error:
            advice = "Give Python 3 source in the encoding it declares (UTF-8 if it declares none), or a notebook."
            self._unreadable.append(_unreadable(shown, f"is not Python source: {error}", advice))
        if document is not None:
            for cell, syntax_error in document.unparsed_cells:
                self._unreadable.append(_unparsed(shown, syntax_error, cell))

    def diagnose(self, selection: Selection) -> list[Finding]:
        """Return the findings in all files, each once, by file and position."""
        findings = [finding for finding in self._unreadable if selection.has(finding.code)]
        for script, document in self._documents:
            # most files of a folder have nothing to do with amp, and rules take time
            if not _MAY_HAVE_FAULTS.search(script.text):
                continue
            try:
                findings += dict.fromkeys(self._findings(script, document, selection))
            except RecursionError:
                finding = _too_deep(script.path)
                findings += [finding] if selection.has(finding.code) else []
        return sorted(findings, key=_sort_key)

    def _findings(self, script: Script, document: Document, selection: Selection) -> Iterator[Finding]:
        """Yield the findings of the selected rules in a script, except those that a comment silences."""
        ignored_by_line = _read_ignore_comments(script.text)
        for rule in RULES.values():
            if rule.find is None or not selection.has(rule.code):
                continue
            for fault in rule.find(script):
                line, column = script.location_of(fault.node)
                # the comment may be on any line of the node
                last_line = getattr(fault.node, "end_lineno", line)
                ignored = set[str]().union(*(ignored_by_line.get(number, ()) for number in range(line, last_line + 1)))
                if rule.code in ignored or _EVERY_CODE in ignored:
                    continue
                cell, line = document.cell_of(line)
                yield Finding(rule.code, fault.severity, fault.message, fault.advice, script.path, line, column, cell)


def _sort_key(finding: Finding) -> tuple[str, int, int, int, str]:
    return finding.path or "", finding.cell or 0, finding.line or 0, finding.column or 0, finding.code


def _unreadable(shown: str, reason: str, advice: str) -> Finding:
    """Return the finding for a file that cannot be checked."""
    return Finding("AMP001", "error", f"this file {reason}", advice, shown, 1, 1)


def _too_deep(shown: str) -> Finding:
    """Return the finding for a file with an expression for which Python's parser or a rule recurses too deeply."""
    reason = "holds an expression that is nested too deeply to be checked"
    return _unreadable(shown, reason, "Split the expression into several statements.")


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
    """Return the codes that comments such as `# amp-patch: ignore[CODE, ...]` name, by line.

    A comment without codes gives `_EVERY_CODE`.
    """
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
        pass  # a few sources can be parsed but not tokenized; their comments are not read to the end
    return codes
