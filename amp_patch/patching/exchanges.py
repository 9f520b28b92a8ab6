"""`ExchangeList`: collects the slots of a search that hold one of the functions, each with the value to write there."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from .patcher import Exchange
from .slots import Entry, Slot, WeakAttribute

Replacements = Mapping[int, Callable[..., Any]]
"""The replacement of each function, by the id of the function."""


class ExchangeList:
    """The exchanges of a search.

    Attributes:
        replacements: of the functions that are searched for.
        wanted: the ids of these functions.
        visited: the ids of the objects that were searched, and need no second visit.
        exchanges: each with the id of its function.
    """

    def __init__(self, replacements: Replacements) -> None:
        self.replacements = replacements
        self.wanted = frozenset(replacements)
        # not into the replacements: their closures hold the originals, and keep them
        self.visited = {id(replacement) for replacement in replacements.values()}
        self.exchanges: list[tuple[int, Exchange]] = []

    def is_first_visit(self, value: Any) -> bool:
        """Return whether an object was not visited before, and count it as visited."""
        is_first = id(value) not in self.visited
        self.visited.add(id(value))
        return is_first

    def append(self, slot: Slot, function: Any, after: Any = None) -> None:
        """Exchange the value of a slot for `after`, or for the replacement of `function`."""
        before = slot.read()
        original = before.__func__ if isinstance(before, staticmethod) else before
        if after is None:
            after = self.replacements[id(function)]
        self.exchanges.append((id(function), Exchange(slot, before, after, original)))

    def append_keys(self, table: dict[Any, Any]) -> None:
        """Exchange the keys of a dict: classes with a `__torch_function__` look handlers up by function."""
        for key in list(dict.keys(table)):
            if id(key) in self.wanted:
                self.append(Entry(table, key, is_key=True), key)

    def append_partial(self, value: Any) -> bool:
        """Exchange the function of a partial. Return whether `value` is a partial of one of the functions."""
        if type(value) is not functools.partial or id(value.func) not in self.wanted:
            return False
        if self.is_first_visit(value):
            self.append(WeakAttribute(value, "func"), value.func)
        return True
