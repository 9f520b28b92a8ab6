"""`CallWatch`: writes the calls of a script onto a `Tape`, from which `replay` can repeat a step.

These are the calls of models, of torch's functions between them, and of `backward`. Calls inside of models are not
written. Losses are noted, too.
"""

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from ...casting import cast_tree, compiling
from ...interrupts import UndoStack
from ...native import calls_under_way, outer_hooks
from ...patching import Patch, Patcher
from ...session import Session
from ...torch_dispatch import has_foreign_function_mode, leave_function_mode
from ...torch_private import get_backward_id, get_call_kwargs, is_replica
from ..sites import find_caller
from .root_hooks import RootHooks
from .surroundings import ModuleState, RandomState, StatefulModules, read_surroundings, read_version
from .tape import Call, Given, Kind, Tape

_CASTS = frozenset({"to", "float", "half", "bfloat16"})
_DRAWS = (
    *("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential", "gumbel", "poisson", "cauchy"),
    *("geometric", "binomial", "standard_gamma", "dirichlet", "rrelu", "fractional_max_pool", "attention"),
)
"""Parts of the names of functions that may draw random numbers."""

_IN_BULK = ("_foreach_", "_amp_", "_fused_")  # functions with these prefixes are not written
_WITHOUT_TENSORS = (bool, int, float, str, torch.dtype, torch.device, torch.Size)
_SKIPPED = frozenset({"register_hook", "retain_grad", "backward"})


class _ThreadState(threading.local):
    """The state of one thread.

    Attributes:
        root: the outermost module that runs; None between calls of models.
        depth: the number of calls of `root` that run: a module may call itself.
        call: the record of the call of `root`; None if this call is not written.
        is_following: whether calls of functions are written.
        is_entered: whether `_Mode` is on in this thread. It may be on although `is_following` is False, because it
            cannot be taken off while it handles a call.
    """

    def __init__(self) -> None:
        self.root: nn.Module | None = None
        self.depth = 0
        self.call: Call | None = None
        self.is_following = self.is_entered = False


