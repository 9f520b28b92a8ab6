"""Attribute patches that leave no trace: `Patcher` puts replacements in and takes every one of them out again.

It knows neither tensors nor dtypes. A replacement is a plain function made from the original; `functools.update_wrapper` gives it the
original's name, docstring and `__wrapped__`, which is also how `wrapt.unwrap_object` finds the way back.
"""

import contextlib
import functools
import logging
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import wrapt

logger = logging.getLogger("amp_patch")

Factory = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute to replace: `owner.name` becomes `factory(original)`."""

    owner: Any
    name: str
    factory: Factory


@dataclass(frozen=True, slots=True)
class _Installed:
    owner: Any
    name: str
    original: Callable[..., Any]
    replacement: Callable[..., Any]
    is_new_attribute: bool  # the owner only inherited the name, or served it dynamically: undo deletes instead of restoring


def _prepare(patch: Patch) -> _Installed:
    _, _, original = wrapt.resolve_path(patch.owner, patch.name)
    if isinstance(original, (staticmethod, classmethod)):
        replacement: Any = type(original)(functools.update_wrapper(patch.factory(original.__func__), original.__func__))
    else:
        replacement = functools.update_wrapper(patch.factory(original), original)
    return _Installed(patch.owner, patch.name, original, replacement, patch.name not in vars(patch.owner))


class Patcher:
    """Installs patches all together or not at all, and undoes them last in, first out."""

    def __init__(self) -> None:
        self._installed: list[_Installed] = []
        self._by_target: dict[tuple[int, str], list[_Installed]] = {}

    def __len__(self) -> int:
        return len(self._installed)

    def install(self, patches: Iterable[Patch]) -> None:
        """Build every replacement, then put them in; on any exception, KeyboardInterrupt included, what went in comes out again."""
        prepared = [_prepare(patch) for patch in patches]
        mark = len(self._installed)
        try:
            for item in prepared:
                self._by_target.setdefault((id(item.owner), item.name), []).append(item)
                self._installed.append(item)  # logged before the attribute changes: an interrupt in between is undone as well
                wrapt.wrap_object(item.owner, item.name, _return_replacement, (item,))  # type: ignore[arg-type]
        except BaseException:
            self._undo_down_to(mark)
            raise

    def undo(self) -> None:
        """Take every patch out again. Calling it twice is harmless.

        A name that somebody else has patched on top of ours is left as it is; our function below it stays callable and must be inert by then.
        """
        self._undo_down_to(0)

    def _undo_down_to(self, mark: int) -> None:
        stuck: list[str] = []
        while len(self._installed) > mark:
            item = self._installed[-1]
            if not _remove(item):
                stuck.append(f"{getattr(item.owner, '__name__', item.owner)}.{item.name}")
            self._by_target[id(item.owner), item.name].remove(item)
            self._installed.pop()
        if stuck:
            logger.warning("left in place, because another patch sits on top: %s. The amp_patch wrapper below it no longer casts.", ", ".join(stuck))

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Put the originals back inside the block, for what reads functions instead of calling them."""
        items = [item for item in reversed(self._installed) if vars(item.owner).get(item.name) is item.replacement]
        try:
            for item in items:
                _put_back(item)
            yield
        finally:
            for item in reversed(items):
                setattr(item.owner, item.name, item.replacement)

    def is_patched(self, owner: Any, name: str) -> bool:
        """Tell whether `owner.name` carries a patch of ours."""
        return bool(self._by_target.get((id(owner), name)))

    def replacements(self) -> dict[int, Callable[..., Any]]:
        """Return the replacement of each module-level function that is patched, by the id of its original."""
        return {id(item.original): item.replacement for item in self._installed if isinstance(item.owner, types.ModuleType)}

    def originals(self) -> dict[int, Callable[..., Any]]:
        """Return the original of each module-level function that is patched, by the id of its replacement."""
        return {id(item.replacement): item.original for item in self._installed if isinstance(item.owner, types.ModuleType)}

    def get_original(self, owner: Any, name: str) -> Callable[..., Any] | None:
        """Return what `owner.name` was before it was patched, or None if it is not patched."""
        items = self._by_target.get((id(owner), name))
        return items[0].original if items else None


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
        delattr(item.owner, item.name)  # a module that serves names through __getattr__: wrapt restores by assignment there
    return vars(item.owner).get(item.name) is not item.replacement
