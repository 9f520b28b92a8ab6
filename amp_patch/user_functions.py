"""Functions of the user's own that follow a rule as listed ops do: decorated, or registered by name."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import ArgumentTypeError, ArgumentValueError, did_you_mean
from .queries import check_owner
from .session import current as _current

Function = TypeVar("Function", bound=Callable[..., Any])


def half_function(function: Function) -> Function:
    """Decorate a function to run in the low dtype, what it calls included, whenever a session patches functions."""
    return _decorate(function, "whitelist")  # type: ignore[no-any-return]


def float_function(function: Function) -> Function:
    """Decorate a function to run in float32, what it calls included, whenever a session patches functions."""
    return _decorate(function, "blacklist")  # type: ignore[no-any-return]


def promote_function(function: Function) -> Function:
    """Decorate a function to run in the widest dtype of its arguments whenever a session patches functions."""
    return _decorate(function, "promote")  # type: ignore[no-any-return]


_NAMES = {"whitelist": "half", "blacklist": "float", "promote": "promote"}


def _decorate(function: Any, kind: str) -> Any:
    if isinstance(function, staticmethod):
        return staticmethod(_decorate(function.__func__, kind))
    if isinstance(function, classmethod):
        return classmethod(_decorate(function.__func__, kind))
    if not callable(function):
        raise ArgumentTypeError(
            f"{_NAMES[kind]}_function decorates a function, not {type(function).__name__}: pass the function itself;"
            f" register_{_NAMES[kind]}_function takes one by its module and name"
        )
    casts: Any = None
    cast_function = function

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal casts, cast_function
        opened = _current.state.session
        if opened is None or opened.casts is None:
            return function(*args, **kwargs)
        if casts is not opened.casts:
            casts, cast_function = opened.casts, opened.casts.wrap(kind, function)
        return cast_function(*args, **kwargs)

    return wrapper


def register_half_function(module: Any, name: str) -> None:
    """Have `module.name` run in the low dtype, from the next `initialize` on, whatever the lists say.

    Raises ArgumentTypeError for a module that is given by its name, ArgumentValueError if there is no such function.
    """
    _register(module, name, "whitelist")


def register_float_function(module: Any, name: str) -> None:
    """Have `module.name` run in float32, from the next `initialize` on, whatever the lists say.

    Raises ArgumentTypeError for a module that is given by its name, ArgumentValueError if there is no such function.
    """
    _register(module, name, "blacklist")


def register_promote_function(module: Any, name: str) -> None:
    """Have `module.name` run in its widest input dtype, from the next `initialize` on.

    Raises ArgumentTypeError for a module that is given by its name, ArgumentValueError if there is no such function.
    """
    _register(module, name, "promote")


def _register(module: Any, name: str, kind: str) -> None:
    check_owner(module, name, f"register_{_NAMES[kind]}_function")
    owner = getattr(module, "__name__", module)
    if not hasattr(module, name):
        raise ArgumentValueError(
            f"{owner} has no function {name!r} to register: name one that it has.{did_you_mean(name, dir(module))}"
        )
    if not callable(getattr(module, name)):
        raise ArgumentTypeError(f"{owner}.{name} is not callable, so it cannot be registered: name a function")
    registered = _current.state.registered
    registered[:] = [entry for entry in registered if not (entry[0] is module and entry[1] == name)]
    registered.append((module, name, kind))
