"""The attributes that Apex set on an optimizer besides `step`: `_amp_stash`, and private methods that scripts call.

Apex made masters in the first `scale_loss`, by methods with `lazy` in their names. Here they exist from `initialize`
on, so these methods do nothing.
"""

import functools
import types
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._core import HandScaledPass, OptimizerView, require_session
from .scaler import LossScaler


class AmpOptimizerState:
    """The attribute `_amp_stash` of an optimizer.

    Lists of groups have one entry for each of `optimizer.param_groups`. Each access makes new lists.
    """

    def __init__(self, view: OptimizerView) -> None:
        self._view = view
        self.lazy_init_called = True
        # set by `show_skip`: its replacement of `step`, and the `step` that this replaced
        self.skip_step: Any = None
        self.usual_step: Any = None

    @property
    def already_patched(self) -> bool:
        """Whether the next `step()` will be skipped. Waits for the device."""
        # Apex skipped a step by patching `step`
        return self._view.is_next_step_skipped()

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether gradients are still scaled, as after `delay_unscale=True`.

        Setting it to False unscales them. Setting it to True has no effect.
        """
        return self._view.has_scaled_gradients

    @params_have_scaled_gradients.setter
    def params_have_scaled_gradients(self, value: bool) -> None:
        if not value:
            self._view.unscale()

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The 16-bit parameters that have masters."""
        return [[parameter for parameter, master in group if parameter is not master] for group in self._view.groups()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The masters of `fp16_groups`."""
        return [[master for parameter, master in group if parameter is not master] for group in self._view.groups()]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The float32 parameters."""
        return [
            [master for parameter, master in group if parameter is master and master.dtype is torch.float32]
            for group in self._view.groups()
        ]

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The 16-bit parameters, with masters or without."""
        return [
            parameter
            for group in self._view.groups()
            for parameter, _ in group
            if parameter.dtype in (torch.float16, torch.bfloat16)
        ]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """The masters of 16-bit parameters."""
        return [master for group in self.fp32_from_fp16_groups for master in group]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The float32 parameters of the model."""
        return [parameter for group in self.fp32_from_fp32_groups for parameter in group]

    all_fp32_params = all_fp32_from_fp32_params


def attach_apex_names(optimizer: Optimizer) -> None:
    """Give a bound optimizer its `_amp_stash` and the private methods, until it is unbound."""
    view = OptimizerView(optimizer)
    view.attach("_amp_stash", AmpOptimizerState(view))
    view.attach("_amp_lazy_init", _masters_exist)
    hand_scaled = HandScaledPass(optimizer)
    view.attach("_prepare_amp_backward", hand_scaled.begin)
    view.attach("_post_amp_backward", functools.partial(_post_amp_backward, hand_scaled, view.device))
    # as in Apex, where the method exists only at levels with masters
    if require_session().policy.master_weights:
        view.attach("_master_params_to_model_params", view.copy_masters_to_parameters)


def _masters_exist() -> None:
    """Do nothing, because masters exist already."""


def _post_amp_backward(hand_scaled: HandScaledPass, device: torch.device, scaler: LossScaler) -> None:
    """Unscale after a backward pass. Report an overflow to `scaler.update_scale()` and to the next `step()`."""
    hand_scaled.end(scaler.open_pass(device))


def show_skip(optimizer: Any) -> None:
    """Replace `optimizer.step` if the next step will be skipped. Restore it if the next step no longer will be.

    Scripts compare `step` with the usual one to find out. The replacement restores the usual `step` and calls it, and
    that skips. Waits for the device. Does nothing for an optimizer that is not bound.
    """
    stash = vars(optimizer).get("_amp_stash")
    if not isinstance(stash, AmpOptimizerState):
        return
    is_shown = vars(optimizer)["step"] is stash.skip_step
    is_skipped = stash.already_patched
    if is_shown == is_skipped:
        return
    if is_shown:  # the gradients that overflowed were zeroed
        optimizer.step = stash.usual_step
        return
    usual = stash.usual_step = vars(optimizer)["step"]
    # if an LR scheduler has wrapped the method, `step` is a plain function
    function = getattr(usual, "__func__", usual)

    @functools.wraps(function)
    def skip_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if vars(self)["step"] is stash.skip_step:  # not if a scheduler has wrapped it meanwhile
            self.step = usual
        return usual(*args, **kwargs)

    # unbinding restores the `step` from before `initialize`, if that was an attribute, from `__wrapped__`
    vars(skip_step)["__wrapped__"] = vars(function).get("__wrapped__")
    stash.skip_step = optimizer.step = types.MethodType(skip_step, optimizer)
