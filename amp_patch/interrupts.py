"""What holds although an interrupt may come at any moment: an undo stack that loses nothing, and which calls are over.

An interrupt is any exception that is no Exception: KeyboardInterrupt, SystemExit, asyncio.CancelledError.
"""

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any


class TerminatedError(KeyboardInterrupt):
    """SIGTERM has come to a command. Ctrl-C reaches the script that it runs as well, this does not."""


class UndoStack:
    """Callbacks to be run last in, first out.

    `contextlib.ExitStack` forgets a callback before it runs it. Here one that an interrupt cut short runs again. So it
    is registered before the change that it undoes, and harmless twice, or without the change.
    """

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], Any]] = []

    def __len__(self) -> int:
        return len(self._callbacks)

    def callback(self, function: Callable[..., Any], *args: Any) -> None:
        """Have `close` call `function(*args)`."""
        self._callbacks.append(functools.partial(function, *args))

    def callback_on(self, owner: object, function: Callable[..., Any], *args: Any) -> None:
        """Have `close` call `function(owner, *args)` if the owner, which is held weakly, is still alive."""
        self.callback(_call_on, weakref.ref(owner), function, *args)

    def close(self) -> None:
        """Run what has not run yet.

        An Exception keeps none of the others from running, and the first one is raised after them. An interrupt is
        raised at once: whoever calls `close` again goes on with the callback that was cut short.
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


def _call_on(reference: "weakref.ref[Any]", function: Callable[..., Any], *args: Any) -> None:
    owner = reference()
    if owner is not None:
        function(owner, *args)


def is_running(frame: types.FrameType) -> bool:
    """Tell whether the call of a frame is under way in this thread."""
    caller: types.FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None
