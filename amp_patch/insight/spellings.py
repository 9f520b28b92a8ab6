"""Finds how the line of a script that raised an exception writes each operand, for example as `x.half()`."""

import ast
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ..torch_private import MODULE_CALL
from .expressions import CAST_METHODS, UNKNOWN, Reader, Source, find_expression
from .failing_call import Levels
from .origins import Origins
from .tensors import storage_of


def find_texts(levels: Levels, tensors: Sequence[Tensor], weights: Sequence[bool], origins: Origins) -> list[str]:
    """Return how the user's innermost line writes each tensor; "" if that is not known.

    `weights` says for each tensor whether it is a weight. If all tensors but one have a text, and all arguments but one
    belong to a tensor, these two are taken to belong together, unless the line shows otherwise. Weights, and tensors
    that are not floating, do not count.
    """
    level = levels.innermost
    expression = None if level is None else find_expression(level.frame, level.index)
    if level is None or expression is None:
        return [""] * len(tensors)
    node, source = expression
    if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(source.parents.get(node), ast.Assign):
        node = source.parents[node]
    reader = Reader(level.frame)
    passed = _find_passed(node, source, reader, levels)
    known = [*passed, *_read_tensors(node, source, reader)]
    texts = [_find_text(tensor, known, passed, origins) for tensor in tensors]
    left = [
        index
        for index, (text, tensor) in enumerate(zip(texts, tensors, strict=True))
        if not text and not weights[index] and tensor.is_floating_point()
    ]
    candidates = dict.fromkeys(text for text in _find_candidates(node, source, reader) if text not in texts)
    if len(left) == 1:
        candidates = {text: None for text in candidates if not _is_cast_away(text, tensors[left[0]])}
    # not if a floating argument is none of the tensors: the function computes them from its arguments then
    are_operands = all(source.spell(part) in texts for part in _find_floating_arguments(node, reader))
    if len(left) == 1 and len(candidates) == 1 and are_operands:
        texts[left[0]] = next(iter(candidates))
    return texts


def _is_cast_away(text: str, tensor: Tensor) -> bool:
    """Return whether a text, such as `f(x).half()`, ends with a cast to another dtype than a tensor has."""
    return any(text.endswith(method) and tensor.dtype is not dtype for dtype, method in CAST_METHODS.items())


def _read_tensors(node: ast.AST, source: Source, reader: Reader) -> list[tuple[str, Tensor]]:
    """Return the expressions in a node that are read as tensors, each with its text."""
    read: list[tuple[str, Tensor]] = []
    for part in ast.walk(node):
        if isinstance(part, ast.expr) and not isinstance(part, ast.Constant):
            with contextlib.suppress(Exception):
                value = reader.read(part)
                if isinstance(value, Tensor):
                    read.append((source.spell(part), value))
    return read


def _find_text(
    tensor: Tensor, known: Sequence[tuple[str, Tensor]], passed: Sequence[tuple[str, Tensor]], origins: Origins
) -> str:
    """Return the text of a tensor in the line: the text of the value in `known` that fits it best; "" without one."""
    storage = storage_of(tensor)
    identical = [text for text, value in known if value is tensor]
    views = [text for text, value in known if storage and storage_of(value) == storage and value.dtype is tensor.dtype]
    texts = identical or views or _find_computed_again(tensor, known) or _find_source(tensor, passed, origins)
    return texts[0] if texts else ""


def _find_computed_again(tensor: Tensor, known: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Return the text of the one expression with the dtype and shape of a tensor, if it ends with a call; else [].

    Each evaluation of a call such as `x[0].double()` makes a new tensor, so the storage cannot identify it.
    """
    like = {text for text, value in known if value.dtype is tensor.dtype and value.shape == tensor.shape}
    return list(like) if len(like) == 1 and next(iter(like)).endswith(")") else []


def _find_source(tensor: Tensor, passed: Sequence[tuple[str, Tensor]], origins: Origins) -> list[str]:
    """Return the text of the first argument of a module from which a tensor may have its dtype; [] without one."""
    made, ancestors = origins.find(tensor), set()
    while made is not None:
        ancestors.add(id(made))
        made = made.parent
    given = [(text, origins.find(value)) for text, value in passed if value.dtype is tensor.dtype]
    return list(dict.fromkeys(text for text, source in given if source is not None and id(source) in ancestors))[:1]


def _find_floating_arguments(node: ast.AST, reader: Reader) -> list[ast.expr]:
    """Return the positional arguments of a function that can be read as floating tensors; [] for a module."""
    if not isinstance(node, ast.Call) or isinstance(reader.read(node.func), nn.Module):
        return []
    values = [(part, reader.read(part)) for part in node.args]
    return [part for part, value in values if isinstance(value, Tensor) and value.is_floating_point()]


def _find_passed(node: ast.AST, source: Source, reader: Reader, levels: Levels) -> list[tuple[str, Tensor]]:
    """Return the positional tensors that the call of a module was given, each with its text; [] for another call."""
    if not isinstance(node, ast.Call) or not isinstance(reader.read(node.func), nn.Module):
        return []
    calls = [level.frame.f_locals.get("args") for level in levels.within() if level.frame.f_code is MODULE_CALL]
    given = next((args for args in calls if isinstance(args, tuple)), ())
    # After `*batch`, positions of arguments differ from the source, and the elements of batch have no text.
    parts = itertools.takewhile(lambda part: not isinstance(part, ast.Starred), node.args)
    return [(source.spell(part), value) for part, value in zip(parts, given, strict=False) if isinstance(value, Tensor)]


def _find_candidates(node: ast.AST, source: Source, reader: Reader) -> list[str]:
    """Return the texts of the arguments that are calls, binary operators or subscripts, and may be floating tensors.

    Returns [] for a module with submodules, whose operands need not be its arguments.
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
    return [
        source.spell(part) for part in _flatten(parts) if isinstance(part, nested) and _is_floating(reader.read(part))
    ]


def _flatten(parts: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield arguments, and in place of tuples and lists such as (h0, c0) their elements."""
    for part in parts:
        if isinstance(part, (ast.Tuple, ast.List)):
            yield from _flatten(part.elts)
        else:
            yield part


def _is_floating(value: Any) -> bool:
    """Return whether a value is, or may be, a floating tensor."""
    return value is UNKNOWN or (isinstance(value, Tensor) and value.is_floating_point())
