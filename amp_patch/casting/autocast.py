"""`Autocast`: the regions of `torch.autocast`, for a session whose lists act inside them.

torch keeps the state: whether autocast is enabled in a thread, and in which dtype. So torch answers every question of a
script as it does without amp_patch, and nested regions, decorators, checkpoints, autograd's threads and
`torch.set_autocast_enabled` need no code here. torch casts the ops that have the same rule in the lists as in torch. An
op with another rule casts by that rule, and runs with autocast disabled.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..config import op_lists
from .compiling import is_dynamo_compiling
from .mode import Mode, Switch


class Autocast:
    """Autocast on one type of device.

    Args:
        device_type: such as "cuda".
        low: regions in another dtype are left to torch. None: all regions count, because nothing is cast in them.
        own: the list of torch's own rules, or None if there is none for the device type.
    """

    def __init__(self, device_type: str, low: torch.dtype | None, own: op_lists.OpLists | None) -> None:
        self.device_type = device_type
        self.low = low
        self.own = own
        self._paths = frozenset() if own is None else frozenset(spelling.entry.path for spelling in own.spellings)

    def is_here(self) -> bool:
        """Return whether this thread is in a region of autocast in which the session casts."""
        if not torch.is_autocast_enabled(self.device_type):
            return False
        return self.low is None or torch.get_autocast_dtype(self.device_type) is self.low

    def leaves(self, entry: op_lists.OpEntry) -> bool:
        """Return whether an entry states torch's own rule."""
        return entry.path in self._paths

    def pause(self) -> bool:
        """Disable autocast in this thread. Return whether there is something to `resume`."""
        if not self.is_here():
            return False
        torch.set_autocast_enabled(self.device_type, False)
        return True

    def resume(self) -> None:
        """Enable autocast again."""
        torch.set_autocast_enabled(self.device_type, True)

    def run_without(self, original: Callable[..., Any], switch: "Switch | RulesAlone") -> Callable[..., Any]:
        """Return `original` run with autocast disabled while the casts of a switch are active."""
        leaves_some = isinstance(switch, RulesAlone)

        @functools.wraps(original)
        def without(*args: Any, **kwargs: Any) -> Any:
            if leaves_some and not switch.is_on_here():
                return original(*args, **kwargs)
            if is_dynamo_compiling():
                with torch.autocast(self.device_type, enabled=False):
                    return original(*args, **kwargs)
            if not self.is_here():
                return original(*args, **kwargs)
            try:
                torch.set_autocast_enabled(self.device_type, False)
                return original(*args, **kwargs)
            finally:
                torch.set_autocast_enabled(self.device_type, True)

        return without


class RulesAlone:
    """The switch of ops that torch casts: on while a region of the session, such as a module rule's, is open."""

    regions = 1  # not 0, so wrappers ask for the mode in every call

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    @property
    def on(self) -> bool:
        """Whether some thread has a region of the session open."""
        return self._switch.on and self._switch.has_regions()

    def mode_here(self) -> Mode:
        """Return how casts act in this thread now. Lists do not count, so BY_LISTS becomes OFF."""
        mode = self._switch.mode_here()
        return Mode.OFF if mode is Mode.BY_LISTS else mode

    def region(self, mode: Mode) -> AbstractContextManager[None]:
        """Open a region; see `Switch.region`."""
        return self._switch.region(mode)

    def is_on_here(self) -> bool:
        """Return whether casts are active in this thread now."""
        return self.mode_here() is not Mode.OFF
