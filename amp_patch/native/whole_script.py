"""One region of `torch.autocast` around everything that a script without regions runs."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..errors import PolicyError

HAS_REGIONS = "this script has regions of torch.autocast: leave --everywhere (everywhere=True) out"


class WholeScript:
    """The region of a thread, once a model was called. Backward passes and optimizer steps run outside of it."""

    def __init__(self) -> None:
        self._region: Any = None
        self._is_left = False  # for an optimizer step

    @property
    def is_entered(self) -> bool:
        """Whether the thread is in it, or left it for a step."""
        return self._region is not None

    def enter(self, device_type: str, low: torch.dtype) -> None:
        """Enter it, without torch's cache of weights, which no step clears. PolicyError inside another region."""
        if torch.is_autocast_enabled(device_type):
            raise PolicyError(HAS_REGIONS)
        region = torch.autocast(device_type, low, cache_enabled=False)
        region.__enter__()
        self._region = region

    def close(self) -> None:
        """Leave it for good."""
        self.come_back()
        if self._region is not None:
            self._region.__exit__(None, None, None)
            self._region = None

    def without(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `original` run outside of it: in a backward pass the gradients of float32 ops stay float32."""

        @functools.wraps(original)
        def outside(*args: Any, **kwargs: Any) -> Any:
            if self._region is None:
                return original(*args, **kwargs)
            with torch.autocast(self._region.device, enabled=False):
                return original(*args, **kwargs)

        return outside

    def leave_for_step(self) -> None:
        """Leave it until `come_back`: some optimizers multiply matrices."""
        if self._region is not None and torch.is_autocast_enabled(self._region.device):
            torch.set_autocast_enabled(self._region.device, False)
            self._is_left = True

    def come_back(self) -> None:
        """Enter it again after a step."""
        if self._is_left:
            torch.set_autocast_enabled(self._region.device, True)
            self._is_left = False
