"""`Autocast`: the regions of `torch.autocast`, for a session whose lists act inside them.

The state stays in torch: whether autocast is enabled in a thread, and in which dtype. So torch's own functions report
this state as they do without amp_patch, and nested regions, decorators, checkpoints, autograd's threads and
`torch.set_autocast_enabled` need no code here. If torch's own rule decides about an op, torch casts it. An op with a
rule of the session's lists casts by that rule, and runs with autocast disabled.
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
        low: only regions of this dtype count; others are left to torch. None: all regions count, for a session that
            casts nothing.
        torch_lists: the lists of torch's own rules, or None if there are none for the device type.
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
        """Return whether an entry is one of torch's own rules, so that torch casts the op by itself."""
        return entry in self._torch_entries

    def pause(self) -> bool:
        """Disable autocast in this thread, if this is a region in which the session casts. Return whether it is."""
        if not self.is_here():
            return False
        torch.set_autocast_enabled(self.device_type, False)
        return True

    def resume(self) -> None:
        """Enable autocast again."""
        torch.set_autocast_enabled(self.device_type, True)

    def run_without(self, original: Callable[..., Any], switch: "Switch | ModuleRulesSwitch") -> Callable[..., Any]:
        """Return a function that runs `original` with autocast disabled while the casts of a switch are active."""
        is_often_off = isinstance(switch, ModuleRulesSwitch)

        @functools.wraps(original)
        def run_without_autocast(*args: Any, **kwargs: Any) -> Any:
            if is_often_off and not switch.is_on_here():
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

        return run_without_autocast


class ModuleRulesSwitch:
    """The switch for ops that torch casts by itself. It is on only in regions of the session, such as the region of a
    module rule. Outside of them, torch casts these ops.
    """

    regions = 1  # not 0, so wrappers ask for the mode in every call

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    @property
    def on(self) -> bool:
        """Whether some thread has a region of the session open."""
        return self._switch.on and self._switch.has_regions()

    def mode_here(self) -> Mode:
        """Return how casts act in this thread now: OFF where the lists decide, because torch follows the same rules."""
        mode = self._switch.mode_here()
        return Mode.OFF if mode is Mode.BY_LISTS else mode

    def region(self, mode: Mode) -> AbstractContextManager[None]:
        """Return a region, not yet open. See `Switch.region`."""
        return self._switch.region(mode)

    def is_on_here(self) -> bool:
        """Return whether casts are active in this thread now."""
        return self.mode_here() is not Mode.OFF
