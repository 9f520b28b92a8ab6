"""`Tree`: a syntax tree with parents. It tells which of two nodes comes first, and whether one excludes the other.

A pass is one run of the body of a function, or of the module, with at most one iteration of each loop.
"""

import ast
from collections.abc import Iterator
from functools import cached_property

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
SCOPES = (*_FUNCTIONS, ast.ClassDef)


def position(node: ast.AST) -> tuple[int, int]:
    """Return the line (from 1) and the column (from 0, in bytes) where a node starts."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def end(node: ast.AST) -> tuple[int, int]:
    """Return the line (from 1) and the column (from 0, in bytes) where a node ends."""
    return getattr(node, "end_lineno", None) or 0, getattr(node, "end_col_offset", None) or 0


def text_of(node: ast.AST) -> str:
    """Return the source text of a node, with uniform spaces and quotes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute)):
        return f"{text_of(node.value)}.{node.attr}"
    return ast.unparse(node)


def names_in(node: ast.AST) -> set[str]:
    """Return all names and chains of attributes in an expression: `f`, `model` and `model.weight` in `f(model.weight)`.

    In a chain that begins with a call or an index, this beginning stays: `f(x).y` gives `f(x).y`, `f` and `x`.
    """
    return {text_of(part) for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute))}


def parts_of(node: ast.expr | None) -> list[ast.expr]:
    """Return the elements of a list or tuple; for any other expression, a list that holds only that expression.

    Returns an empty list for a missing argument (`node` is None) and for the constant None.
    """
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        return []
    if isinstance(node, (ast.List, ast.Tuple)):
        return node.elts
    return [node]


def function_of(call: ast.Call) -> str:
    """Return the text of the called function after its last dot, such as `step` for `optimizer.step()`."""
    return text_of(call.func).rpartition(".")[2]


def argument_of(call: ast.Call, name: str, index: int | None = None) -> ast.expr | None:
    """Return the argument of a call at the position `index` or with the keyword `name`, or None."""
    if index is not None and len(call.args) > index:
        return call.args[index]
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return None


class Tree:
    """The nodes of a module, with their parents.

    An arm of an `if` statement that a constant turns off (`if 0:`) is removed.
    """

    def __init__(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Constant):
                setattr(node, "orelse" if node.test.value else "body", [])
        self.tree = tree

    @cached_property
    def _parents(self) -> dict[ast.AST, tuple[ast.AST, str]]:
        """The parent of every node, and the field of the parent that holds it."""
        parents: dict[ast.AST, tuple[ast.AST, str]] = {}
        for parent in ast.walk(self.tree):
            for field, value in ast.iter_fields(parent):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        parents[child] = (parent, field)
        return parents

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node that has a position, in the order of the text."""
        return sorted((node for node in self._parents if hasattr(node, "lineno")), key=position)

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node that directly contains this one; None for the module."""
        return self._parents.get(node, (None, ""))[0]

    def around(self, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
        """Yield the nodes that contain this one, the innermost first, each with its field that holds this one.

        The fields of an `if`, for example, are "test", "body" and "orelse".
        """
        while node in self._parents:
            node, field = self._parents[node]
            yield node, field

    def parent_statement(self, node: ast.AST) -> ast.stmt:
        """Return the node itself if it is a statement, or else the innermost statement that contains it."""
        while not isinstance(node, ast.stmt):
            node = self._parents[node][0]
        return node

    def frame(self, node: ast.AST) -> ast.AST:
        """Return the frame of a node: the innermost function or lambda whose body holds the node, or else the module.

        A class is not a frame, because its body runs where the class is defined. Decorators and defaults of a function
        also run where the function is defined, so their frame is the one around the function.
        """
        for outer, field in self.around(node):
            if isinstance(outer, _FUNCTIONS) and field == "body":
                return outer
        return self.tree

    def is_in_loop(self, node: ast.AST) -> bool:
        """Return whether a node is in the body of a loop; a loop outside of its function or class does not count."""
        for outer, field in self.around(node):
            if isinstance(outer, SCOPES):
                return False
            if isinstance(outer, LOOPS) and field == "body":
                return True
        return False

    def loop_around(self, node: ast.AST) -> ast.AST | None:
        """Return the innermost loop around a node, or None. The loop may be outside of the node's function."""
        return next((outer for outer, _ in self.around(node) if isinstance(outer, LOOPS)), None)

    def is_before(self, first: ast.AST, second: ast.AST) -> bool:
        """Return whether both nodes have the same frame, are not exclusive, and `first` comes first in the text."""
        is_earlier = end(first) <= position(second) and self.frame(first) is self.frame(second)
        return is_earlier and not self.are_exclusive(first, second)

    def exits_before(self, first: ast.AST, second: ast.AST) -> bool:
        """Return whether a pass that runs `first` seems to leave the function or the loop before it comes to `second`.

        It does if a block around `first`, but not around `second`, ends with `return` or `raise`. It also does if this
        block ends with `continue` or `break`, and `second` is in the same loop.
        """
        around_second = {outer for outer, _ in self.around(second)}
        for outer, field in self.around(first):
            if outer in around_second:
                return False
            body = getattr(outer, field, None)
            last = body[-1] if isinstance(body, list) and body else None
            if isinstance(last, (ast.Return, ast.Raise)):
                return True
            if isinstance(last, (ast.Continue, ast.Break)) and self.loop_around(last) in around_second:
                return True
        return False

    def are_exclusive(self, first: ast.AST, second: ast.AST) -> bool:
        """Return whether two nodes are on different arms of an `if`, `try` or `match`.

        The body of a `try` and its handlers count as different arms, although one pass may run a part of both.
        """
        arms_of_second = dict(self._arms(second))
        return any(branch in arms_of_second and arms_of_second[branch] != arm for branch, arm in self._arms(first))

    def _arms(self, node: ast.AST) -> Iterator[tuple[ast.AST, object]]:
        """Yield each `if`, `try` and `match` around a node, with its arm that holds the node.

        The arm is given as the name of a field, such as "body", or as the node of the handler or `case`.
        """
        child = node
        for outer, field in self.around(node):
            if isinstance(outer, (ast.If, ast.IfExp)) and field in ("body", "orelse"):
                yield outer, field
            elif field in ("handlers", "cases"):
                yield outer, child
            # The `else` of a `try` runs after its body, so both are one arm. `finally` always runs, so it is no arm.
            elif isinstance(outer, (ast.Try, ast.TryStar)) and field in ("body", "orelse"):
                yield outer, "body"
            child = outer
