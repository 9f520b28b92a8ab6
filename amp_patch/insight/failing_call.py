"""Finds the call that raised an exception, and its arguments, in the frames of the traceback."""

import ast
import functools
import operator
import os
import site
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..casting import cast_tree
from ..config import op_names
from ..torch_dispatch import OpOverload, get_argument_names
from ..torch_private import MODULE_CALL
from .expressions import UNKNOWN, Reader, Source, find_expression
from .folding import OpCall
from .observe import Observer
from .ops import find_overload
from .sites import describe_line, is_of_user
from .tensors import storage_of, tensors_in

Cast = Callable[[Tensor], Tensor]

_OPERATORS: dict[type[ast.operator], tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    ast.Add: ("__add__", operator.add, operator.iadd),
    ast.Sub: ("__sub__", operator.sub, operator.isub),
    ast.Mult: ("__mul__", operator.mul, operator.imul),
    ast.Div: ("__truediv__", operator.truediv, operator.itruediv),
    ast.MatMult: ("__matmul__", operator.matmul, operator.imatmul),
    ast.Pow: ("__pow__", operator.pow, operator.ipow),
}
"""For each operator: the name of its method, its function, and the function of its augmented form, such as `+=`."""

_PACKAGES = tuple(
    f"{folder}{os.sep}"
    for folder in {*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()}
    if folder.endswith("-packages")
)
"""Folders of installed packages."""

_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__))
"""The folder of amp_patch."""

_CHECKS = (ast.Name, ast.Attribute, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Tuple, ast.List, ast.Set, ast.Constant)
_GRAMMAR = (ast.expr_context, ast.cmpop, ast.boolop, ast.unaryop)
"""A condition is evaluated a second time only if all its nodes are of these kinds or of `_CHECKS`: it calls nothing."""


@dataclass(frozen=True)
class Level:
    """A frame of a traceback, with the line and the instruction (`tb_lasti` as `index`) that ran in it."""

    frame: types.FrameType
    line: int
    index: int

    @property
    def file(self) -> str:
        """The file of the code."""
        return self.frame.f_code.co_filename

    @property
    def is_of_user(self) -> bool:
        """Whether the code is the user's, or of an installed package other than torch and amp_patch."""
        return is_of_user(self.file)

    @property
    def is_in_package(self) -> bool:
        """Whether the code is of an installed package."""
        return self.file.startswith(_PACKAGES)

    @property
    def place(self) -> str:
        """The line, as `train.py:6`."""
        return describe_line(self.file, self.line)


