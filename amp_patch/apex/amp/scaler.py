"""`LossScaler` with Apex's names, around a loss scaler of amp_patch (`core`): the session's, or a new one.

Reading `_loss_scale` and `_unskipped` waits for the device. A `_loss_scale` that the script sets applies to the next
loss. `_unskipped` counts good optimizer steps; Apex counted backward passes.

Pickles of `apex.amp.scaler.LossScaler`, as in checkpoints of Apex's `FP16_Optimizer`, load into this class.
"""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from .._core import LossScaler as CoreScaler
from .._core import ManualPass
from .._forward import forwarded


class LossScaler:
    """A loss scaler. `loss_scale` is "dynamic" or a number.

    As in Apex, `scale_factor` is ignored: a new dynamic scaler doubles and halves its scale.
    """

    def __init__(
        self,
        loss_scale: float | Literal["dynamic"],
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.core = CoreScaler(loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
        self.core.growth_interval = scale_window
        if self.dynamic:
            # as in Apex: an upper bound below `init_scale` lowers the first scale
            self.core.set_loss_scale(min(max_loss_scale, init_scale))
        self._forget_pass()

    @classmethod
    def of(cls, scaler: CoreScaler) -> "LossScaler":
        """Return a LossScaler around an existing scaler."""
        view = cls.__new__(cls)
        view.core = scaler
        view._forget_pass()
        return view

    def _forget_pass(self) -> None:
        self._pass: ManualPass | None = None
        self._buffer: Tensor | None = None  # `_overflow_buf`, once the script has set or read it
        self._is_overflow = False

    # ---- Apex's attributes -------------------------------------------------------------------------------------------

    @property
    def dynamic(self) -> bool:
        """Whether the scale is dynamic."""
        return self.core.is_dynamic

    @property
    def _loss_scale(self) -> float:
        return self.core.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self.core.set_loss_scale(float(value))

    @property
    def _unskipped(self) -> int:
        return int(self.core.state_dict()["unskipped"])

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self.core.load_state_dict({**self.core.state_dict(), "unskipped": value})

    _scale_seq_len = forwarded("core", "growth_interval")
    _min_loss_scale = forwarded("core", "min_loss_scale")
    _max_loss_scale = forwarded("core", "max_loss_scale")

    @property
    def _has_overflow(self) -> bool:
        return self._is_overflow or (self._pass is not None and self._pass.has_overflow())

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        self._is_overflow = bool(value)

    @property
    def _overflow_buf(self) -> Tensor:
        """A tensor of one integer, which is not 0 after an overflow. `update_scale` reads it.

        Functions of amp_C and scripts may set it. Reading the property may wait for the device.
        """
        if self._buffer is None:
            self._buffer = torch.zeros(1, dtype=torch.int32, device=self.core.scale.device)
        if self._pass is not None and self._pass.has_overflow():
            self._buffer.fill_(1)
        return self._buffer

    @_overflow_buf.setter
    def _overflow_buf(self, value: Tensor) -> None:
        self._buffer = value

    def loss_scale(self) -> float:
        """Return the scale that an update now would give. Waits for the device."""
        return self.core.loss_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return `{"loss_scale": float, "unskipped": int}`, and `hysteresis_tracker` if the hysteresis is above 1."""
        return self.core.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved scale and count. A static scaler keeps its scale."""
        self.core.load_state_dict(state)

    # ---- unscaling by hand: clear_overflow_state, unscale..., update_scale -------------------------------------------

    def clear_overflow_state(self) -> None:
        """Begin a pass. Forget the overflow of the last pass, and set `_overflow_buf` to 0."""
        self._pass, self._is_overflow = None, False
        if self._buffer is not None:
            self._buffer.zero_()

    def unscale(
        self,
        model_grads: Iterable[Tensor],
        master_grads: Iterable[Tensor],
        unused_scale: object = None,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Divide `model_grads` by the scale, or by `scale_override`, and write the quotients to `master_grads`.

        The tensors may have any real floating dtype, and `master_grads` may be the tensors of `model_grads`. If a
        gradient has inf or NaN, the pass overflows. As in Apex, do nothing if the scale is static, the divisor is 1.0,
        and `models_are_masters` is true.
        """
        scale = self.loss_scale() if scale_override is None else scale_override
        if scale == 1.0 and models_are_masters and not self.dynamic:
            return
        sources, targets = list(model_grads), list(master_grads)
        # the model's gradients keep their values, so divide float32 copies, and write these to the masters' gradients
        quotients = [
            source if source is target else source.detach().to(torch.float32, copy=True)
            for source, target in zip(sources, targets, strict=True)
        ]
        if quotients:
            device = quotients[0].device
            divisor = torch.tensor(scale, dtype=torch.float32, device=device)
            self.open_pass(device).unscale_in_place(quotients, divisor)
        with torch.no_grad():
            for source, target in zip(quotients, targets, strict=True):
                if source is not target:
                    target.copy_(source)

    def update_scale(self) -> bool:
        """Update the loss scale, and return whether to skip the step. Under a static scale, return False.

        There is an overflow if a gradient that `unscale` has read since `clear_overflow_state` had inf or NaN, or if
        the script has set `_overflow_buf` or `_has_overflow`. May wait for the device.
        """
        # if nothing was unscaled, no pass is open; open one for the overflow that the script may have set
        ended_pass, self._pass = self.open_pass(torch.device("cpu")), None
        if self._is_overflow or (self._buffer is not None and bool(self._buffer.any())):
            ended_pass.note_overflow()
        self._is_overflow = ended_pass.update_scale()
        return self._is_overflow

    def open_pass(self, device: torch.device) -> ManualPass:
        """Return the open pass. If there is none, begin one, with its overflow flag on `device`."""
        if self._pass is None:
            self._pass = ManualPass(self.core, device)
        return self._pass

    # ---- pickles, Apex's among them ----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {
            "dynamic": self.dynamic,
            "_loss_scale": self._loss_scale,
            "_unskipped": self._unskipped,
            "_scale_seq_len": self._scale_seq_len,
            "_min_loss_scale": self._min_loss_scale,
            "_max_loss_scale": self._max_loss_scale,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        scale = float(state["_loss_scale"])
        self.core = CoreScaler(
            "dynamic" if state["dynamic"] else scale,
            # pickles from before Apex had bounds lack these
            min_loss_scale=state.get("_min_loss_scale"),
            max_loss_scale=state.get("_max_loss_scale", 2.0**24),
        )
        self.core.growth_interval = state.get("_scale_seq_len", 2000)
        self.core.load_state_dict({"loss_scale": scale, "unskipped": state.get("_unskipped", 0)})
        self._forget_pass()
