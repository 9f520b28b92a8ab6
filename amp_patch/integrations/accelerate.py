"""amp_patch with Hugging Face's Accelerate: an `Accelerator` with an opt_level.

from amp_patch.integrations.accelerate import Accelerator

accelerator = Accelerator(opt_level="O4", gradient_accumulation_steps=2)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
"""

from typing import Any

import accelerate
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import api as amp
from ..config import DEFAULT_LEVEL
from ..errors import ArgumentTypeError
from ..training import get_step_was_skipped


class _Optimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Reports steps that amp skips, so that prepared schedules do not advance after one."""

    @property
    def step_was_skipped(self) -> bool:
        return get_step_was_skipped(self.optimizer)


class _AmpState:
    """An object for `register_for_checkpointing`: Accelerate's `save_state` then saves amp's state, too."""

    def state_dict(self) -> dict[str, Any]:
        return amp.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        amp.load_state_dict(state_dict)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """An accelerate.Accelerator whose `prepare` initializes amp, and whose `backward` scales the loss.

    At levels with masters, `clip_grad_norm_` clips the gradients of masters. `optimizer_step_was_skipped` is true after
    a skipped step. `save_state` and `load_state` include the loss scale. In an `accumulate` block, gradients stay
    scaled until the last `backward` before the step, which unscales them.

    Args:
        opt_level: as for `amp_patch.initialize`.
        amp_options: other arguments of `amp_patch.initialize`, such as `lists` and `loss_scale`.
        args, kwargs: as for accelerate.Accelerator.

    Raises ArgumentTypeError if Accelerate's own mixed precision is on.
    """

    def __init__(
        self, *args: Any, opt_level: str = DEFAULT_LEVEL, amp_options: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.mixed_precision != "no":
            raise ArgumentTypeError(
                f"mixed_precision={self.mixed_precision!r}: leave it out of the arguments, and of `accelerate launch`"
                " and its config, since opt_level decides what runs in 16 bits"
            )
        # None after `adopt`: the caller initializes amp
        self._amp_options: dict[str, Any] | None = {"opt_level": opt_level, **(amp_options or {})}
        self._amp_models: list[nn.Module] = []

    @classmethod
    def adopt(cls, accelerator: accelerate.Accelerator) -> None:
        """Make an existing accelerate.Accelerator an instance of this class, for a trainer that has created it.

        Call `amp_patch.initialize` yourself: `prepare` does not.
        """
        accelerator.__class__ = cls
        accelerator._amp_options = None

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Initialize amp for the models and optimizers among `args`, then prepare all of `args`.

        Models are moved to the device of the accelerator first, if it places them.
        """
        optimizers = [argument for argument in args if isinstance(argument, Optimizer)]
        if self._amp_options is not None:
            self._initialize([argument for argument in args if isinstance(argument, nn.Module)], optimizers)
        prepared = super().prepare(*args, **kwargs)
        for optimizer in self._optimizers:
            # Accelerate has no way to choose the class of the wrapper
            if type(optimizer) is AcceleratedOptimizer:
                optimizer.__class__ = _Optimizer
        if optimizers and not any(isinstance(saved, _AmpState) for saved in self._custom_objects):
            self.register_for_checkpointing(_AmpState())
        return prepared

    def _initialize(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        """Move the models to their device, and initialize amp for them, all earlier models, and the optimizers."""
        if self.device_placement:
            for model in models:
                model.to(self.device)
        # initialize all models so far, because a script may call `prepare` once for each
        self._amp_models += models
        if models or optimizers:
            amp.initialize(self._amp_models, optimizers, **(self._amp_options or {}))

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward pass of the loss, divided by the accumulation steps and multiplied by the loss scale."""
        optimizers = [unwrapped(optimizer) for optimizer in self._optimizers]
        # accelerate.Accelerator.backward divides in the same way
        loss = loss / self.gradient_accumulation_steps
        # gradients stay scaled until the last micro-batch before a step
        with amp.scale_loss(loss, optimizers, delay_unscale=not self.sync_gradients) as scaled_loss:
            scaled_loss.backward(**kwargs)


def unwrapped(optimizer: Any) -> Any:
    """Return the torch optimizer inside the wrappers of Accelerate."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
