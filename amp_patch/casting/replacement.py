"""`replace` makes the replacement of an op: a plain function that casts the arguments and calls the original.

An argument whose class has `__torch_function__`, or a TorchFunctionMode, may handle a call itself: an *override*. It
gets the function that was called, and may compare it with a public name (`func is F.linear`) or look it up in a table.
While an op is patched, its public name holds the replacement. So an override must get the replacement, and not torch's
function. It gets the arguments before they are cast. If it then calls the replacement under
`torch._C.DisableTorchFunction()`, the replacement casts them. So casts happen after overrides, as in torch.autocast.
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
"""Takes the arguments of a call of an op, and any `Mode` but OFF. Returns the call to make instead, for example
of the same op with cast arguments."""

NEVER_SKIP = object()
"""The `skip_dtype` of `replace` for an op whose `prepare` has to see every call."""


def replace(
    original: OpFunction,
    prepare: PrepareCall,
    switch: Switch | ModuleRulesSwitch,
    public: "PublicOp",
    skip_dtype: object,
) -> OpFunction:
    """Return the replacement of `original`.

    It calls an override if there is one (under Dynamo, it leaves this to Dynamo). It calls `original` while ops cast
    nothing in the calling thread, and where `skip_dtype` says so. Otherwise it makes the call that `prepare` returns.

    Args:
        switch: says whether ops cast in the calling thread, and in which `Mode`.
        public: finds and calls overrides.
        skip_dtype: in mode BY_LISTS, call `original` without `prepare` if all tensors of a call have this dtype, and no
            argument is a list or tuple that could hold tensors. None: if all tensors have the same dtype,
            whichever it is. NEVER_SKIP: never.
    """
    has_overrides, off, by_lists = public.has_overrides, Mode.OFF, Mode.BY_LISTS
    may_skip = skip_dtype is not NEVER_SKIP

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values()) if kwargs else args
        if has_overrides(values) and not is_dynamo_compiling():
            return public.call_override(args, kwargs)  # Dynamo finds overrides by itself
        if not switch.on:
            return original(*args, **kwargs)
        mode = by_lists
        if switch.regions:
            mode = switch.mode_here()
            if mode is off:
                return original(*args, **kwargs)
        if may_skip and mode is by_lists:
            expected = skip_dtype
            for value in values:
                if isinstance(value, Tensor):
                    if value.dtype is not expected:
                        if expected is not None:
                            break
                        expected = value.dtype
                elif (value.__class__ is list or value.__class__ is tuple) and value and value[0].__class__ is not int:
                    break  # a list whose first item is an int is a shape or an index, and holds no tensors to cast
            else:  # there was no `break`, so nothing has to be cast
                return original(*args, **kwargs)
        function, args, kwargs = prepare(args, kwargs, mode)  # type: ignore[assignment]
        return function(*args, **kwargs)

    return wrapper


def run_in_region(original: OpFunction, mode: Mode, switch: Switch | ModuleRulesSwitch) -> OpFunction:
    """Return a function that runs `original`, and all that it calls, in a region of `mode` (see `mode.Switch`)."""

    def in_region(*args: Any, **kwargs: Any) -> Any:
        with switch.region(mode):
            return original(*args, **kwargs)

    return in_region


class Replacements:
    """Keeps one replacement for each original and rule. torch has some functions under several names, such as
    `torch.conv2d` and `F.conv2d`, and scripts may compare them with `is`.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], tuple[OpFunction, OpFunction]] = {}

    def get(self, rule: str, original: OpFunction, make: Callable[[], OpFunction]) -> OpFunction:
        """Return the replacement of `original` under a rule. Make it if there is none yet."""
        key = rule, id(original)
        if key not in self._made:
            self._made[key] = original, make()  # hold the original, too, so that its id is not reused
        return self._made[key][1]

    def clear(self) -> None:
        """Forget all replacements."""
        self._made.clear()


