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


class _ThreadState(threading.local):
    """The state of one thread.

    Attributes:
        region: the block of torch.autocast, or None until this thread calls a model.
        is_left: whether the region is disabled for an optimizer step.
        inference_depth: the number of open torch.inference_mode blocks.
        began_in_inference: whether the region began inside an inference_mode block that is still open.
    """

    region: Any = None
    is_left = False
    inference_depth = 0
    began_in_inference = False


_THREAD_STATE = _ThreadState()
"""Shared by all installations. A thread that outlives an installation is still in its region, which the next
installation then uses."""


class WholeScript:
    """The region of each thread, once the thread has called a model. Backward passes and optimizer steps run outside.

    Args:
        low: the dtype of the region.
        open_session: called with a device type and `low`. Opens the session whose lists act in the region.
        has_own_amp: returns whether the script called `amp.initialize` itself. If it did, there is no region.
    """

    def __init__(
        self, low: torch.dtype, open_session: Callable[[str, torch.dtype], object], has_own_amp: Callable[[], bool]
    ) -> None:
        self._low = low
        self._open_session = open_session
        self._has_own_amp = has_own_amp
        self._thread = _THREAD_STATE

    @property
    def is_entered(self) -> bool:
        """Whether this thread is in the region, also while the region is disabled for a step."""
        return self._thread.region is not None

    def install(self, undo: UndoStack) -> None:
        """Patch the functions that decide where the region begins and where it is disabled."""
        patcher = Patcher()
        undo.callback(references.undo, [patcher], ())
        patcher.install(
            [
                Patch(torch.autograd, "backward", self._run_outside),
                Patch(torch.autograd, "grad", self._run_outside),
                Patch(torch.inference_mode, "__enter__", self._count_inference),
                Patch(torch.inference_mode, "__exit__", self._restore_after_inference),
                Patch(torch.utils.checkpoint, "checkpoint", self._enter_before_checkpoint),
                Patch(torch.nn.Module, "compile", self._enter_before_compile),
                Patch(Optimizer, "__init__", self._open_session_after_init),
                Patch(torch.Tensor, "numpy", self._widen_for_numpy),
            ]
        )
        references.redirect([(patcher, references.functions_of(patcher))], ())

    # ---- entering and leaving ----------------------------------------------------------------------------------------

    def enter(self, device_type: str) -> None:
        """Enter the region in this thread, unless it has. Raises PolicyError inside a region of the script.

        The region does not begin inside `autocast(enabled=False)`, a backward pass or a trace: these end before it.
        """
        if self._thread.region is not None or device_type == "meta":  # meta tensors have no values to compute
            return
        if torch.is_autocast_enabled(device_type):
            raise PolicyError(HAS_REGIONS)
        if get_autocast_depth() or get_backward_id() != -1 or compiling.is_traced():
            return
        # without torch's cache of weights, which is cleared only at the end of a region: a step would not clear it
        region = torch.autocast(device_type, self._low, cache_enabled=False)
        region.__enter__()  # not a `with`: the region outlives this call
        self._thread.region, self._thread.began_in_inference = region, self._thread.inference_depth > 0

    def close(self) -> None:
        """Leave the region of this thread, if it has one."""
        self.come_back()
        region, self._thread.region = self._thread.region, None
        if region is not None:
            region.__exit__(None, None, None)

    def leave_for_step(self) -> None:
        """Disable the region until `come_back`, because some optimizers multiply matrices."""
        region = self._thread.region
        # disable autocast, but do not exit the block: other blocks may be open inside it
        if region is not None and torch.is_autocast_enabled(region.device):
            torch.set_autocast_enabled(region.device, False)
            self._thread.is_left = True

    def come_back(self) -> None:
        """Enable the region again after a step."""
        if self._thread.is_left:
            torch.set_autocast_enabled(self._thread.region.device, True)
            self._thread.is_left = False

    # ---- patches -----------------------------------------------------------------------------------------------------

    def _run_outside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Run `original` with the region disabled, where a backward pass would cast gradients of float32 ops."""

        @functools.wraps(original)
        def outside(*args: Any, **kwargs: Any) -> Any:
            region = self._thread.region
            if region is None:
                return original(*args, **kwargs)
            with torch.autocast(region.device, enabled=False):
                return original(*args, **kwargs)

        return outside

    def _count_inference(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(mode: Any) -> None:
            original(mode)
            self._thread.inference_depth += 1

        return enter

    def _restore_after_inference(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Enable the region again at the end of the inference_mode block in which it began.

        torch restores the autocast state from before the block there.
        """

        def leave(mode: Any, *error: Any) -> None:
            original(mode, *error)
            # not below 0, because the block may have begun before `install`
            self._thread.inference_depth = max(self._thread.inference_depth - 1, 0)
            if not self._thread.began_in_inference:
                return
            self._thread.began_in_inference = self._thread.inference_depth > 0
            if self._thread.region is not None and not self._thread.is_left and get_autocast_depth() == 1:
                torch.set_autocast_enabled(self._thread.region.device, True)

        return leave

    def _enter_before_checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Enter the region before a checkpoint saves the autocast state for its recomputation."""

        @functools.wraps(original)
        def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            # without tensors, the device is unknown here; then the call of the model enters the region
            if tensors and not compiling.is_dynamo_compiling() and not self._has_own_amp():
                self.enter(tensors[0].device.type)
            return original(function, *args, **kwargs)

        return checkpoint

    def _widen_for_numpy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Convert tensors of the region's dtype to float32 first: numpy has no bfloat16, and a script without mixed
        precision has no cast.
        """

        @functools.wraps(original)
        def numpy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_entered and tensor.dtype is self._low:
                tensor = tensor.float()
            return original(tensor, *args, **kwargs)

        return numpy

    def _enter_before_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Enter the region before a module is compiled in place, because `Takeover` does not see calls of it."""

        @functools.wraps(original)
        def compile(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            weight = next(module.parameters(), None)
            if weight is not None and not self._has_own_amp():
                self.enter(weight.device.type)
            return original(module, *args, **kwargs)

        return compile

    def _open_session_after_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Open the session, which patches functions, before the first call of a model: `F.mse_loss(model(x), y)` looks
        up F.mse_loss before it calls the model.
        """

        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            if weights and weights[0].device.type != "meta" and not self._has_own_amp():
                self._open_session(weights[0].device.type, self._low)

        return init
