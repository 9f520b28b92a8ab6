"""`Script`: a training script, parsed, with the facts that the rules need, such as its assignments and calls of amp.

`expect` reads from the calls of `initialize` whether amp may scale the loss and skip steps.
"""

import ast
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from .. import config
from ..config import DEFAULT_LEVEL
from .names import Names
from .tree import SCOPES, Tree, argument_of, function_of, parts_of, position, text_of

# Functions of Apex and of amp_patch, as `names.canonical` spells them. Scripts that train with amp call one of
# `_TRAINING`.
_TRAINING = ("amp.initialize", "amp.scale_loss", "amp.master_params", "amp.init")
_AMP = (*_TRAINING, "amp.session", "amp.state_dict", "amp.load_state_dict", "amp.disable_casts")


class BlockStatement(NamedTuple):
    """A `with amp.scale_loss(...) as name:` block. `name` is "" without `as`, or if the target is not a plain name."""

    statement: ast.With | ast.AsyncWith
    call: ast.Call
    name: str


class Assignment(NamedTuple):
    """An assignment `target = value`, with the target as text."""

    target: str
    value: ast.expr


class Script(Tree):
    """A parsed script.

    Args:
        path: the path to show in the report.
        text: the source. Raises SyntaxError, ValueError, RecursionError or MemoryError if it cannot be parsed.

    Attributes:
        expected: whether amp may scale the loss and skip steps in this script. `Project` sets it from the calls of
            `initialize` in the script, or in other files. Before that, both count as possible.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        self.expected = Expected(scales=True, skips=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about invalid escapes in the user's strings
            super().__init__(ast.parse(text))

    # The properties below are computed at their first use and kept, because most files need none of them.

    @cached_property
    def names(self) -> Names:
        """The imports and aliases of the script."""
        return Names(self.tree)

    def location_of(self, node: ast.AST) -> tuple[int, int]:
        """Return the line and the column of a node, both from 1, the column in characters."""
        line, byte_column = position(node)
        # not `splitlines`, which also splits at a form feed, where Python does not begin a new line
        lines = self.text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        # ast counts columns in bytes of UTF-8
        before = lines[line - 1].encode()[:byte_column]
        return line, len(before.decode(errors="ignore")) + 1

    # ---- calls -------------------------------------------------------------------------------------------------------

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Every call, in the order of the text."""
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def _resolved_calls(self) -> list[tuple[ast.Call, frozenset[str]]]:
        """Every call, with the dotted names that its function may have."""
        return [(call, self.names.resolve(call.func)) for call in self.calls]

    def calls_of(self, *names: str) -> list[ast.Call]:
        """Return the calls of functions with these full names, such as "amp.scale_loss", in the order of the text."""
        return [call for call, resolved in self._resolved_calls if not resolved.isdisjoint(names)]

    def method_calls(self, *names: str) -> Iterator[tuple[ast.Call, ast.expr]]:
        """Yield each call of a method with one of these names, with the object it is called on: `model` of
        `model.half()`.

        Leaves out calls on imported names, such as `torch.save()`.
        """
        for call in self.calls:
            function = call.func
            if isinstance(function, ast.Attribute) and function.attr in names and not self.names.dotted(function.value):
                yield call, function.value

    @cached_property
    def identifiers(self) -> str:
        """The names, attributes, arguments and imports in the code, a line each.

        Comments, strings and the names of `def` and `class` statements are left out.
        """
        words = set[str]()
        for node in self.nodes:
            if isinstance(node, ast.Name):
                words.add(node.id)
            elif isinstance(node, ast.Attribute):
                words.add(node.attr)
            elif isinstance(node, (ast.arg, ast.keyword)):
                words.add(str(node.arg))
            elif isinstance(node, ast.alias):
                words.add(f"{node.name} {node.asname}")
            elif isinstance(node, ast.ImportFrom):
                words.add(str(node.module))
        return "\n".join(sorted(words))

    @cached_property
    def uses_amp(self) -> bool:
        """Whether the script calls a function in `_AMP`."""
        return "amp" in self.text and bool(self.calls_of(*_AMP))

    @cached_property
    def initializations(self) -> list[ast.Call]:
        """The calls of `amp.initialize`."""
        return self.calls_of("amp.initialize")

    @cached_property
    def blocks(self) -> list[BlockStatement]:
        """The `scale_loss` blocks, in the order of the text.

        The name before `scale_loss` does not matter: scripts keep amp in variables such as `args.amp`.
        """
        blocks = []
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
                blocks.append(BlockStatement(statement, call, name))
        return blocks

    def is_in_block(self, node: ast.AST) -> bool:
        """Return whether a node is in a `scale_loss` block."""
        statements = [block.statement for block in self.blocks]
        for outer, _ in self.around(node):
            if outer in statements:
                return True
            # the body of a function that is defined in a block may run outside of it
            if isinstance(outer, SCOPES):
                return False
        return False

    @cached_property
    def optimizers(self) -> frozenset[str]:
        """The expressions, as text, that are passed as optimizers to `initialize` or `scale_loss`."""
        given = [argument_of(call, "optimizers", 1) for call in self.initializations]
        given += [argument_of(block.call, "optimizers", 1) for block in self.blocks]
        return frozenset(text_of(part) for argument in given for part in parts_of(argument))

    def is_optimizer(self, node: ast.AST) -> bool:
        """Return whether an expression seems to be an optimizer.

        It seems to be one if it is passed to amp as an optimizer, if an optimizer of torch.optim is assigned to it, or
        if the last part of its name contains "optim".
        """
        text = text_of(node)
        is_named = "optim" in text.rpartition(".")[2].lower()
        return is_named or text in self.optimizers or text in self._made_optimizers

    @cached_property
    def _made_optimizers(self) -> frozenset[str]:
        """The targets, as text, to which an optimizer of torch is assigned, as in `opt = torch.optim.AdamW(...)`."""
        made = []
        for assignment in self.assignments:
            value = assignment.value
            if isinstance(value, ast.Call) and any(map(_is_optimizer_class, self.names.resolve(value.func))):
                made.append(assignment.target)
        return frozenset(made)

    # ---- assignments -------------------------------------------------------------------------------------------------

    @cached_property
    def assignments(self) -> list[Assignment]:
        """Every assignment by `=`, to one target each. `a, b = x, y` counts as `a = x` and `b = y`."""
        assignments: list[Assignment] = []
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    assignments += _assign(target, node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                assignments.append(Assignment(text_of(node.target), node.value))
        return assignments

    def values_of(self, name: str) -> list[ast.expr]:
        """Return all values that are assigned to a name, anywhere in the script."""
        return [assignment.value for assignment in self.assignments if assignment.target == name]

    def is_without_amp(self, node: ast.AST) -> bool:
        """Return whether a node may run only in runs without amp.

        That is so if a call of amp is on another arm of an `if`, `try` or `match` around the node.
        """
        return any(self.are_exclusive(node, call) for call in self.calls_of(*_TRAINING))


def _assign(target: ast.expr, value: ast.expr) -> Iterator[Assignment]:
    """Yield one assignment for each name in `target`.

    For `a, b = f()`, where the names have no values of their own, each name gets the whole value.
    """
    if not isinstance(target, (ast.Tuple, ast.List)):
        yield Assignment(text_of(target), value)
    elif isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
        for name, part in zip(target.elts, value.elts, strict=True):
            yield from _assign(name, part)
    else:
        for name in target.elts:
            yield from _assign(name, value)


# ---- opt_levels ------------------------------------------------------------------------------------------------------


class Expected(NamedTuple):
    """The effects that amp may have on a training, at the opt_levels at which it may run.

    Attributes:
        scales: the loss may be multiplied by a scale other than 1.
        skips: steps may be skipped after an overflow, because the loss scale is dynamic.
    """

    scales: bool
    skips: bool


def expect(scripts: Sequence[Script]) -> Expected:
    """Return the effects that amp may have at the opt_levels in these scripts' calls of `initialize`.

    Without such a call, the opt_level is unknown, so both effects are possible.
    """
    expected = [_expect_of(script, call) for script in scripts for call in script.initializations]
    if not expected:
        return Expected(scales=True, skips=True)
    return Expected(any(call.scales for call in expected), any(call.skips for call in expected))


def _expect_of(script: Script, call: ast.Call) -> Expected:
    """Return the effects that amp may have at the opt_level and the loss scale of one call of `initialize`."""
    enabled = _constant(script, argument_of(call, "enabled", 2), True)
    level = _constant(script, argument_of(call, "opt_level", 3), DEFAULT_LEVEL)
    scale = _constant(script, argument_of(call, "loss_scale"), None)
    # `*args` or `**kwargs` may hold a loss scale or a level
    has_stars = any(isinstance(given, ast.Starred) for given in call.args)
    has_stars = has_stars or not all(keyword.arg for keyword in call.keywords)
    if enabled is False:
        return Expected(scales=False, skips=False)
    if isinstance(scale, (int, float)):
        return Expected(scales=scale != 1, skips=False)
    has_dynamic_scale = {known.name: known.has_dynamic_scale for known in config.levels.read_levels()}
    is_dynamic = scale is not None or has_stars or has_dynamic_scale.get(str(level), True)
    return Expected(scales=is_dynamic, skips=is_dynamic)


def _constant(script: Script, node: ast.expr | None, default: object) -> object:
    """Return the value of an argument if it is a constant, or a variable whose only value is a constant.

    Returns the source text of any other expression, and `default` if `node` is None: the argument is not given.
    """
    if node is None:
        return default
    if isinstance(node, ast.Name):
        values = script.values_of(node.id)
        # an argument of a function also has the values that callers pass
        is_argument = any(isinstance(part, ast.arg) and part.arg == node.id for part in script.nodes)
        if len(values) == 1 and not is_argument:
            node = values[0]
    if isinstance(node, ast.Constant):
        return node.value
    return ast.unparse(node)


def _is_optimizer_class(name: str) -> bool:
    """Return whether a full name names a class of torch.optim, such as `torch.optim.AdamW`."""
    module, _, kind = name.rpartition(".")
    return module == "torch.optim" and kind[:1].isupper()
