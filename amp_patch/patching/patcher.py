"""`Patcher`: replaces functions, and restores them.

It knows nothing about tensors and dtypes. A replacement is a plain function that is made from the original.
`functools.update_wrapper` gives it the original's name and docstring, and the attribute `__wrapped__`, by which wrapt
and others find the original.

`install` replaces the attributes that define a function, such as `torch.exp`. `redirect` replaces references to the
function in other slots. Both record an `Exchange` for each slot in one list, and `undo` reverts them in reverse order.

`cover` puts a second function, a *cover*, around replacements: `torch.exp` then holds the cover, which calls the
replacement. `uncover` removes the covers.
"""

import contextlib
import functools
import inspect
import logging
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import wrapt

from . import pickling
from .slots import ABSENT, Attribute, Slot

logger = logging.getLogger("amp_patch")

Factory = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a replacement from the original."""

CoverFactory = Callable[[Any, str, Callable[..., Any]], Callable[..., Any] | None]
"""Makes a cover from the owner, the name and the replacement: `(torch, "exp", replacement)`. None: no cover."""


@dataclass(frozen=True, slots=True)
class Patch:
    """Replaces `owner.name` by `factory(original)`. A `note` is added to the end of the replacement's docstring."""

    owner: Any
    name: str
    factory: Factory
    note: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """A slot, with its value before and after a replacement.

    Attributes:
        slot: a position that holds a function, such as an attribute of a module.
        before: the value that `undo` writes. ABSENT if `undo` deletes the attribute, because its owner inherited it or
            provided it by `__getattr__`.
        after: the value that replaces it: a replacement, or a container that holds replacements.
        original: the function that is replaced, or the container of functions. It may be a static or class method.
        is_patch: whether `install` made the exchange, and not `redirect`.
    """

    slot: Slot
    before: Any
    after: Any
    original: Any
    is_patch: bool = False

    @property
    def is_of_container(self) -> bool:
        """Whether the slot holds a tuple or frozenset with functions, and not a function."""
        return isinstance(self.after, (tuple, frozenset))


def _plan(patch: Patch) -> Exchange:
    """Return the exchange for a patch, with a new replacement. Changes nothing yet."""
    original = _find_original(patch.owner, patch.name)
    if isinstance(original, (staticmethod, classmethod)):
        replacement: Any = type(original)(_make(patch, original.__func__))
    else:
        replacement = _make(patch, original)
    slot = Attribute(patch.owner, patch.name)
    before = original if patch.name in vars(patch.owner) else ABSENT
    return Exchange(slot, before, replacement, original, is_patch=True)


def _find_original(owner: Any, name: str) -> Any:
    """Return the value of an attribute. Of a class, return it as the class holds it: as a staticmethod, for example."""
    if isinstance(owner, type):
        for base in owner.__mro__:
            if name in vars(base):
                return vars(base)[name]
    return getattr(owner, name)


