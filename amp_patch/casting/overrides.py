"""Calls whose arguments answer for themselves by `__torch_function__`, or that a TorchFunctionMode answers.

torch gives them the function that was called, and they compare it with its public name (`func is F.linear`), or look it
up in a table. That name holds a replacement: it is the replacement they are given, before anything is cast. When they
call it in turn, with overrides disabled, it casts; so casts happen below overrides, as those of torch.autocast do.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.overrides import handle_torch_function, has_torch_function


class PublicOp:
    """One op by its public name.

    Args:
        name: of the op. Methods such as `__matmul__` answer NotImplemented where nobody takes the call.
        is_of_torch: whether it is torch's, and so to be overridden at all.

    Attributes:
        function: what the name holds: the replacement.
        has_overrides: tells of a tuple or list of arguments whether one of them, or a mode, may answer the call. While
            Dynamo traces nobody is to be asked: it knows overrides by itself.
    """

    __slots__ = ("_is_operator", "function", "has_overrides")

    def __init__(self, name: str, *, is_of_torch: bool) -> None:
        self.function: Callable[..., Any] | None = None
        self.has_overrides: Callable[[Iterable[Any]], bool] = _find_none
        if is_of_torch:
            self.has_overrides = _has_some_in_lists if name in _TAKE_LISTS else has_torch_function
        self._is_operator = name.startswith("__")

    def hand_over(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have those that may answer the call answer it."""
        try:
            return handle_torch_function(self.function, _flatten((*args, *kwargs.values())), *args, **kwargs)  # type: ignore[arg-type]
        except TypeError:
            if self._is_operator:
                return NotImplemented
            raise


_TAKE_LISTS = frozenset({"einsum", "multi_dot", "chain_matmul", "lstm", "gru", "rnn_tanh", "rnn_relu"})


def _has_some_in_lists(values: Iterable[Any]) -> bool:
    return has_torch_function(list(_flatten(values)))


# finds nothing, without a frame; Dynamo of torch 2.6 calls no bound method of a builtin
_find_none: Callable[[Iterable[Any]], bool] = functools.partial(operator.is_, None)


class Replacements:
    """One replacement for each original and rule, under all the names of the original: a function that torch has twice
    stays one.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def get(
        self, kind: str, original: Callable[..., Any], make: Callable[[], Callable[..., Any]]
    ) -> Callable[..., Any]:
        """Return the replacement of `original` under the rule `kind`; make it where there is none yet."""
        key = kind, id(original)
        if key not in self._made:
            self._made[key] = original, make()  # with the original, which is kept alive
        return self._made[key][1]


NEVER_OVERRIDDEN = PublicOp("", is_of_torch=False)
"""For functions that are not torch's."""


def _flatten(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values, and those in lists and tuples of them."""
    for value in values:
        if value.__class__ is list or value.__class__ is tuple:
            yield from value
        else:
            yield value
