"""`Patcher`: replaces functions, and restores every one of them without a trace.

It knows neither tensors nor dtypes. A replacement is a plain function made from the original.
`functools.update_wrapper` gives it the original's name, docstring and `__wrapped__`, which wrapt follows, too.

`install` replaces attributes of the owners that define a function; `redirect` replaces references to it elsewhere. Both
are lists of `Exchange`s. All exchanges are in one list, and undone in reverse order.
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
Cover = Callable[[Any, str, Callable[..., Any]], Callable[..., Any] | None]


@dataclass(frozen=True, slots=True)
class Patch:
    """Replaces `owner.name` by `factory(original)`, and appends `note` to its docstring."""

    owner: Any
    name: str
    factory: Factory
    note: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """A slot, with its value before and after a replacement.

    Attributes:
        before: ABSENT for an attribute that its owner inherits, or serves by `__getattr__`.
        original: the function that is replaced; for a patch it may be a static or class method.
        is_patch: `install` made it; False for `redirect`.
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
    original = _find_original(patch.owner, patch.name)
    if isinstance(original, (staticmethod, classmethod)):
        replacement: Any = type(original)(_make(patch, original.__func__))
    else:
        replacement = _make(patch, original)
    slot = Attribute(patch.owner, patch.name)
    before = original if patch.name in vars(patch.owner) else ABSENT
    return Exchange(slot, before, replacement, original, is_patch=True)


def _find_original(owner: Any, name: str) -> Any:
    """Return the attribute, of a class as its `__dict__` holds it: a static method, not the function in it."""
    if isinstance(owner, type):
        for base in owner.__mro__:
            if name in vars(base):
                return vars(base)[name]
    return getattr(owner, name)


def _make(patch: Patch, original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the replacement. Its name and module lead to its place, because pickle stores functions by them."""
    # update_wrapper also sets __wrapped__, which wrapt and the session's end follow to the original
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
        self._covers: dict[int, Callable[..., Any]] = {}  # by the id of the replacement that each one calls

    def __len__(self) -> int:
        return len(self._exchanges)

    def install(self, patches: Iterable[Patch]) -> None:
        """Build all replacements, then write them. After any exception, even KeyboardInterrupt, nothing is replaced."""
        self._apply([_plan(patch) for patch in patches])

    def redirect(self, exchanges: Iterable[Exchange]) -> None:
        """Write the new value of each slot. After any exception, even KeyboardInterrupt, all have their earlier one."""
        self._apply(exchanges)

    def _apply(self, exchanges: Iterable[Exchange]) -> None:
        mark = len(self._exchanges)
        try:
            for exchange in exchanges:
                self._exchanges.append(exchange)  # before the slot changes: an interrupt in between is undone as well
                exchange.slot.write(exchange.after)
        except BaseException:
            self._undo_down_to(mark)
            raise

    def undo(self) -> None:
        """Restore everything. Calling it twice is harmless.

        A name that other code has patched on top of ours stays as it is. Our function below it remains callable, so it
        must be inert by then.
        """
        self.uncover()
        self._undo_down_to(0)

    def _undo_down_to(self, mark: int) -> None:
        left: list[str] = []
        while len(self._exchanges) > mark:
            exchange = self._exchanges[-1]
            if not _revert(exchange):
                owner = exchange.slot.owner()
                left.append(f"{getattr(owner, '__name__', owner)}.{exchange.slot.key}")
            if exchange.is_patch:
                pickling.retire(exchange.after)  # copies of models may still hold it
            self._exchanges.pop()  # last, so that an exchange that an interrupt cut short is undone again
        if left:
            logger.warning(
                "left in place, because another patch sits on top: %s. The amp_patch wrapper below it no longer casts.",
                ", ".join(left),
            )

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Context manager: restore the originals, for code that reads functions instead of calling them."""
        in_place: list[tuple[Exchange, Any]] = []
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

    def cover(self, make: Cover) -> None:
        """Replace each replacement, in all its slots, by `make(owner, name, replacement)`, which must call it.

        None leaves a replacement alone. After any exception, there are no covers.
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
        """Remove the covers. Harmless twice, and without covers."""
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
        """Return the original of `owner.name`, or None if it is not patched."""
        exchange = self._get_exchange(owner, name)
        return None if exchange is None else exchange.original

    def _get_exchange(self, owner: Any, name: str) -> Exchange | None:
        """Return the earliest exchange of an attribute."""
        if owner is None:  # the owner of slots that are no attributes
            return None
        for exchange in self._exchanges:
            if exchange.slot.key == name and exchange.slot.owner() is owner and not exchange.is_of_container:
                return exchange
        return None

    def functions(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        """Yield each patched function with its replacement, in the order of installation."""
        for exchange in self._exchanges:
            if not exchange.is_patch or isinstance(exchange.original, classmethod):
                continue
            if isinstance(exchange.original, staticmethod):
                yield exchange.original.__func__, exchange.after.__func__
            else:
                yield exchange.original, exchange.after


def _revert(exchange: Exchange) -> bool:
    """Undo one exchange. Return False if our function stays in place below a patch of other code."""
    value = exchange.slot.read()
    if value is exchange.after:
        exchange.slot.write(exchange.before)
        return True
    is_restored = value is ABSENT or value is exchange.original  # by other code, or an interrupt came before the write
    if is_restored or not exchange.is_patch:
        return True
    if isinstance(exchange.after, (staticmethod, classmethod)):
        return False  # wrapt would leave the function inside of ours
    try:
        wrapt.unwrap_object(exchange.slot.owner(), exchange.slot.key, exchange.after, missing_ok=True)
    except (wrapt.WrapperNotOutermostError, wrapt.WrapperChainTooDeepError):
        return False
    return True
