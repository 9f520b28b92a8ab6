"""Edits that mend a script: each function returns those of one change, or none where lines are shared or order matters.

Statements are moved by whole lines, with the comments at their ends.
"""

import ast
import re
from collections.abc import Iterable, Sequence

from .findings import Edit as Edit
from .findings import Edits
from .script import Script
from .structure import bound_in, names_in, text_of


def apply(text: str, edits: Iterable[Edit]) -> str:
    """Return a text with edits made; they must not overlap."""
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def replace(script: Script, node: ast.AST, text: str) -> Edits:
    """Put a text in the place of a node."""
    return (Edit(*script.span(node), text),)


def insert(script: Script, node: ast.AST, text: str) -> Edits:
    """Add a text right behind a node."""
    stop = script.span(node)[1]
    return (Edit(stop, stop, text),)


def rename(script: Script, node: ast.AST, word: str, text: str) -> Edits:
    """Put a text in the place of the one occurrence of a word in a node."""
    start, end = script.span(node)
    found = [match.start() + start for match in re.finditer(rf"\b{re.escape(word)}\b", script.text[start:end])]
    return (Edit(found[0], found[0] + len(word), text),) if len(found) == 1 else ()


def add_argument(script: Script, call: ast.Call, text: str) -> Edits:
    """Add an argument behind the others of a call."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    end = script.span(call)[1] - 1
    last = max((script.span(one)[1] for one in given), default=end)
    return (Edit(last, last, f", {text}" if given else text),)


def remove_argument(script: Script, call: ast.Call, node: ast.AST) -> Edits:
    """Take one of several arguments out of a call."""
    given = sorted((script.span(one) for one in (*call.args, *call.keywords)), key=lambda span: span[0])
    holder = next((one for one in call.keywords if one.value is node), node)
    index = given.index(script.span(holder))
    if index:
        return (Edit(given[index - 1][1], given[index][1], ""),)
    return (Edit(given[0][0], given[1][0], ""),) if len(given) > 1 else ()


def remove(script: Script, statement: ast.stmt) -> Edits:
    """Take a statement out; `pass` takes its place where there is no other."""
    lines = script.lines_of(statement)
    if lines is None:
        return ()
    return replace(script, statement, "pass") if len(script.siblings(statement)) == 1 else (Edit(*lines, ""),)


def insert_after(script: Script, statement: ast.stmt, *lines: str) -> Edits:
    """Add lines behind a statement, indented as it is."""
    span = script.lines_of(statement)
    if span is None:
        return ()
    text = "".join(f"{script.indentation(statement)}{line}{script.newline}" for line in lines)
    return (Edit(span[1], span[1], text),)


def move(
    script: Script, statement: ast.stmt, call: ast.Call, *, is_before: bool = False, model: str | None = None
) -> Edits:
    """Put a statement right behind that one among its siblings which holds a call of `initialize`, or before it.

    Not if anything but this call binds a name between the two that the statement uses, nor if the statement binds one
    that is used there, other than the model's.
    """
    anchor, initialize = script.ancestor_beside(statement, call), script.statement(call)
    lines, target = script.lines_of(statement), script.lines_of(anchor) if anchor else None
    is_plain = isinstance(initialize, (ast.Assign, ast.Expr)) and initialize.value is call
    if anchor is None or lines is None or target is None or not is_plain:
        return ()
    siblings, returned = script.siblings(statement), set(ast.walk(initialize))
    first, last = sorted((siblings.index(statement), siblings.index(anchor)))
    between = [one for one in siblings[first : last + 1] if one is not statement]
    bound = bound_in(node for one in between for node in ast.walk(one) if node not in returned)
    bound |= bound_in(returned) - names_in(call)
    used = set().union(*map(names_in, between)) - {model}
    if bound & {*names_in(statement), "*"} or bound_in(ast.walk(statement)) & used:
        return ()
    place = target[0] if is_before else target[1]
    return Edit(*lines, ""), Edit(place, place, script.text[slice(*lines)])


def reindent(script: Script, statements: Sequence[ast.stmt], new: str, first: int | None = None) -> Edits:
    """Give statements that follow each other another indentation, from the line `first` on, by default their own.

    Lines inside strings stay as they are.
    """
    old = script.indentation(statements[0])
    if new.strip() or any(script.lines_of(one) is None for one in statements):
        return ()
    decorators = getattr(statements[0], "decorator_list", [])
    first = first or min(one.lineno for one in (statements[0], *decorators))
    lines = range(first, (statements[-1].end_lineno or 0) + 1)
    starts = [script.offset(line) for line in lines if line not in script.lines_in_strings]
    return tuple(Edit(start, start + len(old), new) for start in starts if script.text.startswith(old, start))


def close_block_before(script: Script, block: ast.With | ast.AsyncWith, node: ast.AST, name: str | None) -> Edits:
    """Let a `with` of one item end before the statement of its body that holds a node, if nothing behind needs it."""
    index = next(i for i, one in enumerate(block.body) if one is node or script.structure.is_inside(node, one))
    rest = block.body[index:]
    if not index or len(block.items) > 1 or any(name in names_in(one) for one in rest):
        return ()
    if any(isinstance(one, ast.Call) and text_of(one.func).endswith(".backward") for s in rest for one in ast.walk(s)):
        return ()
    return reindent(script, rest, script.indentation(block))


def unwrap(script: Script, block: ast.With | ast.AsyncWith, item: ast.withitem) -> Edits:
    """Take an item out of a `with`: its body moves to the left where that was the only one."""
    if len(block.items) > 1:
        spans = [script.span(one) for one in block.items]
        index = block.items.index(item)
        start, end = (spans[index - 1][1], spans[index][1]) if index else (spans[0][0], spans[1][0])
        return (Edit(start, end, ""),)
    if script.lines_of(block) is None:
        return ()
    colon = script.text.index(":", script.span(item)[1])
    first = script.line_of(colon) + 1
    body = reindent(script, block.body, script.indentation(block), first)
    return (Edit(script.offset(block.lineno), script.offset(first), ""), *body) if body else ()
