"""`OpWatch`: passes the calls of ops in the forward pass to a function. It watches the thread that created it."""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from ..casting import compiling
from ..config import OpRule
from ..interrupts import UndoStack
from ..native import calls_under_way
from ..patching import references
from ..session import Session
from ..torch_dispatch import get_current_node, leave_function_mode
from .naming import ModuleStack
from .rules import RuleFinder

Function = Callable[..., Any]

OnCall = Callable[[Function, Sequence[Any], Mapping[str, Any], str, OpRule | None], Any]
"""Makes a call: `on_call(function, args, kwargs, op, rule)` returns the result.

`op` is the name of the op, and `rule` its rule; None for an op on no list.
"""


class OpWatch:
    """Sees the calls of ops.

    Covers on patches (`Patcher.cover`) see the calls of listed ops. A TorchFunctionMode, which is on while a module
    runs, sees the calls of other ops. From `start` to `stop`, compiled functions run uncompiled.

    Args:
        session: the session whose lists name the ops.
        on_call: makes each call that is seen.
        name: returns the name of a function that is on no list.
        everywhere: see ops on no list outside of modules, too.

    Attributes:
        is_on: whether it watches: between `start` and `stop`.
        is_busy: whether calls are made directly, unseen, as while `on_call` runs. `on_call` may set it to False, so
            that the calls that it makes are seen as well.
    """

    def __init__(
        self, session: Session, on_call: OnCall, name: Callable[[Any], str], *, everywhere: bool = False
    ) -> None:
        self._session = session
        self._on_call = on_call
        self._name = name
        self._rules = RuleFinder(session)
        self._thread = threading.get_ident()
        self._mode = _Mode(self)
        self._running = _Modules(session.models, self._mode, stays=everywhere)
        self._everywhere = everywhere
        self._covers: list[Function] = []
        self._undo = UndoStack()
        self.is_on = False
        self.is_busy = False

    def start(self) -> None:
        """Watch from now on."""
        self.is_on = True
        self._undo.callback(compiling.run_eagerly())
        self._undo.callback(references.uncover, self._session.patcher, self._covers)
        self._undo.callback(self._mode.leave)  # it may still be on, as after an exception
        self._undo.callback(self._running.close)
        self._session.patcher.cover(self._cover)
        self._running.open()
        for module, _ in calls_under_way():  # a session may be opened by the first call of a model
            self._running.enter(module)
        if self._everywhere:
            self._mode.enter()

    def stop(self) -> None:
        """Undo `start`. A second call does nothing."""
        self.is_on = False
        self._undo.close()

    def modules_here(self) -> list[nn.Module]:
        """Return the modules that are running in this thread, innermost first."""
        return self._running.modules_here()

    def module_name(self) -> str:
        """Return the name of the innermost module that is running in this thread; "" outside of all modules.

        A module without a name, such as a single model itself, is named by its class, in brackets.
        """
        module = self._running.module_here()
        return self._running.here() or ("" if module is None else f"({type(module).__name__})")

    def _cover(self, owner: Any, name: str, replacement: Function) -> Function | None:
        spelling = self._rules.find_spelling(owner, name, replacement)
        if spelling is None:
            return None
        op, rule = spelling.entry.op, spelling.rule

        def cover(*args: Any, **kwargs: Any) -> Any:
            return self.call(replacement, args, kwargs, op, rule)

        self._covers.append(cover)
        return cover

    def call(
        self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], op: str, rule: OpRule | None = None
    ) -> Any:
        """Make a call by `on_call`.

        Make it directly if not `is_on` or if `is_busy`, in other threads, and in backward passes.
        """
        if not self.is_on or self.is_busy or threading.get_ident() != self._thread:
            return function(*args, **kwargs)
        if get_current_node() is not None:  # the backward pass, or a checkpoint in it
            return function(*args, **kwargs)
        self.is_busy = True
        try:
            return self._on_call(function, args, kwargs, op, rule)
        finally:
            self.is_busy = False

    def call_unlisted(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make a call of a function on no list."""
        return self.call(function, args, kwargs, self._name(function))


class _Mode(TorchFunctionMode):
    """Passes calls of torch's functions to an `OpWatch`, as functions on no list. (Listed ones have covers instead.)"""

    def __init__(self, watch: OpWatch) -> None:
        super().__init__()
        self._watch = watch
        self.is_entered = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__" or not callable(func):
            return func(*args, **(kwargs or {}))
        return self._watch.call_unlisted(func, args, kwargs or {})

    def enter(self) -> None:
        """Turn the mode on in this thread. A second call does nothing."""
        # torch may still call a hook that was removed while it went through its hooks
        if not self.is_entered and self._watch.is_on:
            self.is_entered = True
            super().__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Turn the mode off. A second call does nothing."""
        if self.is_entered:
            self.is_entered = False
            leave_function_mode(self)


class _Modules(ModuleStack):
    """The modules that are running. Turns `mode` on while a module runs in the thread that created this object.

    Args:
        stays: whether the mode, once on, stays on between modules, too.
    """

    def __init__(self, get_models: Callable[[], list[nn.Module]], mode: _Mode, *, stays: bool) -> None:
        super().__init__(get_models)
        self._stays = stays
        self._mode = mode
        self._thread = threading.get_ident()

    def enter(self, module: nn.Module) -> None:
        """Note a module whose call began before the hooks were registered."""
        self._enter(module, ())

    def _enter(self, module: nn.Module, args: Any) -> None:
        super()._enter(module, args)
        if threading.get_ident() == self._thread:
            self._mode.enter()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        super()._leave(module, args, output)
        if threading.get_ident() == self._thread and not self._entered() and not self._stays:
            self._mode.leave()


def name_plainly(function: Any) -> str:
    """Return the name of a function without its class or module: "matmul" for torch.matmul and Tensor.__matmul__.

    Return "" for an object without a name.
    """
    name = ""
    with contextlib.suppress(Exception):
        name = str(function.__name__)
    return name.strip("_") if name.startswith("__") else name
