"""One training script, read and never run: its tree, where nodes stand in it, and its calls of amp.

Code that never runs (`if False:`) is left out.
"""

import ast
import re
import warnings
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from .names import Names

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (*_FUNCTIONS, ast.ClassDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_OTHER_AMP = re.compile(r"amp|scaler|fp16|half|precision|native", re.IGNORECASE)
_CORE = ("amp.initialize", "amp.scale_loss", "amp.master_params", "amp.init")
_AMP = (*_CORE, "amp.session", "amp.state_dict", "amp.load_state_dict", "amp.disable_casts")

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


class Block(NamedTuple):
    """One `with ... scale_loss(...) as name:`; the name is None where the block binds none, or more than a name."""

    statement: ast.With | ast.AsyncWith
    call: ast.Call
    name: str | None


class Assignment(NamedTuple):
    """One `target = value`, the target as text."""

    target: str
    value: ast.expr
    statement: ast.stmt


class Script:
    """A parsed script.

    Args:
        path: as it is to be shown.
        text: the source. Raises SyntaxError, ValueError, RecursionError or MemoryError if it cannot be parsed.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in somebody else's strings
            self.tree = ast.parse(text)

    # Cached properties, because most files of a directory need none of them.

    @cached_property
    def names(self) -> Names:
        """What the names stand for."""
        return Names(self.tree)

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

    def place(self, node: ast.AST) -> tuple[int, int]:
        """Return the line and the column of a node, both from 1, the column in characters."""
        line, byte_column = position(node)
        lines = self.text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        before = lines[line - 1].encode()[:byte_column] if line else b""
        return max(line, 1), len(before.decode(errors="ignore")) + 1

    # ---- calls -------------------------------------------------------------------------------------------------------

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Every call, in the order of the text."""
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def _calls_by_name(self) -> dict[str, list[ast.Call]]:
        by_name: dict[str, list[ast.Call]] = {}
        for call in self.calls:
            for name in self.names.resolve(call.func):
                by_name.setdefault(name, []).append(call)
        return by_name

    def calls_of(self, *names: str) -> list[ast.Call]:
        """Return the calls of functions of these names, in the rules' spelling, in the order of the text."""
        found = {call for name in names for call in self._calls_by_name.get(name, ())}
        return sorted(found, key=position)

    def is_call_of(self, node: ast.AST | None, names: Iterable[str]) -> bool:
        """Tell whether `node` is a call of a function of these names."""
        return isinstance(node, ast.Call) and not self.names.resolve(node.func).isdisjoint(names)

    def method_calls(self, *names: str) -> Iterator[tuple[ast.Call, ast.expr]]:
        """Yield (call, receiver) for each call of a method of these names; functions of imported modules are none."""
        for call in self.calls:
            function = call.func
            if isinstance(function, ast.Attribute) and function.attr in names and not self.names.dotted(function.value):
                yield call, function.value

    @cached_property
    def uses_amp(self) -> bool:
        """Whether the script calls amp, Apex's or this package's."""
        return "amp" in self.text and bool(self.calls_of(*_AMP))

    @cached_property
    def initializations(self) -> list[ast.Call]:
        """The calls of `amp.initialize`."""
        return self.calls_of("amp.initialize")

    @cached_property
    def blocks(self) -> list[Block]:
        """The `scale_loss` blocks, in the order of the text, by whatever name the script reaches amp (`args.amp`)."""
        found = []
        for statement in self.nodes:
            if not isinstance(statement, (ast.With, ast.AsyncWith)):
                continue
            for item in statement.items:
                call = item.context_expr
                if isinstance(call, ast.Call) and function_of(call) == "scale_loss":
                    name = item.optional_vars.id if isinstance(item.optional_vars, ast.Name) else None
                    found.append(Block(statement, call, name))
        return found

    def block_around(self, node: ast.AST) -> Block | None:
        """Return the innermost block in whose body a node runs."""
        by_statement = {block.statement: block for block in self.blocks}
        for outer in self.around(node):
            if isinstance(outer, (ast.With, ast.AsyncWith)) and outer in by_statement:
                return by_statement[outer]
            if isinstance(outer, _SCOPES):
                return None
        return None

    @cached_property
    def optimizers(self) -> frozenset[str]:
        """The expressions that stand for an optimizer in a call of `initialize` or `scale_loss`."""
        given = [argument_of(call, "optimizers", 1) for call in self.initializations]
        given += [argument_of(block.call, "optimizers", 1) for block in self.blocks]
        return frozenset(text_of(one) for argument in given for one in parts_of(argument))

    def is_optimizer(self, node: ast.AST) -> bool:
        """Tell whether an expression stands for an optimizer: amp was given it, or its name holds `optim`."""
        text = text_of(node)
        return text in self.optimizers or "optim" in text.rpartition(".")[2].lower()

    # ---- assignments -------------------------------------------------------------------------------------------------

    @cached_property
    def assignments(self) -> list[Assignment]:
        """Every assignment; tuples of equal length are taken apart."""
        found: list[Assignment] = []
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    found += [Assignment(text_of(one), value, node) for one, value in _pairs(target, node.value)]
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                found.append(Assignment(text_of(node.target), node.value, node))
        return found

    def values_of(self, name: str) -> list[ast.expr]:
        """Return everything that is assigned to a name, anywhere in the script."""
        return [one.value for one in self.assignments if one.target == name]

    def assigned_before(self, name: str, node: ast.AST) -> ast.expr | None:
        """Return what `name` was assigned last, in the function of `node` and before it; None if nothing was."""
        for one in reversed(self.assignments):
            if one.target == name and self.is_before(one.statement, node):
                return one.value
        return None

    # ---- structure ---------------------------------------------------------------------------------------------------

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
            if isinstance(outer, _SCOPES):
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

    # ---- conditions --------------------------------------------------------------------------------------------------

    def conditions(self, node: ast.AST) -> Conditions:
        """Return the conditions of the ifs around a node, taken apart at `not`, `and`, `or` and comparisons."""
        found: Conditions = {}
        for outer, field in self._arms(node):
            if isinstance(outer, (ast.If, ast.IfExp)):
                _collect(outer.test, field == "body", found)
        return found

    def is_without_amp(self, node: ast.AST) -> bool:
        """Tell whether a node runs only where amp is switched off.

        It is on the other arm of an `if`, behind `amp.reset()`, or under a condition that contradicts those under which
        the script calls amp.
        """
        core = self.calls_of(*_CORE)
        if any(self.are_exclusive(node, call) for call in core):
            return True
        for reset in self.calls_of("amp.reset"):
            if self.is_before(reset, node) and not any(self.is_before(reset, call) for call in self.initializations):
                return True
        return False

    @cached_property
    def _conditions_of_amp(self) -> Conditions:
        """The conditions of all calls of amp together."""
        found: Conditions = {}
        for call in self.calls_of(*_CORE):
            for text, pairs in self.conditions(call).items():
                found.setdefault(text, set()).update(pairs)
        return found

    def is_beside_amp(self, node: ast.AST) -> bool:
        """Tell whether a node runs in a way of training that no call of amp has a part in.

        It is on the `else` of an `if` on something that no condition of a call of amp speaks of, or under one whose
        condition speaks of another kind of mixed precision.
        """
        for outer, field in self._arms(node):
            if not isinstance(outer, ast.If) or names_in(outer.test) & {*self._conditions_of_amp}:
                continue
            if field == "orelse" or _OTHER_AMP.search(text_of(outer.test)):
                return True
        return False


def _dead_field(node: ast.AST) -> str:
    """Return the field of an `if` with a constant condition that never runs; an empty string for all others."""
    if isinstance(node, (ast.If, ast.IfExp)) and isinstance(node.test, ast.Constant):
        return "orelse" if node.test.value else "body"
    return ""


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if not isinstance(target, (ast.Tuple, ast.List)):
        yield target, value
        return
    is_parallel = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
    for index, one in enumerate(target.elts):
        part = value.elts[index] if is_parallel and isinstance(value, (ast.Tuple, ast.List)) else value
        yield from _pairs(one, part)


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
