"""A syntax tree: where its nodes stand in it, in which order they run, and which never run in one pass.

Code that never runs (`if False:`) is left out.
"""

import ast
from collections.abc import Iterator
from functools import cached_property

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
SCOPES = (*_FUNCTIONS, ast.ClassDef)

Conditions = dict[str, set[tuple[bool, str]]]
"""What must hold for a node to run: for each expression that is tested, pairs of whether it must be true (or equal),
and the constant it is compared with ("" for none).
"""


def position(node: ast.AST) -> tuple[int, int]:
    """Return (line, byte column) of a node's start."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def end(node: ast.AST) -> tuple[int, int]:
    """Return (line, byte column) of a node's end."""
    return getattr(node, "end_lineno", None) or 0, getattr(node, "end_col_offset", None) or 0


def text_of(node: ast.AST) -> str:
    """Return a node as source text in one spelling."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{text_of(node.value)}.{node.attr}"
    return ast.unparse(node)


def names_in(node: ast.AST) -> set[str]:
    """Return the names and chains of attributes in an expression."""
    return {text_of(one) for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute))}


def parts_of(node: ast.expr | None) -> list[ast.expr]:
    """Return the elements of a list or tuple, or the one expression itself; none for None."""
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        return []
    return list(node.elts) if isinstance(node, (ast.List, ast.Tuple)) else [node]


def function_of(call: ast.Call) -> str:
    """Return the last part of the name of the function or method that is called."""
    return text_of(call.func).rpartition(".")[2]


def argument_of(call: ast.Call, name: str, index: int | None = None) -> ast.expr | None:
    """Return the argument that a call gives at the position `index` or by the keyword `name`; None if it gives none."""
    if index is not None and len(call.args) > index:
        return call.args[index]
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return None


class Tree:
    """The nodes of a module that may run, with their parents."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree

    @cached_property
    def _parents(self) -> dict[ast.AST, tuple[ast.AST, str]]:
        """The parent of every node that may run, and the field of the parent that holds it."""
        parents: dict[ast.AST, tuple[ast.AST, str]] = {}
        pending: list[ast.AST] = [self.tree]
        while pending:
            parent = pending.pop()
            dead = _dead_field(parent)
            for field, value in ast.iter_fields(parent):
                if field == dead:
                    continue
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        parents[child] = (parent, field)
                        pending.append(child)
        return parents

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node that has a place and may run, in the order of the text."""
        return sorted((node for node in self._parents if hasattr(node, "lineno")), key=position)

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node around this one; None for the module."""
        return self._parents.get(node, (None, ""))[0]

    def field(self, node: ast.AST) -> str:
        """Return the field of the parent that holds this node, such as `body`; an empty string for the module."""
        return self._parents.get(node, (None, ""))[1]

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around this one, from the inside out."""
        current = self.parent(node)
        while current is not None:
            yield current
            current = self.parent(current)

    def parent_statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that a node is or stands in."""
        return next(one for one in (node, *self.around(node)) if isinstance(one, ast.stmt))

    def frame(self, node: ast.AST) -> ast.AST:
        """Return the innermost function or module that a node runs in.

        The body of a class runs where it is defined, and so do defaults and decorators of a function.
        """
        child = node
        for outer in self.around(node):
            if isinstance(outer, _FUNCTIONS) and self.field(child) == "body":
                return outer
            child = outer
        return self.tree

    def loop(self, node: ast.AST) -> ast.For | ast.AsyncFor | ast.While | None:
        """Return the innermost loop around a node in its own function."""
        child = node
        for outer in self.around(node):
            if isinstance(outer, _LOOPS) and self.field(child) == "body":
                return outer
            if isinstance(outer, SCOPES):
                return None
            child = outer
        return None

    def is_inside(self, node: ast.AST, outer: ast.AST) -> bool:
        """Tell whether `outer` is around `node`."""
        return any(one is outer for one in self.around(node))

    def is_before(self, first: ast.AST, second: ast.AST) -> bool:
        """Tell whether `first` ends before `second` begins in one pass through the same function or module."""
        is_earlier = end(first) <= position(second) and self.frame(first) is self.frame(second)
        return is_earlier and not self.are_exclusive(first, second)

    def are_exclusive(self, one: ast.AST, other: ast.AST) -> bool:
        """Tell whether the nodes never run in one pass.

        They are on different arms of one if, try or match, under conditions that contradict each other, or one comes
        behind a return that ends the other's arm.
        """
        other_conditions = self.conditions(other)
        for text, pairs in self.conditions(one).items():
            if any(_exclude(mine, theirs) for mine in pairs for theirs in other_conditions.get(text, ())):
                return True
        other_arms = dict(self._arms(other))
        for split, arm in self._arms(one):
            if split in other_arms and other_arms[split] != arm:
                return True
        return self._leaves_before(one, other) or self._leaves_before(other, one)

    def _arms(self, node: ast.AST) -> Iterator[tuple[ast.AST, object]]:
        """Yield every if, try and match around a node, with the arm that the node is on."""
        child = node
        for outer in self.around(node):
            field = self.field(child)
            if isinstance(outer, (ast.If, ast.IfExp)) and field in ("body", "orelse"):
                yield outer, field
            elif field in ("handlers", "cases"):
                yield outer, child
            elif isinstance(outer, ast.Try) and field in ("body", "orelse"):
                yield outer, "body"
            child = outer

    def _leaves_before(self, one: ast.AST, other: ast.AST) -> bool:
        """Whether the arm of an if that holds `one` ends by leaving the code around both, before `other` comes."""
        for outer, field in self._arms(one):
            if not isinstance(outer, ast.If) or position(other) < end(outer) or self.is_inside(other, outer):
                continue
            last = (outer.body if field == "body" else outer.orelse)[-1]
            if isinstance(last, _EXITS):
                leaves_function = isinstance(last, (ast.Return, ast.Raise))
                left = self.frame(outer) if leaves_function else self.loop(outer)
                if left is self.tree or (left is not None and self.is_inside(other, left)):
                    return True
        return False

    def conditions(self, node: ast.AST) -> Conditions:
        """Return the conditions of the ifs around a node, taken apart at `not`, `and`, `or` and comparisons."""
        found: Conditions = {}
        for outer, field in self._arms(node):
            if isinstance(outer, (ast.If, ast.IfExp)):
                _collect(outer.test, field == "body", found)
        return found


