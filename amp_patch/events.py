"""What a session tells to those who watch it: in each step, not in each op, and nothing while nobody watches."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class Watcher:
    """Somebody who is told, and does nothing about it by default. What it raises leaves the call that told it."""

    def session_opened(self, session: Any) -> None:
        """A session is in force, or has more models."""

    def session_closing(self, session: Any) -> None:
        """A session is about to undo what it has done."""

    def loss_scaled(self, loss: Any, scaled_loss: Any) -> None:
        """A `scale_loss` block begins: the loss that was passed to it, and what it is about to give."""

    def values_scaled(self) -> None:
        """Values have been multiplied by a loss scale outside of a block, for gradients of their own."""

    def step_begun(self, optimizer: Any) -> None:
        """`step` of a bound optimizer has been called, with no closure: gradients are there, and unscaled."""

    def step_ended(self, optimizer: Any) -> None:
        """A `step` of a bound optimizer has been taken, or skipped."""


watchers: list[Watcher] = []


class _Number:
    """How many events were told so far."""

    value = 0


number = _Number()


def tell(region: AbstractContextManager[Any], event: str, *facts: Any) -> None:
    """Tell all watchers of an event, in a region in which casts are off: what they compute is none of the script's."""
    if watchers:
        number.value += 1
        with region:
            for watcher in tuple(watchers):
                getattr(watcher, event)(*facts)


_local = threading.local()


def count_watching_modes() -> int:
    """Return how many dispatch modes of this thread only watch: everything is to run as it does without them."""
    return getattr(_local, "modes", 0)


def add_watching_modes(number: int) -> None:
    """Count so many more, or with a negative number fewer."""
    _local.modes = count_watching_modes() + number


def watch(watcher: Watcher) -> Callable[[], None]:
    """Have a watcher told from now on; returns what ends that, once or twice."""
    watchers.append(watcher)
    return lambda: watchers.remove(watcher) if watcher in watchers else None
