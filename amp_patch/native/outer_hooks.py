"""`OuterHooks`: global hooks of modules that can be turned off while an outermost module runs.

While there is a global hook, torch calls each module by a slower path. These hooks need to see only the outermost calls
of modules, not the calls inside them.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle


class PausableHook:
    """A hook of torch that can be off for a while.

    Args:
        handle: what torch returned when the hook was registered.
        hook: the hook function. It is on at first.
    """

    def __init__(self, handle: RemovableHandle, hook: Callable[..., Any]) -> None:
        self._handle = handle
        self._hook = hook
        # torch's dicts of options, such as `always_call`, that have the id of the hook
        self._options = [options for options in handle.extra_dict_ref if handle.id in (options() or ())]
        self._is_removed = False

    # A hook that is off must leave no id in torch's dicts: modules are pickled with these ids, and where a module is
    # loaded, an id may belong to another hook. So `pause` removes the hook and its options.
    #
    # `resume` sets the options before the hook, so that an interrupt between the two cannot leave a hook without its
    # options.

    def pause(self) -> None:
        """Turn the hook off. Harmless twice."""
        for dict_ref in (self._handle.hooks_dict_ref, *self._options):
            known = dict_ref()
            if known is not None:
                known.pop(self._handle.id, None)

    def resume(self) -> None:
        """Turn the hook on, unless it was removed. If it was off, it runs after the hooks that are there now. Harmless
        twice.
        """
        hooks = self._handle.hooks_dict_ref()
        if hooks is None or self._is_removed:
            return
        for dict_ref in self._options:
            options = dict_ref()
            if options is not None:
                options[self._handle.id] = True
        hooks[self._handle.id] = self._hook

    def remove(self) -> None:
        """Remove the hook for good. Harmless twice."""
        self._is_removed = True
        self._handle.remove()


class OuterHooks:
    """Global hooks that are turned off and on together."""

    def __init__(self) -> None:
        self._hooks: list[PausableHook] = []

    def add(self, handle: RemovableHandle, hook: Callable[..., Any]) -> Callable[[], None]:
        """Add a hook that is registered with torch already. Return a function that removes it; calling that twice is
        harmless.
        """
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
