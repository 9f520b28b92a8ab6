"""Files as the doctor reads them: Python source, and notebooks, whose code cells become one script."""

import ast
import io
import json
import re
import tokenize
import warnings
from pathlib import Path

_MAGIC = re.compile(r"\s*(?:[%!?]|[\w., ]+=\s*[%!])|[^#\"']*\?\s*$")
_PYTHON_CELL = re.compile(r"(?!%%)|%%(?:time|timeit|capture|prun)\b")
"""A cell of Python: one without a magic for the whole of it, or with one that runs it as Python."""


class Document:
    """A file of code as one text, which knows what line of which cell each of its lines was.

    Args:
        path: the file. Raises OSError, SyntaxError, ValueError or LookupError if it is no source and no notebook.
    """

    def __init__(self, path: Path) -> None:
        self._places: list[tuple[int, int]] = []
        self.faults: list[tuple[int, SyntaxError]] = []
        """The cells that cannot be parsed, by number; the text leaves them out."""
        data = path.read_bytes()
        self.text = self._read_notebook(data) if path.suffix == ".ipynb" else _read_source(data)

    def place(self, line: int) -> tuple[int | None, int]:
        """Return the cell, counted among code cells, and the line in it; no cell in a file of source."""
        return self._places[min(line, len(self._places)) - 1] if self._places else (None, line)

    def _read_notebook(self, data: bytes) -> str:
        tree = json.loads(data.decode())
        if not isinstance(tree, dict) or not isinstance(tree.get("cells"), list):
            raise ValueError("it has no cells, as notebooks of version 4 have")
        if not all(isinstance(cell, dict) for cell in tree["cells"]):
            raise ValueError("it has a cell that is not a mapping")
        lines: list[str] = []
        for number, cell in enumerate((cell for cell in tree["cells"] if cell.get("cell_type") == "code"), 1):
            source = cell.get("source", "")
            parts = [source] if isinstance(source, str) else source
            if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
                raise ValueError(f"code cell {number} has no text")
            text = "".join(parts)
            if not _PYTHON_CELL.match(text):
                continue
            code, fault = _without_magics(text)
            if fault is not None:
                self.faults.append((number, fault))
                continue
            lines += code
            self._places += [(number, line) for line in range(1, len(code) + 1)]
        return "".join(f"{line}\n" for line in lines)


def _read_source(data: bytes) -> str:
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding)


def _without_magics(text: str) -> tuple[list[str], SyntaxError | None]:
    """Return the lines of a cell, with `pass` in place of magics, and what keeps them from being Python.

    A line is taken for a magic only where the parser stops at it: `% x` may well continue an expression.
    """
    lines = text.split("\n")
    while True:
        fault = _find_fault("\n".join(lines))
        at = (fault.lineno or 0) - 1 if fault else -1
        while 0 < at < len(lines) and lines[at - 1].endswith("\\"):
            at -= 1  # to the line that the one with the fault continues
        if fault is None or not 0 <= at < len(lines) or not _MAGIC.match(lines[at]):
            return lines, fault
        is_continued = lines[at].endswith("\\")
        lines[at] = lines[at][: len(lines[at]) - len(lines[at].lstrip())] + "pass"
        while is_continued and at + 1 < len(lines):
            at += 1
            is_continued = lines[at].endswith("\\")
            lines[at] = ""


def _find_fault(text: str) -> SyntaxError | None:
    """Return what keeps text from being Python, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in somebody else's strings
            ast.parse(text)
    except SyntaxError as error:
        return error
    except ValueError as error:  # of a null byte
        return SyntaxError(str(error))
    return None
