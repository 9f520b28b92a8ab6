"""`FP16_Optimizer`: float32 masters and loss scaling around an optimizer, for a model that the user has cast."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...dtypes import LOW_DTYPES
from ...errors import CheckpointError, OptimizerError
from ...reporting import say, set_verbosity
from ...torch_private import foreach_copy_
from .._core import LossScaler, ManualPass, rescale_
from .._forward import forwarded


class FP16_Optimizer:
    """Wraps an optimizer, and puts float32 masters in place of its 16-bit parameters, so the optimizer updates masters.

    The gradients of 16-bit parameters stay scaled, and `update_master_grads` computes the masters' gradients from them.
    So gradients add up over several backward passes as in torch, until `zero_grad`. Unlike in Apex, earlier gradients
    are rescaled if the loss scale changes between backward passes.

    Args:
        init_optimizer: an optimizer of a model that has been moved to its device and cast, as by `network_to_half`.
            Parameters that do not require gradients get no masters.
        static_loss_scale: the loss scale, if it is not dynamic.
        dynamic_loss_scale: whether the loss scale is dynamic. By default, such a scale starts at 2**16 and doubles
            after 2000 good steps. An overflow halves it and skips the step.
        dynamic_loss_args: values for `init_scale`, `scale_window`, `min_loss_scale` or `max_loss_scale`. `scale_factor`
            must be 2. Other values raise OptimizerError. Read only if the loss scale is dynamic.
        verbose: print the package's messages, such as those about skipped steps. False leaves the verbosity as it is.

    Waits for the device in `update_master_grads` if the scale is dynamic.
    """

    dynamic_loss_defaults: Mapping[str, Any] = {}

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer = init_optimizer
        if verbose:
            set_verbosity(1)
        self._dynamic_loss_args = {**self.dynamic_loss_defaults, **(dynamic_loss_args or {})}
        self.loss_scaler = _make_scaler(dynamic_loss_scale, static_loss_scale, self._dynamic_loss_args)
        self.overflow = False
        self._gradient_scale: Tensor | None = None  # the loss scale of gradients; None until the next `backward`
        self._is_unscaled = False  # whether gradients of float32 parameters have been divided by that scale
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp32_groups: list[list[Tensor]] = []
        for group in self.optimizer.param_groups:
            self._adopt(group)
        if self.optimizer.state:
            self.optimizer.load_state_dict(self.optimizer.state_dict())  # casts the state to the masters' dtype

    def _adopt(self, group: dict[str, Any]) -> None:
        """Replace the trained 16-bit parameters of a group by masters, and move their state to the masters."""
        low: list[Tensor] = []
        masters: list[Tensor] = []
        float32: list[Tensor] = []
        for index, parameter in enumerate(group["params"]):
            if not parameter.requires_grad:
                continue
            if parameter.dtype not in LOW_DTYPES:
                float32.append(parameter)
                continue
            master = torch.nn.Parameter(parameter.detach().float())
            group["params"][index] = master
            low.append(parameter)
            masters.append(master)
            if parameter in self.optimizer.state:
                self.optimizer.state[master] = self.optimizer.state.pop(parameter)
        self.fp16_groups.append(low)
        self.fp32_from_fp16_groups.append(masters)
        self.fp32_from_fp32_groups.append(float32)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with masters for its 16-bit parameters."""
        self.optimizer.add_param_group(param_group)
        self._adopt(self.optimizer.param_groups[-1])

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return each 16-bit parameter with its master."""
        groups = zip(self.fp16_groups, self.fp32_from_fp16_groups, strict=True)
        return [pair for low, masters in groups for pair in zip(low, masters, strict=True)]

    def _float32_parameters(self) -> list[Tensor]:
        return [parameter for group in self.fp32_from_fp32_groups for parameter in group]

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Set the gradients of the model's parameters to zero or None, and the gradients of masters to None."""
        pairs = self._pairs()
        for _, master in pairs:
            master.grad = None
        for parameter in (*(low for low, _ in pairs), *self._float32_parameters()):
            if set_grads_to_None:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()
        self._gradient_scale, self._is_unscaled = None, False

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Run the backward pass of the scaled loss, and then `update_master_grads()`.

        Pass `update_master_grads=False` if another backward pass is to add gradients before the step.
        """
        scale = self.loss_scaler.scale_on(loss.device)
        scaled_gradients = _gradients(parameter for parameter, _ in self._pairs())
        float32_gradients = _gradients(self._float32_parameters())
        with torch.no_grad():
            # this pass adds scaled gradients to earlier ones, so scale earlier ones again if they have been unscaled
            if self._is_unscaled:
                rescale_(float32_gradients, scale)
            else:
                scaled_gradients += float32_gradients
            # if the loss scale has changed since the last backward pass, rescale the earlier gradients
            if self._gradient_scale is not None and self._gradient_scale is not scale:
                rescale_(scaled_gradients, scale / self._gradient_scale)
        self._gradient_scale, self._is_unscaled = scale, False
        # scale in float32, because a 16-bit loss times the scale could overflow
        (loss.float() * scale).backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Write unscaled gradients to masters and float32 parameters, update the loss scale, and set `overflow`.

        Without a `backward` since `zero_grad`, gradients have no scale: copy them, and set `overflow` to False.
        """
        pairs = self._pairs()
        for parameter, master in pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        gradients = _gradients(master for _, master in pairs)
        if not self._is_unscaled:
            gradients += _gradients(self._float32_parameters())
        self.overflow = False
        if self._gradient_scale is None or not gradients:
            return
        manual = ManualPass(self.loss_scaler, self._gradient_scale.device)
        manual.unscale_in_place(gradients, self._gradient_scale)
        self._is_unscaled = True
        self.overflow = self._decide(manual)

    def _decide(self, manual: ManualPass) -> bool:
        """Update the loss scale, and return whether the step is to be skipped."""
        return manual.update_scale()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float | Tensor:
        """Clip the norm of the gradients that the optimizer holds, and return the norm before clipping.

        After an overflow, only return -1.
        """
        if self.overflow:
            return -1  # as in Apex
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step(self, closure: object = None) -> Any:
        """Step, copy the masters to the model, and return the result of the optimizer's `step`.

        After an overflow, skip the step and return None.
        Raises OptimizerError for a closure.
        """
        if closure is not None:
            raise OptimizerError("FP16_Optimizer.step takes no closure: call backward(loss), then step()")
        if self.overflow:
            # Apex's words, which people search logs for
            say("Gradient overflow.  Skipping step, reducing loss scale to %s", self.loss_scale)
            return None
        result = self.optimizer.step()
        self._copy_masters()
        return result

    def _copy_masters(self) -> None:
        pairs = self._pairs()
        if pairs:
            with torch.no_grad():
                foreach_copy_([parameter for parameter, _ in pairs], [master for _, master in pairs])

    # ---- attributes of the optimizer ---------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next backward pass. It can be set. Reading it waits for the device."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if self.loss_scaler.is_dynamic:
            self.loss_scaler.load_state_dict({"loss_scale": value, "unskipped": 0})
        else:
            self.loss_scaler = LossScaler(float(value))

    state = forwarded("optimizer", "state")
    param_groups = forwarded("optimizer", "param_groups")
    """The groups hold masters in place of 16-bit parameters that require gradients."""

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError("an FP16_Optimizer belongs to its model: save state_dict() instead of pickling it")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale and of the optimizer, and the masters. Waits for the device.

        The keys are Apex's. Apex pickled an object under "loss_scaler"; here it is a dict of numbers, which
        `torch.load(..., weights_only=True)` can read.
        """
        return {
            "loss_scaler": self.loss_scaler.state_dict(),
            "dynamic_loss_scale": self.loss_scaler.is_dynamic,
            "overflow": self.overflow,
            "first_closure_call_this_step": True,  # Apex kept it between steps; nothing here depends on it
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[master.detach() for master in group] for group in self.fp32_from_fp16_groups],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, from here or from Apex. Copy the masters to the model.

        Raises CheckpointError for any other object, for masters of other shapes, and for other parameter groups. If
        it raises, nothing has changed.
        """
        try:
            saved = self._convert_state_dict(state_dict)
            values = [value for group in saved["fp32_from_fp16"] for value in group]
            shapes = [value.shape for value in values]
            saved_scaler = saved["loss_scaler"]
            if not isinstance(saved_scaler, Mapping):  # Apex pickled the scaler itself
                saved_scaler = {"loss_scale": saved_scaler._loss_scale, "unskipped": saved_scaler._unskipped}
            scaler = _make_scaler(saved["dynamic_loss_scale"], saved_scaler["loss_scale"], self._dynamic_loss_args)
            scaler.load_state_dict(dict(saved_scaler))
            overflow, inner = bool(saved["overflow"]), saved["optimizer_state_dict"]
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"this is not the state of an FP16_Optimizer ({type(error).__name__}: {error}): load the result of"
                " its state_dict()"
            ) from error
        masters = [master for _, master in self._pairs()]
        if [master.shape for master in masters] != shapes:
            raise CheckpointError(
                f"the saved state has {len(values)} masters, and they do not fit the {len(masters)} here: load it for"
                " the same model, cast alike"
            )
        try:
            self.optimizer.load_state_dict(inner)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the saved state of the optimizer does not fit this {type(self.optimizer).__name__} ({error}): load it"
                " for the same parameter groups"
            ) from error
        self.loss_scaler, self.overflow = scaler, overflow
        with torch.no_grad():
            for master, value in zip(masters, values, strict=True):
                master.copy_(value)
        self._copy_masters()

    def _convert_state_dict(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a saved state in the layout of `state_dict`."""
        return state_dict


def _make_scaler(is_dynamic: bool, static_loss_scale: float, dynamic_loss_args: Mapping[str, Any]) -> LossScaler:
    """Return a loss scaler for Apex's arguments. Raises OptimizerError for unknown keys of `dynamic_loss_args`, and for
    another `scale_factor` than 2.
    """
    if not is_dynamic:
        return LossScaler(float(static_loss_scale))
    args = dict(dynamic_loss_args)
    init_scale = args.pop("init_scale", None)
    if args.pop("scale_factor", 2) != 2:
        raise OptimizerError("FP16_Optimizer: scale_factor is always 2; leave it out of dynamic_loss_args")
    scale_window = args.pop("scale_window", None)
    try:
        scaler = LossScaler("dynamic", **args)
    except TypeError:
        allowed = "init_scale, scale_window, min_loss_scale, max_loss_scale"
        raise OptimizerError(
            f"FP16_Optimizer: dynamic_loss_args={dict(dynamic_loss_args)} may hold only {allowed}"
        ) from None
    if scale_window is not None:
        scaler.growth_interval = scale_window
    if init_scale is not None:
        scaler.load_state_dict({"loss_scale": init_scale, "unskipped": 0})
    return scaler


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of the parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
