"""`Float32Script`: gives a script float32 wherever it asks for a 16-bit dtype, so that it becomes its own reference.

To *widen* a tensor is to give it float32 in place of 16 bits. The methods that cast tensors are patched for the whole
run. A mode of torch (TorchFunctionMode) sees all other functions: those that make tensors, those with an argument
`dtype`, and those that get a 16-bit tensor that nothing has widened yet. A mode slows down every op, so it is left
after a few steps in which it had nothing to do.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from .. import events
from ..casting import cast_tree, compiling
from ..dtypes import LOW_DTYPES, is_opaque
from ..interrupts import UndoStack
from ..patching import Patch, Patcher
from ..step_counter import StepCounter
from ..torch_dispatch import REBUILD_TENSOR, leave_function_mode
from .asked_dtypes import AskedDtypes

STEPS = 3
"""After so many steps, the mode is left if it had nothing to do in them. The first step does not count, because it
contains all that the script does before its loop.
"""

_OWN = "amp_patch."
_FOR_SCRIPTS = ("amp_patch.apex.", "amp_patch.casting.replacement", "amp_patch.casting.wrappers")
"""Modules of this package that call torch on behalf of the script."""

_NAMED = {
    f"torch.{place}{kind}Tensor": dtype
    for kind, dtype in (("Half", torch.float16), ("BFloat16", torch.bfloat16))
    for place in ("", "cuda.")
}
"""The 16-bit dtypes by the names of their classes of tensors, which `Tensor.type` takes."""


_PASSED_ON = frozenset({"__get__", "_parse_to"})
"""Functions that the mode passes on: those that read an attribute, and the one that reads the arguments of Module.to,
which then calls Tensor.to.
"""


_COPIES = frozenset({"clone", "__deepcopy__", "empty_like", "zeros_like", "ones_like", "full_like"})
"""Functions whose result has the dtype that the script asked for in their argument."""

_RANDOM = frozenset(
    {"rand", "randn", "rand_like", "randn_like", "normal", "normal_", "uniform_", "bernoulli", "bernoulli_"}
    | {"exponential_", "log_normal_", "cauchy_", "geometric_", "trunc_normal_"}
)
"""Functions that draw other numbers in 16 bits than in float32, from the same seed."""


class _OfThread(threading.local):
    """Whether the mode is on in this thread, and whether it lets everything through."""

    is_entered = False
    is_paused = False


class _InForce:
    script: "Float32Script | None" = None


_in_force = _InForce()


def find_float32_script() -> "Float32Script | None":
    """Return the `Float32Script` in force."""
    return _in_force.script


def find_asked_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype that the script asked for: 16 bits, although the tensor may be float32 in a reference run."""
    script = _in_force.script
    return tensor.dtype if script is None else script.asked.find(tensor)


def as_written() -> contextlib.AbstractContextManager[None]:
    """Return a block in which this thread gets 16 bits where it asks for them, also in a reference run."""
    script = _in_force.script
    return contextlib.nullcontext() if script is None else script.pause()


