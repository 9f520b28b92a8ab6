"""Files as the doctor reads and writes them: Python source, and notebooks, whose code cells become one script.

What is written back is what was read but for the edits: encoding, byte order mark and line ends of source; layout,
outputs and metadata of a notebook.
"""

import ast
import io
import json
import re
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

_CELL = "# amp-patch: cell "
_MAGIC = "# amp-patch: magic "
_IS_MAGIC = re.compile(r"""[ \t]*(?:[%!?]|[\w., ]+=[ \t]*[%!])|[^#"'\n]*\?[ \t\r]*$""", re.MULTILINE)
_CONTINUED = re.compile(r"(?:[^\n]*\\\r?\n)*[^\n]*\n?")
"""A line, with those that backslashes make part of it."""
_PIECE = re.compile(
    r"""("{3}|'{3})(?:\\.|.)*?(?:\1|\Z)|(["'])(?:\\.|(?!\2)[^\\\n])*\2?|\#[^\n]*|\\\r?\n|[^"'#()\[\]{}\\\n]+|.""",
    re.DOTALL,
)
"""A string, a comment, a line end that is escaped, what lies between those and brackets, or one character."""
_PYTHON_MAGICS = re.compile(r"%%(?:time|timeit|capture|prun)\b")
"""Magics of a whole cell that is still Python."""


class Document(Protocol):
    """A file of code; its text ends with a line end."""

    text: str
    is_writable: bool  # as it is, but for the text
    faults: list[tuple[int, SyntaxError]]  # of cells that the text leaves out, by their numbers

    def place(self, text: str, line: int) -> tuple[int | None, int]:
        """Return the cell and the line in it of a line of the text; no cell in a file of source."""

    def encode(self, text: str) -> bytes:
        """Return the file with another text; raises ValueError if it cannot hold that."""


def read_document(path: Path) -> Document:
    """Read a file; raises OSError, SyntaxError, ValueError or LookupError if it is no source and no notebook."""
    data = path.read_bytes()
    return Notebook(data) if path.suffix == ".ipynb" else Source(data)


class Source:
    """Python source."""

    is_writable = True

    def __init__(self, data: bytes) -> None:
        self.faults: list[tuple[int, SyntaxError]] = []
        self._encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(self._encoding)
        self._lacks_end = not text.endswith(("\n", "\r"))
        self.text = text + "\n" * self._lacks_end

    def place(self, text: str, line: int) -> tuple[None, int]:
        """Return the line itself."""
        return None, line

    def encode(self, text: str) -> bytes:
        """Return the text in the encoding that it had."""
        return (text.rstrip("\r\n") if self._lacks_end else text).encode(self._encoding)


class Notebook:
    """A notebook: magics are held as comments, and a comment stands before each cell that is Python.

    Cells that cannot be parsed are left out.
    """

    def __init__(self, data: bytes) -> None:
        self._json = data.decode()
        self._tree = json.loads(self._json)
        if not isinstance(self._tree, dict) or not isinstance(self._tree.get("cells"), list):
            raise ValueError("it has no cells, as notebooks of version 4 have")
        self._bare = self._json.rstrip()
        layouts = ({"indent": indent, "ensure_ascii": ascii} for indent in (1, 2, 4, None) for ascii in (False, True))
        self._layout = next((one for one in layouts if json.dumps(self._tree, **one) == self._bare), None)  # type: ignore[arg-type]
        self.is_writable = self._layout is not None
        self._magics: list[str] = []
        self._cells: dict[int, str] = {}
        self.faults: list[tuple[int, SyntaxError]] = []
        for number, text in self._python_cells():
            held = text if _find_fault(text) is None else self._hold_magics(text)
            if (fault := _find_fault(held)) is None:
                self._cells[number] = held
            else:
                self.faults.append((number, fault))
        self.text = "".join(f"{_CELL}{number}\n{text}\n" for number, text in self._cells.items())

    def _python_cells(self) -> Iterator[tuple[int, str]]:
        """Yield number and source of each code cell; those of another language are left out."""
        code = [cell for cell in self._tree["cells"] if cell.get("cell_type") == "code"]
        for number, cell in enumerate(code, 1):
            source = cell.get("source", "")
            text = source if isinstance(source, str) else "".join(source)
            if not text.startswith("%%") or _PYTHON_MAGICS.match(text):
                yield number, text

    def _hold_magics(self, text: str) -> str:
        """Return the source of a cell with `pass` for statements that are no Python, and as many lines."""
        held, start = [], 0
        while start < len(text):
            magic = _CONTINUED.match(text, start) if _IS_MAGIC.match(text, start) else None
            end = _end_of_statement(text, start) if magic is None else magic.end()
            held.append(self._hold(text[start:end]) if magic else text[start:end])
            start = end
        return "".join(held)

    def _hold(self, magic: str) -> str:
        """Return what stands for a magic: `pass` for its first line, comments for lines that continue it."""
        first, *rest = magic.removesuffix("\n").split("\n")
        code = first.lstrip()
        begins = [f"{first.removesuffix(code)}pass  ", *("" for _ in rest)]
        held = [f"{begin}{_MAGIC}{number}" for number, begin in enumerate(begins, len(self._magics))]
        self._magics += [code, *rest]
        return "\n".join(held) + "\n" * magic.endswith("\n")

    def place(self, text: str, line: int) -> tuple[int, int]:
        """Return the cell, counted among code cells, and the line in it."""
        lines = text.split("\n")[:line]
        start = max((index for index, one in enumerate(lines) if one.startswith(_CELL)), default=0)
        return int(lines[start].removeprefix(_CELL)), max(line - start - 1, 1)

    def encode(self, text: str) -> bytes:
        """Return the notebook with the cells of a text in it, laid out as it was."""
        text = re.sub(rf"(?:pass  )?{_MAGIC}(\d+)", lambda match: self._magics[int(match[1])], text)
        sources = re.split(rf"^{_CELL}\d+\n", text, flags=re.MULTILINE)[1:]
        tree = json.loads(self._json)
        by_number = {number: source.removesuffix("\n") for number, source in zip(self._cells, sources, strict=True)}
        code = [cell for cell in tree["cells"] if cell.get("cell_type") == "code"]
        for number, source in by_number.items():
            is_list = isinstance(code[number - 1].get("source"), list)
            code[number - 1]["source"] = source.splitlines(keepends=True) if is_list else source
        dumped = json.dumps(tree, **(self._layout or {}))  # type: ignore[arg-type]
        return (dumped + self._json[len(self._bare) :]).encode()


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


def _end_of_statement(text: str, start: int) -> int:
    """Return where a line ends that is inside of no brackets and no string."""
    depth = 0
    for piece in _PIECE.finditer(text, start):
        depth += (piece[0] in "([{") - (piece[0] in ")]}")
        if piece[0] == "\n" and depth <= 0:
            return piece.end()
    return len(text)
