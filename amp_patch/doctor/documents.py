"""`Document`: the code of a Python file, or of a notebook, whose code cells are joined into one script."""

import ast
import io
import json
import re
import tokenize
import warnings
from pathlib import Path

_MAGIC = re.compile(r"\s*(?:!(?!=)|\?|%{1,2}\w|[\w., ]+=\s*(?:!|%\w))|[^#\"']*\?\s*$")
"""Fits a line that only IPython understands: `%magic`, `!command`, `names = !command`, `name?`.

A line that begins with `%` and a space, such as `% 3`, or with `!=`, continues an expression of Python.
"""

_COMMANDS = re.compile(
    r"\s*(?:cd|ls|pwd|mkdir|rmdir|rm|cp|mv|cat|ll|man|more|less)(?:\s+[-\w./~$*\"'][^=()]*)?$"
    r"|\s*(?:pip|conda|mamba|uv)\s+(?!(?:in|is|if|and|or|not)\b)[a-z]"
)
"""Fits a command that IPython runs without `%` or `!`, such as `cd ..`, unless a variable has that name."""

_PYTHON_CELL = re.compile(r"(?!%%)|%%(?:time|timeit|capture|prun)\b")
"""Fits the beginning of a cell that holds Python: no magic for the whole cell, or one that runs the cell as Python.

`%%bash`, for example, is not such a beginning.
"""


class Document:
    """A file of code as one text. For a notebook, it knows the cell of each line.

    Args:
        path: the file. Raises OSError, SyntaxError, ValueError, LookupError, RecursionError or MemoryError if it
            cannot be read as source or as a notebook.

    Attributes:
        text: the code.
        unparsed_cells: the cells that cannot be parsed, each with its number and error. The text leaves them out.
    """

    def __init__(self, path: Path) -> None:
        # for each line of the text, the number of its cell and of its line in that cell; empty for a Python file
        self._cells: list[tuple[int, int]] = []
        self.unparsed_cells: list[tuple[int, SyntaxError]] = []
        data = path.read_bytes()
        if path.suffix == ".ipynb":
            self.text = self._read_notebook(data)
        else:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            self.text = data.decode(encoding)

    def cell_of(self, line: int) -> tuple[int | None, int]:
        """Return the number of the code cell that has a line of the text, and the line in that cell, both from 1.

        In a Python file, the cell is None, and the line is the line of the text.
        """
        if not self._cells:
            return None, line
        return self._cells[line - 1]

    def _read_notebook(self, data: bytes) -> str:
        """Return the code of a notebook, with `pass` in place of magics. Leave out cells that are no valid Python."""
        try:
            code_cells = [cell for cell in json.loads(data)["cells"] if cell.get("cell_type") == "code"]
            # the source is one text, or a list of lines
            cells = ["".join(cell.get("source", "")) for cell in code_cells]
        except (TypeError, KeyError, AttributeError):
            raise ValueError("it has no cells with text, as notebooks of version 4 have") from None
        lines: list[str] = []
        for number, text in enumerate(cells, 1):
            if not _PYTHON_CELL.match(text.lstrip()):  # IPython skips empty lines before a magic
                continue
            code = _without_magics(text)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # Python warns about invalid escapes in the user's strings
                    ast.parse("\n".join(code))
            except SyntaxError as error:
                self.unparsed_cells.append((number, error))
                continue
            lines += code
            self._cells += [(number, line) for line in range(1, len(code) + 1)]
        return "".join(f"{line}\n" for line in lines)


def _without_magics(text: str) -> list[str]:
    """Return the lines of a cell, with `pass` in place of magics."""
    lines = []
    magic_goes_on = False  # whether the line before belongs to a magic, and ends with a backslash
    for line in _dedent(text).split("\n"):
        # a command without an argument, such as `ls`, may be a variable
        is_command = _COMMANDS.match(line) is not None and " " in line.strip()
        if magic_goes_on:
            lines.append("")  # an empty line, so that later lines keep their numbers
        elif _MAGIC.match(line) or is_command:
            indent = len(line) - len(line.lstrip())
            lines.append(line[:indent] + "pass")
        else:
            lines.append(line)
            continue
        magic_goes_on = line.endswith("\\")
    return lines


def _dedent(text: str) -> str:
    """Return a cell without the indent of its first line, which IPython removes from all lines."""
    first = next((line for line in text.split("\n") if line.strip()), "")
    indent = first[: len(first) - len(first.lstrip())]
    if not indent:
        return text
    return "\n".join(line.removeprefix(indent) for line in text.split("\n"))
