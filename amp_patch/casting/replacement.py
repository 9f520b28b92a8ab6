"""The replacement of an op: a plain function, which has the same form for every rule.

Arguments may handle a call themselves, by `__torch_function__`, and so may a TorchFunctionMode. torch passes them the
function that was called. They compare it with its public name (`func is F.linear`) or look it up in a table, and that
name holds the replacement. So they get the replacement, before anything is cast. When they call it with overrides
disabled, it casts. Casts therefore happen below overrides, as in torch.autocast.
"""

import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .autocast import RulesAlone
from .compiling import is_dynamo_compiling
from .mode import Mode, Switch

OpFunction = Callable[..., Any]

PreparedCall = tuple[OpFunction, Sequence[Any], dict[str, Any]]
"""A function, and the arguments to call it with."""

PrepareCall = Callable[[tuple[Any, ...], dict[str, Any], Mode], PreparedCall]
"""Returns the call to make in place of an op called with these arguments, in that mode. The mode is never OFF."""

ALWAYS = object()
"""For `passing`: every call is prepared."""


def replace(
    original: OpFunction, prepare: PrepareCall, switch: Switch | RulesAlone, public: "PublicOp", passing: object
) -> OpFunction:
    """Return the replacement of `original`.

    Args:
        prepare: called if casts are active and some tensor does not have the dtype `passing`, or some are in a list.
        switch: whether casts are active.
        public: the public name of the op.
        passing: if all tensors have this dtype, the op is called as it is; None means any dtype that all have.
    """
    has_overrides, off, by_lists, may_pass = public.has_overrides, Mode.OFF, Mode.BY_LISTS, passing is not ALWAYS

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
        if may_pass and mode is by_lists:
            expected = passing
            for value in values:
                if isinstance(value, Tensor):
                    if value.dtype is not expected:
                        if expected is not None:
                            break
                        expected = value.dtype
                elif (value.__class__ is list or value.__class__ is tuple) and value and value[0].__class__ is not int:
                    break
            else:
                return original(*args, **kwargs)
        function, args, kwargs = prepare(args, kwargs, mode)  # type: ignore[assignment]
        return function(*args, **kwargs)

    return wrapper


def run_in_region(original: OpFunction, mode: Mode, switch: Switch | RulesAlone) -> OpFunction:
    """Return `original` run in a region of that mode. Functions that it calls are inside the region."""

    def in_region(*args: Any, **kwargs: Any) -> Any:
        with switch.region(mode):
            return original(*args, **kwargs)

    return in_region


class Replacements:
    """One replacement for each original and rule. A function that torch has under two names gets one replacement."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], tuple[OpFunction, OpFunction]] = {}

    def get(self, rule: str, original: OpFunction, make: Callable[[], OpFunction]) -> OpFunction:
        """Return the replacement of `original` under a rule. Make it if there is none yet."""
        key = rule, id(original)
        if key not in self._made:
            self._made[key] = original, make()  # the original too: while it lives, its id is not reused
        return self._made[key][1]

    def clear(self) -> None:
        """Drop all references, so that replacements that nothing else holds are freed at once."""
        self._made.clear()


class PublicOp:
    """One op by its public name.

    Args:
        name: the name of the op. Methods such as `__pow__` return NotImplemented if no argument handles the call.
        original: torch's function; None for functions that are not torch's, which are never overridden.
        takes_lists: whether the op takes tensors in lists, which may handle the call, too.

    Attributes:
        has_overrides: takes the arguments as a tuple or list, and returns whether one of them, or a mode, may handle
            the call. Not used while Dynamo traces, because Dynamo handles overrides itself.
    """

    __slots__ = ("_by_torch", "_function", "_is_operator", "has_overrides")

    def __init__(self, name: str, original: OpFunction | None, *, takes_lists: bool = False) -> None:
        self._function: Callable[[], OpFunction | None] = lambda: None
        self._is_operator = name.startswith("__")
        self._by_torch = original if original is not None and _names_public(original) else None
        self.has_overrides: Callable[[Sequence[Any]], bool] = _find_none
        if original is not None:
            self.has_overrides = _has_some_in_lists if takes_lists or name in _TAKE_LISTS else has_torch_function

    def lead_to(self, function: OpFunction) -> OpFunction:
        """Set the function that the name holds, and return it. It is held weakly, because it holds this object."""
        self._function = weakref.ref(function)
        return function

    def hand_over(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the arguments or the mode handle the call."""
        if self._by_torch is not None:
            return self._by_torch(*args, **kwargs)
        try:
            return handle_torch_function(self._function(), _flatten((*args, *kwargs.values())), *args, **kwargs)  # type: ignore[arg-type]
        except TypeError:
            if self._is_operator:
                return NotImplemented
            raise


def _names_public(original: OpFunction) -> bool:
    """Return whether torch's function itself looks up its public name, and hands calls over by that.

    Methods in C do, and undecorated functions in Python. For them torch decides in which form the arguments are handed
    over, and under which of several names (`Tensor.matmul` for `@`).
    """
    if type(original) is types.FunctionType:
        return not hasattr(original, "__wrapped__") and "handle_torch_function" in original.__code__.co_names
    return type(original) is types.MethodDescriptorType


_TAKE_LISTS = frozenset(
    {"einsum", "linalg_multi_dot", "chain_matmul", "lstm", "gru", "rnn_tanh", "rnn_relu", "index_put", "index_put_"}
    | {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack", "row_stack", "block_diag"}
)


def _has_some_in_lists(values: Sequence[Any]) -> bool:
    for value in values:
        if (value.__class__ is list or value.__class__ is tuple) and has_torch_function(value):
            return True
    return has_torch_function(values)


# False for every argument, and enters no frame. Not a bound method of a builtin, which Dynamo of torch 2.6 cannot call.
_find_none: Callable[[Sequence[Any]], bool] = functools.partial(operator.is_, None)


NEVER_OVERRIDDEN = PublicOp("", None)
"""For functions that are not torch's."""


def _flatten(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values, and the values in lists and tuples among them."""
    for value in values:
        if value.__class__ is list or value.__class__ is tuple:
            yield from value
        else:
            yield value
