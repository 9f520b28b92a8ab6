"""The `scale_loss` blocks of a script, and its backward passes."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from .script import Script
from .structure import text_of


@dataclass(frozen=True, slots=True)
class Block:
    """One `with ... scale_loss(...) as name:`; the name is None where the block binds none, or more than a name."""

    statement: ast.With | ast.AsyncWith
    name: str | None


def get_blocks(script: Script) -> list[Block]:
    """Return the blocks of a script, in the order of the text."""
    statements = [node for node in script.nodes if isinstance(node, (ast.With, ast.AsyncWith))]
    found = []
    for statement in statements:
        for item in statement.items:
            if script.is_call_of(item.context_expr, ["amp.scale_loss"]):
                name = item.optional_vars.id if isinstance(item.optional_vars, ast.Name) else None
                found.append(Block(statement, name))
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

    Left out: `engine.backward(loss)`, `self.backward()`, and losses that a GradScaler has scaled.
    """
    for call, loss in script.method_calls("backward"):
        is_own = isinstance(loss, ast.Name) and loss.id in ("self", "cls", "ctx")
        methods = [node.func for node in ast.walk(loss) if isinstance(node, ast.Call)]
        is_scaled_otherwise = any(text_of(method).rpartition(".")[2] in ("scale", "super") for method in methods)
        if not call.args and not is_own and not is_scaled_otherwise:
            yield call, loss
