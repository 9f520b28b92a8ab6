"""`replace` makes the replacement of an op: a plain function, which has the same form for every rule.

An argument with `__torch_function__`, or a TorchFunctionMode, may handle a call itself (an *override*). Such code gets
the function that was called, and compares it with a public name (`func is F.linear`) or looks it up in a table. Public
names hold the replacements. So overrides get the replacement, before any argument is cast. When they call it with
overrides disabled, it casts. Casts therefore happen after overrides, as in torch.autocast.
"""

import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..torch_private import PYTHON_OP_MODULES
from .autocast import ModuleRulesSwitch
from .compiling import is_dynamo_compiling
from .mode import Mode, Switch

OpFunction = Callable[..., Any]

PreparedCall = tuple[OpFunction, Sequence[Any], dict[str, Any]]
"""A function, its positional arguments and its keyword arguments."""

PrepareCall = Callable[[tuple[Any, ...], dict[str, Any], Mode], PreparedCall]
"""Returns the call to make in place of an op called with these arguments, in that mode. The mode is never OFF."""

NEVER = object()
"""The `no_cast_dtype` of `replace` for an op whose `prepare` has to see every call."""


def replace(
    original: OpFunction,
    prepare: PrepareCall,
    switch: Switch | ModuleRulesSwitch,
    public: "PublicOp",
    no_cast_dtype: object,
) -> OpFunction:
    """Return the replacement of `original`.

    Args:
        prepare: called if casts are active, unless `no_cast_dtype` shows that nothing has to be cast.
        switch: says whether casts are active.
        public: the op as overrides see it.
        no_cast_dtype: outside regions, `original` is called without `prepare` if all tensors of a call have this dtype
            and none is in a list. None: it is enough that all have the same dtype. `NEVER`: every call is prepared.
    """
    has_overrides, off, by_lists = public.has_overrides, Mode.OFF, Mode.BY_LISTS
    may_skip = no_cast_dtype is not NEVER

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values()) if kwargs else args
        if has_overrides(values) and not is_dynamo_compiling():
            return public.hand_over(args, kwargs)
        if not switch.on:
            return original(*args, **kwargs)
        mode = by_lists
        if switch.regions:
            mode = switch.mode_here()
            if mode is off:
                return original(*args, **kwargs)
        if may_skip and mode is by_lists:
            expected = no_cast_dtype
            for value in values:
                if isinstance(value, Tensor):
                    if value.dtype is not expected:
                        if expected is not None:
                            break
                        expected = value.dtype
                elif (value.__class__ is list or value.__class__ is tuple) and value and value[0].__class__ is not int:
                    break  # a list whose first item is an int is a shape or the like, and holds no tensors
            else:  # no `break`: nothing has to be cast
                return original(*args, **kwargs)
        function, args, kwargs = prepare(args, kwargs, mode)  # type: ignore[assignment]
        return function(*args, **kwargs)

    return wrapper


def run_in_region(original: OpFunction, mode: Mode, switch: Switch | ModuleRulesSwitch) -> OpFunction:
    """Return a function that runs `original`, and all that it calls, in a region of that mode."""

    def in_region(*args: Any, **kwargs: Any) -> Any:
        with switch.region(mode):
            return original(*args, **kwargs)

    return in_region


