"""`Attributes`: methods and values put on one object, here an optimizer, until they are taken off again."""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from ..interrupts import UndoStack


class Attributes:
    """What one owner has put on objects. Neither the owner nor the attributes keep the objects alive.

    Args:
        owner: by which its methods are known again.
        undo: where taking them off is registered.
    """

    def __init__(self, owner: object, undo: UndoStack) -> None:
        self._owner = owner
        self._undo = undo

    def attach(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute; one that the class computes hides it. A later value takes the place of an earlier one."""
        self._undo.callback(_delete, weakref.ref(target), name)
        vars(target)[name] = value

    def replace(self, target: Any, name: str, method: Callable[..., Any]) -> None:
        """Have `target.name(...)` call `method(original, ...)`."""
        original = getattr(target, name)
        had_own = name in vars(target)

        @functools.wraps(original)
        def replacement(self_: Any, *args: Any, **kwargs: Any) -> Any:
            return method(original, *args, **kwargs)

        vars(replacement)["_amp_stash"] = self._owner  # without holding what holds the target
        self._undo.callback(_restore, weakref.ref(target), self._owner, name, had_own)
        setattr(target, name, types.MethodType(replacement, target))


def _delete(reference: Callable[[], Any], name: str) -> None:
    target = reference()
    if target is not None:
        vars(target).pop(name, None)


def _restore(reference: Callable[[], Any], owner: object, name: str, had_own: bool) -> None:
    """Take a method off, unless somebody (an LR scheduler) has wrapped it since: then it stays, and calls straight
    through.
    """
    target = reference()
    current = None if target is None else vars(target).get(name)
    if not isinstance(current, types.MethodType) or vars(current.__func__).get("_amp_stash") is not owner:
        return
    if had_own:
        setattr(target, name, current.__func__.__wrapped__)  # type: ignore[attr-defined]
    else:
        delattr(target, name)
