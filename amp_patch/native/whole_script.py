"""`WholeScript`: one region of `torch.autocast` around everything that a script without regions runs."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.optim import Optimizer

from ..casting import compiling
from ..errors import PolicyError
from ..interrupts import UndoStack
from ..patching import Patch, Patcher, references
from ..torch_private import get_autocast_depth, get_backward_id

HAS_REGIONS = "this script has regions of torch.autocast: leave --everywhere (everywhere=True) out"


class _OfThread(threading.local):
    """The state of a thread.

    Attributes:
        region: the block of torch.autocast, once this thread has called a model.
        is_left: the region is disabled for an optimizer step.
        modes: the number of torch.inference_mode blocks that are open.
        is_in_mode: the region began inside of one.
    """

    region: Any = None
    is_left = False
    modes = 0
    is_in_mode = False


_HERE = _OfThread()
"""Shared by all installations: a thread that outlives one is still in its region, and the next installation uses it."""


class WholeScript:
    """The region of each thread, once the thread has called a model. Backward passes and optimizer steps run outside.

    Args:
        low: the dtype of the region.
        open_session: opens the session whose lists act in the region, given a device type and `low`.
        has_own_amp: returns whether the script called `amp.initialize` itself. Then there is no region.
    """

    def __init__(
        self, low: torch.dtype, open_session: Callable[[str, torch.dtype], object], has_own_amp: Callable[[], bool]
    ) -> None:
        self._low = low
        self._open_session = open_session
        self._has_own_amp = has_own_amp
        self._here = _HERE

    @property
    def is_entered(self) -> bool:
        """Whether this thread is in the region, or left it for a step."""
        return self._here.region is not None

    def install(self, undo: UndoStack) -> None:
        """Patch the functions that decide where the region begins and where it is disabled."""
        patcher = Patcher()
        undo.callback(references.undo, [patcher], ())
        patcher.install(
            [
                Patch(torch.autograd, "backward", self._without),
                Patch(torch.autograd, "grad", self._without),
                Patch(torch.inference_mode, "__enter__", self._count_mode),
                Patch(torch.inference_mode, "__exit__", self._restore_after),
                Patch(torch.utils.checkpoint, "checkpoint", self._enter_before),
                Patch(torch.nn.Module, "compile", self._enter_with_module),
                Patch(Optimizer, "__init__", self._open_session_after),
                Patch(torch.Tensor, "numpy", self._widen_for),
            ]
        )
        references.redirect([(patcher, references.functions_of(patcher))], ())

    # ---- entering and leaving ----------------------------------------------------------------------------------------

    def enter(self, device_type: str) -> None:
        """Enter the region in this thread, once. Raises PolicyError inside a region of the script.

        torch's cache of weights is off, since no step would clear it. The region does not begin inside of a block that
        ends before it: `autocast(enabled=False)`, a backward pass, or a trace.
        """
        if self._here.region is not None or device_type == "meta":  # meta tensors compute nothing
            return
        if torch.is_autocast_enabled(device_type):
            raise PolicyError(HAS_REGIONS)
        if get_autocast_depth() or get_backward_id() != -1 or compiling.is_traced():
            return
        region = torch.autocast(device_type, self._low, cache_enabled=False)
        region.__enter__()  # not a `with`: the region outlives this call
        self._here.region, self._here.is_in_mode = region, self._here.modes > 0

    def close(self) -> None:
        """Leave the region for good, in this thread."""
        self.come_back()
        region, self._here.region = self._here.region, None
        if region is not None:
            region.__exit__(None, None, None)

    def leave_for_step(self) -> None:
        """Disable the region until `come_back`: some optimizers multiply matrices."""
        region = self._here.region
        # only the flag: the block stays open, because other blocks may be open inside of it
        if region is not None and torch.is_autocast_enabled(region.device):
            torch.set_autocast_enabled(region.device, False)
            self._here.is_left = True

    def come_back(self) -> None:
        """Enable the region again after a step."""
        if self._here.is_left:
            torch.set_autocast_enabled(self._here.region.device, True)
            self._here.is_left = False

    # ---- patches -----------------------------------------------------------------------------------------------------

    def _without(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Run `original` outside of the region: in a backward pass, gradients of float32 ops stay float32."""

        @functools.wraps(original)
        def outside(*args: Any, **kwargs: Any) -> Any:
            region = self._here.region
            if region is None:
                return original(*args, **kwargs)
            with torch.autocast(region.device, enabled=False):
                return original(*args, **kwargs)

        return outside

    def _count_mode(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(mode: Any) -> None:
            original(mode)
            self._here.modes += 1

        return enter

    def _restore_after(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Enable the region again after the torch.inference_mode in which it began, because its end disables it."""

        def leave(mode: Any, *error: Any) -> None:
            original(mode, *error)
            self._here.modes = max(self._here.modes - 1, 0)  # the mode may have begun before the installation
            if not self._here.is_in_mode:
                return
            self._here.is_in_mode = self._here.modes > 0
            if self._here.region is not None and not self._here.is_left and get_autocast_depth() == 1:
                torch.set_autocast_enabled(self._here.region.device, True)

        return leave

    def _enter_before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Enter the region before a checkpoint saves the autocast state for its recomputation."""

        @functools.wraps(original)
        def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            # without tensors, the checkpoint does not show its device; the model's own call enters the region then
            if tensors and not compiling.is_dynamo_compiling() and not self._has_own_amp():
                self.enter(tensors[0].device.type)
            return original(function, *args, **kwargs)

        return checkpoint

    def _widen_for(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Convert tensors of the region's dtype to float32 first: numpy has no bfloat16, and a script without mixed
        precision has no cast.
        """

        @functools.wraps(original)
        def numpy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_entered and tensor.dtype is self._low:
                tensor = tensor.float()
            return original(tensor, *args, **kwargs)

        return numpy

    def _enter_with_module(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Enter the region before a module is compiled in place, because no hook sees its calls."""

        @functools.wraps(original)
        def compile(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            weight = next(module.parameters(), None)
            if weight is not None and not self._has_own_amp():
                self.enter(weight.device.type)
            return original(module, *args, **kwargs)

        return compile

    def _open_session_after(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Open the session early: `F.mse_loss(model(x), y)` looks up F.mse_loss before it calls the model."""

        def make(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            if weights and weights[0].device.type != "meta" and not self._has_own_amp():
                self._open_session(weights[0].device.type, self._low)

        return make
