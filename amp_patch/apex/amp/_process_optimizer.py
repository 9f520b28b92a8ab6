"""What Apex put on an optimizer besides `step`: `_amp_stash` and the private methods that scripts call.

Right where Apex was not: masters exist from `initialize` on, so nothing is lazy; they never forget a gradient, and
parameters that are unfrozen later have theirs.
"""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...errors import OptimizerError
from .._core import OptimizerView, add_optimizer, require_session
from .scaler import LossScaler


class AmpOptimizerState:
    """`optimizer._amp_stash`.

    The lists of groups are parallel to `optimizer.param_groups`; all lists are made anew at each reading.
    """

    def __init__(self, view: OptimizerView) -> None:
        self._view = view
        self.lazy_init_called = True

    @property
    def already_patched(self) -> bool:
        """Whether the next `step()` will be skipped. Waits for the device."""
        return self._view.is_next_step_skipped()

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether gradients carry the loss scale: after `delay_unscale=True`. Setting it to False unscales them."""
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
        """Their masters."""
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
    methods: dict[str, Callable[..., Any]] = {
        "_amp_lazy_init": _masters_exist,
        "_prepare_amp_backward": _prepare_amp_backward,
        "_post_amp_backward": _post_amp_backward,
    }
    if require_session().policy.master_weights:
        methods["_master_params_to_model_params"] = _master_params_to_model_params
    for name, function in methods.items():
        view.attach(name, types.MethodType(function, optimizer))


def _process_optimizer(optimizer: Optimizer, properties: object) -> Optimizer:
    """Bring an optimizer that was made later under the options in force, and return it. `properties` has no effect.

    Raises OptimizerError for one that amp has already, SessionError before `initialize`.
    """
    session = require_session()
    if session.bindings.find_optimizer(optimizer) is not None:
        raise OptimizerError(f"this {type(optimizer).__name__} was given to amp before: once is enough")
    add_optimizer(session, optimizer, 0)
    attach_apex_names(optimizer)
    return optimizer


def _masters_exist(optimizer: Optimizer) -> None:
    """Masters exist from `initialize` on."""


def _master_params_to_model_params(optimizer: Any) -> None:
    """Copy the masters to the 16-bit parameters."""
    OptimizerView(optimizer).push_masters()


def _prepare_amp_backward(optimizer: Optimizer) -> None:
    """Make gradients ready for a backward pass of a loss that the caller multiplies by the first scaler's scale."""
    OptimizerView(optimizer).begin_pass()


def _post_amp_backward(optimizer: Optimizer, scaler: LossScaler) -> None:
    """Unscale after that pass; `scaler.update_scale()` and the next `step()` know of an overflow."""
    view = OptimizerView(optimizer)
    view.end_pass(scaler.open_pass(view.device))


# ---- a skip that shows before the step -------------------------------------------------------------------------------


def show_skip(optimizer: Any) -> None:
    """Make `optimizer.step` another object while the next step will be skipped: scripts compare it with the usual.

    The skip step puts the usual one back and calls it: that one skips, and says so. Waits for the device.
    """
    step = vars(optimizer)["step"]
    function = _function_of(step)
    # a step that wraps a skip step has taken over its attributes, and is none
    shown, usual = vars(function).get("_amp_skip_step", (None, step))
    is_shown = shown is not None and shown() is function
    is_skipped = OptimizerView(optimizer).is_next_step_skipped()
    if is_shown and not is_skipped:
        optimizer.step = usual
    if is_shown or not is_skipped:
        return

    @functools.wraps(function)
    def skip_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _function_of(vars(self)["step"]) is this():  # not if an LR scheduler has wrapped it meanwhile
            self.step = step
        return step(*args, **kwargs)

    this = weakref.ref(skip_step)
    # undoing the binding looks for the original there, if the optimizer had a `step` of its own
    vars(skip_step).update(_amp_skip_step=(this, step), __wrapped__=getattr(step, "__wrapped__", None))
    optimizer.step = types.MethodType(skip_step, optimizer)


def _function_of(step: Any) -> Any:
    """Return the function of a method; an LR scheduler puts a plain function in the place of the method."""
    return getattr(step, "__func__", step)
