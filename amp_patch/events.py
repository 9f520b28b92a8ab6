"""Events of a session, and their listeners. Events happen per step, not per op, and cost nothing without listeners."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class Watcher:
    """Base class of listeners. Exceptions propagate to the caller."""

    def session_opened(self, session: Any) -> None:
        """A session is in force, or has more models."""

    def session_closing(self, session: Any) -> None:
        """A session is about to undo its changes."""

    def loss_scaled(self, loss: Any, scaled_loss: Any) -> None:
        """A `scale_loss` block begins. `scaled_loss` is the value of its `as` name."""

    def values_scaled(self) -> None:
        """Values were multiplied by a loss scale outside a block, for separate gradients."""

    def step_begun(self, optimizer: Any) -> None:
        """`step` of a bound optimizer has been called, with no closure: gradients are there, and unscaled."""

    def step_ended(self, optimizer: Any) -> None:
        """A `step` of a bound optimizer has been taken, or skipped."""


watchers: list[Watcher] = []


class _Number:
    """The number of events so far."""

    value = 0


number = _Number()


def tell(region: AbstractContextManager[Any], event: str, *facts: Any) -> None:
    """Call a method of all watchers inside `region`, in which casts are off: they do not compute for the script."""
    if watchers:
        number.value += 1
        with region:
            # a copy, because a watcher may remove itself
            for watcher in tuple(watchers):
                getattr(watcher, event)(*facts)


_local = threading.local()


def count_watching_modes() -> int:
    """Return the number of dispatch modes in this thread that only watch, and must not change how anything runs."""
    return getattr(_local, "modes", 0)


def add_watching_modes(number: int) -> None:
    """Change that number: a negative `number` lowers it."""
    _local.modes = count_watching_modes() + number


def watch(watcher: Watcher) -> Callable[[], None]:
    """Add a watcher. Return the function that removes it, which is harmless twice."""
    watchers.append(watcher)
    return lambda: watchers.remove(watcher) if watcher in watchers else None
