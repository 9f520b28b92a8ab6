"""Where a node stands in its script: scope, loop, order, and which nodes never run in one pass."""

import ast
from collections.abc import Iterable, Iterator, Sequence

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)

Atoms = dict[str, set[tuple[bool, str]]]
"""What must hold for a node to run: for each expression tested, the pairs of (is it wanted?, the value it is compared
with or '').
"""


def position(node: ast.AST) -> tuple[int, int]:
    """Return (line, byte column) of a node's start."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def end(node: ast.AST) -> tuple[int, int]:
    """Return (line, byte column) of a node's end."""
    return getattr(node, "end_lineno", None) or 0, getattr(node, "end_col_offset", None) or 0


def text_of(node: ast.AST) -> str:
    """Return a node as source text in one spelling."""
    return ast.unparse(node)


def names_in(node: ast.AST) -> set[str]:
    """Return the names and chains of attributes in an expression."""
    return {text_of(one) for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute))}


def bound_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names and chains of attributes that nodes bind, in any way, or delete; "*" for a star import."""
    bound = set()
    for node in nodes:
        if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
            bound |= names_in(node)
        given = getattr(node, "asname", None) or getattr(node, "name", None) or getattr(node, "arg", None)
        if isinstance(given, str) and not isinstance(node, ast.keyword):
            bound.add(given.partition(".")[0])
        bound.add(getattr(node, "rest", None) or "")
    return bound - {"", "self"}


def function_of(call: ast.Call) -> str:
    """Return the last part of the name of the function or method that is called."""
    return text_of(call.func).rpartition(".")[2]


def argument_of(call: ast.Call, name: str, index: int | None = None) -> ast.expr | None:
    """Return the argument that a call gives at the position `index` or by the keyword `name`; None if it gives none."""
    if index is not None and len(call.args) > index:
        return call.args[index]
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


class Structure:
    """The parents of every node of one tree."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self._parents: dict[ast.AST, tuple[ast.AST, str]] = {}
        pending: list[ast.AST] = [tree]
        while pending:
            parent = pending.pop()
            for name, value in ast.iter_fields(parent):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self._parents[child] = (parent, name)
                        pending.append(child)

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node around this one; None for the module."""
        found = self._parents.get(node)
        return found[0] if found else None

    def field(self, node: ast.AST) -> str:
        """Return the field of the parent that holds this node, such as `body`; an empty string for the module."""
        found = self._parents.get(node)
        return found[1] if found else ""

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around this one, from the inside out."""
        current = self.parent(node)
        while current is not None:
            yield current
            current = self.parent(current)

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the innermost function, class or module that a node runs in.

        Defaults and decorators of a function run around it.
        """
        child = node
        for outer in self.around(node):
            if isinstance(outer, (*FUNCTIONS, ast.ClassDef)) and self.field(child) == "body":
                return outer
            child = outer
        return self.tree

    def frame(self, node: ast.AST) -> ast.AST:
        """Return the innermost function or module that a node runs in; the body of a class runs where it is defined."""
        scope = self.scope(node)
        while isinstance(scope, ast.ClassDef):
            scope = self.scope(scope)
        return scope

    def loop(self, node: ast.AST) -> ast.AST | None:
        """Return the innermost loop around a node in its own scope."""
        for outer in self.around(node):
            if isinstance(outer, _LOOPS):
                return outer
            if isinstance(outer, (*FUNCTIONS, ast.ClassDef)):
                return None
        return None

    def is_inside(self, node: ast.AST, outer: ast.AST) -> bool:
        """Tell whether `outer` is around `node`."""
        return any(one is outer for one in self.around(node))

    def is_before(self, first: ast.AST, second: ast.AST) -> bool:
        """Tell whether `first` ends before `second` begins in one pass through the same function or module."""
        return (
            end(first) <= position(second)
            and self.frame(first) is self.frame(second)
            and not self.are_exclusive(first, second)
        )

    def are_exclusive(self, one: ast.AST, other: ast.AST) -> bool:
        """Tell whether the nodes never run in one pass.

        They are on different arms of one if, try or match, or one comes behind a return that ends the other's arm.
        """
        arms, other_arms = self._arms(one), self._arms(other)
        if any(arms[split] != arm for split, arm in other_arms.items() if split in arms):
            return True
        return self._leaves_before(one, other) or self._leaves_before(other, one)

    def _arms(self, node: ast.AST) -> dict[ast.AST, object]:
        """The arm of every if, try and match around a node."""
        arms: dict[ast.AST, object] = {}
        child = node
        for outer in self.around(node):
            field = self.field(child)
            if isinstance(outer, (ast.If, ast.IfExp)) and field in ("body", "orelse"):
                arms[outer] = field
            elif field in ("handlers", "cases"):
                arms[outer] = child
            elif isinstance(outer, ast.Try) and field in ("body", "orelse"):
                arms[outer] = "body"
            child = outer
        return arms

    def _leaves_before(self, one: ast.AST, other: ast.AST) -> bool:
        """Whether the arm of an if that holds `one` ends by leaving, before `other` comes."""
        child = one
        for outer in self.around(one):
            if isinstance(outer, (*FUNCTIONS, ast.ClassDef)):
                return False
            if isinstance(outer, ast.If) and self.field(child) in ("body", "orelse"):
                last = getattr(outer, self.field(child))[-1]
                if (
                    isinstance(last, _EXITS)
                    and position(other) > (outer.end_lineno or 0, 0)
                    and not self.is_inside(other, outer)
                ):
                    loop = self.loop(outer)
                    around = self.scope(outer) if isinstance(last, (ast.Return, ast.Raise)) or loop is None else loop
                    if self.is_inside(other, around):
                        return True
            child = outer
        return False

    # ---- guards ------------------------------------------------------------------------------------------------------

    def atoms(self, node: ast.AST) -> Atoms:
        """Return the conditions of the ifs around a node.

        They are taken apart at `not`, `and`, `or` and comparisons with constants.
        """
        atoms: Atoms = {}
        child = node
        for outer in self.around(node):
            if isinstance(outer, (ast.If, ast.IfExp)) and self.field(child) in ("body", "orelse"):
                _collect(outer.test, self.field(child) == "body", atoms)
            child = outer
        return atoms


def contradict(atoms: Atoms, others: Sequence[Atoms]) -> bool:
    """Tell whether a condition of `atoms` fails whenever those of `others` on the same expression hold."""
    for text, mine in atoms.items():
        theirs = [pair for other in others for pair in other.get(text, ())]
        if theirs and all(_exclude(pair, own) for pair in theirs for own in mine):
            return True
    return False


def _exclude(one: tuple[bool, str], other: tuple[bool, str]) -> bool:
    if one[1] == other[1]:
        return one[0] is not other[0]
    return one[0] and other[0] and "" not in (one[1], other[1])


def _collect(test: ast.expr, wanted: bool, atoms: Atoms) -> None:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        _collect(test.operand, not wanted, atoms)
    elif isinstance(test, ast.BoolOp):
        if isinstance(test.op, ast.And) is wanted:
            for value in test.values:
                _collect(value, wanted, atoms)
    elif isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.comparators[0], ast.Constant):
        operator = test.ops[0]
        if isinstance(operator, (ast.Eq, ast.Is, ast.NotEq, ast.IsNot)):
            is_equal = isinstance(operator, (ast.Eq, ast.Is))
            atoms.setdefault(text_of(test.left), set()).add((wanted is is_equal, repr(test.comparators[0].value)))
    else:
        atoms.setdefault(text_of(test), set()).add((wanted, ""))
