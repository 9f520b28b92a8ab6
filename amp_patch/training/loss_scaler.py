"""`LossScaler`: the factor that a loss is multiplied by, and the rule that changes it after each step.

The state is 0-dim tensors on the device of the last loss, so an update does not wait for the device. Reading a value
back (`loss_scale()`, `state_dict()`) does. The scaler knows no optimizer and no gradients.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ..config import presets
from ..dtypes import round_to_float32
from ..multi_tensor import clone
from ..torch_private import update_scale_
from .unscaling import either


class LossScaler:
    """A static or dynamic loss scale, as in Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2.

    By default, a dynamic scale starts at 2**16, halves after a step with a non-finite gradient, and doubles after 2000
    good steps in a row. Its start and each update are clamped to [min_loss_scale, max_loss_scale]. It is updated once
    for all backward passes before a step (or before a `zero_grad` without a step), by GradScaler's kernel.

    With a `hysteresis` above 1, the scales follow `DynamicGradScaler` in Megatron-LM
    (megatron/core/optimizer/grad_scaler.py). Each overflow takes 1 from a count, the overflows left, which starts at
    `hysteresis`. The scale backs off only if the count is then 0. The count is full again when the scale grows.

    Attributes:
        warned_scale: the scale at the last warning that it has fallen; inf before the first warning.
        scale: 0-dim float32, on the device where it was last used. Updates do not write into it, because blocks keep
            the scale of their loss.
        known_scale: the last scale that the host knows.
        found_inf: 0-dim float32, 1.0 if a backward pass since the last update has overflowed. None if no pass was
            checked since the last update.
        awaits_loss: True for a dynamic scale until a loss is scaled, or the user was warned that none is.
        awaits_backward: True until a scaled loss has gone backward, or the user was warned that none has. Always
            False for a static scale of 1.
        is_shared: True if several ranks decide together, so that a single rank must not update the scale.
        is_identity: True for a static scale of 1.
    """

    def __init__(
        self,
        loss_scale: float | presets.DynamicScale | Literal["dynamic"],
        *,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        given = presets.parse_loss_scale(loss_scale)
        self.is_dynamic = isinstance(given, presets.DynamicScale)
        rule = given if isinstance(given, presets.DynamicScale) else presets.DynamicScale()
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        self.growth_factor = rule.growth_factor
        self.backoff_factor = rule.backoff_factor
        self.growth_interval = rule.growth_interval
        self.hysteresis = rule.hysteresis
        self._start = max(min(max_loss_scale, rule.init), min_loss_scale or 0.0)
        if not isinstance(given, presets.DynamicScale):
            self._start = given
        self.is_identity = not self.is_dynamic and self._start == 1.0
        self.is_shared = False
        self.awaits_backward = not self.is_identity
        self.restart()

    def restart(self) -> None:
        """Go back to the first scale, and forget all steps."""
        self.scale = torch.tensor(self._start, dtype=torch.float32)
        self.known_scale = self.scale.item()
        self.warned_scale = math.inf
        self._good_steps = torch.zeros((), dtype=torch.int32)
        self._overflows_left = torch.tensor(self.hysteresis, dtype=torch.int32)
        self.awaits_loss = self.is_dynamic
        self.found_inf: Tensor | None = None

    def scale_on(self, device: torch.device) -> Tensor:
        """Move the scale to `device` and return it, to scale a loss. Clears `awaits_loss`."""
        self.awaits_loss = False
        if self.scale.device != device:
            self.scale = self.scale.to(device)
            self._good_steps = self._good_steps.to(device)
            self._overflows_left = self._overflows_left.to(device)
        return self.scale

    def note_backward(self, gradient: Tensor) -> None:
        """Record that a scaled loss goes backward. This is a tensor hook on scaled losses."""
        self.awaits_backward = False

    def add_found_inf(self, found_inf: Tensor) -> None:
        """Add the flag of a backward pass, for the next update: 0-dim float32, 1.0 if it overflowed, else 0.0."""
        self.found_inf = either(self.found_inf, found_inf)

    def update(self) -> None:
        """Update the scale once for all passes since the last update, if there were any. Waits for no device."""
        if self.found_inf is not None:
            self.scale, self._good_steps, self._overflows_left = self._advance(self.found_inf)
            self.found_inf = None

    def update_with_ranks(self, found_inf: Tensor, is_due: Tensor) -> None:
        """Update the scale for all ranks that decide together. Does not wait for the device.

        Args:
            found_inf: 0-dim float32, 1.0 if a pass of any rank since the last update has overflowed.
            is_due: 0-dim float32, 1.0 if there was a pass on any rank. Otherwise the scale stays as it is.
        """
        is_due = is_due.to(self.scale.device) > 0
        scale, good_steps, overflows_left = self._advance(found_inf)
        self.scale = torch.where(is_due, scale, self.scale)
        self._good_steps = torch.where(is_due, good_steps, self._good_steps)
        self._overflows_left = torch.where(is_due, overflows_left, self._overflows_left)
        self.found_inf = None

    def _next_state(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state after the next update: scale, good steps, overflows left.

        Where ranks decide together, return the present state, because this rank alone cannot know the next one.
        """
        if self.is_shared or self.found_inf is None:
            return self.scale, self._good_steps, self._overflows_left
        return self._advance(self.found_inf)

    def _advance(self, found_inf: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state after an update, without updating: the scale, the number of good steps, and the number of
        overflows left until the scale backs off.
        """
        if not self.is_dynamic:  # Apex counts these steps in its checkpoints, too
            return self.scale, self._good_steps + 1, self._overflows_left
        # the kernel writes in place, but open blocks may hold the old scale
        scale, good_steps, overflows_left = clone(self.scale), clone(self._good_steps), self._overflows_left
        found_inf = found_inf.to(scale.device)
        update_scale_(scale, good_steps, found_inf, self.growth_factor, self.backoff_factor, self.growth_interval)
        if self.hysteresis > 1:
            is_overflow = found_inf > 0
            grows = good_steps == 0  # the kernel resets the count when it changes the scale
            refilled = torch.where(grows, self.hysteresis, overflows_left)
            overflows_left = torch.where(is_overflow, overflows_left - 1, refilled).clamp_(min=0)
            scale = torch.where(is_overflow & (overflows_left > 0), self.scale, scale)  # undo the kernel's backoff
        # without a minimum, the smallest normal number: a scale of 0 would turn every later gradient into NaN
        lowest = self.min_loss_scale or torch.finfo(torch.float32).tiny
        return scale.clamp_(lowest, self.max_loss_scale), good_steps, overflows_left

    @property
    def hopeless_after(self) -> int:
        """The number of skipped steps in a row after which a too large scale cannot be the cause of the overflows.

        It is the number of overflows that lower the scale by a factor of 2**100, and at least 100.
        """
        return max(100, self.hysteresis - 1 + math.ceil(100 * math.log(0.5) / math.log(self.backoff_factor)))

    @property
    def is_hopeless(self) -> bool:
        """Whether the known scale is so small that it cannot be the cause of the overflows.

        It has then fallen from its start by a factor of 2**100, or to the smallest normal number of float32. Always
        False for a static scale, and with a `min_loss_scale`.
        """
        lowest = max(self._start * 2.0**-100, torch.finfo(torch.float32).tiny)
        return self.is_dynamic and self.min_loss_scale is None and self.known_scale <= lowest

    def loss_scale(self) -> float:
        """Return the scale that an update would give now. Waits for the device.

        Until the next update, losses are multiplied by `scale`. Where ranks decide together, this is `scale` itself.
        """
        return float(self._next_state()[0].item())

    def set_loss_scale(self, loss_scale: float) -> None:
        """Set the scale of the next losses, even if the scale is static.

        Unless ranks decide together, an update comes first: the passes since the last update count as one step.
        Raises ValueError unless float32 holds `loss_scale` as a finite positive number.
        """
        if not 0 < round_to_float32(loss_scale) < math.inf:
            raise ValueError(f"loss_scale={loss_scale} must be finite and positive, in float32")
        if not self.is_shared:
            self.update()  # an update at the next step would change the scale that is set here
        self.scale = torch.tensor(float(loss_scale), dtype=torch.float32, device=self.scale.device)
        self.known_scale = float(loss_scale)
        self.is_identity = not self.is_dynamic and loss_scale == 1.0
        self.awaits_backward &= not self.is_identity

    def pack_state(self, device: torch.device) -> Tensor:
        """Return the state as one float32 tensor of shape (3,): the scale, the good steps, and the overflows left."""
        state = (self.scale, self._good_steps, self._overflows_left)
        return torch.stack([value.to(device, torch.float32) for value in state])

    def load_packed_state(self, state: Tensor) -> None:
        """Take over the state that `pack_state` returned on another rank. Does not wait for the device."""
        self.scale = clone(state[0])
        self._good_steps, self._overflows_left = state[1].to(torch.int32), state[2].to(torch.int32)

    def state_dict(self) -> dict[str, Any]:
        """Return `{"loss_scale": float, "unskipped": int}`, the entry that Apex writes. Waits for the device.

        `unskipped` is the number of good steps since the last overflow or growth; of a static scale, the number of all
        steps. A static scale of 1 counts none. With a `hysteresis` above 1, the dict also holds `hysteresis_tracker`:
        the number of overflows left until the scale backs off.
        """
        scale, good_steps, overflows_left = self._next_state()
        state: dict[str, Any] = {"loss_scale": float(scale.item()), "unskipped": int(good_steps.item())}
        if self.hysteresis > 1:
            state["hysteresis_tracker"] = int(overflows_left.item())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from `state_dict` or from Apex. A static scale keeps its value.

        Raises KeyError, TypeError or ValueError if `state` cannot be read.
        """
        scale = _read_scale(state["loss_scale"])
        unskipped = _read_count("unskipped", state["unskipped"])
        overflows_left = _read_count("hysteresis_tracker", state.get("hysteresis_tracker", self.hysteresis))
        self.found_inf = None
        if self.is_dynamic:
            self.known_scale, self.warned_scale = scale, math.inf
            self.scale = torch.tensor(scale, dtype=torch.float32)
            # torch's kernel lets the scale grow when the count equals the interval: a larger count would never do so
            unskipped = min(unskipped, self.growth_interval - 1)
        self._good_steps = torch.tensor(unskipped, dtype=torch.int32)
        self._overflows_left = torch.tensor(min(overflows_left, self.hysteresis), dtype=torch.int32)


def _read_scale(value: Any) -> float:
    """Return a saved loss scale. Raises TypeError, or ValueError unless float32 holds it as a positive number."""
    try:
        scale = round_to_float32(float(value))
    except (OverflowError, RuntimeError) as error:
        raise ValueError(f"loss_scale cannot be read: {error}") from None
    if not 0 < scale < math.inf:
        raise ValueError(f"loss_scale must be a positive number that float32 can hold, not {value!r}")
    return scale


def _read_count(name: str, value: Any) -> int:
    """Return a saved count. Raises TypeError, or ValueError unless int32 holds it and it is not negative."""
    try:
        count = int(value)
    except (OverflowError, RuntimeError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from None
    if not 0 <= count < 2**31:
        raise ValueError(f"{name} must be 0 or above, and fit into 32 bits")
    return count