def _dead_field(node: ast.AST) -> str:
    """Return the field of an `if` with a constant condition that never runs; an empty string for all others."""
    if isinstance(node, (ast.If, ast.IfExp)) and isinstance(node.test, ast.Constant):
        return "orelse" if node.test.value else "body"
    return ""


def _exclude(one: tuple[bool, str], other: tuple[bool, str]) -> bool:
    """Whether two conditions on one expression never hold together."""
    if one[1] == other[1]:
        return one[0] is not other[0]
    return one[0] and other[0] and "" not in (one[1], other[1])


def _collect(test: ast.expr, is_wanted: bool, found: Conditions) -> None:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        _collect(test.operand, not is_wanted, found)
    elif isinstance(test, ast.BoolOp):
        if isinstance(test.op, ast.And) is is_wanted:
            for value in test.values:
                _collect(value, is_wanted, found)
    elif isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.comparators[0], ast.Constant):
        operator = test.ops[0]
        if isinstance(operator, (ast.Eq, ast.Is, ast.NotEq, ast.IsNot)):
            is_equal = isinstance(operator, (ast.Eq, ast.Is))
            constant = repr(test.comparators[0].value)
            found.setdefault(text_of(test.left), set()).add((is_wanted is is_equal, constant))
    else:
        found.setdefault(text_of(test), set()).add((is_wanted, ""))
