"""The attributes that Apex set on an optimizer besides `step`: `_amp_stash`, and private methods that scripts call.

Masters are float32 copies of 16-bit parameters, which the optimizer updates. Apex made them in the first `scale_loss`,
by the method `_amp_lazy_init`. Here they exist from `initialize` on, so this method does nothing.
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

    Attributes named `..._groups` have one list for each of `optimizer.param_groups`. Each access makes new lists.
    """

    def __init__(self, view: OptimizerView) -> None:
        self._view = view
        self.lazy_init_called = True
        # `show_skip` sets both
        self.skip_step: Any = None  # the replacement of `optimizer.step`
        self.usual_step: Any = None  # the method that `skip_step` replaces

    @property
    def already_patched(self) -> bool:
        """Whether the next `step()` will be skipped. (Apex skipped it by patching `step`.) May wait for the device."""
        return self._view.is_next_step_skipped()

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether gradients are still scaled, as after a block of `scale_loss(..., delay_unscale=True)`.

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
        """The float32 parameters, which need no masters."""
        groups: list[list[Tensor]] = []
        for pairs in self._view.groups():
            has_no_master = [parameter for parameter, master in pairs if parameter is master]
            groups.append([parameter for parameter in has_no_master if parameter.dtype is torch.float32])
        return groups

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
        """The masters of `fp32_from_fp16_groups`."""
        return [master for group in self.fp32_from_fp16_groups for master in group]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The parameters of `fp32_from_fp32_groups`."""
        return [parameter for group in self.fp32_from_fp32_groups for parameter in group]

    all_fp32_params = all_fp32_from_fp32_params


def attach_apex_names(optimizer: Optimizer) -> None:
    """Give an optimizer of the session its `_amp_stash` and the private methods, until the session ends."""
    view = OptimizerView(optimizer)
    view.attach("_amp_stash", AmpOptimizerState(view))
    view.attach("_amp_lazy_init", _masters_exist)
    hand_scaled = HandScaledPass(optimizer)
    view.attach("_prepare_amp_backward", hand_scaled.begin)
    view.attach("_post_amp_backward", functools.partial(_post_amp_backward, hand_scaled, view.device))
    # as in Apex, where this method exists only at opt_levels with masters
    if require_session().policy.master_weights:
        view.attach("_master_params_to_model_params", view.copy_masters_to_parameters)


def _masters_exist() -> None:
    """The method `_amp_lazy_init`: does nothing, because masters exist already."""


def _post_amp_backward(hand_scaled: HandScaledPass, device: torch.device, scaler: LossScaler) -> None:
    """Unscale the gradients of a backward pass. Note an overflow for the next `scaler.update_scale()` and `step()`."""
    hand_scaled.end(scaler.open_pass(device))


def show_skip(optimizer: Any) -> None:
    """Replace `optimizer.step` if the next step will be skipped. Restore it if the next step will be taken after all.

    Apex replaced `step` to skip, so scripts compare `optimizer.step` with the usual method to notice a skip. This
    replacement puts the usual `step` back and calls it, and the usual `step` skips. May wait for the device. Does
    nothing for an optimizer that was not passed to `initialize`.
    """
    stash = vars(optimizer).get("_amp_stash")
    if not isinstance(stash, AmpOptimizerState):
        return
    is_shown = vars(optimizer)["step"] is stash.skip_step
    is_skipped = stash.already_patched
    if is_shown == is_skipped:
        return
    if is_shown:  # for example, the script has zeroed the gradients that overflowed
        optimizer.step = stash.usual_step
        return
    usual_step = stash.usual_step = vars(optimizer)["step"]
    # if an LR scheduler has wrapped the method, `step` is a plain function
    function = getattr(usual_step, "__func__", usual_step)

    @functools.wraps(function)
    def skip_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if vars(self)["step"] is stash.skip_step:  # else a scheduler has wrapped `skip_step` in the meantime
            self.step = usual_step
        return usual_step(*args, **kwargs)

    # if `step` was an instance attribute before `initialize`, the session restores it from `__wrapped__` when it ends
    vars(skip_step)["__wrapped__"] = vars(function).get("__wrapped__")
    stash.skip_step = optimizer.step = types.MethodType(skip_step, optimizer)
