"""`Float32Run`: a probe for a run in float32. It also measures the error that each op would have in 16 bits."""

import contextlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import resolve_name

from ...casting import Mode
from ...config import OpRule
from ...errors import SessionError
from ...interrupts import UndoStack
from ...session import Session
from ...torch_private import BatchNormBase
from ..naming import join_names
from ..op_watch import Function, OpWatch
from ..recordings import Record
from ..records import ModulesRecord
from ..shadow import Shadow
from ..tensors import storage_of, tensors_in
from .check import Check

WHOLE_MODEL = "**"
"""The pattern that matches every module, also the model itself."""


class Float32Run(Check):
    """A `Check` that also measures the errors of ops, for a run that keeps all modules in float32.

    The last module rule of the run must be `{match: "**", run: float32}`. It measures the forward passes of the thread
    that opens the session; ops on no list only while a module runs. Code of torch.compile runs uncompiled.
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
        """Begin to measure the models of a session. Called again when the session gets more models.

        Raises SessionError if the session has no 16-bit dtype.
        """
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
        """Stop watching. A second call does nothing."""
        super().stop()
        if self._shadowing is not None:
            self._shadowing.stop()


class _Shadowing:
    """Finds the calls that would run in 16 bits without the rule for "**", and measures them with a `Shadow`.

    For listed ops, the lists and module rules decide on the dtype. An op on no list would run in the dtype of its
    inputs. To know that dtype, the addresses of storages that would hold 16 bits are kept until the step ends.

    At levels that cast the model, ops in modules would run in 16 bits, except in modules that a rule keeps in float32,
    and in BatchNorm layers under `keep_batchnorm_fp32`.
    """

    def __init__(self, session: Session, shadow: Shadow) -> None:
        self._session = session
        self.shadow = shadow
        self._names: dict[int, str] = {}  # of modules, by id
        self._dtypes: dict[int, str] = {}  # by id of a module: "low" or "float32" if rules decide its dtype, else ""
        for model in session.models():
            self._add_module(model, "", "")
        self._ran: set[str] = set()  # the names of modules in which ops ran
        self._watch = OpWatch(session, self._call, _name_function)
        self._low_storages: set[int] = set()
        self._undo = UndoStack()

    def _add_module(self, module: nn.Module, name: str, inherited: str) -> None:
        """Note the names of a module and its submodules, and the dtypes in which they run without the rule for "**".

        `inherited`: the dtype of the parent module: "low", "float32", or "" for none.
        """
        dtype = inherited
        if self._session.oplists is not None:
            # without the last rule, for "**", which only this run has
            for rule in self._session.oplists.modules[:-1]:
                if rule.chooses(name, module):
                    dtype = rule.run
        if not dtype and isinstance(module, BatchNormBase) and self._session.policy.keep_batchnorm_fp32:
            dtype = "float32"
        self._names[id(module)], self._dtypes[id(module)] = name, dtype
        for child_name, child in module.named_children():
            self._add_module(child, join_names(name, child_name), dtype)

    def modules(self) -> ModulesRecord:
        """Return the names of all modules below the models, and of the modules in which ops ran."""
        names = dict.fromkeys(name for name in self._names.values() if name)
        return ModulesRecord(tuple(names), tuple(name for name in names if name in self._ran))

    def start(self) -> None:
        """Watch ops, and open a region in which this thread casts to float32."""
        region = self._session.switch.region(Mode.FLOAT32, pauses_autocast=False)
        self._undo.callback(region.close)
        region.open()
        self._undo.callback(self._watch.stop)
        self._watch.start()

    def stop(self) -> None:
        """Undo `start`. A second call does nothing."""
        self._undo.close()
        self.end_step()

    def end_step(self) -> None:
        """Drop the tensors and addresses that were kept for the step."""
        self.shadow.end_step()
        self._low_storages.clear()

    def _call(
        self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], op: str, rule: OpRule | None
    ) -> Any:
        """Call a function, and measure it if it would run in 16 bits. `rule` is None for an op on no list."""
        module = self._find_module()
        inputs = [tensor for tensor in tensors_in([*args, *kwargs.values()]) if tensor.dtype is torch.float32]
        would_be_low = bool(inputs) and kwargs.get("out") is None and self._would_be_low(rule, module, inputs)
        # Where lists decide, an unlisted function that is written in Python has no dtype of its own: measure the ops
        # that it calls.
        is_composed = rule is None and self._session.casts is not None and isinstance(function, types.FunctionType)
        if is_composed:
            self._watch.is_busy = False
        if would_be_low and not is_composed:
            module_name = ""
            if module is not None:
                module_name = self._names[id(module)] or WHOLE_MODEL
            casts_inputs = rule is not None and bool(rule.runs_in)
            # At a level that casts the model, ops on weights are the ones whose inputs are rounded to 16 bits.
            if self._session.casts is None:
                casts_inputs = any(isinstance(tensor, nn.Parameter) for tensor in inputs)
            result = self.shadow.run(module_name, op, function, args, kwargs, is_listed=casts_inputs)
        else:
            result = function(*args, **kwargs)
        self._mark(result, would_be_low)
        return result

    def _find_module(self) -> nn.Module | None:
        """Return the innermost module of the models that runs now, or None. Note every module that runs now."""
        named = [module for module in self._watch.modules_here() if id(module) in self._names]
        self._ran.update(self._names[id(module)] for module in named)
        return next(iter(named), None)

    def _would_be_low(self, rule: OpRule | None, module: nn.Module | None, inputs: Sequence[Tensor]) -> bool:
        """Return whether an op would run in 16 bits, by its rule, the module that runs, and its inputs."""
        dtype_of_module = ""
        if module is not None:
            dtype_of_module = self._dtypes[id(module)]
        if self._session.casts is None:  # a level that casts the model
            return module is not None and dtype_of_module != "float32"
        switch = self._session.switch
        if switch.autocast is not None and not switch.is_autocast_here():
            return False
        if rule is not None and rule.runs_in:
            return dtype_of_module == "low" or (rule.runs_in == "low" and dtype_of_module != "float32")
        if rule is OpRule.BANNED:
            return False
        arrays = [tensor for tensor in inputs if tensor.dim()] or inputs  # 0-dim tensors do not decide
        are_low = [storage_of(tensor) in self._low_storages for tensor in arrays]
        if rule is OpRule.MATCH:  # one argument decides; which one is not looked up
            return any(are_low)
        return all(are_low)

    def _mark(self, result: Any, would_be_low: bool) -> None:
        """Note that the storages of a result would hold 16 bits, or that they would not."""
        storages = {storage_of(tensor) for tensor in tensors_in([result]) if tensor.is_floating_point()} - {0}
        if would_be_low:
            self._low_storages |= storages
        else:
            self._low_storages -= storages


def _name_function(function: Any) -> str:
    """Return the name of a function as scripts write it, such as `F.linear`."""
    name = ""
    with contextlib.suppress(Exception):
        name = resolve_name(function) or ""
    name = name or str(getattr(function, "__name__", function))
    return name.replace("torch.nn.functional.", "F.").replace("torch.Tensor.", "Tensor.")