def _make(patch: Patch, original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the replacement. Its `__module__` and `__qualname__` are the patched name, by which pickle stores it."""
    # update_wrapper also sets `__wrapped__`
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
    """Installs patches all together or not at all, and undoes them in reverse order."""

    def __init__(self) -> None:
        self._exchanges: list[Exchange] = []
        self._covers: dict[int, Callable[..., Any]] = {}  # by the id of the replacement that the cover calls

    def __len__(self) -> int:
        return len(self._exchanges)

    def install(self, patches: Iterable[Patch]) -> None:
        """Build all replacements, then write them. After any exception, also KeyboardInterrupt, none of them stays."""
        self._apply([_plan(patch) for patch in patches])

    def redirect(self, exchanges: Iterable[Exchange]) -> None:
        """Write the new value of each slot. After any exception, also KeyboardInterrupt, none of them stays."""
        self._apply(exchanges)

    def _apply(self, exchanges: Iterable[Exchange]) -> None:
        count_before = len(self._exchanges)
        try:
            for exchange in exchanges:
                # recorded before the slot changes, so that an interrupt between the two is undone as well
                self._exchanges.append(exchange)
                exchange.slot.write(exchange.after)
        except BaseException:
            self._undo_down_to(count_before)
            raise

    def undo(self) -> None:
        """Restore the originals. A second call does nothing.

        If other code has wrapped a replacement with wrapt, its wrapper stays, and calls the original from now on. A
        wrapper of any other kind, or around a static or class method, stays too, and still calls the replacement. So
        before `undo`, the caller must make replacements call their originals without casts. A warning names the
        attribute, unless the wrapper of a plain function has no `__wrapped__`.
        """
        self.uncover()
        self._undo_down_to(0)

    def _undo_down_to(self, count: int) -> None:
        """Undo the latest exchanges, until `count` are left."""
        stuck: list[str] = []
        while len(self._exchanges) > count:
            exchange = self._exchanges[-1]
            if not _revert(exchange):
                owner = exchange.slot.owner()
                stuck.append(f"{getattr(owner, '__name__', owner)}.{exchange.slot.key}")
            if exchange.is_patch:
                pickling.retire(exchange.after)  # a copy of a model may still hold the replacement
            self._exchanges.pop()  # last, so that the next call undoes an exchange that an interrupt cut short
        if stuck:
            logger.warning(
                "left in place, because another patch sits on top: %s. The amp_patch wrapper below it no longer casts.",
                ", ".join(stuck),
            )

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Context manager: restore the originals, for code that inspects functions instead of calling them.

        Slots that the program has changed after `install` or `redirect` are left alone.
        """
        in_place: list[tuple[Exchange, Any]] = []  # each with the value of its slot: our replacement, or its cover
        for exchange in self._exchanges:
            value = exchange.slot.read()
            if value is exchange.after or value is self._covers.get(id(exchange.after), exchange.after):
                in_place.append((exchange, value))
        try:
            for exchange, _ in reversed(in_place):
                exchange.slot.write(exchange.before)
            yield
        finally:
            for exchange, value in in_place:
                exchange.slot.write(value)

    def cover(self, make: CoverFactory) -> None:
        """Put covers on replacements that are plain functions, in the attributes and other slots that hold them. A
        tuple that holds a replacement is left alone.

        `make(owner, name, replacement)` returns the cover, which must call the replacement, or None for no cover. After
        any exception, all covers are removed.
        """
        try:
            for exchange in self._exchanges:
                replacement = exchange.after
                if not exchange.is_patch or not inspect.isfunction(replacement) or id(replacement) in self._covers:
                    continue
                cover = make(exchange.slot.owner(), exchange.slot.key, replacement)
                if cover is not None:
                    self._covers[id(replacement)] = functools.update_wrapper(cover, replacement)
            for exchange in self._exchanges:
                cover = self._covers.get(id(exchange.after))
                if cover is not None and exchange.slot.read() is exchange.after:
                    exchange.slot.write(cover)
        except BaseException:
            self.uncover()
            raise

    def uncover(self) -> None:
        """Remove the covers, if there are any."""
        if not self._covers:
            return
        for exchange in self._exchanges:
            cover = self._covers.get(id(exchange.after))
            if cover is not None and exchange.slot.read() is cover:
                exchange.slot.write(exchange.after)
        self._covers.clear()

    def is_patched(self, owner: Any, name: str) -> bool:
        """Return whether `owner.name` was patched, or redirected to a replacement."""
        return self._get_exchange(owner, name) is not None

    def get_original(self, owner: Any, name: str) -> Callable[..., Any] | None:
        """Return the original of `owner.name`, or None unless `is_patched`."""
        exchange = self._get_exchange(owner, name)
        return None if exchange is None else exchange.original

    def _get_exchange(self, owner: Any, name: str) -> Exchange | None:
        """Return the earliest exchange of an attribute, which has its original value, or None if there is none."""
        if owner is None:  # otherwise, slots that are not attributes would match
            return None
        for exchange in self._exchanges:
            if exchange.slot.key == name and exchange.slot.owner() is owner and not exchange.is_of_container:
                return exchange
        return None

    def attributes(self) -> Iterator[tuple[Any, str, Any, Any]]:
        """Yield the owner, name, original and replacement of each patched attribute."""
        for exchange in self._exchanges:
            if exchange.is_patch:
                yield exchange.slot.owner(), str(exchange.slot.key), exchange.original, exchange.after

    def functions(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        """Yield each patched function with its replacement, in the order of installation. Leaves class methods out."""
        for exchange in self._exchanges:
            if not exchange.is_patch or isinstance(exchange.original, classmethod):
                continue
            if isinstance(exchange.original, staticmethod):
                yield exchange.original.__func__, exchange.after.__func__
            else:
                yield exchange.original, exchange.after


def _revert(exchange: Exchange) -> bool:
    """Undo one exchange. Return False if a wrapper in the slot is known to still call the replacement."""
    value = exchange.slot.read()
    if value is exchange.after:
        exchange.slot.write(exchange.before)
        return True
    # other code has restored it, or an interrupt came before our write
    is_restored = value is ABSENT or value is exchange.original
    # a reference that the program has replaced is the program's own
    if is_restored or not exchange.is_patch:
        return True
    if isinstance(exchange.after, (staticmethod, classmethod)):
        return False  # wrapt cannot take the replacement, which is in a static or class method, out of a wrapper
    # if other code has wrapped our replacement by wrapt, take the replacement out of the wrapper
    try:
        wrapt.unwrap_object(exchange.slot.owner(), exchange.slot.key, exchange.after, missing_ok=True)
    except (wrapt.WrapperNotOutermostError, wrapt.WrapperChainTooDeepError):
        return False
    return True
