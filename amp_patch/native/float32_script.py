"""`Float32Script`: gives a script float32 wherever it asks for a 16-bit dtype, for a reference run in float32.

To *widen* a 16-bit tensor is to make it float32. The methods that cast tensors, such as `Tensor.half`, are patched for
the whole run. A TorchFunctionMode (the *mode*) sees other functions of torch, such as those that make tensors, and
widens their arguments and results. The mode slows down every op, so `Float32Script.step_ended` ends it after a few
steps if it is not needed.
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
"""The number of optimizer steps after which the mode may end."""

_AMP_MODULES = "amp_patch."
_FOR_SCRIPTS = ("amp_patch.apex.", "amp_patch.casting.replacement", "amp_patch.casting.wrappers")
"""Prefixes of the names of modules of this package that call torch on behalf of the script."""

_DTYPE_OF_CLASS = {
    f"torch.{place}{kind}Tensor": dtype
    for kind, dtype in (("Half", torch.float16), ("BFloat16", torch.bfloat16), ("Float", torch.float32))
    for place in ("", "cuda.")
}
"""The dtypes of old tensor classes, by the names that `Tensor.type` takes, such as "torch.HalfTensor"."""

_NEVER_WIDENED = frozenset({"__get__", "_parse_to"})
"""Functions that the mode leaves alone: `__get__` reads an attribute, and `_parse_to` the arguments of Module.to."""

_COPIES = frozenset({"clone", "__deepcopy__", "empty_like", "zeros_like", "ones_like", "full_like"})
"""Functions whose result has the dtype of their first argument, unless they get a `dtype`."""

_RANDOM = frozenset(
    {"rand", "randn", "rand_like", "randn_like", "normal", "normal_", "uniform_", "bernoulli", "bernoulli_"}
    | {"exponential_", "log_normal_", "cauchy_", "geometric_", "trunc_normal_"}
)
"""Functions that may draw other numbers in 16 bits than in float32, from the same seed."""


class _ThreadState(threading.local):
    """The state of one thread.

    Attributes:
        is_entered: whether the mode is on in this thread.
        is_paused: whether neither the mode nor the patched methods widen anything in this thread now.
    """

    is_entered = False
    is_paused = False


class _InForce:
    script: "Float32Script | None" = None


_in_force = _InForce()


def find_float32_script() -> "Float32Script | None":
    """Return the `Float32Script` in force, or None if the script gets the dtypes that it asks for."""
    return _in_force.script


def find_asked_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a tensor. If it is float32 where the script asked for 16 bits, return that 16-bit dtype."""
    script = _in_force.script
    return tensor.dtype if script is None else script.asked.find(tensor)


def as_written() -> contextlib.AbstractContextManager[None]:
    """Context manager: nothing is widened in this thread while the block runs."""
    script = _in_force.script
    return contextlib.nullcontext() if script is None else script.pause()


