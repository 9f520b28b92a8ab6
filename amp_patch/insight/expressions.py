"""The expression that ran in a frame of a traceback, and the values of its parts.

Names, stored attributes, items of plain containers, and results of a few methods of tensors are read. Reading them runs
no code of the script, except methods that a subclass of Tensor overrides.
"""

import ast
import functools
import inspect
import itertools
import linecache
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

UNKNOWN = object()
"""Stands for the value of an expression that is not read."""

_TENSOR_ATTRIBUTES = frozenset({"data", "grad", "T", "mT", "real", "dtype", "device"})
"""The attributes of tensors that are read."""

_PURE_METHODS = frozenset(
    {
        "clone",
        "float",
        "half",
        "bfloat16",
        "double",
        "detach",
        "cpu",
        "contiguous",
        "flatten",
        "squeeze",
        "unsqueeze",
        "t",
        "view",
        "reshape",
        "permute",
        "transpose",
    }
)
"""Methods of tensors that are called to read their result. None of them writes."""

CAST_METHODS = {
    torch.float32: ".float()",
    torch.float16: ".half()",
    torch.bfloat16: ".bfloat16()",
    torch.float64: ".double()",
}
"""The call that casts a tensor to a dtype."""

_CASTS = frozenset({"float", "half", "bfloat16", "double"})
"""The methods in `_PURE_METHODS` that cast."""


class Source:
    """The syntax tree of a source, and its text."""

    def __init__(self, text: str) -> None:
        tree = ast.parse(text)
        self._text = text
        self._by_place: dict[tuple[int | None, ...], ast.AST] = {}
        self._statements: list[ast.stmt] = []
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
            if isinstance(node, ast.stmt):
                self._statements.append(node)
            if isinstance(node, (ast.expr, ast.stmt)):
                place = node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
                # ast.walk is breadth-first, so a statement `f()` comes before the call `f()`, which replaces it.
                if isinstance(self._by_place.get(place, node), (ast.Expr, type(node))):
                    self._by_place[place] = node

    def find(self, place: tuple[int | None, ...]) -> ast.AST | None:
        """Return the expression at (line, end line, column, end column); else the statement there; else None."""
        return self._by_place.get(place)

    def spell(self, node: ast.AST) -> str:
        """Return the text of an expression in the source. If it has several lines, return the text of `ast.unparse`."""
        text = ast.get_source_segment(self._text, node)
        return ast.unparse(node) if text is None or "\n" in text else text

    def calls_of_statement(self, line: int) -> Iterator[ast.Call]:
        """Yield the calls of the innermost statement at a line (of the last one, if the line has several). Leave out
        calls in statements that this statement contains.
        """
        around = [node for node in self._statements if node.lineno <= line <= (node.end_lineno or node.lineno)]
        rest: list[ast.AST] = [max(around, key=lambda node: (node.lineno, node.col_offset))] if around else []
        while rest:
            node = rest.pop()
            rest += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]
            if isinstance(node, ast.Call):
                yield node

    def calls_at(self, line: int) -> list[ast.Call]:
        """Return the calls that begin in a line."""
        return [node for node in self._by_place.values() if isinstance(node, ast.Call) and node.lineno == line]


@functools.lru_cache(maxsize=8)
def _parse(lines: tuple[str, ...]) -> Source | None:
    try:
        return Source("".join(lines))
    except (SyntaxError, ValueError, RecursionError):
        return None


def read_source(file: str, names: dict[str, Any] | None = None) -> Source | None:
    """Return the source of a file or notebook cell; None if it cannot be parsed. `names`: globals of its code.

    The source is empty for a file that is not there.
    """
    return _parse(tuple(linecache.getlines(file, names)))


