"""`WholeScript`: puts a script without regions of `torch.autocast` into one region, from the first call of a model.

A region is a block `with torch.autocast(...)`.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.optim import Optimizer

from ..casting import compiling
from ..interrupts import UndoStack
from ..patching import Patch, Patcher, references
from ..script_settings import HasRegionsError
from ..torch_private import get_autocast_depth, get_backward_id

HAS_REGIONS = "this script has regions of torch.autocast: leave --everywhere (everywhere=True) out"


class _ThreadState(threading.local):
    """The state of one thread.

    Attributes:
        region: the torch.autocast object of the thread's region, or None before it begins.
        is_disabled_for_step: whether the region is disabled because an optimizer step runs.
        inference_depth: the number of open torch.inference_mode blocks.
        began_in_inference: whether the region began inside an inference_mode block that is still open.
    """

    region: Any = None
    is_disabled_for_step = False
    inference_depth = 0
    began_in_inference = False


_THREAD_STATE = _ThreadState()
"""Shared by all installations: after one was removed, another thread may still be in its region, and the next
installation uses that region."""


class WholeScript:
    """Puts each thread in one region, from its first call of a model on.

    Backward passes run with autocast disabled, and so do optimizer steps without a closure.

    Args:
        low: the dtype of the region.
        open_session: called with a device type and `low`. Opens the session whose lists decide in the region.
        has_own_amp: returns whether the script uses amp itself. Then no region is entered.
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
        """Whether this thread has its region, which may be disabled now."""
        return self._thread.region is not None

    def install(self, undo: UndoStack) -> None:
        """Install the patches, and redirect references to the patched functions, until `undo` is closed."""
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
        """Enter the region in this thread, unless it has one. Raises HasRegionsError inside a region of the script.

        Do nothing inside `autocast(enabled=False)`, a backward pass or a trace: the region would have to end with them.
        """
        if self._thread.region is not None or device_type == "meta":  # meta tensors have no values to compute
            return
        if torch.is_autocast_enabled(device_type):
            raise HasRegionsError(HAS_REGIONS)
        if get_autocast_depth() or get_backward_id() != -1 or compiling.is_traced():
            return
        # Without torch's cache of cast weights: torch clears it at the end of a region only, so after a step it would
        # hold old weights.
        region = torch.autocast(device_type, self._low, cache_enabled=False)
        region.__enter__()  # not a `with`: the region outlives this call
        self._thread.region, self._thread.began_in_inference = region, self._thread.inference_depth > 0

    def close(self) -> None:
        """Exit the region of this thread, if it has one."""
        self.enable_after_step()
        region, self._thread.region = self._thread.region, None
        if region is not None:
            region.__exit__(None, None, None)

    def disable_for_step(self) -> None:
        """Disable autocast until `enable_after_step`, because some optimizers need matrix products in float32."""
        region = self._thread.region
        # do not exit the region, because the script may have opened other torch.autocast blocks inside it
        if region is not None and torch.is_autocast_enabled(region.device):
            torch.set_autocast_enabled(region.device, False)
            self._thread.is_disabled_for_step = True

    def enable_after_step(self) -> None:
        """Enable autocast again after a step."""
        if self._thread.is_disabled_for_step:
            torch.set_autocast_enabled(self._thread.region.device, True)
            self._thread.is_disabled_for_step = False

    # ---- patches -----------------------------------------------------------------------------------------------------

    def _run_outside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs `original`, a backward pass, with autocast disabled. Otherwise its ops would be
        cast, too.
        """

        @functools.wraps(original)
        def outside(*args: Any, **kwargs: Any) -> Any:
            region = self._thread.region
            if region is None:
                return original(*args, **kwargs)
            with torch.autocast(region.device, enabled=False):
                return original(*args, **kwargs)

        return outside

    def _count_inference(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `torch.inference_mode.__enter__` that counts the open blocks."""

        def enter(mode: Any) -> None:
            original(mode)
            self._thread.inference_depth += 1

        return enter

    def _restore_after_inference(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `torch.inference_mode.__exit__` that enables autocast again. At the end of an inference_mode block,
        torch restores the autocast state from before the block: disabled, if the region began inside the block.
        """

        def leave(mode: Any, *error: Any) -> None:
            original(mode, *error)
            # not below 0, because the block may have begun before `install`
            self._thread.inference_depth = max(self._thread.inference_depth - 1, 0)
            if not self._thread.began_in_inference:
                return
            self._thread.began_in_inference = self._thread.inference_depth > 0  # the block around this one ends later
            # not in a torch.autocast block of the script inside the region, which has an autocast state of its own
            if self._thread.region is not None and not self._thread.is_disabled_for_step and get_autocast_depth() == 1:
                torch.set_autocast_enabled(self._thread.region.device, True)

        return leave

    def _enter_before_checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `torch.utils.checkpoint.checkpoint` that enters the region first, because a checkpoint saves the
        autocast state and restores it when it computes the forward pass again.
        """

        @functools.wraps(original)
        def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            # without tensors, the device is not known here, and the region begins when the function calls a module
            if tensors and not compiling.is_dynamo_compiling() and not self._has_own_amp():
                self.enter(tensors[0].device.type)
            return original(function, *args, **kwargs)

        return checkpoint

    def _widen_for_numpy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `Tensor.numpy` that first converts tensors of the region's dtype to float32: numpy has no bfloat16,
        and a script without mixed precision does not call `.float()` itself.
        """

        @functools.wraps(original)
        def numpy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_entered and tensor.dtype is self._low:
                tensor = tensor.float()
            return original(tensor, *args, **kwargs)

        return numpy

    def _enter_before_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `Module.compile` that enters the region first, because `Takeover` does not see later calls of the
        module.
        """

        @functools.wraps(original)
        def compile(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            weight = next(module.parameters(), None)
            if weight is not None and not self._has_own_amp():
                self.enter(weight.device.type)
            return original(module, *args, **kwargs)

        return compile

    def _open_session_after_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return an `Optimizer.__init__` that opens the session, which patches functions. At the first call of a model,
        it would be too late: Python evaluates `F.mse_loss` in `F.mse_loss(model(x), y)` before it calls the model.
        """

        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            if weights and weights[0].device.type != "meta" and not self._has_own_amp():
                self._open_session(weights[0].device.type, self._low)

        return init
