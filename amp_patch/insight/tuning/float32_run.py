"""`Float32Run`: a run in float32 that also measures the errors of its ops in 16 bits."""

import contextlib
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, resolve_name

from ...casting import Mode, compiling
from ...config import OpRule
from ...errors import SessionError
from ...interrupts import UndoStack
from ...patching import references
from ...session import Session
from ...torch_dispatch import get_current_node
from ...torch_private import BatchNormBase
from ..naming import ModuleStack, join_names
from ..recordings import Record
from ..records import ModulesRecord
from ..rules import RuleFinder
from ..tensors import storage_of, tensors_in
from .check import Check
from .shadow import Function, Shadow

WHOLE_MODEL = "**"
"""The pattern that matches the model itself."""


class Float32Run(Check):
    """A `Check` of a run whose last list has `modules: [{match: "**", run: float32}]`.

    It measures listed ops everywhere and other ops in modules, in the forward pass of the first thread. Code of
    torch.compile runs uncompiled.
    """

    def __init__(self, steps: int = 2, *, on_end: Callable[[], None] = lambda: None) -> None:
        super().__init__(steps, on_end=on_end)
        self._shadow: Shadow | None = None
        self._shadowing: _Shadowing | None = None

    def _records(self) -> list[Record]:
        records = super()._records()
        if self._shadowing is not None:
            records += [*self._shadowing.shadow.records(), self._shadowing.modules()]
        return records

    def session_opened(self, session: Session) -> None:
        """Begin. Called again when a session gets more models."""
        super().session_opened(session)
        low = session.policy.low_dtype
        if low is None:
            raise SessionError(
                f"nothing to tune: {session.policy.opt_level} runs everything in float32; use another level"
            )
        if self._shadowing is not None:
            self._shadowing.stop()
        if self._shadow is None:
            self._shadow = Shadow(low, lambda: float(session.scalers[0].scale))
        self._shadowing = _Shadowing(session, self._shadow)
        self._shadowing.start()

    def step_ended(self, optimizer: Optimizer) -> None:
        """Record a step, and restore the weights."""
        if self._shadowing is not None:
            self._shadowing.end_step()
        super().step_ended(optimizer)

    def stop(self) -> None:
        """Stop watching. Harmless twice."""
        super().stop()
        if self._shadowing is not None:
            self._shadowing.stop()


