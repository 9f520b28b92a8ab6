"""`Autocast`: lets a session cast inside the regions of `torch.autocast` only.

torch itself keeps the state: whether autocast is enabled in a thread, and in which dtype. So nested regions,
decorators, checkpoints, autograd's threads and `torch.set_autocast_enabled` need no code here.

If the session's lists keep torch's own rule for an op, torch casts its arguments. If they have another rule, a patch of
the op casts the arguments by that rule, and then runs the op with autocast disabled.
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
    """The regions of torch.autocast, on one type of device, in which a session casts.

    Args:
        device_type: such as "cuda".
        low: the session casts only in regions of this dtype. None: in regions of any dtype.
        torch_lists: the lists of torch.autocast's own rules, or None if there are none for the device type.
    """

    def __init__(self, device_type: str, low: torch.dtype | None, torch_lists: op_lists.OpLists | None) -> None:
        self.device_type = device_type
        self.low = low
        self.torch_lists = torch_lists
        spellings = () if torch_lists is None else torch_lists.spellings
        self._torch_entries = frozenset(spelling.entry for spelling in spellings)

    def is_here(self) -> bool:
        """Return whether this thread is in a region of autocast in which the session casts."""
        if not torch.is_autocast_enabled(self.device_type):
            return False
        return self.low is None or torch.get_autocast_dtype(self.device_type) is self.low

    def is_torch_rule(self, entry: op_lists.OpEntry) -> bool:
        """Return whether a list entry is one of torch's own rules, so that torch itself casts the op's arguments."""
        return entry in self._torch_entries

    def pause(self) -> bool:
        """If this thread is in a region in which the session casts, disable autocast there and return True.

        Else return False.
        """
        if not self.is_here():
            return False
        torch.set_autocast_enabled(self.device_type, False)
        return True

    def resume(self) -> None:
        """Enable autocast again."""
        torch.set_autocast_enabled(self.device_type, True)

    def run_without(self, original: Callable[..., Any], switch: "Switch | ModuleRulesSwitch") -> Callable[..., Any]:
        """Return a function that calls `original`, with autocast disabled if the call is in a region (`is_here`).

        With a `ModuleRulesSwitch`, autocast stays enabled while that switch is off in the calling thread.
        """
        # while a `ModuleRulesSwitch` is off, a patch calls this function, too, and torch has to cast
        may_leave_casts_to_torch = isinstance(switch, ModuleRulesSwitch)

        @functools.wraps(original)
        def run_without_autocast(*args: Any, **kwargs: Any) -> Any:
            if may_leave_casts_to_torch and not switch.is_on_here():
                return original(*args, **kwargs)
            if not self.is_here():
                return original(*args, **kwargs)
            if is_dynamo_compiling():
                with torch.autocast(self.device_type, enabled=False):
                    return original(*args, **kwargs)
            try:
                torch.set_autocast_enabled(self.device_type, False)
                return original(*args, **kwargs)
            finally:
                torch.set_autocast_enabled(self.device_type, True)

        return run_without_autocast


class ModuleRulesSwitch:
    """The switch for patched ops whose rule is torch's own. The patches cast only in a `mode.Region` of the session, as
    during a call of a module that has a rule. Elsewhere, torch.autocast casts the arguments of these ops.
    """

    regions = 1  # not 0, so that patched ops ask `mode_here` in each call

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    @property
    def on(self) -> bool:
        """Whether the session's switch is on, and some thread has one of its `Region`s open."""
        return self._switch.on and self._switch.has_regions()

    def mode_here(self) -> Mode:
        """Return how these ops cast in this thread now. Where the lists decide, it is OFF: torch has the same rules."""
        mode = self._switch.mode_here()
        return Mode.OFF if mode is Mode.BY_LISTS else mode

    def region(self, mode: Mode) -> AbstractContextManager[None]:
        """Return a `Region` that is not open yet. See `Switch.region`."""
        return self._switch.region(mode)

    def is_on_here(self) -> bool:
        """Return whether these ops cast in this thread now."""
        return self.mode_here() is not Mode.OFF