class Levels:
    """Frames of an exception, the innermost last.

    Args:
        error: the exception whose frames to take, or None.
        levels: frames that come first.
    """

    def __init__(self, error: BaseException | None, levels: Sequence[Level] = ()) -> None:
        self.all: list[Level] = list(levels)
        trace = None if error is None else error.__traceback__
        while trace is not None:
            self.all.append(Level(trace.tb_frame, trace.tb_lineno, trace.tb_lasti))
            trace = trace.tb_next

    @property
    def caller(self) -> "Levels | None":
        """The frames without the innermost one; None if the user's code is in none of them."""
        outer = Levels(None, self.all[:-1])
        return None if outer.innermost is None else outer

    @property
    def of_user(self) -> list[Level]:
        """The frames of the user's code (see `Level.is_of_user`), the innermost last."""
        return [level for level in self.all if level.is_of_user]

    @property
    def innermost(self) -> Level | None:
        """The innermost frame of the user's code; None without one."""
        return next(reversed(self.of_user), None)

    @property
    def own(self) -> Level | None:
        """The innermost frame of the user's code outside of installed packages; None without one."""
        return next((level for level in reversed(self.of_user) if not level.is_in_package), None)

    def down_to_own(self) -> "Levels":
        """Return the frames down to `own`; none if there is no such frame."""
        return Levels(None, self.all[: self.all.index(self.own) + 1] if self.own is not None else ())

    def within(self) -> list[Level]:
        """Return the innermost frame of the user's code, and all frames below it. Return all frames if none is the
        user's.
        """
        start = max((index for index, level in enumerate(self.all) if level.is_of_user), default=0)
        return self.all[start:]

    def find_local(self, file: str, name: str) -> Any:
        """Return the variable `name` of the innermost frame that has it and whose path ends with `file`; else None."""
        for level in reversed(self.all):
            if level.file.endswith(file) and name in level.frame.f_locals:
                return level.frame.f_locals[name]
        return None

    def find_module(self, observer: Observer) -> str:
        """Return the name of the innermost module of the models that is `self` in a frame; "" for none."""
        for level in reversed(self.all):
            name = observer.name_module(level.frame.f_locals.get("self"))
            if name is not None:
                return name
        return ""

    def find_call_of_model(self) -> Level | None:
        """Return the frame of the user's own code that called the outermost module; None without one."""
        codes = [level.frame.f_code for level in self.all]
        if MODULE_CALL not in codes:
            return None
        outer = self.all[: codes.index(MODULE_CALL)]
        return next((level for level in reversed(outer) if level.is_of_user and not level.is_in_package), None)

    def find_covered(self) -> OpCall | None:
        """Return the outermost call of a listed op that was running; None without one. It is the local variable `call`
        of the function `cover` in `Observer._cover`.
        """
        calls = (level.frame.f_locals.get("call") for level in self.all if level.frame.f_code.co_name == "cover")
        return next((call for call in calls if isinstance(call, OpCall)), None)

    def find_names(self) -> Iterator[tuple[str, bool]]:
        """Yield the name of the function that each frame of `within` calls, the outermost frame first.

        An operator or an assignment to an item counts as a call of its method, such as `__add__`. Frames that run none
        of these are left out. The second value says whether the function may be one of torch, or a method of tensors.
        """
        for level in self.within():
            expression = find_expression(level.frame, level.index)
            node = None if expression is None else expression[0]
            if isinstance(node, ast.Call):
                yield _name_function(node.func), _may_be_of_torch(node.func, Reader(level.frame))
            elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _OPERATORS:
                yield _OPERATORS[type(node.op)][0], True
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                yield "__setitem__", True

    def find_variable(self, storage: int, tensor: Tensor | None = None) -> tuple[str, str]:
        """Return the name of a variable, and the line of its frame. The variable holds `tensor`, or a tensor whose
        storage has the address `storage` (0: not known).

        The outermost frame of the user's code with such a variable counts. Return ("", "") if no frame has one.
        """
        for level in self.of_user:
            for name, value in list(level.frame.f_locals.items()):
                for part in tensors_in([value]):
                    if part is tensor or (storage and storage_of(part) == storage):
                        return name, level.place
        return "", ""


def name_of_call(levels: Levels) -> str:
    """Return the name of the function that the user's line calls, else of the next call inside; "" if none is known."""
    return next((name for name, _ in levels.find_names()), "")


def _may_be_of_torch(function: ast.expr, reader: Reader) -> bool:
    """Return whether an expression, which is called, may be a function of torch or a method of tensors."""
    value = reader.read(function)
    if value is UNKNOWN:  # perhaps a method of the result of another call
        return isinstance(function, ast.Attribute) and reader.read(function.value) is UNKNOWN
    if isinstance(value, nn.Module):
        return False
    if isinstance(getattr(value, "__self__", None), Tensor):
        return True
    spellings = op_names.find_known_spellings(_name_function(function))
    return any(getattr(owner, name, None) is value for (_, name), owner in spellings.items())


