"""`FP16_Optimizer` of `apex.optimizers` in 2019, and later of `apex.contrib`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import OptimizerError
from ...torch_private import flatten_dense_tensors, unflatten_dense_tensors
from .._core import ManualPass
from .._forward import forwarded
from ..fp16_utils.fp16_optimizer import FP16_Optimizer as _FP16Optimizer


class FP16_Optimizer(_FP16Optimizer):
    """A variant of `fp16_utils.FP16_Optimizer`. Differences:

    * By default, its dynamic scale doubles after every 1000 good steps, and does not fall below 1.
    * By default, `step` unscales the gradients, and `backward` does not. So the scale is updated once for each step,
      and not for each backward pass.
    * An overflow skips the step also under a static scale.

    `state_dict` returns two sets of entries: first those of this class in Apex, second those of
    `fp16_utils.FP16_Optimizer`.
    `load_state_dict` needs only the second set. It also takes the first set alone if all parameters are 16-bit and
    require gradients.

    Subclasses of 2019 read and write these attributes:

    Attributes:
        cur_iter: the number of updates of the loss scale so far. After loading a state dict without this entry, the
            count begins with the scaler's number of good steps.
        last_overflow_iter: the value of `cur_iter` at the start of the last step with an overflow; -1 if there was
            none.
    """

    dynamic_loss_defaults: Mapping[str, Any] = {"scale_window": 1000, "min_loss_scale": 1.0}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self._flat_groups: list[Tensor] = []

    # ---- the attributes of 2019 --------------------------------------------------------------------------------------

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is dynamic. Setting another value raises OptimizerError."""
        return self.loss_scaler.is_dynamic

    @dynamic_loss_scale.setter
    def dynamic_loss_scale(self, value: bool) -> None:
        if bool(value) is not self.loss_scaler.is_dynamic:
            raise OptimizerError(
                f"dynamic_loss_scale={value!r}: it cannot change later; pass it to FP16_Optimizer(...)"
            )

    cur_scale = _FP16Optimizer.loss_scale

    @property
    def scale_factor(self) -> float:
        """Always 2. Setting another value raises OptimizerError."""
        return 2.0

    @scale_factor.setter
    def scale_factor(self, value: float) -> None:
        if value != 2:
            raise OptimizerError(f"scale_factor={value!r}: it is always 2")

    scale_window = forwarded("loss_scaler", "growth_interval")
    """The number of good steps after which a dynamic scale doubles."""

    @property
    def fp32_groups(self) -> list[list[Tensor]]:
        """The tensors that the optimizer holds, by group: masters, and the parameters that have no master."""
        return [list(group["params"]) for group in self.param_groups]

    @property
    def fp32_groups_flat(self) -> list[Tensor]:
        """The masters of each group as one tensor of shape (n,). The masters are views of it."""
        with torch.no_grad():
            # only for groups that were added since the last access: masters of earlier groups are views already
            for masters in self.fp32_from_fp16_groups[len(self._flat_groups) :]:
                flat = flatten_dense_tensors([master.detach() for master in masters]) if masters else torch.empty(0)
                for master, view in zip(masters, unflatten_dense_tensors(flat, masters), strict=True):
                    master.data = view
                self._flat_groups.append(flat)
        return self._flat_groups

    # ---- steps -------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, update_master_grads: bool = False, retain_graph: bool = False) -> None:
        """Run the backward pass as the base class does, but leave the gradients scaled by default: `step` unscales."""
        super().backward(loss, update_master_grads, retain_graph)

    def step(self, closure: object = None) -> Any:
        """Step as the base class does. First unscale the gradients, unless `update_master_grads` has done so."""
        if self._gradient_scale is not None and not self._is_unscaled:
            self.update_master_grads()
        return super().step(closure)

    def _decide(self, manual: ManualPass) -> bool:
        self._set_good_steps()
        # under a static scale, the base class skips no step, but in Apex this class skipped those with an overflow
        overflow = super()._decide(manual) or manual.has_overflow()
        if overflow:
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1
        return overflow

    def _set_good_steps(self) -> None:
        """Set the scaler's number of good steps to the number that follows from the counters of this class.

        Scripts may have set these counters.
        """
        # as Apex counted: the steps since the last overflow
        good_steps = (self.cur_iter - 1 - self.last_overflow_iter) % self.scale_window
        if self.dynamic_loss_scale and self.loss_scaler.state_dict()["unskipped"] != good_steps:
            self.loss_scaler.load_state_dict({"loss_scale": self.cur_scale, "unskipped": good_steps})

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale and of the optimizer, and the masters. Waits for the device."""
        return {
            **super().state_dict(),
            **{name: getattr(self, name) for name in _SAVED_ATTRIBUTES},
            "cur_scale": self.cur_scale,
            "scale_factor": 2,
            "fp32_groups": [[parameter.detach() for parameter in group] for group in self.fp32_groups],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this class or of `fp16_utils.FP16_Optimizer`, from here or from Apex. Copy the masters
        to the model.

        Raises CheckpointError for any other object, for masters of other shapes, and for other parameter groups. If
        it raises, nothing has changed.
        """
        super().load_state_dict(state_dict)
        # a state of the base class has no counters: derive them from its number of good steps
        self.cur_iter, self.last_overflow_iter = self.loss_scaler.state_dict()["unskipped"], -1
        for name in _SAVED_ATTRIBUTES:
            if name in state_dict:
                setattr(self, name, state_dict[name])

    def _convert_state_dict(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        if "fp32_from_fp16" in state_dict:
            return state_dict
        if "fp32_groups_flat" in state_dict:
            groups = [
                unflatten_dense_tensors(flat, masters)
                for flat, masters in zip(state_dict["fp32_groups_flat"], self.fp32_from_fp16_groups, strict=True)
            ]
        else:
            groups = state_dict["fp32_groups"]
        return {
            "loss_scaler": {"loss_scale": state_dict["cur_scale"], "unskipped": 0},
            "dynamic_loss_scale": state_dict["dynamic_loss_scale"],
            "overflow": False,
            "optimizer_state_dict": state_dict["optimizer_state_dict"],
            "fp32_from_fp16": groups,
        }


_SAVED_ATTRIBUTES = ("cur_iter", "last_overflow_iter", "scale_window")
"""The attributes that this class adds to a state dict under their own names."""