class PublicOp:
    """Finds the override of a call of one op, and calls it with the function that the op's public name holds.

    Args:
        name: the name of the op. An operator method such as `__pow__` returns NotImplemented if no override handles the
            call, so that Python tries `__rpow__` of the other operand.
        original: torch's function. None for a function without overrides, such as the user's own.
        takes_lists: look for overrides in lists, too. For the names in `_TAKE_LISTS`, this is always done.

    Attributes:
        has_overrides: takes the values of all arguments, and returns whether one of them, or a TorchFunctionMode, may
            handle the call.
    """

    __slots__ = ("_get_replacement", "_is_operator", "_original_if_dispatching", "has_overrides")

    def __init__(self, name: str, original: OpFunction | None, *, takes_lists: bool = False) -> None:
        self._get_replacement: Callable[[], OpFunction | None] = lambda: None
        self._is_operator = name.startswith("__")
        self._original_if_dispatching: OpFunction | None = None
        self.has_overrides: Callable[[Sequence[Any]], bool] = _have_no_overrides
        if original is not None:
            self.has_overrides = _have_overrides_in_lists if takes_lists or name in _TAKE_LISTS else has_torch_function
            if _calls_overrides(original):
                self._original_if_dispatching = original

    def set_replacement(self, function: OpFunction) -> OpFunction:
        """Set the replacement, which overrides get, and return it."""
        # a weak reference, because the replacement holds this object
        self._get_replacement = weakref.ref(function)
        return function

    def call_override(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let `__torch_function__` of an argument, or a TorchFunctionMode, handle the call."""
        if self._original_if_dispatching is not None:
            return self._original_if_dispatching(*args, **kwargs)
        values = _flatten((*args, *kwargs.values()))
        try:
            return handle_torch_function(self._get_replacement(), values, *args, **kwargs)  # type: ignore[arg-type]
        except TypeError:
            if self._is_operator:
                return NotImplemented
            raise


def _calls_overrides(original: OpFunction) -> bool:
    """Return whether `original` calls overrides itself, with the function that its public name holds: the replacement.

    Methods of Tensor in C do, and most undecorated functions in Python: F.relu calls `handle_torch_function` with
    `relu`, a global of its module, which is patched. `call_override` calls such an original. So torch decides how the
    arguments are passed, and under which of several names (`Tensor.matmul` for `@`).
    """
    if type(original) is types.FunctionType:
        return not hasattr(original, "__wrapped__") and "handle_torch_function" in original.__code__.co_names
    return type(original) is types.MethodDescriptorType


def supports_overrides(original: OpFunction) -> bool:
    """Return whether torch calls overrides for this function of torch.

    It does not for a few Python functions, such as grouped_mm and flex_attention. An override sees only the functions
    that these call.
    """
    if type(original) is not types.FunctionType or hasattr(original, "__wrapped__"):
        return True
    # F.max_pool2d is a closure, which calls one of two functions, depending on `return_indices`
    chooses_function = original.__closure__ is not None and original.__module__ in PYTHON_OP_MODULES
    return chooses_function or "handle_torch_function" in original.__code__.co_names


def is_of_torch(original: OpFunction) -> bool:
    """Return whether torch defines a function or method."""
    module = getattr(original, "__module__", None)
    if module is None:  # as for methods of tensors in C
        return issubclass(Tensor, getattr(original, "__objclass__", ()))
    return bool(module.partition(".")[0] == "torch")


def find_inplace_position(original: OpFunction) -> int | None:
    """Return the position of the parameter `inplace`, such as 1 for `F.relu`, or None if no position has that name."""
    code = getattr(getattr(original, "__wrapped__", original), "__code__", None)
    if code is None:
        return None
    names = code.co_varnames[: code.co_argcount]
    if "inplace" not in names:
        return None
    return int(names.index("inplace"))


# names of ops that take lists of tensors
_TAKE_LISTS = frozenset(
    {"einsum", "linalg_multi_dot", "chain_matmul", "lstm", "gru", "rnn_tanh", "rnn_relu", "index_put", "index_put_"}
    | {"__setitem__"}
    | {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack", "row_stack", "block_diag"}
)


def _have_overrides_in_lists(values: Sequence[Any]) -> bool:
    """Return whether a value has an override, or an item of a value that is a list or tuple."""
    for value in values:
        if (value.__class__ is list or value.__class__ is tuple) and has_torch_function(value):
            return True
    return has_torch_function(values)


# `None is values` is False for any values, and takes no Python frame. Dynamo of torch 2.6 could not call a bound method
# of a builtin here, such as `().__contains__`.
_have_no_overrides: Callable[[Sequence[Any]], bool] = functools.partial(operator.is_, None)


WITHOUT_OVERRIDES = PublicOp("", None)
"""The `PublicOp` of a function that only a replacement calls: the replacement has called the overrides already."""


def _flatten(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values. In place of a list or tuple, yield its items."""
    for value in values:
        if value.__class__ is list or value.__class__ is tuple:
            yield from value
        else:
            yield value
