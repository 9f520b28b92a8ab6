"""`ExchangeList`: collects the slots in which a search finds a function, each with the value to write there.

A slot is a position that holds a value, such as an attribute or an entry of a dict. An exchange is a slot with its
values before and after the function is replaced.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from .patcher import Exchange
from .slots import Entry, Slot, WeakAttribute

Replacements = Mapping[int, Callable[..., Any]]
"""The replacement of each function, by `id(function)`."""


class ExchangeList:
    """The exchanges of a search.

    Attributes:
        replacements: the replacement of each function that is searched for, by `id(function)`.
        wanted: the ids of the functions that are searched for.
        visited: the ids of the objects that were searched already.
        exchanges: for each slot that was found to hold one of the functions, `id(function)` and the exchange.
    """

    def __init__(self, replacements: Replacements) -> None:
        self.replacements = replacements
        self.wanted = frozenset(replacements)
        # replacements count as visited from the start, because their closures hold the originals, and must keep them
        self.visited = {id(replacement) for replacement in replacements.values()}
        self.exchanges: list[tuple[int, Exchange]] = []

    def is_first_visit(self, value: Any) -> bool:
        """Mark an object as visited. Return whether it was not visited before."""
        is_first = id(value) not in self.visited
        self.visited.add(id(value))
        return is_first

    def append(self, slot: Slot, function: Any, after: Any = None) -> None:
        """Add the exchange of a slot that holds `function`. `after`: the value to write; the replacement by default."""
        before = slot.read()
        original = before.__func__ if isinstance(before, staticmethod) else before
        if after is None:
            after = self.replacements[id(function)]
        self.exchanges.append((id(function), Exchange(slot, before, after, original)))

    def append_keys(self, table: dict[Any, Any]) -> None:
        """Add an exchange for each key of a dict that is one of the functions.

        Tensor classes with a `__torch_function__` often keep their handlers in such dicts, by function.
        """
        for key in list(dict.keys(table)):
            if id(key) in self.wanted:
                self.append(Entry(table, key, is_key=True), key)

    def append_partial(self, value: Any) -> bool:
        """Return whether `value` is a `functools.partial` of one of the functions. If it is, add its exchange once."""
        if type(value) is not functools.partial or id(value.func) not in self.wanted:
            return False
        if self.is_first_visit(value):
            self.append(WeakAttribute(value, "func"), value.func)
        return True
