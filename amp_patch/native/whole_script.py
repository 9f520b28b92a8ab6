"""One region of `torch.autocast` around everything that a script without regions runs."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.optim import Optimizer

from ..casting import compiling
from ..errors import PolicyError
from ..patching import Patch
from ..torch_private import get_autocast_depth

HAS_REGIONS = "this script has regions of torch.autocast: leave --everywhere (everywhere=True) out"


class WholeScript:
    """The region of a thread, once a model was called. Backward passes and optimizer steps run outside of it.

    Args:
        low: the dtype of the region.
        open_session: given the type of a device and `low`, opens the session whose lists act in the region.
        is_of_amp: tells whether the script has an amp of its own in force, which decides.
    """

    def __init__(
        self, low: torch.dtype, open_session: Callable[[str, torch.dtype], object], is_of_amp: Callable[[], bool]
    ) -> None:
        self._low = low
        self._open_session = open_session
        self._is_of_amp = is_of_amp
        self._region: Any = None
        self._depth = 0  # blocks of autocast around what runs in it
        self._is_left = False  # for an optimizer step

    @property
    def is_entered(self) -> bool:
        """Whether the thread is in it, or left it for a step."""
        return self._region is not None

    def patches(self) -> list[Patch]:
        """Return the patches that keep the region around all forward passes and around nothing else; and numpy's."""
        return [
            Patch(torch.autograd, "backward", self._without),
            Patch(torch.autograd, "grad", self._without),
            Patch(torch.inference_mode, "__exit__", self._restore_after),
            Patch(torch.utils.checkpoint, "checkpoint", self._enter_before),
            Patch(Optimizer, "__init__", self._open_session_after),
            Patch(Tensor, "numpy", self._widen_for),
        ]

    # ---- in and out --------------------------------------------------------------------------------------------------

    def enter(self, device_type: str) -> None:
        """Enter it once, without torch's cache of weights, which no step clears. PolicyError inside another region."""
        if self._region is not None:
            return
        if torch.is_autocast_enabled(device_type):
            raise PolicyError(HAS_REGIONS)
        region = torch.autocast(device_type, self._low, cache_enabled=False)
        region.__enter__()
        self._region = region
        self._depth = get_autocast_depth()

    def close(self) -> None:
        """Leave it for good."""
        self.come_back()
        if self._region is not None:
            self._region.__exit__(None, None, None)
            self._region = None

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

    # ---- what is patched ---------------------------------------------------------------------------------------------

    def _without(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `original` run outside of it: in a backward pass the gradients of float32 ops stay float32."""

        @functools.wraps(original)
        def outside(*args: Any, **kwargs: Any) -> Any:
            if self._region is None:
                return original(*args, **kwargs)
            with torch.autocast(self._region.device, enabled=False):
                return original(*args, **kwargs)

        return outside

    def _restore_after(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Enable it again after torch.inference_mode, which puts back the state of autocast from before it."""

        def leave(mode: Any, *error: Any) -> None:
            original(mode, *error)
            if self._region is not None and not self._is_left and get_autocast_depth() == self._depth:
                torch.set_autocast_enabled(self._region.device, True)

        return leave

    def _enter_before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Enter it before a checkpoint takes down how autocast is to be when it computes the model again."""

        @functools.wraps(original)
        def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            if tensors and not compiling.is_dynamo_compiling() and not self._is_of_amp():
                self.enter(tensors[0].device.type)
            return original(function, *args, **kwargs)

        return checkpoint

    def _widen_for(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `Tensor.numpy` that gives a float32 copy of what is in the region's dtype: numpy has no bfloat16, and
        a script without mixed precision does not cast by itself.
        """

        @functools.wraps(original)
        def numpy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self._region is not None and tensor.dtype is self._low:
                tensor = tensor.float()
            return original(tensor, *args, **kwargs)

        return numpy

    def _open_session_after(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Open the session early: `F.mse_loss(model(x), y)` looks F.mse_loss up before it calls the model."""

        def make(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            if weights and weights[0].device.type != "meta" and not self._is_of_amp():
                self._open_session(weights[0].device.type, self._low)

        return make
