"""amp_patch with Lightning, as a precision plugin.

    from amp_patch.integrations.lightning import AmpPrecision

    trainer = lightning.Trainer(plugins=AmpPrecision(opt_level="O4"))

It works with `lightning`. With `pytorch_lightning`, import that before this module, and do not import `lightning`.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import api as amp
from ..config import DEFAULT_LEVEL
from ..training import get_step_was_skipped

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning.pytorch" in sys.modules:
    from lightning.pytorch.plugins import Precision
else:
    from pytorch_lightning.plugins import Precision


class AmpPrecision(Precision):  # type: ignore[misc]
    """A precision plugin that trains at an opt_level, with Lightning's own clipping, accumulation and checkpoints.

    When a fit starts, every child of the LightningModule with parameters is passed to `amp_patch.initialize` as a
    model, so calls such as `self.net(x)` in a `training_step` are cast. An opt_level that casts models leaves the
    parameters of the LightningModule itself in float32. The closure of a step runs once, before amp decides whether to
    skip the step, except under LBFGS. Schedules that advance after every step do not advance after a skipped step.

    amp stays on after the fit, so you can evaluate and save the model; `amp_patch.reset()` ends it. Without a fit
    before, `validate` and `test` run without amp.

    Args:
        opt_level: as for `amp_patch.initialize`.
        amp_options: other arguments of `amp_patch.initialize`, such as `lists` and `loss_scale`.
    """

    precision = "32-true"  # Lightning itself must cast nothing

    def __init__(self, opt_level: str = DEFAULT_LEVEL, **amp_options: Any) -> None:
        super().__init__()
        self._options = {"opt_level": opt_level, **amp_options}
        self._optimizers: list[Any] = []

    def connect(
        self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Any], list[Any]]:
        """Initialize amp for the children of the LightningModule and the optimizers. Return the arguments.

        Without optimizers, amp is not initialized.
        """
        # a strategy may pass the LightningModule inside a wrapper
        lightning_module = getattr(model, "module", model) if not hasattr(model, "training_step") else model
        models = [child for child in lightning_module.children() if next(child.parameters(), None) is not None]
        if optimizers:
            amp.initialize(models, optimizers, **self._options, replace=bool(self._optimizers))
            self._optimizers = list(optimizers)
        for entry in lr_schedulers:
            # replace the class of the schedule, not its method `step`: an attribute would get into its state dict
            kind = type(entry.scheduler)
            if entry.interval == "step" and not issubclass(kind, _WaitingAfterSkips):
                entry.scheduler.__class__ = type(kind.__name__, (_WaitingAfterSkips, kind), {})
        return model, optimizers, lr_schedulers

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of the scaled loss."""
        optimizers = self._optimizers if optimizer is None else [getattr(optimizer, "optimizer", optimizer)]
        with amp.scale_loss(tensor, optimizers) as scaled_loss:
            super().backward(scaled_loss, model, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, then step the optimizer, and return the closure's result.

        If `training_step` returned None, skip the step. LBFGS runs the closure itself, several times, so it needs a
        static loss scale.
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = self._wrap_closure(model, optimizer, closure)
        if result is None and model.automatic_optimization:  # `training_step` returned None to skip the batch
            return result
        optimizer.step(**kwargs)
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return amp's state for a checkpoint; empty if amp has not been initialized."""
        return amp.state_dict() if self._optimizers else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load amp's state from a checkpoint, if amp has been initialized."""
        if self._optimizers:
            amp.load_state_dict(state_dict)


class _WaitingAfterSkips:
    """A mixin for LR schedules: `step` does nothing after a step that the optimizer has skipped."""

    optimizer: Any

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if not get_step_was_skipped(self.optimizer):
            super().step(*args, **kwargs)  # type: ignore[misc]
