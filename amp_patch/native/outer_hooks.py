"""`OuterHooks`: global hooks of modules that are off while an outermost module runs.

While there is a global hook, torch calls each module by a slower path, in every step. These hooks need outermost calls
only.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle


class PausableHook:
    """A hook of torch that can be off for a while.

    Args:
        handle: what torch returned for the hook.
        hook: the hook, which is on.
    """

    def __init__(self, handle: RemovableHandle, hook: Callable[..., Any]) -> None:
        self._handle = handle
        self._hook = hook
        self._is_removed = False

    # One change of a dict each: an interrupt cannot leave a hook half on, and `remove` works in either state.

    def pause(self) -> None:
        """Turn the hook off. Harmless twice."""
        hooks = self._handle.hooks_dict_ref()
        if hooks is not None:
            hooks.pop(self._handle.id, None)

    def resume(self) -> None:
        """Turn the hook on, as the last one. Harmless twice."""
        hooks = self._handle.hooks_dict_ref()
        if hooks is not None and not self._is_removed:
            hooks[self._handle.id] = self._hook

    def remove(self) -> None:
        """Remove the hook for good. Harmless twice."""
        self._is_removed = True
        self._handle.remove()


class OuterHooks:
    """The global hooks that are off together. Whoever turns them off turns them on again."""

    def __init__(self) -> None:
        self._hooks: list[PausableHook] = []

    def add(self, handle: RemovableHandle, hook: Callable[..., Any]) -> Callable[[], None]:
        """Add a hook that was registered just now. Return the function that removes it, which may be called twice."""
        added = PausableHook(handle, hook)
        self._hooks.append(added)

        def remove() -> None:
            added.remove()
            if added in self._hooks:
                self._hooks.remove(added)

        return remove

    def pause(self) -> None:
        """Turn all hooks off."""
        for hook in self._hooks:
            hook.pause()

    def resume(self) -> None:
        """Turn all hooks on. Harmless twice."""
        for hook in self._hooks:
            hook.resume()


outer_hooks = OuterHooks()
