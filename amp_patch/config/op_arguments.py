"""Finds the position of an argument of an op, from its signature, docstring or schema. Calls no op.

A list entry of the rule `match`, such as `{op: attend, like: value}`, names an argument of the op by `like`. The
tensors of a call are cast to the dtype of this argument.
"""

import inspect
import re
import types
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter
from typing import Any

from ..errors import OpListError, did_you_mean

# The head of the docstring of a function of torch in C: `matmul(input, other, *, out=None) -> Tensor`.
_HEAD = re.compile(r"\s*(?P<name>\w+)\((?P<parameters>[^()]*(?:\([^()]*\)[^()]*)*)\)")
# A comma between parameters, and not inside a default such as `(0, 1)`.
_COMMA = re.compile(r",\s*(?![^()\[\]]*[)\]])")

_ANYWHERE, _BY_NAME = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
_CATCH_ALL = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}


def find_position(function: Any, argument: str) -> int | None:
    """Return the position of an argument in a call of a function, from 0; None if it can be passed by name only.

    Raises OpListError, without a location, if the function has no such argument, or if the names of its arguments
    cannot be read.
    """
    if isinstance(function, (staticmethod, classmethod)):
        function = function.__func__
    function = inspect.unwrap(function)  # torch's own function, if a session has replaced it
    parameters = _read_parameters(function)
    named = [parameter for parameter in parameters if parameter.kind not in _CATCH_ALL]
    for position, parameter in enumerate(named):
        if parameter.name == argument:
            return None if parameter.kind is _BY_NAME else position
    raise OpListError(_explain_missing(function, argument, parameters))


def _explain_missing(function: Any, argument: str, parameters: Sequence[Parameter]) -> str:
    """Return the message that no argument of a function is known to have this name."""
    shown = getattr(function, "__name__", None) or str(function)
    names: list[str] = []
    catch_all: list[str] = []
    for parameter in parameters:
        if parameter.kind in _CATCH_ALL:
            catch_all.append(f"{_CATCH_ALL[parameter.kind]}{parameter.name}")
        else:
            names.append(parameter.name)
    if catch_all:
        problem = f"{shown} takes {' and '.join(catch_all)}, so no argument is known to be {argument!r}"
        return f"{problem}; put the rule on a function that names its arguments.{did_you_mean(argument, names)}"
    if not names:
        problem = f"{shown} does not tell the names of its arguments, so none is known to be {argument!r}"
        return f"{problem}; put the rule on a Python function that calls it"
    return f"{shown} has no argument {argument!r}; it has {', '.join(names)}.{did_you_mean(argument, names)}"


def _read_parameters(function: Callable[..., Any]) -> list[Parameter]:
    """Return the parameters of a function. They are only `*args` and `**kwargs`, or none, if no names can be read."""
    parameters: list[Parameter] = []
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function in C
        parameters = list(_read_docstring(function))
    # an op of `torch.library` has the signature (*args, **kwargs), and its arguments are in its schema
    if all(parameter.kind in _CATCH_ALL for parameter in parameters):
        parameters = list(_read_schema(function)) or parameters
    return parameters


def _read_schema(function: Any) -> Iterator[Parameter]:
    """Yield the parameters of an op that `torch.library` made."""
    from ..torch_dispatch import list_schema_arguments

    for name, is_by_name in list_schema_arguments(function):
        yield Parameter(name, _BY_NAME if is_by_name else _ANYWHERE)


def _read_docstring(function: Any) -> Iterator[Parameter]:
    """Yield the parameters of a function in C from the head of its docstring (see `_HEAD`), if it has one."""
    name = getattr(function, "__name__", "")
    head = _HEAD.match(getattr(function, "__doc__", None) or "")
    if head is None or head["name"] != name:
        return
    if isinstance(function, types.MethodDescriptorType):  # the docstring leaves out the tensor itself
        yield Parameter("self", _ANYWHERE)
    is_by_name = False
    for text in _COMMA.split(head["parameters"]):
        words = re.split("[=:]", text)[0].split()
        if words == ["*"]:
            is_by_name = True
        elif words and words[-1].isidentifier():
            yield Parameter(words[-1], _BY_NAME if is_by_name else _ANYWHERE)
