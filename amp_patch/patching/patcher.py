"""Patches that leave no trace: `Patcher` puts replacements in and takes every one of them out again.

It knows neither tensors nor dtypes. A replacement is a plain function made from the original;
`functools.update_wrapper` gives it the original's name, docstring and `__wrapped__`, which is also how
`wrapt.unwrap_object` finds the way back. `install` replaces attributes of the owners that define a function, `redirect`
other references to it.
"""

import contextlib
import functools
import inspect
import logging
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import wrapt

from . import pickling

logger = logging.getLogger("amp_patch")

Factory = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute to replace: `owner.name` becomes `factory(original)`. Its docstring ends with the note."""

    owner: Any
    name: str
    factory: Factory
    note: str = ""


class Slot(Protocol):
    """Somewhere that refers to a function without being asked for it by name each time: a global, a default argument,
    an item of a table.
    """

    def owner(self) -> Any:
        """Return the object whose attribute the slot is; None if it is no attribute, or its owner is gone."""

    @property
    def key(self) -> Any:
        """The name of the attribute."""

    def read(self) -> Any:
        """Return what is there; something that is nowhere else if nothing is."""

    def write(self, value: Any) -> None:
        """Put `value` there."""


@dataclass(frozen=True, slots=True)
class Redirection:
    """A slot, what it held, what it is to hold, and the function (or one of them) that this is about."""

    slot: Slot
    before: Any
    after: Any
    function: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Installed:
    owner: Any
    name: str
    original: Callable[..., Any]
    replacement: Callable[..., Any]
    # the owner only inherited the name, or served it dynamically: undo deletes instead of restoring
    is_new_attribute: bool


def _prepare(patch: Patch) -> _Installed:
    _, _, original = wrapt.resolve_path(patch.owner, patch.name)
    if isinstance(original, (staticmethod, classmethod)):
        replacement: Any = type(original)(_make(patch, original.__func__))
    else:
        replacement = _make(patch, original)
    return _Installed(patch.owner, patch.name, original, replacement, patch.name not in vars(patch.owner))


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
        self._installed: list[_Installed] = []
        self._by_target: dict[tuple[int, str], list[_Installed]] = {}
        self._redirected: list[Redirection] = []
        self._redirected_attributes: dict[tuple[int, Any], Redirection] = {}
        self._covers: dict[int, Callable[..., Any]] = {}  # by the id of the replacement that each is around

    def __len__(self) -> int:
        return len(self._installed) + len(self._redirected)

    def install(self, patches: Iterable[Patch]) -> None:
        """Build every replacement, then put them in; on any exception, KeyboardInterrupt included, what went in comes
        out again.
        """
        prepared = [_prepare(patch) for patch in patches]
        mark = len(self._installed)
        try:
            for item in prepared:
                self._by_target.setdefault((id(item.owner), item.name), []).append(item)
                # logged before the attribute changes: an interrupt in between is undone as well
                self._installed.append(item)
                wrapt.wrap_object(item.owner, item.name, _return_replacement, (item,))  # type: ignore[arg-type]
        except BaseException:
            self._undo_down_to(mark)
            raise

    def redirect(self, redirections: Iterable[Redirection]) -> None:
        """Write what each slot is to hold; on any exception, the slots written so far get back what they held."""
        mark = len(self._redirected)
        try:
            for redirection in redirections:
                self._redirected.append(redirection)  # logged before it is written, as above
                if (owner := redirection.slot.owner()) is not None:
                    self._redirected_attributes[id(owner), redirection.slot.key] = redirection
                redirection.slot.write(redirection.after)
        except BaseException:
            self._restore_down_to(mark)
            raise

    def undo(self) -> None:
        """Take every patch out again. Calling it twice is harmless.

        A name that somebody else has patched on top of ours is left as it is; our function below it stays callable and
        must be inert by then.
        """
        self.uncover()
        self._restore_down_to(0)
        self._undo_down_to(0)

    def forget(self, owner: Any, name: str) -> None:
        """Forget the patches of an attribute that has been defined anew, as `importlib.reload` does: there is nothing
        of ours left in it.
        """
        forgotten = self._by_target.pop((id(owner), name), [])
        self._installed = [item for item in self._installed if not any(item is other for other in forgotten)]
        for item in forgotten:
            pickling.retire(item.replacement)

    def _restore_down_to(self, mark: int) -> None:
        while len(self._redirected) > mark:
            redirection = self._redirected[-1]
            if redirection.slot.read() is redirection.after:  # else it is somebody else's by now, or was never written
                redirection.slot.write(redirection.before)
            self._redirected.pop()
        for key in [
            key
            for key, redirection in self._redirected_attributes.items()
            if not mark or not any(redirection is kept for kept in self._redirected)
        ]:
            del self._redirected_attributes[key]

    def _undo_down_to(self, mark: int) -> None:
        stuck: list[str] = []
        while len(self._installed) > mark:
            item = self._installed[-1]
            if not _remove(item):
                stuck.append(f"{getattr(item.owner, '__name__', item.owner)}.{item.name}")
            pickling.retire(item.replacement)
            items = self._by_target.get((id(item.owner), item.name), [])
            if item in items:  # not if an interrupt came here before
                items.remove(item)
            self._installed.pop()
        if stuck:
            logger.warning(
                "left in place, because another patch sits on top: %s. The amp_patch wrapper below it no longer casts.",
                ", ".join(stuck),
            )

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Put the originals back inside the block, for what reads functions instead of calling them."""
        covers = dict(self._covers)
        items = [
            (item, held)
            for item in reversed(self._installed)
            if (held := vars(item.owner).get(item.name)) is item.replacement
            or (held is not None and held is covers.get(id(item.replacement)))
        ]
        redirections = [
            (redirection, held)
            for redirection in reversed(self._redirected)
            if (held := redirection.slot.read()) is redirection.after
            or (held is not None and held is covers.get(id(redirection.after)))
        ]
        try:
            for redirection, _ in redirections:
                redirection.slot.write(redirection.before)
            for item, _ in items:
                _put_back(item)
            yield
        finally:
            for item, held in reversed(items):
                setattr(item.owner, item.name, held)
            for redirection, held in reversed(redirections):
                redirection.slot.write(held)

    def cover(self, make: Callable[[Any, str, Callable[..., Any]], Callable[..., Any] | None]) -> None:
        """Put a function around each replacement, wherever it is referred to: `make(owner, name, replacement)`, or
        leave it alone for None. It must call what it covers. On any exception, all is as it was.
        """
        try:
            for item in self._installed:
                key = id(item.replacement)
                if key in self._covers or not inspect.isfunction(item.replacement):
                    continue
                if (made := make(item.owner, item.name, item.replacement)) is not None:
                    self._covers[key] = functools.update_wrapper(made, item.replacement)
            for item in self._installed:
                if id(item.replacement) in self._covers and vars(item.owner).get(item.name) is item.replacement:
                    setattr(item.owner, item.name, self._covers[id(item.replacement)])
            for one in self._redirected:
                if id(one.after) in self._covers and one.slot.read() is one.after:
                    one.slot.write(self._covers[id(one.after)])
        except BaseException:
            self.uncover()
            raise

    def uncover(self) -> None:
        """Put the replacements back. Harmless twice, and without covers."""
        covers = self._covers
        for item in self._installed if covers else ():
            made = covers.get(id(item.replacement))
            if made is not None and vars(item.owner).get(item.name) is made:
                setattr(item.owner, item.name, item.replacement)
        for one in self._redirected if covers else ():
            made = covers.get(id(one.after))
            if made is not None and one.slot.read() is made:
                one.slot.write(one.after)
        covers.clear()

    def is_patched(self, owner: Any, name: str) -> bool:
        """Tell whether `owner.name` carries a patch of ours, or was redirected to one."""
        return bool(self._by_target.get((id(owner), name))) or self._find_redirection(owner, name) is not None

    def is_in_place(self, owner: Any, name: str) -> bool:
        """Tell whether the patch of `owner.name` is still there, or below another one. Runs no code of the owner's."""
        items = self._by_target.get((id(owner), name))
        value = inspect.getattr_static(owner, name, None) if items else None
        while value is not None:
            if value is items[-1].replacement:  # type: ignore[index]
                return True
            value = inspect.getattr_static(value, "__wrapped__", None)
        return False

    def get_original(self, owner: Any, name: str) -> Callable[..., Any] | None:
        """Return what `owner.name` was before it was patched, or None if it is not patched."""
        items = self._by_target.get((id(owner), name))
        if items:
            return items[0].original
        redirection = self._find_redirection(owner, name)
        before = None if redirection is None else redirection.before
        return before.__func__ if isinstance(before, staticmethod) else before

    def _find_redirection(self, owner: Any, name: str) -> Redirection | None:
        redirection = self._redirected_attributes.get((id(owner), name))
        return redirection if redirection is not None and redirection.slot.owner() is owner else None

    def functions(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        """Yield each patched function with its replacement, in the order in which they were put in."""
        for item in self._installed:
            if isinstance(item.original, staticmethod):
                yield item.original.__func__, item.replacement.__func__  # type: ignore[attr-defined]
            elif not isinstance(item.original, classmethod):
                yield item.original, item.replacement


def _put_back(item: _Installed) -> None:
    if item.is_new_attribute:
        delattr(item.owner, item.name)
    else:
        setattr(item.owner, item.name, item.original)


def _return_replacement(_: Any, item: _Installed) -> Any:
    return item.replacement


def _remove(item: _Installed) -> bool:
    """Undo one patch; return False if something foreign sits on top of it."""
    if isinstance(item.original, (staticmethod, classmethod)):  # wrapt would restore the function inside
        if vars(item.owner).get(item.name) is item.replacement:
            _put_back(item)
            return True
        return item.name not in vars(item.owner) or vars(item.owner)[item.name] is item.original
    if vars(item.owner).get(item.name) is not item.replacement:
        try:
            current = wrapt.resolve_path(item.owner, item.name)[2]
        except AttributeError:
            return True
        if current is item.original:
            return True  # interrupted before it went in, or taken out already
    try:
        wrapt.unwrap_object(item.owner, item.name, item.replacement, missing_ok=True)
    except (wrapt.WrapperNotOutermostError, wrapt.WrapperChainTooDeepError):
        return False
    if item.is_new_attribute and vars(item.owner).get(item.name) is item.original:
        # a module that serves names through __getattr__: wrapt restores by assignment there
        delattr(item.owner, item.name)
    return vars(item.owner).get(item.name) is not item.replacement
