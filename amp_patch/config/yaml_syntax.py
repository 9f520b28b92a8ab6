"""What the YAML parser's complaints mean: a sentence and a remedy in the place of its grammar."""

import re
from typing import Any

_INDICATOR = re.compile(r"[*&!%@`|>]")
_VALUE = re.compile(r"[^,}\]#\n]*")


def explain_syntax(exc: Any, text: str) -> tuple[str, int, int]:
    """Return what is wrong with a file that is not YAML, and what to do, with line and column from 1.

    Args:
        exc: the `yaml.YAMLError`, of either of PyYAML's parsers.
    """
    problem = getattr(exc, "problem", None) or " ".join(str(exc).split()) or type(exc).__name__
    context, begin = getattr(exc, "context", None) or "", getattr(exc, "context_mark", None)
    mark = getattr(exc, "problem_mark", None) or begin
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    opened = f"{begin.line + 1}:{begin.column + 1}" if begin else f"{line}:{column}"
    lines = text.splitlines()
    source = lines[line - 1] if line <= len(lines) else ""
    if "\t" in source[: len(source) - len(source.lstrip())]:
        return "this line begins with a tab; indent with spaces, YAML does not allow tabs there", line, column
    if "alias" in context or "anchor" in context or "cannot start any token" in problem:
        return _explain_indicator(source, line, column)
    if "simple key" in context and begin and lines[begin.line].lstrip().startswith("-"):
        return (
            "a dash without a space after it begins no item; write `- ` and the name",
            begin.line + 1,
            begin.column + 1,
        )
    if "escape" in problem and begin:
        return "a backslash in double quotes begins an escape; use single quotes", begin.line + 1, begin.column + 1
    return _explain(problem, context, source.strip(), opened, source[column - 1 : column]), line, column


def _explain_indicator(source: str, line: int, column: int) -> tuple[str, int, int]:
    """Say that a value needs quotes; the mark is at its first character, or at the second."""
    start = next((at for at in (column - 1, column) if at and _INDICATOR.match(source[at - 1 : at])), column)
    found = _VALUE.match(source, start - 1)
    value = found[0].strip() if found else ""
    return f"a plain value cannot begin with {value[:1]}; quote it: {quote(value)}", line, start


def quote(value: str) -> str:
    """Return a value as it is to be written: in quotes that leave backslashes alone, if it has any."""
    return f"'{value}'" if "\\" in value or '"' in value else f'"{value}"'


def _explain(problem: str, context: str, source: str, opened: str, found: str) -> str:
    if "flow node" in context:  # where a value is due: the mark is there, and not at the bracket
        if found == ",":
            return "no value stands before this comma; write one, or take the comma out"
        return "a bracket is not closed before this; close it, or quote a value that has a `:` in it"
    if "flow" in context:
        return f"the bracket at {opened} is not closed before this; close it, or quote a value that has a `:` in it"
    if "unexpected ':'" in problem:
        return "a plain value in brackets has a `:` in it; quote the value"
    if "quoted scalar" in context or "double-quoted" in context:
        return f"the quote at {opened} is not closed; close it"
    if "simple key" in context:
        return f"the key at {opened} has no colon; write `key:`"
    if source.startswith("-") and any(
        words in problem for words in ("mapping values", "block end", "expected key", "indicator")
    ):
        return "this item is indented otherwise than the list it belongs to; put the dashes of a list below each other"
    if "mapping values" in problem:
        return "there is a second colon in this entry; quote the value, or indent the line as those it belongs to"
    if any(words in problem for words in ("block end", "expected key", "indicator", "document start")):
        return "this is indented otherwise than what it belongs to; begin the keys of a mapping in one column"
    return problem