class Replacements:
    """Keeps one replacement for each original and rule, because torch has some functions under several names."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], tuple[OpFunction, OpFunction]] = {}

    def get(self, rule: str, original: OpFunction, make: Callable[[], OpFunction]) -> OpFunction:
        """Return the replacement of `original` under a rule. Make it if there is none yet."""
        key = rule, id(original)
        if key not in self._made:
            self._made[key] = original, make()  # hold the original, too, so that its id is not reused
        return self._made[key][1]

    def clear(self) -> None:
        """Drop all references, so that replacements that nothing else holds are freed at once."""
        self._made.clear()


class PublicOp:
    """One op as overrides see it: by its public name, which holds the replacement.

    Args:
        name: the name of the op. Methods such as `__pow__` return NotImplemented if no argument handles the call.
        original: torch's function. None for a function that is not torch's, and so has no overrides.
        takes_lists: whether the op takes lists of tensors, which may have overrides, too.

    Attributes:
        has_overrides: takes the arguments as a tuple or list, and returns whether one of them, or a mode, may handle
            the call. Not used while Dynamo traces, because Dynamo handles overrides itself.
    """

    __slots__ = ("_dispatcher", "_function", "_is_operator", "has_overrides")

    def __init__(self, name: str, original: OpFunction | None, *, takes_lists: bool = False) -> None:
        self._function: Callable[[], OpFunction | None] = lambda: None
        self._is_operator = name.startswith("__")
        self._dispatcher = original if original is not None and _dispatches_by_name(original) else None
        self.has_overrides: Callable[[Sequence[Any]], bool] = _have_no_overrides
        if original is not None:
            self.has_overrides = _have_overrides_in_lists if takes_lists or name in _TAKE_LISTS else has_torch_function

    def set_replacement(self, function: OpFunction) -> OpFunction:
        """Set the replacement, which overrides get, and return it."""
        # a weak reference, because the replacement holds this object
        self._function = weakref.ref(function)
        return function

    def hand_over(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the arguments or a mode handle the call."""
        if self._dispatcher is not None:
            return self._dispatcher(*args, **kwargs)
        try:
            return handle_torch_function(self._function(), _flatten((*args, *kwargs.values())), *args, **kwargs)  # type: ignore[arg-type]
        except TypeError:
            if self._is_operator:
                return NotImplemented
            raise


def _dispatches_by_name(original: OpFunction) -> bool:
    """Return whether torch's function itself passes the replacement to overrides, because it looks up its own public
    name.

    Methods in C and undecorated functions in Python do so. `hand_over` simply calls them: torch then decides how the
    arguments are passed, and which of several names is used (`Tensor.matmul` for `@`).
    """
    if type(original) is types.FunctionType:
        return not hasattr(original, "__wrapped__") and "handle_torch_function" in original.__code__.co_names
    return type(original) is types.MethodDescriptorType


def supports_overrides(original: OpFunction) -> bool:
    """Return whether a function of torch lets its arguments handle the call.

    Python functions that do not, such as grouped_mm and flex_attention, call other functions, which do.
    """
    if type(original) is not types.FunctionType or hasattr(original, "__wrapped__"):
        return True
    # F.max_pool2d is a closure, which chooses between two functions by `return_indices`
    is_choice = original.__closure__ is not None and original.__module__ in PYTHON_OP_MODULES
    return is_choice or "handle_torch_function" in original.__code__.co_names


# ops that take lists of tensors
_TAKE_LISTS = frozenset(
    {"einsum", "linalg_multi_dot", "chain_matmul", "lstm", "gru", "rnn_tanh", "rnn_relu", "index_put", "index_put_"}
    | {"__setitem__"}
    | {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack", "row_stack", "block_diag"}
)


def _have_overrides_in_lists(values: Sequence[Any]) -> bool:
    """Return whether one of the values, or of the items of lists and tuples among them, has an override."""
    for value in values:
        if (value.__class__ is list or value.__class__ is tuple) and has_torch_function(value):
            return True
    return has_torch_function(values)


# False for any arguments, without a Python frame. Dynamo of torch 2.6 could not call a bound method of a builtin here.
_have_no_overrides: Callable[[Sequence[Any]], bool] = functools.partial(operator.is_, None)


WITHOUT_OVERRIDES = PublicOp("", None)
"""For functions that are not torch's, or that are called after overrides."""


def _flatten(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values. In place of a list or tuple, yield its items."""
    for value in values:
        if value.__class__ is list or value.__class__ is tuple:
            yield from value
        else:
            yield value
