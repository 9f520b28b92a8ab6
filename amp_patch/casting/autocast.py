"""`Autocast`: the regions of `torch.autocast`, for a session that stands over them.

torch keeps the state: whether autocast is enabled in a thread, and in which dtype. So every question that a script asks
of torch has the answer that it has without us, and nested regions, decorators, checkpoints, autograd's threads and
`torch.set_autocast_enabled` need no code here. Ops whose rule is torch's own are left to torch. An op whose rule is
another casts by that rule and runs with autocast disabled.
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
        low: regions in another dtype are left to torch; None: all are alike, since nothing is cast in them.
        own: the list of what torch itself does, or None where there is no such list.
    """

    def __init__(self, device_type: str, low: torch.dtype | None, own: op_lists.OpLists | None) -> None:
        self.device_type = device_type
        self.low = low
        self.own = own
        self._paths = frozenset() if own is None else frozenset(one.entry.path for one in own.spellings)

    def is_here(self) -> bool:
        """Tell whether this thread is in a region of autocast in which the session acts."""
        if not torch.is_autocast_enabled(self.device_type):
            return False
        return self.low is None or torch.get_autocast_dtype(self.device_type) is self.low

    def leaves(self, entry: op_lists.OpEntry) -> bool:
        """Tell whether an entry says what torch itself does."""
        return entry.path in self._paths

    def pause(self) -> bool:
        """Disable autocast in this thread, and tell whether there is something to `resume`."""
        if not self.is_here():
            return False
        torch.set_autocast_enabled(self.device_type, False)
        return True

    def resume(self) -> None:
        """Enable autocast again."""
        torch.set_autocast_enabled(self.device_type, True)

    def run_without(self, original: Callable[..., Any], switch: "Switch | RulesAlone") -> Callable[..., Any]:
        """Return `original` run with autocast disabled where the casts of a switch act: its arguments are cast."""
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
    """The switch of ops that are left to torch: on while a region of ours, such as a module rule's, is open."""

    regions = 1  # so that each call asks

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    @property
    def on(self) -> bool:
        """Whether some thread has a region of ours open."""
        return self._switch.on and self._switch.has_regions()

    def mode_here(self) -> Mode:
        """Return how casts act in this thread now, but for lists, which do not."""
        mode = self._switch.mode_here()
        return Mode.OFF if mode is Mode.BY_LISTS else mode

    def region(self, mode: Mode) -> AbstractContextManager[None]:
        """Open a region; see `Switch.region`."""
        return self._switch.region(mode)

    def is_on_here(self) -> bool:
        """Tell whether casts act in this thread now."""
        return self.mode_here() is not Mode.OFF