class _Shadowing:
    """Finds the calls of one session that would run in 16 bits, and gives them to a `Shadow`.

    The lists decide for listed ops. Any other op runs in the dtype of its inputs, so the addresses of storages that
    would hold 16 bits are kept until the step ends. At levels that cast the model, all ops in it would run in 16 bits,
    except where module rules say otherwise.
    """

    def __init__(self, session: Session, shadow: Shadow) -> None:
        self._session = session
        self.shadow = shadow
        self._rules = RuleFinder(session)
        self._thread = threading.get_ident()
        self._names: dict[int, str] = {}
        self._runs: dict[int, str] = {}
        for model in session.models():
            self._see(model, "", "")
        self._ran: set[str] = set()
        self._mode = _Mode(self)
        self._running = _Modules(session.models, self._mode)
        self._covers: list[Function] = []
        self._low_storages: set[int] = set()
        self._undo = UndoStack()
        self._is_busy = False
        self.is_on = False

    def _see(self, module: nn.Module, name: str, inherited: str) -> None:
        """Note the rule of the script's own lists that decides for a module, and for each module in it."""
        run = inherited
        if self._session.oplists is not None:
            for rule in self._session.oplists.modules[:-1]:
                if rule.chooses(name, module):
                    run = rule.run
        if not run and isinstance(module, BatchNormBase) and self._session.policy.keep_batchnorm_fp32:
            run = "float32"
        self._names[id(module)], self._runs[id(module)] = name, run
        for child_name, child in module.named_children():
            self._see(child, join_names(name, child_name), run)

    def modules(self) -> ModulesRecord:
        """Return the names of all modules below the models, and of the modules that ran."""
        names = dict.fromkeys(name for name in self._names.values() if name)
        return ModulesRecord(tuple(names), tuple(name for name in names if name in self._ran))

    def start(self) -> None:
        """Cover the patched ops, send all casts of this thread to float32, and run compiled code uncompiled."""
        self.is_on = True
        switch, patcher = self._session.switch, self._session.patcher
        region = switch.region(Mode.FLOAT32, pauses=False)
        self._undo.callback(region.close)
        region.open()
        self._undo.callback(compiling.run_eagerly())
        self._undo.callback(references.uncover, patcher, self._covers)
        self._undo.callback(self._mode.leave)  # an exception in a forward leaves the mode on
        self._undo.callback(self._running.close)
        patcher.cover(self._cover)
        self._running.open()

    def stop(self) -> None:
        """Undo `start`. Harmless twice."""
        self.is_on = False
        self._undo.close()
        self.end_step()

    def end_step(self) -> None:
        """Drop the tensors and addresses of the step."""
        self.shadow.end_step()
        self._low_storages.clear()

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
        """Call a function, with its shadow if it would run in 16 bits. `rule` is None for an op on no list."""
        if not self.is_on or self._is_busy or threading.get_ident() != self._thread:
            return function(*args, **kwargs)
        if get_current_node() is not None:  # the backward pass, or a checkpoint in it
            return function(*args, **kwargs)
        module = self._find_module()
        inputs = [tensor for tensor in tensors_in([*args, *kwargs.values()]) if tensor.dtype is torch.float32]
        is_low = bool(inputs) and kwargs.get("out") is None and self._is_low(rule, module, inputs)
        is_composed = rule is None and self._session.casts is not None and isinstance(function, types.FunctionType)
        self._is_busy = not is_composed  # a function written in Python may call listed ones, which are measured
        try:
            if is_low and not is_composed:
                place = ""
                if module is not None:
                    place = self._names[id(module)] or WHOLE_MODEL
                is_listed = rule is not None and bool(rule.runs_in)
                if self._session.casts is None:  # the inputs of a layer are cast, whatever their dtype
                    is_listed = any(isinstance(tensor, nn.Parameter) for tensor in inputs)
                result = self.shadow.run(place, op, function, args, kwargs, is_listed=is_listed)
            else:
                result = function(*args, **kwargs)
            self._mark(result, is_low)
            return result
        finally:
            self._is_busy = False

    def _find_module(self) -> nn.Module | None:
        named = [module for module in self._running.modules_here() if id(module) in self._names]
        self._ran.update(self._names[id(module)] for module in named)
        return next(iter(named), None)

    def _is_low(self, rule: OpRule | None, module: nn.Module | None, inputs: Sequence[Tensor]) -> bool:
        run = ""
        if module is not None:
            run = self._runs[id(module)]
        if self._session.casts is None:
            return module is not None and run != "float32"
        switch = self._session.switch
        if switch.autocast is not None and not switch.is_autocast_here():
            return False
        if rule is not None and rule.runs_in:
            return run == "low" or (rule.runs_in == "low" and run != "float32")
        if rule is OpRule.BANNED:
            return False
        arrays = [tensor for tensor in inputs if tensor.dim()] or inputs  # a scalar does not decide on the dtype
        return all(storage_of(tensor) in self._low_storages for tensor in arrays)

    def _mark(self, result: Any, is_low: bool) -> None:
        storages = {storage_of(tensor) for tensor in tensors_in([result]) if tensor.is_floating_point()} - {0}
        if is_low:
            self._low_storages |= storages
        else:
            self._low_storages -= storages


class _Mode(TorchFunctionMode):
    """Passes calls of functions on no list, inside of models, to a `_Shadowing`."""

    def __init__(self, shadowing: _Shadowing) -> None:
        super().__init__()
        self._shadowing = shadowing
        self.is_entered = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__" or not callable(func):
            return func(*args, **(kwargs or {}))
        return self._shadowing.call(func, args, kwargs or {}, _name_function(func))

    def enter(self) -> None:
        """Turn the mode on, in the thread that opened the session."""
        if not self.is_entered and self._shadowing.is_on:  # torch still calls a hook that was removed in the same call
            self.is_entered = True
            super().__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Turn the mode off. Harmless twice."""
        if self.is_entered:
            self.is_entered = False
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Modules(ModuleStack):
    """The modules that are running. The mode is on while a module runs in the first thread."""

    def __init__(self, get_models: Callable[[], list[nn.Module]], mode: _Mode) -> None:
        super().__init__(get_models)
        self._mode = mode
        self._thread = threading.get_ident()

    def _enter(self, module: nn.Module, args: Any) -> None:
        super()._enter(module, args)
        if threading.get_ident() == self._thread:
            self._mode.enter()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        super()._leave(module, args, output)
        if threading.get_ident() == self._thread and not self._running():
            self._mode.leave()


def _name_function(function: Any) -> str:
    """Return a function as scripts write it."""
    name = ""
    with contextlib.suppress(Exception):
        name = resolve_name(function) or ""
    name = name or str(getattr(function, "__name__", function))
    return name.replace("torch.nn.functional.", "F.").replace("torch.Tensor.", "Tensor.")
