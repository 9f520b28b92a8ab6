"""`LossScaler`: multiply the loss, and find the next scale after each step.

The state is two 0-dim tensors on the device of the loss, so that neither scaling nor updating waits for the device.
Reading a value back (`loss_scale()`, `state_dict()`) does. The scaler knows no optimizer and no gradients.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ..torch_private import update_scale_
from .backward_pass import BackwardPass, PassState, combine_found_inf
from .unscaling import rescale_ as rescale_
from .unscaling import unscale_ as unscale_

GROWTH_FACTOR = 2.0
BACKOFF_FACTOR = 0.5
GROWTH_INTERVAL = 2000
"""Good steps before the scale doubles, and the factors: the values Apex and torch.amp.GradScaler both use."""

INIT_SCALE = 2.0**16


class LossScaler:
    """A static or dynamic loss scale, as of Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2.

    Dynamic: start at 2**16 (or the bound that excludes it), halve after a step with a non-finite gradient, double after
    2000 good steps in a row, stay within [min_loss_scale, max_loss_scale]. There is one decision per optimizer step,
    however many backward passes led to it.
    """

    def __init__(
        self,
        loss_scale: float | Literal["dynamic"],
        *,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        growth_interval: int = GROWTH_INTERVAL,
    ) -> None:
        self.is_dynamic = loss_scale == "dynamic"
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        self.growth_interval = growth_interval
        start = (
            max(min(max_loss_scale, INIT_SCALE), min_loss_scale or 0.0)
            if loss_scale == "dynamic"
            else float(loss_scale)
        )
        self._scale = torch.tensor(start, dtype=torch.float32)
        self._good_steps = torch.zeros((), dtype=torch.int32)
        self.is_identity = not self.is_dynamic and start == 1.0
        self._unjudged: list[BackwardPass] = []

    @property
    def scale(self) -> Tensor:
        """The scale as a 0-dim float32 tensor where it was last used.

        It never changes in place: a later update makes a new tensor.
        """
        return self._scale

    def scale_on(self, device: torch.device) -> Tensor:
        """Move the scale to `device` and return it."""
        if self._scale.device != device:
            self._scale = self._scale.to(device)
            self._good_steps = self._good_steps.to(device)
        return self._scale

    def begin_pass(self, device: torch.device, *, is_delayed: bool = False) -> BackwardPass:
        """Return the record of a backward pass of a loss on `device` that begins now; an update judges it once it is
        closed.
        """
        backward_pass = BackwardPass(self, device, is_delayed=is_delayed)
        self._unjudged.append(backward_pass)
        return backward_pass

    def update(self) -> None:
        """Update the scale once for all closed passes since the last update; without any, do nothing.

        Waits for nothing.
        """
        due = self._due()
        self._scale, self._good_steps = self._next_state()
        for one in due:
            one.state = PassState.JUDGED
        self._forget_judged()

    def discard(self, backward_pass: BackwardPass) -> None:
        """Leave a pass out of the next update: its body has failed."""
        backward_pass.withdraw()
        self._forget_judged()

    def _due(self) -> list[BackwardPass]:
        return [one for one in self._unjudged if one.is_due]

    def _forget_judged(self) -> None:
        self._unjudged = [one for one in self._unjudged if one.state is not PassState.JUDGED]

    def _next_state(self) -> tuple[Tensor, Tensor]:
        """The state after an update: what `update` installs, and what readers are told while one is due."""
        due = self._due()
        if not due:
            return self._scale, self._good_steps
        for one in due:  # of a delayed pass nobody has looked at the gradients yet
            one.complete()
        scale, good_steps = self._scale.clone(), self._good_steps.clone()
        if not self.is_dynamic:
            return scale, good_steps + 1
        found_inf = combine_found_inf(due).to(scale.device)
        update_scale_(scale, good_steps, found_inf, GROWTH_FACTOR, BACKOFF_FACTOR, self.growth_interval)
        # the smallest normal number stands in for "no minimum": a scale of 0 would turn every gradient into NaN for
        # good
        return scale.clamp_(self.min_loss_scale or torch.finfo(torch.float32).tiny, self.max_loss_scale), good_steps

    def loss_scale(self) -> float:
        """Return the scale that the next backward pass will use. Waits for the device."""
        return float(self._next_state()[0].item())

    def set_loss_scale(self, loss_scale: float) -> None:
        """Multiply the next losses by `loss_scale`, also under a static scale. An update that is due is made first.

        Raises ValueError unless it is finite and positive.
        """
        if not (math.isfinite(loss_scale) and loss_scale > 0):
            raise ValueError(f"loss_scale={loss_scale} must be finite and positive")
        self.update()
        self._scale = torch.tensor(float(loss_scale), dtype=torch.float32, device=self._scale.device)
        self.is_identity = not self.is_dynamic and loss_scale == 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return `{"loss_scale": float, "unskipped": int}`, the entry Apex writes. Waits for the device."""
        scale, good_steps = self._next_state()
        return {"loss_scale": float(scale.item()), "unskipped": int(good_steps.item())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a scale and the number of good steps since it last changed. Raises KeyError, TypeError or
        ValueError on anything else.

        A static scale stays what it was set to: what another run had found by then is no reason to change it.
        """
        scale, unskipped = float(state["loss_scale"]), int(state["unskipped"])
        if not (math.isfinite(scale) and scale > 0 and unskipped >= 0):
            raise ValueError(
                f"loss_scale must be finite and positive and unskipped not negative, not {scale} and {unskipped}"
            )
        self._unjudged.clear()
        if self.is_dynamic:
            self._scale = torch.tensor(scale, dtype=torch.float32, device=self._scale.device)
        # at the interval or beyond it the equality test of the growth rule would never hold again
        self._good_steps = torch.tensor(
            min(unskipped, self.growth_interval - 1) if self.is_dynamic else unskipped, dtype=torch.int32
        )
        self._good_steps = self._good_steps.to(self._scale.device)
