"""Patches that leave no trace: `Patcher` puts replacements in and takes every one of them out again.

It knows neither tensors nor dtypes. A replacement is a plain function made from the original;
`functools.update_wrapper` gives it the original's name, docstring and `__wrapped__`, which is also how wrapt finds the
way back. `install` replaces attributes of the owners that define a function, `redirect` other references to it. Both
exchange what a slot holds; all exchanges are in one list, which is undone backwards.
"""

import contextlib
import functools
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import wrapt

from . import pickling

logger = logging.getLogger("amp_patch")

Factory = Callable[[Callable[..., Any]], Callable[..., Any]]
Cover = Callable[[Any, str, Callable[..., Any]], Callable[..., Any] | None]

ABSENT = object()
"""What a slot holds that holds nothing."""

namespace_of: Callable[[Any], dict[str, Any]] = vars(types.ModuleType)["__dict__"].__get__
attributes_of: Callable[[type], Mapping[str, Any]] = vars(type)["__dict__"].__get__


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute to replace: `owner.name` becomes `factory(original)`. Its docstring ends with the note."""

    owner: Any
    name: str
    factory: Factory
    note: str = ""


class Slot:
    """Somewhere that refers to a function. All but `Attribute` are read and written without running anybody's code.

    Each can `read` its value, which may be ABSENT, and `write` another.

    Attributes:
        key: of an attribute, its name.
    """

    __slots__ = ("_holder", "key")

    def __init__(self, holder: Any, key: Any) -> None:
        self._holder = holder
        self.key = key

    def owner(self) -> Any:
        """Return the object whose attribute the slot is; None if it is no attribute, or its owner is gone."""
        return None

    def read(self) -> Any:
        raise NotImplementedError

    def write(self, value: Any) -> None:
        raise NotImplementedError


class Attribute(Slot):
    """An attribute of what a patch is for. To write ABSENT takes it away."""

    def owner(self) -> Any:
        return self._holder

    def read(self) -> Any:
        return vars(self._holder).get(self.key, ABSENT)

    def write(self, value: Any) -> None:
        if value is ABSENT:
            delattr(self._holder, self.key)
        else:
            setattr(self._holder, self.key, value)


class Item(Slot):
    """An item of a dict, such as a global of the module `owner`."""

    __slots__ = ("_owner",)

    def __init__(self, holder: dict[Any, Any], key: Any, owner: types.ModuleType | None = None) -> None:
        super().__init__(holder, key)
        self._owner = owner

    def owner(self) -> Any:
        return self._owner

    def read(self) -> Any:
        return dict.get(self._holder, self.key, ABSENT)

    def write(self, value: Any) -> None:
        dict.__setitem__(self._holder, self.key, value)


class Key(Slot):
    """A key of a dict, which stays where it is in the order."""

    def read(self) -> Any:
        return self.key if dict.__contains__(self._holder, self.key) else ABSENT

    def write(self, value: Any) -> None:
        items = [(value if key is self.key else key, item) for key, item in dict.items(self._holder)]
        self.key = value
        dict.update(self._holder, items)  # before anything goes: other threads may look something up
        try:
            dict.clear(self._holder)
        finally:  # also if an interrupt comes
            dict.update(self._holder, items)


class Place(Slot):
    """A place in a list. Where the list has another length by then, it is not there any more."""

    def read(self) -> Any:
        return self._holder[self.key] if self.key < list.__len__(self._holder) else ABSENT

    def write(self, value: Any) -> None:
        list.__setitem__(self._holder, self.key, value)


class Member(Slot):
    """A member of a set."""

    def read(self) -> Any:
        return self.key if set.__contains__(self._holder, self.key) else ABSENT

    def write(self, value: Any) -> None:
        before, self.key = self.key, value
        set.add(self._holder, value)
        set.discard(self._holder, before)


class _WeakSlot(Slot):
    """A slot of an object that may belong to a model, and is not kept alive."""

    def __init__(self, holder: Any, key: str) -> None:
        super().__init__(weakref.ref(holder), key)

    def owner(self) -> Any:
        return self._holder()

    def read(self) -> Any:
        holder = self._holder()
        return ABSENT if holder is None else self._get(holder)

    def write(self, value: Any) -> None:
        holder = self._holder()
        if holder is not None:
            self._set(holder, value)

    def _get(self, holder: Any) -> Any:
        raise NotImplementedError

    def _set(self, holder: Any, value: Any) -> None:
        raise NotImplementedError


class ClassAttribute(_WeakSlot):
    """An attribute that a class itself holds."""

    def _get(self, holder: type) -> Any:
        return attributes_of(holder).get(self.key, ABSENT)

    def _set(self, holder: type, value: Any) -> None:
        type.__setattr__(holder, self.key, value)


class InstanceAttribute(_WeakSlot):
    """An attribute in the `__dict__` of a module of a model."""

    def _get(self, holder: Any) -> Any:
        return vars(holder).get(self.key, ABSENT)

    def _set(self, holder: Any, value: Any) -> None:
        vars(holder)[self.key] = value


class PartialFunction(_WeakSlot):
    """The function of a `functools.partial`, which may be held anywhere."""

    def owner(self) -> Any:
        return None

    def _get(self, holder: Any) -> Any:
        return holder.func

    def _set(self, holder: Any, value: Any) -> None:
        functools.partial.__setstate__(holder, (value, holder.args, holder.keywords, vars(holder) or None))  # type: ignore[attr-defined]


class Defaults(_WeakSlot):
    """The positional defaults of a function, one tuple."""

    def owner(self) -> Any:
        return None  # an attribute, but none that is a function

    def _get(self, holder: types.FunctionType) -> Any:
        return holder.__defaults__

    def _set(self, holder: types.FunctionType, value: Any) -> None:
        holder.__defaults__ = value


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """A slot, what it held, and what it is to hold.

    Attributes:
        before: ABSENT for an attribute that its owner only inherited, or served by `__getattr__`.
        original: the function that is replaced; for a patch it may be a static or class method.
        is_patch: whether `install` made it, and not `redirect`.
    """

    slot: Slot
    before: Any
    after: Any
    original: Any
    is_patch: bool = False

    @property
    def is_of_container(self) -> bool:
        """Whether the slot holds a function in a tuple or frozenset, and not itself."""
        return isinstance(self.after, (tuple, frozenset))


def _plan(patch: Patch) -> Exchange:
    original = _find_original(patch.owner, patch.name)
    if isinstance(original, (staticmethod, classmethod)):
        replacement: Any = type(original)(_make(patch, original.__func__))
    else:
        replacement = _make(patch, original)
    slot = Attribute(patch.owner, patch.name)
    before = original if patch.name in vars(patch.owner) else ABSENT
    return Exchange(slot, before, replacement, original, is_patch=True)


def _find_original(owner: Any, name: str) -> Any:
    """Return what an attribute is, of a class without what its type makes of it: a static method is one."""
    if isinstance(owner, type):
        for base in owner.__mro__:
            if name in vars(base):
                return vars(base)[name]
    return getattr(owner, name)


def _make(patch: Patch, original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the replacement. It says that it is where it will be, since pickle stores a function as that."""
    replacement = functools.update_wrapper(patch.factory(original), original)
    if patch.note:
        replacement.__doc__ = f"{original.__doc__ or ''}\n\n{patch.note}".lstrip()
    if isinstance(patch.owner, types.ModuleType):
        replacement.__module__, replacement.__qualname__ = patch.owner.__name__, patch.name
    elif isinstance(patch.owner, type):
        replacement.__module__ = patch.owner.__module__
        replacement.__qualname__ = f"{patch.owner.__qualname__}.{patch.name}"
    return replacement