class Float32Script(events.Watcher):
    """Keeps a script in float32 from `start` on, until the function that it returns is called.

    Code of this package may still ask for 16 bits.

    Objects that hold `torch.bfloat16` stay as they are; a tensor that is made with such a dtype is float32. Code of
    torch.compile runs uncompiled as long as the mode is on, and to the end if the script asks for 16 bits.

    Attributes:
        asked: which tensors are float32 although the script asked for 16 bits.
        has_acted: whether the script asked for 16 bits at all.
        not_widened: descriptions of what has to stay in 16 bits.
        is_timed: whether the script takes as long as in float32 by itself, once the first steps are over.
    """

    def __init__(self) -> None:
        self.asked = AskedDtypes()
        self.has_acted = False
        self.not_widened: dict[str, None] = {}
        self.is_timed = True
        self._default: torch.dtype | None = None  # the 16-bit dtype that the script made the default
        self._mode = _Mode(self)
        self._local = _OfThread()
        self._is_on = False
        self._is_compiled = False
        self._acts = 0  # how often the mode had something to do since the last step
        self._steps, self._acts_in_steps = 0, 0  # steps so far, and the acts in them without those in the first
        self._counter = StepCounter()
        self._float: Callable[..., Any] = Tensor.float
        self._widened: list[tuple[Tensor, torch.dtype]] = []
        self._undo = UndoStack()
        self._undo_mode = UndoStack()

    # ---- starting and stopping ---------------------------------------------------------------------------------------

    def start(self) -> Callable[[], None]:
        """Keep the script in float32 from now on. Call the result to end this."""
        self._undo.callback(setattr, _in_force, "script", _in_force.script)
        _in_force.script = self
        default = torch.get_default_dtype()
        if default in LOW_DTYPES:
            self._undo.callback(torch.set_default_dtype, default)
            torch.set_default_dtype(torch.float32)
            self._default, self.has_acted = default, True
        self._undo.callback(self._narrow)
        patcher = Patcher()
        self._undo.callback(patcher.undo)
        casts = ("half", "bfloat16", "float", "to", "type")
        patcher.install(
            [
                *(Patch(Tensor, name, self._make_cast) for name in casts),
                Patch(torch, "set_default_dtype", self._keep_default),
                Patch(torch, "set_default_tensor_type", self._keep_default),
                Patch(torch, "compile", self._note_compiled),
                Patch(*REBUILD_TENSOR, self._widen_loaded),
            ]
        )
        self._undo.callback(events.watch(self))
        self._undo.callback(self._undo_mode.close)
        self._undo_mode.callback(register_module_forward_pre_hook(self._widen_module).remove)
        self._is_on = True
        self._undo_mode.callback(self._leave_mode)
        self._enter_mode()
        return self._undo.close

    def _enter_mode(self) -> None:
        """Turn the mode on in this thread: torch keeps modes for each thread."""
        if self._is_on and not self._local.is_entered:
            self._local.is_entered = True
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _leave_mode(self) -> None:
        self._is_on = False  # other threads keep the mode, which does nothing from now on
        if self._local.is_entered:
            self._local.is_entered = False
            leave_function_mode(self._mode)

    def _narrow(self) -> None:
        """Cast tensors that were widened in place back to 16 bits, because they may outlive the run."""
        for tensor, dtype in self._widened:
            tensor.data = tensor.data.to(dtype)
        self._widened.clear()

    def step_ended(self, optimizer: Optimizer) -> None:
        """Leave the mode after the first steps if it had nothing to do in them."""
        if not self._is_on or not self._counter.note(optimizer):
            return
        self._steps += 1
        if self._steps > 1:
            self._acts_in_steps += self._acts
        self._acts = 0
        if self._steps != STEPS:
            return
        self.is_timed = not self._acts_in_steps and not (self.has_acted and self._is_compiled)
        if self.is_timed:
            self._undo_mode.close()

    # ---- patches -----------------------------------------------------------------------------------------------------

    def _make_cast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of a method that casts."""
        name = original.__name__
        by_name = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32}.get(name)
        to_float32 = self._float if by_name in LOW_DTYPES else original

        @functools.wraps(original)
        def cast(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            wanted = by_name or self._find_wanted(args, kwargs)
            if wanted is None or self._local.is_paused or _is_own(sys._getframe(1)):
                return original(tensor, *args, **kwargs)
            if wanted not in LOW_DTYPES:
                result = original(tensor, *args, **kwargs)
                # the script expects a copy of a tensor that it believes to be of 16 bits
                if result is tensor and self.asked and self.asked.find(tensor) is not wanted:
                    return tensor.clone()
                return result
            if is_opaque(tensor):
                self.note_not_widened(tensor)
                return original(tensor, *args, **kwargs)
            args, kwargs = _replace_dtypes(args, kwargs)
            return self._give(tensor, to_float32(tensor, *args, **kwargs), wanted)

        return cast

    def _find_wanted(self, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.dtype | None:
        """Return the dtype that the arguments of `to` or `type` name; None if they name none."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.dtype):
                return value
            if isinstance(value, Tensor):
                return self.asked.find(value)
            dtype = _find_named(value)
            if dtype is not None:
                return dtype
        return None

    def _give(self, source: Tensor, result: Tensor, wanted: torch.dtype) -> Tensor:
        """Note that a result stands for a tensor of 16 bits. It is a copy where the script would have got one."""
        self.has_acted = True
        if result is source and self.asked.find(source) is not wanted:
            result = source.clone()
        self.asked.add(result, wanted)
        return result

    def _keep_default(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that makes float32 the default where the script asks for 16 bits, and remembers that."""

        @functools.wraps(original)
        def set_default(value: Any) -> None:
            dtype = value if isinstance(value, torch.dtype) else _find_named(value)
            self._default = dtype if dtype in LOW_DTYPES else None
            if self._default is None:
                original(value)
                return
            self.has_acted = True
            original(torch.float32 if isinstance(value, torch.dtype) else torch.FloatTensor)

        return set_default

    def _note_compiled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Run code uncompiled while the mode is on, because neither the mode nor the patches act in compiled code."""

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            if self._is_on and not self._is_compiled:
                self._is_compiled = True
                self._undo_mode.callback(compiling.run_eagerly())
            return original(*args, **kwargs)

        return compile

    def _widen_loaded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Widen a tensor that is read from a file or another process. First make it in the dtype it is stored in."""

        @functools.wraps(original)
        def rebuild(*args: Any, **kwargs: Any) -> Any:
            with self.pause():
                result = original(*args, **kwargs)
                return self.widen(result) if result.dtype in LOW_DTYPES else result

        return rebuild

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Return a block in which this thread gets 16 bits where it asks for them."""
        before, self._local.is_paused = self._local.is_paused, True
        try:
            yield
        finally:
            self._local.is_paused = before

    # ---- modules -----------------------------------------------------------------------------------------------------

    def _widen_module(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of all modules: widen weights that nothing has widened yet."""
        self._enter_mode()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.dtype in LOW_DTYPES:
                self._acts += 1
                self.widen_in_place(tensor)

    # ---- what the mode does ------------------------------------------------------------------------------------------

    def call(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch with float32 in place of 16 bits, in its arguments and in its result."""
        if not self._is_on or self._local.is_paused or _is_own(sys._getframe(2)):
            return function(*args, **kwargs)
        wanted = next((dtype for dtype in (*args, *kwargs.values()) if isinstance(dtype, torch.dtype)), None)
        name = getattr(function, "__name__", "")
        if wanted is not None and name == "view":  # another dtype for the same bits
            return self._call_view(function, args, kwargs, wanted)
        if _draws(function, name):
            return self._draw(function, args, kwargs)
        if _writes(name):
            self._widen_written(args[:1] or list(kwargs.values())[:1])
        if "out" in kwargs:
            self._widen_written([kwargs["out"]])
        if wanted in LOW_DTYPES:
            args, kwargs = _replace_dtypes(args, kwargs)
        args = [self._widen_argument(value) for value in args]
        kwargs = {key: self._widen_argument(value) for key, value in kwargs.items()}
        result = function(*args, **kwargs)
        if name in _COPIES and wanted is None and self.asked:
            self._note_copy(next(_tensors_in([*args, *kwargs.values()]), None), result)
        if wanted is None and self._default is not None and next(_tensors_in([*args, *kwargs.values()]), None) is None:
            wanted = self._default
        if isinstance(result, Tensor) and (wanted in LOW_DTYPES or result.dtype in LOW_DTYPES):
            self._acts += 1
            return self._widen_result(result, wanted)
        return result

    def _call_view(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], wanted: torch.dtype) -> Any:
        if wanted not in LOW_DTYPES:
            if self.asked.find(args[0]) in LOW_DTYPES:
                self.not_widened["the bits of a 16-bit tensor, which Tensor.view shows as whole numbers"] = None
            return function(*args, **kwargs)
        self._acts += 1
        return self.widen(function(*args, **kwargs))

    def _note_copy(self, source: Tensor | None, result: Any) -> None:
        if source is not None and isinstance(result, Tensor) and self.asked.find(source) in LOW_DTYPES:
            self.asked.add(result, self.asked.find(source))

    def _draw(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Draw random numbers in the dtype that the script asked for, because other numbers are drawn in float32."""
        target = next(_tensors_in([*args, *kwargs.values()]), None)
        dtype = None if target is None else self.asked.find(target)
        if target is None and self._default is not None and "dtype" not in kwargs:
            kwargs = {**kwargs, "dtype": self._default}
        if target is None or dtype is target.dtype:
            result = function(*args, **kwargs)
        else:
            with self.pause(), torch.no_grad():
                low = target.to(dtype)
            args = _replace_tensor(target, low, args)
            kwargs = dict(zip(kwargs, _replace_tensor(target, low, kwargs.values()), strict=True))
            result = function(*args, **kwargs)
        if not isinstance(result, Tensor) or result.dtype not in LOW_DTYPES:
            return result
        self._acts += 1
        if target is None or not _writes(getattr(function, "__name__", "")):
            return self.widen(result)
        with self.pause(), torch.no_grad():
            target.copy_(result)
        return target

    def _widen_result(self, result: Tensor, wanted: torch.dtype | None) -> Tensor:
        if result.dtype in LOW_DTYPES:
            return self.widen(result)
        if result.dtype is torch.float32 and wanted is not None:
            self.has_acted = True
            self.asked.add(result, wanted)
        return result

    def _widen_argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.dtype not in LOW_DTYPES:
                return value
            self._acts += 1
            if isinstance(value, nn.Parameter):
                self.widen_in_place(value)
                return value
            return self.widen(value)
        if isinstance(value, (list, tuple)) and any(tensor.dtype in LOW_DTYPES for tensor in _tensors_in(value)):
            return cast_tree(value, self._widen_argument)
        return value

    def _widen_written(self, values: Sequence[Any]) -> None:
        """Widen the tensors that an op is about to write. They stay the same objects."""
        for tensor in _tensors_in(values):
            if tensor.dtype in LOW_DTYPES:
                self._acts += 1
                self.widen_in_place(tensor)

    # ---- widening ----------------------------------------------------------------------------------------------------

    def widen(self, tensor: Tensor) -> Tensor:
        """Return a copy in float32; an opaque tensor itself."""
        if is_opaque(tensor):
            self.note_not_widened(tensor)
            return tensor
        with self.pause():
            self.has_acted = True
            result = tensor.float()
            self.asked.add(result, tensor.dtype)
            return result

    def widen_in_place(self, tensor: Tensor) -> None:
        """Make a tensor float32, with its gradient. Optimizers and modules keep the object."""
        if is_opaque(tensor):
            self.note_not_widened(tensor)
            return
        with self.pause(), torch.no_grad():
            dtype, gradient = tensor.dtype, tensor.grad
            self.has_acted = True
            self._widened.append((tensor, dtype))
            tensor.grad = None  # torch refuses a gradient of another dtype
            tensor.data = tensor.data.float()
            if gradient is not None:
                tensor.grad = gradient.float()
            self.asked.add(tensor, dtype)

    def note_not_widened(self, tensor: Tensor) -> None:
        """Note a tensor that hides its values, such as a quantized weight."""
        self.not_widened[f"tensors of class {type(tensor).__name__}"] = None


class _Mode(TorchFunctionMode):
    """Passes all functions of torch to a `Float32Script`."""

    def __init__(self, script: Float32Script) -> None:
        super().__init__()
        self._script = script

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _PASSED_ON:
            return func(*args, **(kwargs or {}))
        return self._script.call(func, args, kwargs or {})


def _is_own(frame: Any) -> bool:
    """Return whether code of this package makes a call, and not on behalf of the script."""
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith(_OWN) and not name.startswith(_FOR_SCRIPTS)


def _find_named(value: Any) -> torch.dtype | None:
    """Return the 16-bit dtype of a class of tensors such as torch.HalfTensor, or of its name; None for others."""
    if isinstance(value, str):
        return _NAMED.get(value)
    if isinstance(value, type):
        return _NAMED.get(f"{value.__module__}.{value.__name__}")
    return None


def _replace_dtypes(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with float32 in place of 16-bit dtypes and of the classes of 16-bit tensors."""

    def replace(value: Any) -> Any:
        is_low = (isinstance(value, torch.dtype) and value in LOW_DTYPES) or _find_named(value) is not None
        return torch.float32 if is_low else value

    return tuple(map(replace, args)), {key: replace(value) for key, value in kwargs.items()}


def _draws(function: Any, name: str) -> bool:
    """Return whether a function fills a tensor with random numbers, or makes such a tensor."""
    return name in _RANDOM or getattr(function, "__module__", "") == "torch.nn.init"


def _replace_tensor(target: Tensor, low: Tensor, values: Iterable[Any]) -> list[Any]:
    """Return `values` with `low` in place of `target`."""
    return [low if value is target else value for value in values]


def _writes(name: str) -> bool:
    """Return whether a function of that name writes its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_")


def _tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)
