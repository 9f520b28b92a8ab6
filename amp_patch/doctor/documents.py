"""Files as the doctor reads and writes them: Python source, and notebooks, whose code cells become one script.

What is written back is what was read but for the edits: encoding, byte order mark and line ends of source; layout,
outputs and metadata of a notebook.
"""

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

_CELL = "# amp-patch: cell "
_MAGIC = "pass  # amp-patch: magic "
_IS_MAGIC = re.compile(r"\s*(?:[%!?]|[\w., ]+=\s*[%!])|[^#]*\?\s*$")
_PYTHON_MAGICS = re.compile(r"%%(?:time|timeit|capture|prun)\b")
"""Magics of a whole cell that is still Python."""


class Document(Protocol):
    """A file of code; its text ends with a line end."""

    text: str
    is_writable: bool  # as it is, but for the text

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
    """A notebook: magics are held as comments, and a comment stands before each cell that is Python."""

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
        cells = [f"{_CELL}{number}\n{self._hold_magics(text)}\n" for number, _, text in self._python_cells()]
        self.text = "".join(cells)

    def _python_cells(self) -> Iterator[tuple[int, dict[str, Any], str]]:
        """Yield number, cell and source of each code cell; those of another language are left out."""
        code = [cell for cell in self._tree["cells"] if cell.get("cell_type") == "code"]
        for number, cell in enumerate(code, 1):
            source = cell.get("source", "")
            text = source if isinstance(source, str) else "".join(source)
            if not text.startswith("%%") or _PYTHON_MAGICS.match(text):
                yield number, cell, text

    def _hold_magics(self, text: str) -> str:
        """Return the source of a cell with `pass` for lines that are no Python."""
        try:
            ast.parse(text)
        except (SyntaxError, ValueError):
            lines = text.split("\n")
            for index, line in enumerate(lines):
                if _IS_MAGIC.match(line):
                    code = line.lstrip()
                    lines[index] = f"{line[: len(line) - len(code)]}{_MAGIC}{len(self._magics)}"
                    self._magics.append(code)
            return "\n".join(lines)
        return text

    def place(self, text: str, line: int) -> tuple[int, int]:
        """Return the cell, counted among code cells, and the line in it."""
        lines = text.split("\n")[:line]
        start = max((index for index, one in enumerate(lines) if one.startswith(_CELL)), default=0)
        return int(lines[start].removeprefix(_CELL)), max(line - start - 1, 1)

    def encode(self, text: str) -> bytes:
        """Return the notebook with the cells of a text in it, laid out as it was."""
        text = re.sub(f"{_MAGIC}(\\d+)", lambda match: self._magics[int(match[1])], text)
        sources = re.split(rf"^{_CELL}\d+\n", text, flags=re.MULTILINE)[1:]
        tree = json.loads(self._json)
        by_number = {
            number: source.removesuffix("\n")
            for (number, *_), source in zip(self._python_cells(), sources, strict=True)
        }
        code = [cell for cell in tree["cells"] if cell.get("cell_type") == "code"]
        for number, source in by_number.items():
            is_list = isinstance(code[number - 1].get("source"), list)
            code[number - 1]["source"] = source.splitlines(keepends=True) if is_list else source
        dumped = json.dumps(tree, **(self._layout or {}))  # type: ignore[arg-type]
        return (dumped + self._json[len(self._bare) :]).encode()