@dataclass(frozen=True)
class FailingCall:
    """A call that may have raised, and that can be run again with other arguments.

    A *check* is treated like a call: the condition of an `assert`, or of the `if` around a `raise`.

    Attributes:
        name: the name of the op or of the function. For a check, the name of the function that contains it.
        operands: the tensors among its arguments, each with its name; for a module, also its parameters. For a check,
            the tensors that the condition names.
        run: makes the call again. It takes a function, such as a cast, and replaces each tensor by what this returns.
        written: the operand that it writes to; None if there is none, or if that is not known.
        has_out: whether it has the argument `out`.
        is_kernel: whether it is an op of torch's dispatcher, not a call in Python code.
        forward: for an op of the backward pass, the call of the forward pass whose gradient it computes; else None.
        is_reached: whether lists and rules for modules act where it runs; None if that is not known.
        is_check: whether it is a check.
        stand_in: an operand of one element, in place of an argument that is the result of another call. It has the
            dtype of the result of the last op. None if there is none.
    """

    name: str
    operands: Sequence[tuple[str, Tensor]]
    run: Callable[[Cast], Any]
    written: Tensor | None = None
    has_out: bool = False
    is_kernel: bool = False
    forward: OpCall | None = None
    is_reached: bool | None = None
    is_check: bool = False
    stand_in: Tensor | None = None


def find_failing_calls(levels: Levels, observer: Observer) -> Iterator[FailingCall]:
    """Yield the calls that may have raised an exception, the most likely first:

    1. the op that torch's dispatcher ran, if a dispatch mode of this package or of torch was handling it;
    2. the Python calls in the frames of `Levels.within`, from the innermost to the user's line, without amp_patch's;
    3. the call in the user's line once more, if one of its arguments is the result of another call, as in `f(g(x))`. No
       frame holds this result, so `stand_in` takes its place.
    """
    within = levels.within()
    for level in reversed(levels.all):
        if level.frame.f_code.co_name == "__torch_dispatch__" and not level.is_of_user:
            call = _read_kernel(level, observer)
            if call is not None:
                yield call
                break
    for level in reversed(within):
        if level.file.startswith(_OWN_FOLDER):
            continue
        call = _read_call(level)
        if call is not None:
            yield call
    latest = observer.origins.last
    if latest is not None and latest.call is not None and levels.innermost is not None:
        stand_in = torch.zeros(1, dtype=latest.dtype)
        call = _read_call(levels.innermost, stand_in)
        if call is not None and any(tensor is stand_in for _, tensor in call.operands):
            yield replace(call, stand_in=stand_in)


def _read_kernel(level: Level, observer: Observer) -> FailingCall | None:
    """Return the op that the `__torch_dispatch__` in this frame was running; None if its variables do not show it."""
    known = level.frame.f_locals
    function, args, kwargs = known.get("func"), known.get("args"), known.get("kwargs")
    if not isinstance(function, OpOverload) or not isinstance(args, tuple):
        return None
    names = get_argument_names(function)
    operands: list[tuple[str, Tensor]] = []
    for name, value in (*zip(names, args, strict=False), *(kwargs or {}).items()):
        tensors = list(tensors_in([value]))
        operands += [(f"{name}[{n}]" if len(tensors) > 1 else name, tensor) for n, tensor in enumerate(tensors)]
    where = observer.failed_in
    overload = find_overload(function)
    return FailingCall(
        overload.name,
        operands,
        functools.partial(_call_again, function, args, kwargs or {}),
        written=next(tensors_in(_find_written(function, overload.written, args, kwargs or {})), None),
        has_out="out" in (kwargs or {}),
        is_kernel=True,
        forward=None if where is None else where.forward,
        is_reached=None if where is None else where.is_reached,
    )