class CallWatch:
    """Watches calls of models by hooks, calls of torch's functions between them by `_Mode`, and `backward` by a patch.

    `_Mode` is on from the end of a call of a model to the next call of a model, call of `backward` or optimizer step,
    except during `zero_grad`. It is not turned on while a TorchFunctionMode of the script is on.

    Args:
        tape: where the calls are written.
        get_session: returns the session in force; None while there is none.
        on_backward: called with the session and a tensor of one element that is about to go backward.
    """

    def __init__(
        self,
        tape: Tape,
        get_session: Callable[[], Session | None],
        on_backward: Callable[[Session, Tensor], None],
    ) -> None:
        self._tape = tape
        self._get_session = get_session
        self._on_backward = on_backward
        self._local = _ThreadState()
        self._modes: dict[int, _Mode] = {}  # by thread
        self._models: weakref.WeakKeyDictionary[nn.Module, StatefulModules] = weakref.WeakKeyDictionary()
        # by id of the `Call` of a model: the states of its modules before the call, to compare with those after it
        self._states: dict[int, list[ModuleState]] = {}
        self._root_hooks = RootHooks(self._enter, self._leave)
        self._undo = UndoStack()
        self.is_paused = False
        self.before_next_call: Callable[[], None] | None = None  # called once, before the next call of a model

    def start(self) -> None:
        """Watch from now on."""
        patcher = Patcher()
        self._undo.callback(patcher.undo)
        self._undo.callback(self.leave)
        self._undo.callback(self._root_hooks.remove)
        self._undo.callback(outer_hooks.add(register_module_forward_pre_hook(self._enter), self._enter))
        leave = register_module_forward_hook(self._leave, always_call=True)
        self._undo.callback(outer_hooks.add(leave, self._leave))
        patcher.install(
            [
                Patch(torch.autograd, "backward", self._watch_backward),
                Patch(Tensor, "backward", self._leave_before),
                Patch(torch.optim.Optimizer, "zero_grad", self._leave_during),
            ]
        )
        for module, frame in calls_under_way():  # a session may be opened by the first call of a model
            if self._local.root is None:
                self._note_entry(module, frame.f_locals.get("args", ()), frame)
            elif self._local.root is module:
                self._local.depth += 1

    def stop(self) -> None:
        """Undo `start`, and clear the tape. Harmless twice."""
        self._undo.close()
        self._models.clear()
        self._tape.clear()
        self.before_next_call = None

    def end_step(self) -> None:
        """End a step: the next call belongs to the next step."""
        self._tape.end()
        self._states.clear()
        # `_leave` resets it, too, but torch calls no hook of a module that a KeyboardInterrupt has ended
        self._local.root = None
        self._root_hooks.end_step()
        self.leave()

    # ---- calls of models ---------------------------------------------------------------------------------------------

    # `_enter` and `_leave` are global hooks. In the first call of a model, they run for each of its modules. In later
    # calls, `RootHooks` may turn them off once the model has begun, and let the model alone call them.

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook of all modules."""
        if compiling.is_dynamo_compiling():
            return
        local = self._local
        if local.root is None:
            self._note_entry(module, args, sys._getframe(1))
        elif local.root is module:
            if [called for called, _ in calls_under_way()].count(module) > 1:
                local.depth += 1
            else:  # the last call has ended without `_leave`: torch calls no hook after an error that is no Exception
                self._root_hooks.end()
                self._note_entry(module, args, sys._getframe(1))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of all modules, also after an exception."""
        if compiling.is_dynamo_compiling():
            return
        local = self._local
        if local.root is module:
            local.depth -= 1
            if not local.depth:
                self._note_end(output)

    def _note_entry(self, module: nn.Module, args: tuple[Any, ...], frame: types.FrameType) -> None:
        """Note that an outermost module is called. `frame` is torch's frame of the call.

        The call is not written while the watch is paused, in a backward pass, in a replica that DataParallel made,
        without a session, or while a compiler or tracer records the code.
        """
        local = self._local
        local.root, local.depth = module, 1
        self._root_hooks.note_thread()
        if not self.is_paused and not is_replica(module) and get_backward_id() == -1:
            session = self._get_session()
            if session is not None and not compiling.is_traced():
                is_known = module in self._models
                self._begin_call(session, module, args, get_call_kwargs(frame))
                # not in the first call of a model, in which the hook of `native.Takeover` must see its inner modules
                if is_known:
                    self._root_hooks.begin(module)

    def _note_end(self, output: Any) -> None:
        """Note that the call of the outermost module has ended."""
        local = self._local
        self._root_hooks.end()
        call, local.root, local.call = local.call, None, None
        if call is not None:
            self._end_call(call, output)

    def _begin_call(self, session: Session, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leave()
        if self.before_next_call is not None:
            self.before_next_call()
            self.before_next_call = None
        call = Call(Kind.MODEL, model, find_caller(), read_surroundings(session), has_raised=True)
        call.is_training = model.training
        call.random = RandomState(session.device_type, has_python=False)
        if any(isinstance(value, Iterator) for value in (*args, *kwargs.values())):
            call.obstacle = "an argument of the model is an iterator, such as a generator, which may be used up"
            args, kwargs = (), {}
        self._tape.add(call, args, dict(kwargs))
        self._states[id(call)] = self._find_modules(model).read(model)
        self._local.call = call

    def _end_call(self, call: Call, output: Any) -> None:
        call.has_raised = output is None and sys.exception() is not None
        self._tape.note_results(call, tensors_of(output))
        call.states = self._find_modules(call.function).compare(self._states.pop(id(call), []))
        if not self.is_paused:
            self._follow()

    def _find_modules(self, model: nn.Module) -> StatefulModules:
        known = self._models.get(model)
        if known is None:
            known = self._models[model] = StatefulModules()
        return known

    # ---- functions ---------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Write calls of torch's functions in this thread from now on.

        Does nothing if a TorchFunctionMode of the script is on.
        """
        local = self._local
        if not local.is_entered and not has_foreign_function_mode():
            mode = self._modes.setdefault(threading.get_ident(), _Mode(self))
            mode.__enter__()  # type: ignore[no-untyped-call]
            local.is_entered = True
        local.is_following = local.is_entered

    def leave(self) -> None:
        """Write no more calls of torch's functions in this thread. Harmless twice."""
        local = self._local
        local.is_following = False
        if local.is_entered and leave_function_mode(self._modes[threading.get_ident()]):
            local.is_entered = False

    def _leave_before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `Tensor.backward` that takes `_Mode` off before torch passes the call to it. While `_Mode` handles a
        call, it cannot be taken off.
        """

        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._local.is_entered and get_backward_id() == -1:
                self.leave()
            return original(*args, **kwargs)

        return backward

    def _leave_during(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `zero_grad` that runs without `_Mode`, which would handle each read of a gradient."""

        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            if not self._local.is_following:
                return original(*args, **kwargs)
            self.leave()
            try:
                return original(*args, **kwargs)
            finally:
                self._follow()

        return zero_grad

    def note_function(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Write a call of a function of torch that has run, if it has made or changed a tensor.

        Casts by amp, and calls that the repetition of a step does not need, are left out.
        """
        if self.is_paused or not self._local.is_following:
            return
        session = self._get_session()
        if session is None:
            return
        traits = _find_traits(function)
        if traits.is_skipped:
            return
        results = [args[0]] if traits.returns_nothing else tensors_of(result)
        if not results:
            return
        first = _find_tensor(args)
        caller = find_caller()
        # a cast by amp itself: a repeated step lets amp cast `first` again
        if traits.is_cast and caller.by == "cast" and first is not None:
            self._tape.note_alias(results[0], first)
            return
        # Do not write a change in place of a tensor that no call on the tape has made. For later calls, the tape holds
        # this tensor itself, which has the change already.
        if traits.changes_first and (first is None or self._tape.find_maker(first) is None):
            return
        if first is None and not tensors_of((args, kwargs)):
            return  # a new tensor, made from numbers: if later calls use it, the tape holds the tensor itself for them
        call = Call(Kind.FUNCTION, function, caller, read_surroundings(session), changes_first=traits.changes_first)
        if traits.draws:
            call.random = RandomState(session.device_type, has_python=False)
        self._tape.add(call, args, dict(kwargs))
        self._tape.note_results(call, results)

    # ---- losses and backward passes ----------------------------------------------------------------------------------

    def note_loss(self, session: Session, loss: Tensor, scaled_loss: Tensor, scale: Callable[[], float]) -> None:
        """Write that `loss` is a loss, and that `scaled_loss` is its product with the loss scale.

        `scale` returns the loss scale.
        """
        call = Call(Kind.LOSS, None, find_caller(), read_surroundings(session), is_kept=True, scale=scale)
        self._tape.add(call, (loss, scaled_loss), {})
        call.loss = Given(loss.detach(), read_version(loss))

    def _watch_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_paused or get_backward_id() != -1:
                return original(tensors, *args, **kwargs)
            self.leave()
            tensors, args = _read_once(tensors), tuple(map(_read_once, args))
            kwargs = {name: _read_once(value) for name, value in kwargs.items()}
            session = self._get_session()
            if session is not None:
                if isinstance(tensors, Tensor) and tensors.numel() == 1:
                    self._on_backward(session, tensors)
                call = Call(Kind.BACKWARD, None, find_caller(), read_surroundings(session), is_kept=True)
                self._tape.add(call, (tensors, *args), kwargs)
            return original(tensors, *args, **kwargs)

        return backward


class _Mode(TorchFunctionMode):
    """Tells a `CallWatch` of each call of a function of torch outside of modules."""

    def __init__(self, watch: CallWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if compiling.is_dynamo_compiling():
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self._watch.note_function(func, args, kwargs, result)
        return result


def _read_once(value: Any) -> Any:
    """Return an iterator as a tuple, which can be read again, and any other value as it is."""
    return tuple(value) if isinstance(value, Iterator) else value


def _find_tensor(values: Sequence[Any]) -> Tensor | None:
    """Return the first value that is a tensor; None if there is none."""
    for value in values:
        if isinstance(value, Tensor):
            return value
    return None


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a value, in the order of `cast_tree`."""
    if isinstance(value, Tensor):
        return [value]
    if value is None or isinstance(value, _WITHOUT_TENSORS):
        return []
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    cast_tree(value, note)
    return tensors


class _Traits(NamedTuple):
    """The traits of a function of torch.

    Attributes:
        is_skipped: whether its calls are not written.
        is_cast: whether it may convert its argument to another dtype.
        changes_first: whether it changes its first argument in place.
        returns_nothing: whether it changes its first argument, and returns None.
        draws: whether it may draw random numbers.
    """

    is_skipped: bool
    is_cast: bool
    changes_first: bool
    returns_nothing: bool
    draws: bool


@functools.lru_cache(maxsize=512)
def _find_traits(function: Any) -> _Traits:
    """Guess the traits of a function from its name."""
    name = str(getattr(function, "__name__", ""))
    reads_gradient = getattr(getattr(function, "__self__", None), "__name__", "") == "grad"
    is_setter = name == "__setitem__"
    return _Traits(
        is_skipped=name.startswith(_IN_BULK) or name in _SKIPPED or reads_gradient,
        is_cast=name in _CASTS,
        changes_first=is_setter or (name.endswith("_") and not name.endswith("__")),
        returns_nothing=is_setter,
        draws=any(word in name for word in _DRAWS),
    )
