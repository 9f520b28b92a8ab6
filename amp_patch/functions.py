"""Functions of the user's own that follow a rule as listed ops do, decorated or registered by name; and whether a
function is patched, and what it was before.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import ArgumentTypeError, ArgumentValueError, did_you_mean
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


def check_owner(owner: Any, name: Any, function: str) -> None:
    """Raise ArgumentTypeError unless `owner` may have a function of that name: both are most often given as text."""
    if isinstance(owner, str) or not isinstance(name, str):
        place = owner if isinstance(owner, str) else getattr(owner, "__name__", "torch")
        given = name if isinstance(name, str) else getattr(name, "__name__", "matmul")
        wrong = f"the owner as text, {owner!r}" if isinstance(owner, str) else f"a {type(name).__name__}"
        raise ArgumentTypeError(
            f"{function} takes a module or class, and the name of a function in it as text, not {wrong}: write"
            f" {function}({place}, {given!r})"
        )


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


def is_patched(owner: Any, name: str) -> bool:
    """Tell whether `owner.name`, such as `(torch, "matmul")`, is patched now.

    Raises ArgumentTypeError if the owner is given by its name.
    """
    check_owner(owner, name, "is_patched")
    opened = _current.state.session
    return opened is not None and opened.patcher.is_patched(owner, name)


def get_original(owner: Any, name: str) -> Any:
    """Return `owner.name` as it is without patches.

    Raises ArgumentTypeError if the owner is given by its name, and ArgumentValueError if it has no such name.
    """
    check_owner(owner, name, "get_original")
    opened = _current.state.session
    original = None if opened is None else opened.patcher.get_original(owner, name)
    if original is None and not hasattr(owner, name):
        hint = did_you_mean(name, dir(owner))
        raise ArgumentValueError(
            f"{getattr(owner, '__name__', owner)} has no {name!r}: name a function that it has.{hint}"
        )
    return getattr(owner, name) if original is None else original
