"""Where the nodes of a syntax tree stand in their text: trees count lines and bytes, texts characters."""

import ast
import bisect
import re
from functools import cached_property

from .structure import end, position

_LINE_END = re.compile(r"\r\n|\r|\n")  # as Python counts lines: a form feed ends none


class Places:
    """The places in a text."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def _starts(self) -> list[int]:
        """Where each line starts, and the end of the text."""
        return [0, *(match.end() for match in _LINE_END.finditer(self.text)), len(self.text)]

    @cached_property
    def newline(self) -> str:
        """How the first line ends."""
        ending = _LINE_END.search(self.text)
        return ending[0] if ending else "\n"

    @cached_property
    def indent(self) -> str:
        """What a line of a block is indented by."""
        return "\t" if re.search(r"^\t", self.text, re.MULTILINE) else "    "

    def offset(self, line: int, column: int = 0) -> int:
        """Return how many characters come before a line (from 1) and a byte of it (from 0), as syntax trees count."""
        if line >= len(self._starts):
            return len(self.text)
        start, stop = self._starts[line - 1 : line + 1]
        return start + len(self.text[start:stop].encode()[:column].decode(errors="ignore"))

    def line_of(self, offset: int) -> int:
        """Return the line, from 1, that holds a character."""
        return bisect.bisect_right(self._starts, offset)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node starts and ends, in characters."""
        if isinstance(node, ast.withitem):
            return self.span(node.context_expr)[0], self.span(node.optional_vars or node.context_expr)[1]
        return self.offset(*position(node)), self.offset(*end(node))

    def receiver_span(self, call: ast.Call) -> tuple[int, int]:
        """Return the span of what a method is called on, with its parentheses."""
        start, stop = self.span(call.func)
        return start, self.text.rindex(".", start, stop)

    def place(self, node: ast.AST) -> tuple[int, int]:
        """Return the line and the column of a node, both from 1, the column in characters."""
        line = max(position(node)[0], 1)
        return line, self.span(node)[0] - self.offset(line) + 1