def _find_written(function: Any, places: frozenset[int], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an op writes to, which may be in `kwargs`, such as `out`."""
    names = get_argument_names(function)
    return [args[place] if place < len(args) else kwargs.get(names[place]) for place in sorted(places)]


def _call_again(function: Callable[..., Any], args: Any, kwargs: dict[str, Any], cast: Cast) -> Any:
    """Call a function with the result of `cast` for each tensor among its arguments."""
    kwargs = {name: cast_tree(value, cast) for name, value in kwargs.items()}
    return function(*[cast_tree(value, cast) for value in args], **kwargs)


# ---- calls of Python -------------------------------------------------------------------------------------------------


def _read_call(level: Level, stand_in: Tensor | None = None) -> FailingCall | None:
    """Return the call, operator, assignment or check that ran in a frame; None if it cannot be read, or run again."""
    expression = find_expression(level.frame, level.index)
    if expression is None:
        return None
    node, source = expression
    reader = Reader(level.frame, stand_in)
    if isinstance(source.parents.get(node), ast.Assert):
        return _read_check(source.parents[node], source, level)
    match node:
        case ast.Call():
            return _read_function(node, reader)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            name, function, _ = _OPERATORS[type(node.op)]
            return _make_call(name, function, [(node.left, reader), (node.right, reader)])
        case ast.AugAssign() if type(node.op) in _OPERATORS:
            name, _, function = _OPERATORS[type(node.op)]
            return _make_call(name, function, [(node.target, reader), (node.value, reader)], writes=True)
        case ast.Subscript(ctx=ast.Store()):
            return _read_item_assignment(node, source, reader)
        case ast.Attribute(ctx=ast.Store(), attr="grad"):
            return _read_grad_assignment(node, source, reader)
        case ast.Raise():
            return _read_check(node, source, level)
    return None


Parts = Sequence[tuple[ast.expr, Reader]]
"""The arguments of a call in the source, each with the reader of its frame."""


def _make_call(name: str, function: Callable[..., Any], parts: Parts, *, writes: bool = False) -> FailingCall | None:
    """Return the call of a function with positional arguments; None if one of them cannot be read."""
    values = [reader.read(node) for node, reader in parts]
    if any(value is UNKNOWN for value in values):
        return None
    operands = [
        (ast.unparse(node), tensor)
        for (node, _), value in zip(parts, values, strict=True)
        for tensor in tensors_in([value])
    ]
    run = functools.partial(_call_again, function, values, {})
    written = values[0] if writes and isinstance(values[0], Tensor) else None
    return FailingCall(name, operands, run, written=written)


def _read_function(node: ast.Call, reader: Reader) -> FailingCall | None:
    """Return a call of a function, method or module; None if an argument cannot be read, or it must not run again."""
    function, name = reader.read(node.func), _name_function(node.func)
    parts: list[tuple[str, ast.expr]] = [(ast.unparse(part), part) for part in node.args]
    if isinstance(node.func, ast.Attribute):
        owner = reader.read(node.func.value)
        if isinstance(owner, Tensor):
            function = functools.partial(_call_method, node.func.attr)
            parts.insert(0, (ast.unparse(node.func.value), node.func.value))
        elif owner is UNKNOWN:
            return None
    if not callable(function) or function is UNKNOWN or not _may_run_again(function):
        return None
    values = [_read_argument(part, reader) for _, part in parts]
    args = [value for given in values for value in given]
    keywords = {item.arg: reader.read(item.value) for item in node.keywords if item.arg is not None}
    has_mapping = len(keywords) < len(node.keywords)  # `**kwargs`, which is not read
    if has_mapping or any(value is UNKNOWN for value in (*args, *keywords.values())):
        return None
    operands = [(text, tensor) for (text, _), given in zip(parts, values, strict=True) for tensor in tensors_in(given)]
    operands += [
        (ast.unparse(item.value), tensor) for item in node.keywords for tensor in tensors_in([keywords[item.arg or ""]])
    ]
    if isinstance(function, nn.Module):
        operands += list(function.named_parameters())
        function = functools.partial(_call_module, function)
    written = keywords.get("out")
    if name.endswith("_") and not name.endswith("__") and operands:  # an op in place, such as add_
        written = operands[0][1]
    run = functools.partial(_call_again, function, args, keywords)
    return FailingCall(name, operands, run, written=next(tensors_in([written]), None), has_out="out" in keywords)


def _read_argument(node: ast.expr, reader: Reader) -> Sequence[Any]:
    """Return the values of an argument: one, or several for `*args`."""
    if not isinstance(node, ast.Starred):
        return [reader.read(node)]
    value = reader.read(node.value)
    return value if isinstance(value, (tuple, list)) else [UNKNOWN]


def _name_function(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)


def _call_method(name: str, owner: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(owner, name)(*args, **kwargs)


def _call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # `forward` alone: hooks of the module are code of the script, and may have effects.
    return module.forward(*args, **kwargs)


def _may_run_again(function: Any) -> bool:
    """Return whether a second call, on copies of the tensors, is safe: it must not run code of the script.

    True for:

    * methods of tensors;
    * modules of torch without buffers, if all modules inside are torch's, too;
    * functions of amp_patch, of torch, and of packages whose names begin with "torch";
    * other callable objects except Python functions and methods, partials and classes: most are functions in C.
    """
    if isinstance(function, functools.partial):
        return function.func is _call_method  # a method of a tensor
    if isinstance(function, nn.Module):
        has_state = any(buffer.numel() for buffer in function.buffers())
        is_of_torch = all(type(module).__module__.startswith("torch.nn.modules") for module in function.modules())
        return is_of_torch and not has_state
    if isinstance(function, (types.FunctionType, types.MethodType)):
        return (function.__module__ or "").startswith(("torch", "amp_patch"))
    return not isinstance(function, type)


def _read_item_assignment(node: ast.Subscript, source: Source, reader: Reader) -> FailingCall | None:
    """Return the call of `x[index] = value`; None if something else assigns to `x[index]`, such as a `for`, or if a
    part of it cannot be read.
    """
    assignment = source.parents.get(node)
    if not isinstance(assignment, ast.Assign):
        return None
    return _make_call(
        "__setitem__",
        operator.setitem,
        [(part, reader) for part in (node.value, node.slice, assignment.value)],
        writes=True,
    )


def _read_grad_assignment(node: ast.Attribute, source: Source, reader: Reader) -> FailingCall | None:
    """Return the call of `parameter.grad = value`; None in the same cases as `_read_item_assignment`."""
    assignment = source.parents.get(node)
    if not isinstance(assignment, ast.Assign):
        return None

    def assign(parameter: Tensor, gradient: Tensor) -> None:
        parameter.detach().clone().grad = gradient

    return _make_call("assignment of .grad", assign, [(node.value, reader), (assignment.value, reader)], writes=True)


def _read_check(node: ast.AST, source: Source, level: Level) -> FailingCall | None:
    """Return the condition of an `assert`, or of the nearest `if` around a `raise`, as a call that raises where the
    script does.

    Returns None if the condition has other nodes than `_CHECKS` and `_GRAMMAR`, such as a call, if it names no tensor,
    or if it reads no `dtype`.
    """
    test: ast.AST | None = node
    expects = False
    if isinstance(node, ast.Assert):
        test, expects = node.test, True
    else:
        while test is not None and not isinstance(test, ast.If):
            test = source.parents.get(test)
        test = None if test is None else test.test
    if not isinstance(test, ast.expr) or not all(map(_is_of_check, ast.walk(test))):
        return None
    reader, operands = Reader(level.frame), []
    is_about_dtype = any(isinstance(part, ast.Attribute) and part.attr == "dtype" for part in ast.walk(test))
    for part in ast.walk(test):
        value = reader.read(part) if isinstance(part, ast.Name) else None
        if isinstance(part, ast.Name) and isinstance(value, Tensor):
            operands.append((part.id, value))
    if not is_about_dtype or not operands:
        return None
    code = compile(ast.Expression(test), "<condition>", "eval")
    names: Mapping[str, Any] = level.frame.f_locals

    def run(cast: Cast) -> None:
        changed = {name: cast(value) if isinstance(value, Tensor) else value for name, value in names.items()}
        if bool(eval(code, level.frame.f_globals, changed)) is not expects:
            raise AssertionError

    return FailingCall(level.frame.f_code.co_name, list(dict(operands).items()), run, is_check=True)


def _is_of_check(node: ast.AST) -> bool:
    return isinstance(node, (*_CHECKS, *_GRAMMAR))