def find_expression(frame: types.FrameType, index: int) -> tuple[ast.AST, Source] | None:
    """Return the node of the instruction at `index` (`tb_lasti` of a traceback), and the source that has the node.

    None if the node is not known.
    """
    place = next(itertools.islice(frame.f_code.co_positions(), index // 2, None), None)
    source = read_source(frame.f_code.co_filename, frame.f_globals)
    node = None if place is None or source is None else source.find(place)
    return None if node is None or source is None else (node, source)


class Reader:
    """Reads the values of expressions in a frame.

    Args:
        stand_in: the value to read for a call, except a call of `_PURE_METHODS` without keywords. None: UNKNOWN.
    """

    def __init__(self, frame: types.FrameType, stand_in: Tensor | None = None) -> None:
        self._stand_in = stand_in
        self._locals, self._globals, self._builtins = frame.f_locals, frame.f_globals, frame.f_builtins

    def read(self, node: ast.AST) -> Any:
        """Return the value of an expression, or UNKNOWN."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._read_name(node.id)
            case ast.Attribute():
                return read_attribute(self.read(node.value), node.attr)
            case ast.Subscript():
                return self._read_item(self.read(node.value), self.read(node.slice))
            case ast.UnaryOp(op=ast.USub()):
                value = self.read(node.operand)
                return -value if isinstance(value, (int, float)) else UNKNOWN
            case ast.Tuple() | ast.List():
                values = [self.read(element) for element in node.elts]
                if any(value is UNKNOWN for value in values):
                    return UNKNOWN
                return tuple(values) if isinstance(node, ast.Tuple) else values
            case ast.Slice():
                return self._read_slice(node)
            case ast.Call(func=ast.Attribute(attr=name), keywords=[]) if name in _PURE_METHODS:
                return self._read_call(node)
            case ast.Call() if self._stand_in is not None:
                return self._stand_in
        return UNKNOWN

    def _read_name(self, name: str) -> Any:
        for names in (self._locals, self._globals, self._builtins):
            if name in names:
                return names[name]
        return UNKNOWN

    def _read_slice(self, node: ast.Slice) -> Any:
        bounds = [None if bound is None else self.read(bound) for bound in (node.lower, node.upper, node.step)]
        return UNKNOWN if any(bound is UNKNOWN for bound in bounds) else slice(*bounds)

    def _read_item(self, owner: Any, key: Any) -> Any:
        if key is UNKNOWN or type(owner) not in (dict, list, tuple, Tensor, nn.Parameter):
            return UNKNOWN
        try:
            return owner[key]
        except Exception:  # whatever is wrong with the key
            return UNKNOWN

    def _read_call(self, node: ast.Call) -> Any:
        assert isinstance(node.func, ast.Attribute)
        owner, values = self.read(node.func.value), [self.read(argument) for argument in node.args]
        # The shape of the stand-in may be wrong. So of its methods, only casts are called; a call of another method
        # counts as the stand-in itself.
        if owner is not UNKNOWN and owner is self._stand_in and node.func.attr not in _CASTS:
            return owner
        if not isinstance(owner, Tensor) or any(value is UNKNOWN for value in values):
            return UNKNOWN
        try:
            return getattr(owner, node.func.attr)(*values)
        except Exception:  # whatever is wrong with the arguments
            return UNKNOWN


def read_attribute(owner: Any, name: str) -> Any:
    """Return an attribute. UNKNOWN stands for attributes that are not read, such as properties and class methods.

    Of a tensor, methods and `_TENSOR_ATTRIBUTES` are read; of another object, what it stores in `__dict__`, and
    functions, tensors and static methods of its class; of an nn.Module, also parameters, buffers and submodules.
    """
    if owner is UNKNOWN:
        return UNKNOWN
    if isinstance(owner, Tensor):
        is_method = callable(inspect.getattr_static(Tensor, name, None))
        return getattr(owner, name) if name in _TENSOR_ATTRIBUTES or is_method else UNKNOWN
    stored = getattr(owner, "__dict__", {})
    if isinstance(owner, nn.Module):
        for kind in ("_parameters", "_buffers", "_modules"):
            if name in stored.get(kind, ()):
                return stored[kind][name]
    if name in stored:
        return stored[name]
    static = inspect.getattr_static(owner, name, UNKNOWN)
    if isinstance(static, staticmethod):
        return static.__func__
    if inspect.isfunction(static):
        return static if isinstance(owner, type) else static.__get__(owner)
    return static if isinstance(static, (Tensor, types.BuiltinFunctionType)) else UNKNOWN
