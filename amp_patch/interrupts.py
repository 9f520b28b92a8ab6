"""Tools for code that must stay correct if an interrupt comes at any moment: `UndoStack`, `Change` and `is_running`.

An interrupt is an exception whose class is not a subclass of Exception, such as KeyboardInterrupt or SystemExit.
"""

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any


class TerminatedError(KeyboardInterrupt):
    """A command has received SIGTERM. Unlike Ctrl-C, it does not reach the script: the command must end the script."""


class UndoStack:
    """A stack of callbacks that `close` runs last in, first out.

    `contextlib.ExitStack` removes a callback before it runs it, so a callback that an interrupt cuts short never runs
    to its end. Here, it runs again at the next `close`. Register a callback before the change that it undoes. A
    callback must be harmless if it runs twice, or if the change was never made.
    """

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], Any]] = []

    def __len__(self) -> int:
        return len(self._callbacks)

    def callback(self, function: Callable[..., Any], *args: Any) -> None:
        """Make `close` call `function(*args)`."""
        self._callbacks.append(functools.partial(function, *args))

    def callback_on(self, owner: object, function: Callable[..., Any], *args: Any) -> None:
        """Make `close` call `function(owner, *args)`, unless the owner has been freed by then. Holds it weakly."""
        self.callback(_call_on, weakref.ref(owner), function, *args)

    def close(self) -> None:
        """Run the callbacks that have not run yet.

        After an Exception, the other callbacks still run; then the first Exception is raised. An interrupt is raised at
        once, and the next call of `close` starts with the callback that was cut short.
        """
        errors: list[Exception] = []
        while self._callbacks:
            try:
                self._callbacks[-1]()
            except Exception as error:
                errors.append(error)
            # only now, so that an interrupt above leaves the callback on the stack
            self._callbacks.pop()
        if errors:
            raise errors[0]


class Change:
    """A context manager around code that changes many tensors. It records whether an exception cut the change short.

    Attributes:
        is_half_done: True inside a block, and after a block that raised, until a later block ends without an exception.
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
    """Return whether the call that a frame belongs to is still running in this thread."""
    caller: types.FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None
