"""Questions about the session in force."""

from typing import Any

from .errors import ArgumentTypeError, ArgumentValueError, did_you_mean
from .session import Stats
from .session import current as _current


def check_owner(owner: Any, name: Any, function: str) -> None:
    """Raise ArgumentTypeError unless `owner` may have a function of that name: both are most often given as text."""
    if isinstance(owner, str) or not isinstance(name, str):
        place = owner if isinstance(owner, str) else getattr(owner, "__name__", "torch")
        given = name if isinstance(name, str) else getattr(name, "__name__", "matmul")
        wrong = f"the owner as text, {owner!r}" if isinstance(owner, str) else f"the name as {type(name).__name__}"
        raise ArgumentTypeError(
            f"{function} takes a module or class itself and a name in it as text, and was given {wrong}: write"
            f" {function}({place}, {given!r})"
        )


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


def stats(*, wait: bool = True) -> Stats:
    """Return the level, counts and loss scales of the session in force; zeros and None without one.

    Waits for the device, unless `wait` is False: steps and scales are then those that the host knows of by now.
    """
    opened = _current.state.session
    if opened is None:
        return Stats(None, None, 0, 0, 0, 0, 0, ())
    return opened.stats(wait=wait)
