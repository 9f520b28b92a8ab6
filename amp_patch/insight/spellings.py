"""How the line of a script that raised writes the operands of the call."""

import ast
import contextlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..torch_private import MODULE_CALL
from .expressions import UNKNOWN, Reader, Source, find_expression
from .failing_call import Levels
from .origins import Origins
from .tensors import storage_of


def find_texts(levels: Levels, tensors: Sequence[Tensor], weights: Sequence[bool], origins: Origins) -> list[str]:
    """Return how the user's innermost line writes each tensor; "" where that is not known.

    `weights` says which tensors are parameters. If one other tensor and one argument are left, they belong together.
    """
    level = levels.innermost
    found = None if level is None else find_expression(level.frame, level.index)
    if level is None or found is None:
        return [""] * len(tensors)
    node, source = found
    if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(source.parents.get(node), ast.Assign):
        node = source.parents[node]
    reader = Reader(level.frame)
    passed = _find_passed(node, source, reader, levels)
    known = list(passed)
    for part in ast.walk(node):
        if isinstance(part, ast.expr) and not isinstance(part, ast.Constant):
            with contextlib.suppress(Exception):
                value = reader.read(part)
                if isinstance(value, Tensor):
                    known.append((source.spell(part), value))
    texts = []
    for tensor in tensors:
        storage = storage_of(tensor)
        same = [text for text, value in known if value is tensor] or [
            text for text, value in known if storage and storage_of(value) == storage and value.dtype is tensor.dtype
        ]
        if not same:
            same = _find_computed_again(tensor, known) or _find_source(tensor, passed, origins)
        texts.append(same[0] if same else "")
    left = [
        index
        for index, (text, tensor) in enumerate(zip(texts, tensors, strict=True))
        if not text and not weights[index] and tensor.is_floating_point()
    ]
    unread = [text for text in _find_unread(node, source, reader) if text not in texts]
    # An argument that is no operand shows that the operands are made of the arguments, as in F.cross_entropy.
    are_operands = all(source.spell(part) in texts for part in _find_floating_arguments(node, reader))
    if len(left) == 1 and len(unread) == 1 and are_operands:
        texts[left[0]] = unread[0]
    return texts


def _find_computed_again(tensor: Tensor, known: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Return the text of the call, such as `x[0].double()`, that may have made a tensor; [] if there are several."""
    like = {text for text, value in known if value.dtype is tensor.dtype and value.shape == tensor.shape}
    return list(like) if len(like) == 1 and next(iter(like)).endswith(")") else []


def _find_source(tensor: Tensor, passed: Sequence[tuple[str, Tensor]], origins: Origins) -> list[str]:
    """Return the text of the argument of a module from which a tensor has its dtype; [] if there is none."""
    made, calls = origins.find(tensor), set()
    while made is not None:
        calls.add(id(made))
        made = made.parent
    given = [(text, origins.find(value)) for text, value in passed if value.dtype is tensor.dtype]
    return list(dict.fromkeys(text for text, source in given if source is not None and id(source) in calls))[:1]


def _find_floating_arguments(node: ast.AST, reader: Reader) -> list[ast.expr]:
    """Return the positional arguments of a function that are read as floating tensors."""
    if not isinstance(node, ast.Call) or isinstance(reader.read(node.func), nn.Module):
        return []
    values = [(part, reader.read(part)) for part in node.args]
    return [part for part, value in values if isinstance(value, Tensor) and value.is_floating_point()]


def _find_passed(node: ast.AST, source: Source, reader: Reader, levels: Levels) -> list[tuple[str, Tensor]]:
    """Return the arguments that the call of a module was given, each with its text in the user's line."""
    if not isinstance(node, ast.Call) or not isinstance(reader.read(node.func), nn.Module):
        return []
    calls = [level.frame.f_locals.get("args") for level in levels.within() if level.frame.f_code is MODULE_CALL]
    given = next((args for args in calls if isinstance(args, tuple)), ())
    return [
        (source.spell(part), value) for part, value in zip(node.args, given, strict=False) if isinstance(value, Tensor)
    ]


def _find_unread(node: ast.AST, source: Source, reader: Reader) -> list[str]:
    """Return the arguments of a call that are results of other calls, which have no name.

    Of a module with modules inside, the arguments need not be the operands.
    """
    match node:
        case ast.Call():
            called = reader.read(node.func)
            if isinstance(called, nn.Module) and next(called.children(), None) is not None:
                return []
            parts = [*node.args, *(item.value for item in node.keywords)]
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, (ast.Call, ast.BinOp)):
                parts.insert(0, node.func.value)
        case ast.BinOp():
            parts = [node.left, node.right]
        case ast.AugAssign() | ast.Assign():
            parts = [node.value]
        case _:
            return []
    nested = (ast.Call, ast.BinOp, ast.Subscript)
    return [source.spell(part) for part in parts if isinstance(part, nested) and _is_floating(reader.read(part))]


def _is_floating(value: Any) -> bool:
    """Return whether a value is, or may be, a floating tensor."""
    return value is UNKNOWN or (isinstance(value, Tensor) and value.is_floating_point())
