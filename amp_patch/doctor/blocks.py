"""The `scale_loss` blocks of a script, its backward passes, and GradScalers that are switched off."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from .levels import UNKNOWN, is_written_out, literal
from .names import AUTOCASTS, SCALERS
from .script import Script
from .structure import argument_of, text_of


@dataclass(frozen=True, slots=True)
class Block:
    """One `with ... scale_loss(...) as name:`; the name is None where the block binds none, or more than a name."""

    statement: ast.With | ast.AsyncWith
    item: ast.withitem
    call: ast.Call
    name: str | None


def get_blocks(script: Script) -> list[Block]:
    """Return the blocks of a script, in the order of the text."""
    found = []
    for statement in script.nodes:
        if not isinstance(statement, (ast.With, ast.AsyncWith)):
            continue
        for item in statement.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and script.is_call_of(call, ["amp.scale_loss"]):
                name = item.optional_vars.id if isinstance(item.optional_vars, ast.Name) else None
                found.append(Block(statement, item, call, name))
    return found


def get_block_around(script: Script, blocks: list[Block], node: ast.AST) -> Block | None:
    """Return the innermost block in whose body a node runs."""
    scope = script.structure.scope(node)
    for outer in script.structure.around(node):
        for block in blocks:
            if block.statement is outer and script.structure.scope(outer) is scope:
                return block
    return None


def get_backward_calls(script: Script) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Yield (call, loss) for each `loss.backward()`.

    Left out: `engine.backward(loss)`, `self.backward()`, and losses that a GradScaler has scaled. One that is switched
    off gives the loss itself.
    """
    for call, loss in script.method_calls("backward"):
        if isinstance(loss, ast.Call) and len(loss.args) == 1 and _is_scaling_by_nothing(script, loss):
            loss = loss.args[0]
        is_own = isinstance(loss, ast.Name) and loss.id in ("self", "cls", "ctx")
        methods = [node.func for node in ast.walk(loss) if isinstance(node, ast.Call)]
        is_scaled_otherwise = any(text_of(method).rpartition(".")[2] in ("scale", "super") for method in methods)
        if not call.args and not is_own and not is_scaled_otherwise:
            yield call, loss


def _is_scaling_by_nothing(script: Script, call: ast.Call) -> bool:
    """Whether a call is `scaler.scale(...)` of scalers that are made with `enabled=False` and no others."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "scale":
        return False
    made = [value for target, value, _ in script.assignments if target == text_of(call.func.value)]
    scalers = [one for one in made if isinstance(one, ast.Call) and script.is_call_of(one, SCALERS)]
    return bool(made) and len(scalers) == len(made) and all(get_switch(script, one)[1] is False for one in scalers)


def get_switch(script: Script, call: ast.Call) -> tuple[ast.expr | None, object]:
    """Return the argument `enabled` of a call of autocast or a GradScaler, and its value, which is True by default."""
    names = script.names.resolve(call.func)
    nodes = {argument_of(call, "enabled", at) for name, at in {**AUTOCASTS, **SCALERS}.items() if name in names}
    if len(nodes) > 1 or not is_written_out(call):
        return None, UNKNOWN
    node = nodes.pop()
    return node, True if node is None else literal(script, node)
