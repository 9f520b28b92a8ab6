"""One training script, read and never run: its assignments, its calls of amp, and what it asks of `initialize`."""

import ast
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from .. import config
from ..config import DEFAULT_LEVEL
from .names import Names
from .tree import SCOPES, Tree, argument_of, function_of, parts_of, position, text_of

_CORE = ("amp.initialize", "amp.scale_loss", "amp.master_params", "amp.init")
_AMP = (*_CORE, "amp.session", "amp.state_dict", "amp.load_state_dict", "amp.disable_casts")


class Block(NamedTuple):
    """One `with ... scale_loss(...) as name:`; the name is "" where the block binds none, or more than a name."""

    statement: ast.With | ast.AsyncWith
    call: ast.Call
    name: str


class Assignment(NamedTuple):
    """One `target = value`, the target as text."""

    target: str
    value: ast.expr


class Script(Tree):
    """A parsed script.

    Args:
        path: as it is to be shown.
        text: the source. Raises SyntaxError, ValueError, RecursionError or MemoryError if it cannot be parsed.

    Attributes:
        expected: what amp may do in it, by its own calls of `initialize`, or by those of files that were given with it.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        self.expected = Expected(scales=True, skips=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in somebody else's strings
            super().__init__(ast.parse(text))

    # Cached properties, because most files of a directory need none of them.

    @cached_property
    def names(self) -> Names:
        """What the names stand for."""
        return Names(self.tree)

    def place(self, node: ast.AST) -> tuple[int, int]:
        """Return the line and the column of a node, both from 1, the column in characters."""
        line, byte_column = position(node)
        lines = self.text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        before = lines[line - 1].encode()[:byte_column]
        return line, len(before.decode(errors="ignore")) + 1

    # ---- calls -------------------------------------------------------------------------------------------------------

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Every call, in the order of the text."""
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def _resolved_calls(self) -> list[tuple[ast.Call, frozenset[str]]]:
        return [(call, self.names.resolve(call.func)) for call in self.calls]

    def calls_of(self, *names: str) -> list[ast.Call]:
        """Return the calls of functions of these names, in the rules' spelling, in the order of the text."""
        return [call for call, resolved in self._resolved_calls if not resolved.isdisjoint(names)]

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
                if not isinstance(call, ast.Call) or function_of(call) != "scale_loss":
                    continue
                name = ""
                if isinstance(item.optional_vars, ast.Name):
                    name = item.optional_vars.id
                found.append(Block(statement, call, name))
        return found

    def is_in_block(self, node: ast.AST) -> bool:
        """Tell whether a node runs in the body of a block."""
        statements = [block.statement for block in self.blocks]
        for outer, _ in self.around(node):
            if outer in statements:
                return True
            if isinstance(outer, SCOPES):
                return False
        return False

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
                    found += _assign(target, node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                found.append(Assignment(text_of(node.target), node.value))
        return found

    def values_of(self, name: str) -> list[ast.expr]:
        """Return everything that is assigned to a name, anywhere in the script."""
        return [one.value for one in self.assignments if one.target == name]

    def is_without_amp(self, node: ast.AST) -> bool:
        """Tell whether a node runs only where amp is switched off: on the other arm of an `if` from a call of amp."""
        return any(self.are_exclusive(node, call) for call in self.calls_of(*_CORE))


def _assign(target: ast.expr, value: ast.expr) -> Iterator[Assignment]:
    """Yield the assignments of one statement: each element of a tuple gets its own value, or the whole one."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        yield Assignment(text_of(target), value)
    elif isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
        for name, part in zip(target.elts, value.elts, strict=True):
            yield from _assign(name, part)
    else:
        for name in target.elts:
            yield from _assign(name, value)


# ---- levels ----------------------------------------------------------------------------------------------------------


class Expected(NamedTuple):
    """What the calls of `initialize` in view may do: what any of them does at any level that is possible.

    Attributes:
        scales: the loss may be multiplied by something other than 1.
        skips: steps may be skipped after an overflow, since the scale is dynamic.
    """

    scales: bool
    skips: bool


def expect(scripts: Sequence[Script]) -> Expected:
    """Return what the calls of `initialize` in these scripts may do; without any call, everything is possible."""
    expected = [_expect_of(script, call) for script in scripts for call in script.initializations]
    if not expected:
        return Expected(scales=True, skips=True)
    return Expected(any(one.scales for one in expected), any(one.skips for one in expected))


def _expect_of(script: Script, call: ast.Call) -> Expected:
    enabled = _constant(script, argument_of(call, "enabled", 2), True)
    level = _constant(script, argument_of(call, "opt_level", 3), DEFAULT_LEVEL)
    scale = _constant(script, argument_of(call, "loss_scale"), None)
    has_stars = any(isinstance(one, ast.Starred) for one in call.args) or not all(one.arg for one in call.keywords)
    if enabled is False:
        return Expected(scales=False, skips=False)
    if isinstance(scale, (int, float)):
        return Expected(scales=scale != 1, skips=False)
    has_dynamic_scale = {known.name: known.has_dynamic_scale for known in config.levels.read_levels()}
    is_dynamic = scale is not None or has_stars or has_dynamic_scale.get(str(level), True)
    return Expected(scales=is_dynamic, skips=is_dynamic)


def _constant(script: Script, node: ast.expr | None, default: object) -> object:
    """Return the value of a constant, or of a name that is assigned one constant in the whole script, or its text."""
    if node is None:
        return default
    if isinstance(node, ast.Name):
        values = script.values_of(node.id)
        is_argument = any(isinstance(one, ast.arg) and one.arg == node.id for one in script.nodes)
        if len(values) == 1 and not is_argument:
            node = values[0]
    if isinstance(node, ast.Constant):
        return node.value
    return ast.unparse(node)
