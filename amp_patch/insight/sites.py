"""The line of a script that called an op, and the role of the code between line and op, read from the stack."""

import ast
import functools
import inspect
import linecache
import os
import re
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..torch_dispatch import find_backward
from .expressions import read_source

_ROOT = Path(__file__).parent.parent
_PACKAGE = __name__.partition(".")[0]
_TORCH = f"{Path(torch.__file__).parent}/"
_ROLES_OF_TORCH = {  # by the beginnings of file names; the first that fits counts
    f"{_TORCH}optim/": "optimizer",
    f"{_TORCH}amp/grad_scaler.py": "amp",
    _TORCH: "",
}
_CHECKPOINT = f"{_TORCH}utils/checkpoint.py"
_LOW_DTYPE = re.compile(r"half(tensor)?\b|float16|get_autocast", re.IGNORECASE)  # also bfloat16, get_autocast_dtype
_COMPUTED = (ast.Call, ast.BinOp)  # expressions that compute a tensor
_RECOMPUTES = (_CHECKPOINT, f"{_TORCH}autograd/")
"""Files with code that repeats a forward pass: torch's checkpoints, and autograd, which runs checkpoints of scripts."""
_STDLIB = Path(threading.__file__).parent
_LIBRARIES = ("<", f"{_STDLIB}/contextlib.py", f"{_STDLIB}/importlib/")
"""Beginnings of file names whose code is not the user's: code without a file, and Python's contextlib and importlib."""


class Site(NamedTuple):
    """The innermost line of the user's code on the stack, and the code of amp_patch or torch that it has called.

    Attributes:
        place: the line, as `train.py:6`; "" if no line is known.
        by: the role of the called code: "cast", "border" (casts of a module's inputs and outputs), "amp" (scales,
            gradients, masters), "optimizer", or "" for any other. Code of amp_patch has the `__role__` of its module or
            package, or else "amp".
        file, number: the file and the number of the line.
    """

    place: str
    by: str
    file: str = ""
    number: int = 0


class Caller(NamedTuple):
    """The innermost line of the user's code on the stack. `find_site` makes a `Site` of it.

    Attributes:
        file, number: the file and the number of the line; "" and 0 if no line is known.
        by: the role of the called code, as in `Site`.
        known: the global variables of the line's module.
    """

    file: str
    number: int
    by: str
    known: dict[str, Any]


def find_caller() -> Caller:
    """Return where the code that is running was called from. In a thread of autograd, no line is known."""
    by = ""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        caller: Caller | None = None
        if code is _REPEATS:
            caller = frame.f_locals["caller"]
            role = caller.by
        else:
            role = _find_role(code.co_filename)
            if role is None:
                return Caller(code.co_filename, frame.f_lineno, by, frame.f_globals)
        # The innermost role counts, with two exceptions: the code that asked for a cast replaces the role "cast", and
        # "optimizer" replaces all others.
        if role and (by in ("", "cast") or role == "optimizer"):
            by = role
        if caller is not None:
            return caller._replace(by=by)
        frame = frame.f_back
    return Caller("", 0, by, {})


