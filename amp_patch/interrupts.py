"""Code that stays correct if an interrupt comes at any moment: an undo stack, a mark on changes that are half done, and
the test whether a call is over.

An interrupt is any exception that is no Exception: KeyboardInterrupt, SystemExit, asyncio.CancelledError.
"""

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any


class TerminatedError(KeyboardInterrupt):
    """A command has received SIGTERM. Unlike Ctrl-C, this signal does not reach the script that the command runs."""


class UndoStack:
    """A stack of callbacks that `close` runs last in, first out.

    `contextlib.ExitStack` removes a callback before it runs it. Here a callback that an interrupt cut short runs again.
    So register a callback before the change that it undoes, and make it harmless twice, or without the change.
    """

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], Any]] = []

    def __len__(self) -> int:
        return len(self._callbacks)

    def callback(self, function: Callable[..., Any], *args: Any) -> None:
        """Make `close` call `function(*args)`."""
        self._callbacks.append(functools.partial(function, *args))

    def callback_on(self, owner: object, function: Callable[..., Any], *args: Any) -> None:
        """Make `close` call `function(owner, *args)` if the owner, which is held weakly, is still alive."""
        self.callback(_call_on, weakref.ref(owner), function, *args)

    def close(self) -> None:
        """Run the callbacks that have not run yet.

        After an Exception the others still run; then the first Exception is raised. An interrupt is raised at once. The
        next call of `close` starts with the callback that was cut short.
        """
        errors: list[Exception] = []
        while self._callbacks:
            try:
                self._callbacks[-1]()
            except Exception as error:
                errors.append(error)
            self._callbacks.pop()
        if errors:
            raise errors[0]


class Change:
    """`with change:` encloses code that changes many tensors. An exception in it leaves only some of them changed.

    Attributes:
        is_half_done: True inside the block, and for good once an exception has ended one.
    """

    def __init__(self) -> None:
        self.is_half_done = False

    def __enter__(self) -> None:
        self.is_half_done = True

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        self.is_half_done = kind is not None


def _call_on(reference: "weakref.ref[Any]", function: Callable[..., Any], *args: Any) -> None:
    owner = reference()
    if owner is not None:
        function(owner, *args)


def is_running(frame: types.FrameType) -> bool:
    """Return whether the call of a frame is running in this thread."""
    caller: types.FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None