class Float32Script(events.Watcher):
    """Keeps a script in float32 from `start` on, until the function that `start` returns is called.

    Calls that amp_patch makes for itself still get 16 bits. A variable such as `dtype = torch.bfloat16` keeps its
    value, but a tensor that is made with it is float32. Once the script calls torch.compile, compiled functions run
    uncompiled as long as the mode is on. If the script has also asked for 16 bits by step `STEPS`, the mode stays on.

    Attributes:
        asked: the tensors that are float32 although the script asked for 16 bits.
        has_acted: whether the script has asked for 16 bits so far.
        not_widened: descriptions of what could not be widened, as keys: "tensors of class Int4Tensor".
        is_timed: False if the mode, which slows steps down, had to stay on after `STEPS` steps.
    """

    def __init__(self) -> None:
        self.asked = AskedDtypes()
        self.has_acted = False
        self.not_widened: dict[str, None] = {}
        self.is_timed = True
        self._default: torch.dtype | None = None  # the 16-bit dtype that the script made the default
        self._mode = _Mode(self)
        self._local = _ThreadState()
        self._is_on = False
        self._is_compiled = False
        self._mode_actions = 0  # how often the mode had to widen something since the last step
        self._mode_actions_in_steps = 0  # the sum of `_mode_actions` over all steps but the first
        self._steps = 0
        self._counter = StepCounter()
        self._float: Callable[..., Any] = Tensor.float
        self._widened: list[tuple[Tensor, torch.dtype]] = []  # widened in place, with the dtype before
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
        self._undo.callback(self._undo_widening)
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
        """Turn the mode on in this thread, if it is not. torch keeps a stack of modes for each thread."""
        if self._is_on and not self._local.is_entered:
            self._local.is_entered = True
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _leave_mode(self) -> None:
        self._is_on = False  # the mode stays on the stacks of other threads, and does nothing from now on
        if self._local.is_entered:
            self._local.is_entered = False
            leave_function_mode(self._mode)

    def _undo_widening(self) -> None:
        """Cast tensors that were widened in place, and their gradients, back to 16 bits."""
        for tensor, dtype in self._widened:
            _change_dtype(tensor, dtype)
        self._widened.clear()

    def step_ended(self, optimizer: Optimizer) -> None:
        """End the mode after `STEPS` steps, unless it widened a tensor after step 1, or has to keep code uncompiled."""
        if not self._is_on or not self._counter.note(optimizer):
            return
        self._steps += 1
        if self._steps > 1:
            self._mode_actions_in_steps += self._mode_actions
        self._mode_actions = 0
        if self._steps != STEPS:
            return
        self.is_timed = not self._mode_actions_in_steps and not (self.has_acted and self._is_compiled)
        if self.is_timed:
            self._undo_mode.close()

    # ---- patches -----------------------------------------------------------------------------------------------------

    def _make_cast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of a method that casts: `half`, `bfloat16`, `float`, `to` or `type`."""
        name = original.__name__
        dtype_of_method = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32}.get(name)
        to_float32 = self._float if dtype_of_method in LOW_DTYPES else original

        @functools.wraps(original)
        def cast(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            requested = dtype_of_method or self._find_requested(args, kwargs)
            if requested is None or self._local.is_paused or _is_called_by_amp(sys._getframe(1)):
                return original(tensor, *args, **kwargs)
            if requested not in LOW_DTYPES:
                result = original(tensor, *args, **kwargs)
                # The script expects a copy, because it has asked for 16 bits in this tensor.
                if result is tensor and self.asked and self.asked.find(tensor) is not requested:
                    return tensor.clone()
                return result
            if is_opaque(tensor):
                self.note_not_widened(tensor)
                return original(tensor, *args, **kwargs)
            args, kwargs = _replace_dtypes(args, kwargs)
            return self._note_result(tensor, to_float32(tensor, *args, **kwargs), requested)

        return cast

    def _find_requested(self, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.dtype | None:
        """Return the dtype that the arguments of `to` or `type` ask for; None if they ask for none: `to("cuda")`."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.dtype):
                return value
            if isinstance(value, Tensor):
                return self.asked.find(value)
            dtype = _find_dtype_of_class(value)
            if dtype is not None:
                return dtype
        return None

    def _note_result(self, source: Tensor, result: Tensor, requested: torch.dtype) -> Tensor:
        """Return the float32 result of a cast to `requested`, and note what the script asked for.

        If the cast would have made a copy of `source`, the result is a copy, too.
        """
        self.has_acted = True
        if result is source and self.asked.find(source) is not requested:
            result = source.clone()
        self.asked.add(result, requested)
        return result

    def _keep_default(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of `set_default_dtype` or `set_default_tensor_type`. It sets float32 for 16 bits."""

        @functools.wraps(original)
        def set_default(value: Any) -> None:
            dtype = value if isinstance(value, torch.dtype) else _find_dtype_of_class(value)
            self._default = dtype if dtype in LOW_DTYPES else None
            if self._default is None:
                original(value)
                return
            self.has_acted = True
            original(torch.float32 if isinstance(value, torch.dtype) else torch.FloatTensor)

        return set_default

    def _note_compiled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of `torch.compile`. It lets compiled functions run uncompiled while the mode is on."""
        # neither the mode nor the patched methods work in compiled code

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            if self._is_on and not self._is_compiled:
                self._is_compiled = True
                self._undo_mode.callback(compiling.run_eagerly())
            return original(*args, **kwargs)

        return compile

    def _widen_loaded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of `REBUILD_TENSOR`, torch's function that makes loaded tensors. It widens them."""

        @functools.wraps(original)
        def rebuild(*args: Any, **kwargs: Any) -> Any:
            with self.pause():
                result = original(*args, **kwargs)
                return self.widen(result) if result.dtype in LOW_DTYPES else result

        return rebuild

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager: nothing is widened in this thread while the block runs."""
        before, self._local.is_paused = self._local.is_paused, True
        try:
            yield
        finally:
            self._local.is_paused = before

    # ---- modules -----------------------------------------------------------------------------------------------------

    def _widen_module(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of all modules: enter the mode in this thread, and widen 16-bit parameters and buffers."""
        self._enter_mode()
        if self._local.is_paused:
            return
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.dtype in LOW_DTYPES:
                self._mode_actions += 1
                self.widen_in_place(tensor)

    # ---- what the mode does ------------------------------------------------------------------------------------------

    def call(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function that the mode has seen. In a call by the script, widen 16-bit arguments and the result."""
        if not self._is_on or self._local.is_paused or _is_called_by_amp(sys._getframe(2)):
            return function(*args, **kwargs)
        requested = next((dtype for dtype in (*args, *kwargs.values()) if isinstance(dtype, torch.dtype)), None)
        name = getattr(function, "__name__", "")
        if requested is not None and name == "view":  # `view(dtype)` reads the same bits as another dtype
            return self._call_view(function, args, kwargs, requested)
        if _is_random(function, name):
            return self._draw(function, args, kwargs)
        if _is_in_place(name):
            self._widen_written(args[:1] or list(kwargs.values())[:1])
        if "out" in kwargs:
            self._widen_written([kwargs["out"]])
        if requested in LOW_DTYPES:
            args, kwargs = _replace_dtypes(args, kwargs)
        args = [self._widen_argument(value) for value in args]
        kwargs = {key: self._widen_argument(value) for key, value in kwargs.items()}
        result = function(*args, **kwargs)
        if requested is None:
            first_tensor = next(_tensors_in([*args, *kwargs.values()]), None)
            if name in _COPIES and self.asked:
                self._note_copy(first_tensor, result)
            if first_tensor is None:  # as in `torch.zeros(3)`: the default dtype of the script decides
                requested = self._default
        if isinstance(result, Tensor) and (requested in LOW_DTYPES or result.dtype in LOW_DTYPES):
            self._mode_actions += 1
            return self._widen_result(result, requested)
        return result

    def _call_view(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], requested: torch.dtype) -> Any:
        """Call `tensor.view(requested)`: widen a 16-bit result, or note that widening has lost the bits to read."""
        if requested not in LOW_DTYPES:
            if self.asked.find(args[0]) in LOW_DTYPES:
                self.not_widened["the bits of a 16-bit tensor, which Tensor.view shows as whole numbers"] = None
            return function(*args, **kwargs)
        self._mode_actions += 1
        return self.widen(function(*args, **kwargs))

    def _note_copy(self, source: Tensor | None, result: Any) -> None:
        """If the script asked for 16 bits in `source`, note that it asks for them in `result`, a copy of it, too."""
        if source is not None and isinstance(result, Tensor) and self.asked.find(source) in LOW_DTYPES:
            self.asked.add(result, self.asked.find(source))

    def _draw(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function that draws random numbers in the dtype that the script asked for, and widen the result.

        From the same seed, torch may draw other numbers in float32 than in 16 bits.
        """
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
        self._mode_actions += 1
        if target is None or not _is_in_place(getattr(function, "__name__", "")):
            return self.widen(result)
        with self.pause(), torch.no_grad():
            target.copy_(result)
        return target

    def _widen_result(self, result: Tensor, requested: torch.dtype | None) -> Tensor:
        if result.dtype in LOW_DTYPES:
            return self.widen(result)
        if result.dtype is torch.float32 and requested is not None:
            self.has_acted = True
            self.asked.add(result, requested)
        return result

    def _widen_argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.dtype not in LOW_DTYPES:
                return value
            self._mode_actions += 1
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
                self._mode_actions += 1
                self.widen_in_place(tensor)

    # ---- widening ----------------------------------------------------------------------------------------------------

    def widen(self, tensor: Tensor) -> Tensor:
        """Return a float32 copy of a 16-bit tensor. Return an opaque tensor, such as a quantized one, as it is."""
        if is_opaque(tensor):
            self.note_not_widened(tensor)
            return tensor
        with self.pause():
            self.has_acted = True
            result = tensor.float()
            self.asked.add(result, tensor.dtype)
            return result

    def widen_in_place(self, tensor: Tensor) -> None:
        """Make a tensor and its gradient float32, unless it is opaque. Optimizers and modules hold the same object."""
        if is_opaque(tensor):
            self.note_not_widened(tensor)
            return
        with self.pause(), torch.no_grad():
            dtype = tensor.dtype
            self.has_acted = True
            self._widened.append((tensor, dtype))
            _change_dtype(tensor, torch.float32)
            self.asked.add(tensor, dtype)

    def note_not_widened(self, tensor: Tensor) -> None:
        """Note an opaque tensor, such as a quantized weight, which has to stay as it is."""
        self.not_widened[f"tensors of class {type(tensor).__name__}"] = None


class _Mode(TorchFunctionMode):
    """Passes the functions of torch to a `Float32Script`, except `_NEVER_WIDENED`."""

    def __init__(self, script: Float32Script) -> None:
        super().__init__()
        self._script = script

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _NEVER_WIDENED:
            return func(*args, **(kwargs or {}))
        return self._script.call(func, args, kwargs or {})


def _change_dtype(tensor: Tensor, dtype: torch.dtype) -> None:
    """Change the dtype of a tensor, which stays the same object, and of its gradient."""
    gradient = tensor.grad if tensor.is_leaf else None
    if gradient is not None:
        tensor.grad = None  # torch refuses a gradient of another dtype
    tensor.data = tensor.data.to(dtype)
    if gradient is not None:
        tensor.grad = gradient.to(dtype)


def _is_called_by_amp(frame: Any) -> bool:
    """Return whether a frame runs code of this package, except for modules that call torch on behalf of the script."""
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith(_AMP_MODULES) and not name.startswith(_FOR_SCRIPTS)


def _find_dtype_of_class(value: Any) -> torch.dtype | None:
    """Return the dtype of a tensor class in `_DTYPE_OF_CLASS`, or of its name; None for other values."""
    if isinstance(value, str):
        return _DTYPE_OF_CLASS.get(value)
    if isinstance(value, type):
        return _DTYPE_OF_CLASS.get(f"{value.__module__}.{value.__name__}")
    return None


def _replace_dtypes(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments in which float32 replaces 16-bit dtypes and 16-bit tensor classes."""

    def replace(value: Any) -> Any:
        dtype = value if isinstance(value, torch.dtype) else _find_dtype_of_class(value)
        return torch.float32 if dtype in LOW_DTYPES else value

    return tuple(map(replace, args)), {key: replace(value) for key, value in kwargs.items()}


def _is_random(function: Any, name: str) -> bool:
    """Return whether a function may draw random numbers. All functions of torch.nn.init count."""
    return name in _RANDOM or getattr(function, "__module__", "") == "torch.nn.init"


def _replace_tensor(target: Tensor, low: Tensor, values: Iterable[Any]) -> list[Any]:
    return [low if value is target else value for value in values]


def _is_in_place(name: str) -> bool:
    """Return whether a function of that name writes its first argument, such as `add_` and `__setitem__`."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return name.endswith("_")


def _tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)