def repeat(caller: Caller, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function. In it, `find_caller` finds the line of `caller`, whoever calls this."""
    return function(*args, **kwargs)


_REPEATS = repeat.__code__


def find_site() -> Site:
    """Return where the code that is running was called from. In a thread of autograd, `place` is ""."""
    caller = find_caller()
    place = describe_line(caller.file, caller.number) if caller.file else ""
    return Site(place, caller.by, caller.file, caller.number)


def is_of_user(file: str) -> bool:
    """Return whether a file is the user's or of a package: not torch's, amp_patch's, or one of `_LIBRARIES`."""
    return _find_role(file) is None


def names_dtype() -> bool:
    """Return whether the line that `find_site` returns names a 16-bit dtype, as in `.half()`.

    A line such as `x.to(y.dtype)` names none. Returns True if no line is known.
    """
    caller = find_caller()
    if not caller.file:
        return True
    line = linecache.getline(caller.file, caller.number, caller.known)
    return _LOW_DTYPE.search(line) is not None


def casts_result(file: str, number: int) -> bool:
    """Return whether the statement of a line casts a computed value to 16 bits, as in `softmax(x).half()`.

    Reads the source, because torch runs no op for a cast of a result that has 16 bits already.
    """
    source = read_source(file) if file else None
    return source is not None and any(map(_casts_result, source.calls_of_statement(number)))


def _casts_result(call: ast.Call) -> bool:
    """Return whether a call casts a computed value to 16 bits, or computes with a 16-bit `dtype`."""
    func, given = call.func, [*call.args, *(keyword.value for keyword in call.keywords)]
    if isinstance(func, ast.Attribute) and any(isinstance(part, _COMPUTED) for part in ast.walk(func.value)):
        is_cast = func.attr in ("half", "bfloat16")
        return is_cast or (func.attr in ("to", "type") and any(map(_is_low_dtype, given)))
    is_region = "autocast" in ast.unparse(func)
    dtypes = [keyword.value for keyword in call.keywords if keyword.arg == "dtype"]
    return not is_region and bool(call.args) and any(map(_is_low_dtype, dtypes))


def _is_low_dtype(node: ast.expr) -> bool:
    return _LOW_DTYPE.search(ast.unparse(node)) is not None


def find_low_lines(file: str) -> list[str]:
    """Return the lines of a file that name a 16-bit dtype, but not autocast."""
    lines = enumerate(linecache.getlines(file), 1)
    return [
        describe_line(file, number)
        for number, line in lines
        if _LOW_DTYPE.search(line.partition("#")[0]) and "autocast" not in line
    ]


def describe_line(file: str, line: int) -> str:
    """Return `train.py:6`, or as IPython writes it, `Cell In[6], line 6`."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        named = shell.compile.format_code_name(file)
        if named is not None:
            return f"{' '.join(named)}, line {line}"
    return f"{os.path.basename(file)}:{line}"


def is_backward_of_user(node: Any) -> bool:
    """Return whether a node of the backward pass runs a `backward` that the user or a package has written."""
    backward = find_backward(node)
    code = None if backward is None else getattr(inspect.unwrap(backward), "__code__", None)
    return code is not None and _find_role(code.co_filename) is None


def is_under_checkpoint() -> bool:
    """Return whether torch.utils.checkpoint runs a forward again. Only meaningful in code that autograd calls."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CHECKPOINT:
        frame = frame.f_back
    return frame is not None


def find_recomputed() -> nn.Module | None:
    """Return the module that a checkpoint runs again: the module of the outermost call inside it. None without one.

    Hooks do not find it if the script has passed a method of the module, or a function that uses it, to the checkpoint:
    torch calls no hook of the module then.
    """
    outermost: nn.Module | None = None
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not _calls_forward(frame.f_code):
        outermost = _find_module(frame) or outermost
        frame = frame.f_back
    return None if frame is None else outermost


def _calls_forward(code: types.CodeType) -> bool:
    """Return whether code of torch runs a forward pass again: a checkpoint, or autograd, but not `Function.apply`."""
    is_of_forward = code.co_name == "apply" and code.co_varnames[:1] == ("cls",)
    return code.co_filename.startswith(_RECOMPUTES) and not is_of_forward


def _find_module(frame: types.FrameType) -> nn.Module | None:
    """Return the module of a call: its first argument, its `self`, or the only module among its variables."""
    known, code = frame.f_locals, frame.f_code
    for name in (*code.co_varnames[: min(1, code.co_argcount)], "self"):
        module = known.get(name)
        if isinstance(module, nn.Module):
            return module
    modules = {id(value): value for value in known.values() if isinstance(value, nn.Module)}
    return next(iter(modules.values())) if len(modules) == 1 else None


@functools.cache
def _find_role(file: str) -> str | None:
    """Return the role of the code in a file; None for the user's code. The cache holds an entry for each file."""
    if file.startswith(f"{_ROOT}/"):
        return _find_own_role(Path(file).relative_to(_ROOT).with_suffix("").parts)
    for folder, role in _ROLES_OF_TORCH.items():
        if file.startswith(folder):
            return role
    if file.startswith(_LIBRARIES) and not file.startswith("<ipython-input-"):
        return ""
    return None


def _find_own_role(parts: tuple[str, ...]) -> str:
    """Return the role of a module of amp_patch, or else of the innermost package that has one, or else "amp"."""
    for length in range(len(parts), 0, -1):
        module = sys.modules.get(".".join((_PACKAGE, *parts[:length])))
        role = vars(module).get("__role__") if module is not None else None  # a module may have its own __getattr__
        if role is not None:
            return str(role)
    return "amp"
