"""`ContainerSearch`: finds patched functions in nested lists, tuples, sets and dicts, to put their replacements there.
Also finds objects that hold such a function where it cannot be replaced.

Tensor classes with a `__torch_function__` often keep the functions that they handle in a dict or a set. There, they
look up the function that torch passes to them. While it is patched, this is the replacement, so the container must hold
the replacement.
"""

import gc
import sys
import types
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

from .exchanges import ExchangeList
from .patcher import Exchange
from .slots import Entry, Slot, WeakAttribute, namespace_of

_IMMUTABLE = frozenset({tuple, frozenset})
_SEARCHED = _IMMUTABLE | {list, set}
"""The types of containers that are searched, beside dicts.

Subclasses of these types are not searched: a named tuple, for example, cannot be made from a list of its members.
"""

_CONTAINERS = frozenset({dict, tuple, list, set, frozenset})


class Unsearched(NamedTuple):
    """A value that the first pass of a `Search` collected for the second pass: a container, or any other object.

    Attributes:
        prefix, name: messages name the value as `prefix.name`, such as `mylib.activations.ACT2FN`.
        holder, key: the class or the dict (also a module's namespace) that holds the value, and the key there. Both
            None for an attribute of a layer: functions in such a value are reported, and not replaced.
    """

    prefix: str
    name: str
    value: Any
    holder: Any = None
    key: Any = None


class ContainerSearch:
    """The second pass of a `Search`: searches the values that the first pass collected in `unsearched`.

    Args:
        exchanges: the exchanges of the first pass. This pass appends its own.
        unsearched: empty when this object is made. The first pass fills it.
    """

    def __init__(self, exchanges: ExchangeList, unsearched: Sequence[Unsearched]) -> None:
        self._exchanges = exchanges
        self._wanted = exchanges.wanted
        self._unsearched = unsearched
        self._holds_any = False
        self._exchanged: set[int] = set()  # ids of tuples and frozensets that are exchanged for a copy

    def run(self) -> None:
        """Search the containers among the values."""
        contents = _contents_of([entry.value for entry in self._unsearched], self._exchanges.visited)
        self._holds_any = not self._wanted.isdisjoint(map(id, contents))
        # nearly always, no value holds such a function: one look at all contents is faster than one for each value
        if not self._holds_any:
            return
        # A snapshot, without the values that this pass visits: a tuple in several positions must be replaced in each.
        visited = frozenset(self._exchanges.visited)
        for entry in self._unsearched:
            if entry.holder is not None and self._holds_wanted(entry.value, visited):
                self._search(entry.value, entry.holder, entry.key)

    def find_unreplaced(self) -> list[str]:
        """Return the values that still hold a patched function, each as `prefix.name (its class)`. Call it after the
        exchanges were written.
        """
        if not self._holds_any:
            return []
        searched = set(self._exchanges.visited)
        for module in list(sys.modules.values()):
            if issubclass(type(module), types.ModuleType):
                searched.add(id(namespace_of(module)))
        unreplaced = {}  # by the id of the value, because a value with several names is reported once
        for entry in self._unsearched:
            if id(entry.value) not in self._exchanged and self._holds_wanted(entry.value, searched):
                unreplaced[id(entry.value)] = f"{entry.prefix}.{entry.name} ({type(entry.value).__name__})"
        return list(unreplaced.values())

    def _holds_wanted(self, value: Any, visited: Container[int]) -> bool:
        return not self._wanted.isdisjoint(map(id, _contents_of([value], visited)))

    def _search(self, container: Any, holder: Any, key: Any) -> None:
        """Search a container, and the containers in it.

        `holder` holds the container under `key`. Both are None for a member of a tuple or frozenset, because such a
        member cannot be written: only the whole tuple or frozenset can be exchanged.
        """
        kind = type(container)
        if kind in _IMMUTABLE:
            self._replace_immutable(container, holder, key)
        is_dict = issubclass(kind, dict)
        if not (is_dict or kind in _SEARCHED) or not self._exchanges.is_first_visit(container):
            return
        if is_dict:
            self._exchanges.append_keys(container)
        members = list(dict.items(container)) if is_dict else list(enumerate(container))
        for index, member in members:
            is_wanted = id(member) in self._wanted
            if is_wanted and kind not in _IMMUTABLE:  # for a function in a tuple, see `_replace_immutable`
                self._exchanges.append(Entry(container, member if kind is set else index), member)
                continue
            self._exchanges.append_partial(member)
            if kind in _IMMUTABLE:
                self._search(member, None, None)
            else:
                self._search(member, container, index)

    def _replace_immutable(self, container: Any, holder: Any, key: Any) -> None:
        """If a tuple or frozenset holds patched functions, add an exchange that writes a copy with the replacements."""
        copy, function = self._copy_with_replacements(container)
        if function is None or holder is None:
            return
        kind = type(holder)
        slot: Slot
        if kind is list or issubclass(kind, dict):
            slot = Entry(holder, key)
        elif issubclass(kind, type):
            slot = WeakAttribute(holder, key)
        else:  # a tuple that is a member of a set is left alone
            return
        # The patcher of any function in the tuple can undo the exchange: name one of them.
        self._exchanges.exchanges.append((id(function), Exchange(slot, container, copy, container)))
        self._exchanged.add(id(container))

    def _copy_with_replacements(self, container: Any) -> tuple[Any, Callable[..., Any] | None]:
        """Return a copy of a tuple or frozenset that holds replacements instead of functions, and one of the functions.
        If there is none in it, return the container itself and None.
        """
        members: list[Any] = []
        last_function: Callable[..., Any] | None = None
        for member in container:
            function = None
            if id(member) in self._wanted:
                members.append(self._exchanges.replacements[id(member)])
                function = member
            elif type(member) in _IMMUTABLE:
                inner_copy, function = self._copy_with_replacements(member)
                members.append(inner_copy)
            else:
                members.append(member)
            if function is not None:
                last_function = function
        if last_function is None:
            return container, None
        return type(container)(members), last_function


def _contents_of(values: Iterable[Any], visited: Container[int]) -> list[Any]:
    """Return the objects that values refer to, directly or through up to two containers.

    Leaves out direct references to objects in `visited`, and does not look into containers in `visited`.
    `gc.get_referents` runs no code of the values.
    """
    referents = gc.get_referents(*values)
    contents = [value for value in referents if id(value) not in visited]
    for _ in range(2):  # as deep as the tables of torchao and functorch are nested
        inner = [value for value in referents if type(value) in _CONTAINERS and id(value) not in visited]
        referents = gc.get_referents(*inner)
        contents += referents
    return contents
