"""Reads Python source, and notebooks, whose code cells become one script."""

import ast
import io
import json
import re
import tokenize
import warnings
from pathlib import Path

_MAGIC = re.compile(r"\s*(?:[!?]|%{1,2}\w|[\w., ]+=\s*(?:!|%\w))|[^#\"']*\?\s*$")
"""A line of IPython: `%magic`, `!command`, `names = !command`, `name?`. A line that begins with `% 3` is Python."""

_PYTHON_CELL = re.compile(r"(?!%%)|%%(?:time|timeit|capture|prun)\b")
"""A cell of Python: one without a magic for the whole of it, or with one that runs it as Python."""


class Document:
    """A file of code as one text, with the cell and the line in it for each of its lines.

    Args:
        path: the file. Raises OSError, SyntaxError, ValueError or LookupError if it is no source and no notebook.
    """

    def __init__(self, path: Path) -> None:
        self._cells: list[tuple[int, int]] = []  # cell and line in it, by line of the text
        self.faults: list[tuple[int, SyntaxError]] = []
        """The cells that cannot be parsed, by number. The text leaves them out."""
        data = path.read_bytes()
        if path.suffix == ".ipynb":
            self.text = self._read_notebook(data)
        else:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            self.text = data.decode(encoding)

    def cell_of(self, line: int) -> tuple[int | None, int]:
        """Return the number of the code cell, and the line in it; None for the cell in a file of source."""
        if not self._cells:
            return None, line
        return self._cells[line - 1]

    def _read_notebook(self, data: bytes) -> str:
        try:
            code_cells = [cell for cell in json.loads(data)["cells"] if cell.get("cell_type") == "code"]
            # the source is one text, or a list of lines
            cells = ["".join(cell.get("source", "")) for cell in code_cells]
        except (TypeError, KeyError, AttributeError):
            raise ValueError("it has no cells with text, as notebooks of version 4 have") from None
        lines: list[str] = []
        for number, text in enumerate(cells, 1):
            if not _PYTHON_CELL.match(text):
                continue
            code = _without_magics(text)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about invalid escapes in the user's strings
                    ast.parse("\n".join(code))
            except SyntaxError as error:
                self.faults.append((number, error))
                continue
            lines += code
            self._cells += [(number, line) for line in range(1, len(code) + 1)]
        return "".join(f"{line}\n" for line in lines)


def _without_magics(text: str) -> list[str]:
    """Return the lines of a cell, with `pass` in place of magics."""
    lines = []
    is_continued = False
    for line in text.split("\n"):
        # the rest of a magic over several lines; an empty line keeps the line numbers right
        if is_continued:
            lines.append("")
        elif _MAGIC.match(line):
            indent = len(line) - len(line.lstrip())
            lines.append(line[:indent] + "pass")
        else:
            lines.append(line)
            continue
        is_continued = line.endswith("\\")
    return lines
