"""`RootHooks`: while a model runs, replaces the global hooks in `outer_hooks` by hooks of the outermost module alone
(the *root*). torch calls modules faster if no global hook is on.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...native import PausableHook, outer_hooks
from ...torch_dispatch import count_compiled
from ..owned_hook import OwnedHook


class _EnterHook(OwnedHook):
    """Forward pre-hook of a root."""

    def __call__(self, root: nn.Module, args: Any) -> None:
        owner = self.owner()
        if owner is not None and owner.stands_for(root):
            owner.enter(root, args)


class _LeaveHook(OwnedHook):
    """Forward hook of a root, also after an exception."""

    def __call__(self, root: nn.Module, args: Any, output: Any) -> None:
        owner = self.owner()
        if owner is not None and owner.stands_for(root):
            owner.leave(root, args, output)


class RootHooks:
    """Turns the global hooks off while a root runs, and then on again.

    Args:
        enter: called when the root is called while it runs and the global hooks are off.
        leave: called when a call of the root ends while the global hooks are off.
    """

    def __init__(self, enter: Callable[[nn.Module, Any], None], leave: Callable[[nn.Module, Any, Any], None]) -> None:
        self.enter = enter
        self.leave = leave
        self._hooks: weakref.WeakKeyDictionary[nn.Module, tuple[PausableHook, ...]] = weakref.WeakKeyDictionary()
        self._root: nn.Module | None = None
        self._stale: nn.Module | None = None  # a root whose hooks are still on after its call has ended
        self._threads: set[int] = set()  # the threads that have called a model
        self._compiled_before = count_compiled()

    def stands_for(self, root: nn.Module) -> bool:
        """Return whether `root` runs now, and the global hooks are off for it."""
        return root is self._root

    def note_thread(self) -> None:
        """Note that this thread calls a model."""
        self._threads.add(threading.get_ident())

    def begin(self, root: nn.Module) -> None:
        """Turn the global hooks off and the root's own on, for the call of a root that has begun.

        The global hooks stay on in these cases: several threads have called models, and calls of the others would be
        missed; torch.compile has compiled something since this object was made, and would compile it again; the root is
        a ScriptModule; the hooks of an earlier root are still on.
        """
        # torch may call the hooks of the earlier root in this call, although they are turned off now. They do nothing,
        # because `_root` is None, so this call needs the global hooks.
        if self._stale is not None:
            self._turn_stale_off()
            return
        if (
            len(self._threads) > 1
            or count_compiled() != self._compiled_before
            or isinstance(root, torch.jit.ScriptModule)
        ):
            return
        for hook in self._hooks.get(root) or self._add_hooks(root):
            hook.resume()
        outer_hooks.pause()
        self._root = root

    def end(self) -> None:
        """Turn the global hooks on and the root's own off. While an exception is handled, the root's own stay on until
        the next `begin` or `end_step`.

        A second call does nothing.
        """
        root, self._root = self._root, None
        if root is None:
            return
        outer_hooks.resume()
        self._stale = root
        if sys.exception() is None:  # otherwise torch may be in a loop over the hooks of the root
            self._turn_stale_off()

    def end_step(self) -> None:
        """End a step: no call of a root is under way any more."""
        self.end()
        self._turn_stale_off()

    def remove(self) -> None:
        """Remove the hooks of all roots, and turn the global hooks on."""
        self.end()
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.remove()
        self._hooks.clear()

    def _add_hooks(self, root: nn.Module) -> tuple[PausableHook, ...]:
        enter, leave = _EnterHook(self), _LeaveHook(self)
        hooks = (
            PausableHook(root.register_forward_pre_hook(enter), enter),
            PausableHook(root.register_forward_hook(leave, always_call=True), leave),
        )
        self._hooks[root] = hooks
        return hooks

    def _turn_stale_off(self) -> None:
        root, self._stale = self._stale, None
        for hook in () if root is None else self._hooks.get(root, ()):
            hook.pause()