class Patcher:
    """Installs patches all together or not at all, and undoes them last in, first out."""

    def __init__(self) -> None:
        self._exchanges: list[Exchange] = []
        self._covers: dict[int, Callable[..., Any]] = {}  # by the id of the replacement that each is around

    def __len__(self) -> int:
        return len(self._exchanges)

    def install(self, patches: Iterable[Patch]) -> None:
        """Build every replacement, then put them in; on any exception, KeyboardInterrupt included, what went in comes
        out again.
        """
        self._put_in([_plan(patch) for patch in patches])

    def redirect(self, exchanges: Iterable[Exchange]) -> None:
        """Write what each slot is to hold; on any exception, the slots written so far get back what they held."""
        self._put_in(exchanges)

    def _put_in(self, exchanges: Iterable[Exchange]) -> None:
        mark = len(self._exchanges)
        try:
            for exchange in exchanges:
                self._exchanges.append(exchange)  # before the slot changes: an interrupt in between is undone as well
                exchange.slot.write(exchange.after)
        except BaseException:
            self._undo_down_to(mark)
            raise

    def undo(self) -> None:
        """Take every patch out again. Calling it twice is harmless.

        A name that other code has patched on top of ours is left as it is; our function below it stays callable and
        must be inert by then.
        """
        self.uncover()
        self._undo_down_to(0)

    def _undo_down_to(self, mark: int) -> None:
        stuck: list[str] = []
        while len(self._exchanges) > mark:
            exchange = self._exchanges[-1]
            if not _take_out(exchange):
                owner = exchange.slot.owner()
                stuck.append(f"{getattr(owner, '__name__', owner)}.{exchange.slot.key}")
            if exchange.is_patch:
                pickling.retire(exchange.after)  # copies of models may still hold it
            self._exchanges.pop()  # last: what an interrupt cut short is done again
        if stuck:
            logger.warning(
                "left in place, because another patch sits on top: %s. The amp_patch wrapper below it no longer casts.",
                ", ".join(stuck),
            )

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Put the originals back inside the block, for what reads functions instead of calling them."""
        in_place: list[tuple[Exchange, Any]] = []
        for exchange in self._exchanges:
            held = exchange.slot.read()
            if held is exchange.after or held is self._covers.get(id(exchange.after), exchange.after):
                in_place.append((exchange, held))
        try:
            for exchange, _ in reversed(in_place):
                exchange.slot.write(exchange.before)
            yield
        finally:
            for exchange, held in in_place:
                exchange.slot.write(held)

    def cover(self, make: Cover) -> None:
        """Put a function around each replacement, wherever it is referred to: `make(owner, name, replacement)`, or
        leave it alone for None. It must call what it covers. On any exception, all is as it was.
        """
        try:
            for exchange in self._exchanges:
                replacement = exchange.after
                if not exchange.is_patch or not inspect.isfunction(replacement) or id(replacement) in self._covers:
                    continue
                made = make(exchange.slot.owner(), exchange.slot.key, replacement)
                if made is not None:
                    self._covers[id(replacement)] = functools.update_wrapper(made, replacement)
            for exchange in self._exchanges:
                made = self._covers.get(id(exchange.after))
                if made is not None and exchange.slot.read() is exchange.after:
                    exchange.slot.write(made)
        except BaseException:
            self.uncover()
            raise

    def uncover(self) -> None:
        """Put the replacements back. Harmless twice, and without covers."""
        if not self._covers:
            return
        for exchange in self._exchanges:
            made = self._covers.get(id(exchange.after))
            if made is not None and exchange.slot.read() is made:
                exchange.slot.write(exchange.after)
        self._covers.clear()

    def is_patched(self, owner: Any, name: str) -> bool:
        """Tell whether `owner.name` carries a patch of ours, or was redirected to one."""
        return self._find(owner, name) is not None

    def get_original(self, owner: Any, name: str) -> Callable[..., Any] | None:
        """Return what `owner.name` was before it was patched, or None if it is not patched."""
        found = self._find(owner, name)
        return None if found is None else found.original

    def _find(self, owner: Any, name: str) -> Exchange | None:
        """Return the earliest exchange of an attribute."""
        if owner is None:  # which slots that are no attributes have, too
            return None
        for exchange in self._exchanges:
            if exchange.slot.key == name and exchange.slot.owner() is owner and not exchange.is_of_container:
                return exchange
        return None

    def functions(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        """Yield each patched function with its replacement, in the order in which they were put in."""
        for exchange in self._exchanges:
            if not exchange.is_patch or isinstance(exchange.original, classmethod):
                continue
            if isinstance(exchange.original, staticmethod):
                yield exchange.original.__func__, exchange.after.__func__
            else:
                yield exchange.original, exchange.after


def _take_out(exchange: Exchange) -> bool:
    """Undo one exchange. Return False if our function stays below that of other code."""
    held = exchange.slot.read()
    if held is exchange.after:
        exchange.slot.write(exchange.before)
        return True
    is_gone = held is ABSENT or held is exchange.original  # taken out already, or never put in
    if is_gone or not exchange.is_patch:
        return True
    if isinstance(exchange.after, (staticmethod, classmethod)):
        return False  # wrapt would leave the function inside of ours
    try:
        wrapt.unwrap_object(exchange.slot.owner(), exchange.slot.key, exchange.after, missing_ok=True)
    except (wrapt.WrapperNotOutermostError, wrapt.WrapperChainTooDeepError):
        return False
    return True
