"""Events of a session, and the watchers that listen to them.

There are a few events in a step and none for an op. Without watchers, an event costs one test of a list.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class Watcher:
    """Base class of watchers. It has a method for each event, which does nothing.

    An exception in such a method propagates to the caller of `tell`. An optimizer is *bound* if it was passed to
    `initialize`, or if it steps in a script that `amp_patch.native` observes.
    """

    observes_ops = True
    """Whether the watcher observes every op. If so, a session of `amp_patch.native` also wraps the ops that
    torch.autocast casts by itself.
    """

    def session_opened(self, session: Any) -> None:
        """Called when a session has been opened, and when models or optimizers have joined it."""

    def session_closing(self, session: Any) -> None:
        """Called when a session is about to undo its changes."""

    def loss_scaled(self, loss: Any, scaled_loss: Any) -> None:
        """Called when a `scale_loss` block begins. In a script that `amp_patch.native` observes: when a GradScaler
        scales a loss, or when an unscaled loss goes backward. `scaled_loss` is the value that goes backward.
        """

    def values_scaled(self) -> None:
        """Called when `amp.scale` is about to multiply tensors by a loss scale, outside of a block."""

    def step_begun(self, optimizer: Any) -> None:
        """Called when `step` of a bound optimizer begins, unless a closure has yet to compute the gradients.

        The gradients do not contain the loss scale any more. In a script that `amp_patch.native` observes, they may
        contain it if a GradScaler leaves the unscaling to a fused optimizer.
        """

    def step_ended(self, optimizer: Any) -> None:
        """Called when a `step` of a bound optimizer has been taken or skipped."""

    def misused(self, misuse: Any) -> None:
        """Called when a script without `amp.initialize` has used GradScaler or autocast wrongly.

        `misuse` is a `native.Misuse`.
        """

    def refused(self, misuse: Any, error: Any) -> None:
        """Called when GradScaler has raised `error` in a script without `amp.initialize`, because of a misuse."""


watchers: list[Watcher] = []


class _EventCount:
    """The number of calls of `tell` that had watchers to call. `value` is an attribute, so that modules that import
    `event_count` see later values.
    """

    value = 0


event_count = _EventCount()


def tell(region: AbstractContextManager[Any], event: str, *facts: Any) -> None:
    """Call the method `event` of all watchers, with `facts` as its arguments.

    `region` is a context manager around these calls. The caller passes one that turns casts off, for an event at which
    watchers compute with tensors.
    """
    if watchers:
        event_count.value += 1
        with region:
            # a copy, because a watcher may remove itself meanwhile
            for watcher in tuple(watchers):
                getattr(watcher, event)(*facts)


_local = threading.local()


def count_watching_modes() -> int:
    """Return the number of TorchDispatchModes in this thread that belong to watchers.

    Under other dispatch modes, a session casts weights at each use instead of taking stored copies. Modes of watchers
    must not have this effect, because they only observe.
    """
    return getattr(_local, "modes", 0)


def add_watching_modes(number: int) -> None:
    """Add to the number that `count_watching_modes` returns. A negative `number` lowers it."""
    _local.modes = count_watching_modes() + number


def watch(watcher: Watcher) -> Callable[[], None]:
    """Add a watcher. Return the function that removes it; calling that twice is harmless."""
    watchers.append(watcher)
    return lambda: watchers.remove(watcher) if watcher in watchers else None
