"""amp_patch with the Trainer of Hugging Face's transformers.

from amp_patch.integrations.huggingface import AmpTrainerMixin

class Trainer(AmpTrainerMixin, transformers.Trainer): ...

Trainer(model=model, args=arguments, train_dataset=data, opt_level="O4").train()
"""

import os
from typing import Any

import torch

from .. import api as amp
from ..config import DEFAULT_LEVEL
from ..errors import ArgumentTypeError
from .accelerate import Accelerator, unwrapped

STATE_NAME = "amp.pt"


class AmpTrainerMixin:
    """A mixin: put it before a Trainer class of transformers in the bases of your class.

    The Trainer then scales losses. While gradients accumulate, they stay scaled, and the last backward pass before the
    step unscales them. `max_grad_norm`, and `grad_norm` in the logs, refer to unscaled gradients. The LR schedule does
    not advance after a skipped step. Checkpoints with optimizer states hold amp's state in `amp.pt`, and saved models
    are float32.

    Args:
        opt_level: as for `amp_patch.initialize`.
        amp_options: other arguments of `amp_patch.initialize`, such as `lists` and `loss_scale`.
        args, kwargs: as for the Trainer. Raises ArgumentTypeError if `fp16` or `bf16` is set in its arguments, or
            Accelerate's mixed precision is on.
    """

    def __init__(
        self, *args: Any, opt_level: str = DEFAULT_LEVEL, amp_options: dict[str, Any] | None = None, **kwargs: Any
    ):
        self._amp_options = {"opt_level": opt_level, **(amp_options or {})}
        self._amp_optimizer: Any = None
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Trainer's accelerator scale the loss."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator = self.accelerator  # type: ignore[attr-defined]
        if accelerator.mixed_precision != "no":
            raise ArgumentTypeError(
                f"Accelerate's mixed precision is {accelerator.mixed_precision!r}: leave fp16 and bf16 out of the"
                " arguments, and mixed precision out of `accelerate launch` and its config, because opt_level decides"
                " what runs in 16 bits"
            )
        Accelerator.adopt(accelerator)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer, and initialize amp for it and the model."""
        trainer: Any = self
        super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        optimizer = unwrapped(trainer.optimizer)
        # the Trainer may call this several times, with the same optimizer or a new one
        if optimizer is not self._amp_optimizer:
            amp.initialize(trainer.model, optimizer, **self._amp_options, replace=self._amp_optimizer is not None)
            self._amp_optimizer = optimizer
        return trainer.optimizer

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add amp's loss scale and skipped steps to logs that have a loss."""
        stats = amp.stats(wait=False)
        if "loss" in logs and stats.loss_scales:
            logs = {**logs, "amp/loss_scale": stats.loss_scales[0], "amp/steps_skipped": stats.steps_skipped}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self.args.should_save:  # type: ignore[attr-defined]
            torch.save(amp.state_dict(), os.path.join(output_dir, STATE_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        path = "" if checkpoint is None else os.path.join(checkpoint, STATE_NAME)
        if os.path.isfile(path):
            amp.load_state_dict(torch.load(path, weights_only=True))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        trainer: Any = self
        model = trainer.accelerator.unwrap_model(trainer.model)
        config: Any = getattr(model, "config", None)
        if trainer.args.should_save and str(getattr(config, "dtype", None)).endswith("float16"):
            # transformers has written the dtype of the parameters into the config, but the saved weights are float32
            config.dtype = torch.float32
            config.save_pretrained(trainer.args.output_dir if output_dir is None else output_dir)
