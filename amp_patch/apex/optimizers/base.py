"""`FusedOptimizer`: the base class of Apex's optimizers, on top of torch.optim.Optimizer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import CheckpointError, OptimizerError
from ..updates import full_dtype

Work = list[tuple[dict[str, Any], list[Tensor], list[Tensor]]]
"""For each parameter group with gradients: the group, its parameters that have a gradient, and their gradients."""


class FusedOptimizer(torch.optim.Optimizer):
    """Base class of Apex's optimizers. A subclass implements the step in `_update`.

    Parameters may have any floating dtype and be on any devices. `step` raises OptimizerError if a parameter with a
    gradient is complex, or if its gradient is sparse.

    Attributes:
        found_inf: None, or a flag (0-dim float32) for one step, which is skipped if the flag is 1. amp sets the flag
            for a subclass with `reads_flag`, GradScaler for one with `_step_supports_amp_scaling`.
    """

    # the attributes that hold options, for copies and pickles; torch's Optimizer does not know them
    _options: ClassVar[tuple[str, ...]] = ("set_grad_none",)
    found_inf: Tensor | None = None
    reads_flag = False
    """Whether `_update` passes `found_inf` to kernels, which skip the step if it is 1. If False, amp sets no flag."""

    def __init__(self, params: Any, defaults: dict[str, Any], set_grad_none: bool, amsgrad: bool = False) -> None:
        if amsgrad:
            raise OptimizerError(f"{type(self).__name__} has no AMSGrad variant: leave amsgrad out, or use torch.optim")
        for name in ("lr", "eps", "weight_decay", "momentum"):
            value = defaults.get(name, 0.0)
            # `not >=` is also true for NaN; the default lr of FusedSGD is torch's object `required`, which is no number
            if isinstance(value, (int, float)) and not value >= 0.0:
                raise OptimizerError(f"{type(self).__name__}: {name}={value!r} must not be negative")
        betas = defaults.get("betas", ())
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise OptimizerError(f"{type(self).__name__}: betas={betas!r} must be at least 0 and below 1")
        super().__init__(params, defaults)
        self.set_grad_none = set_grad_none

    @property
    def _dummy_overflow_buf(self) -> Tensor:
        """A new flag (int32, shape (1,), value 0) that subclasses in scripts pass to functions of amp_C."""
        return torch.zeros(1, dtype=torch.int32, device=self.param_groups[0]["params"][0].device)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Set gradients to None or to zero. If `set_to_none` is None, `set_grad_none` decides."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call `closure`, if it is given, and take one step. Return the result of `closure`, or None without one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._update(self._collect())
        return loss

    step_by_flag = step
    """The same function as `step`, unless a subclass in a script overrides `step` alone.

    amp sets `found_inf` only if the two are the same: a `step` of a script may not expect a flag.
    """

    def _update(self, work: Work) -> None:
        """Take one step on the parameters in `work`, with gradients disabled."""
        raise NotImplementedError

    def _collect(self) -> Work:
        """Return the parameters with gradients, by group. Raises OptimizerError for tensors that are not supported."""
        work: Work = []
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in params:
                if parameter.grad.layout != torch.strided:
                    name = type(self).__name__
                    raise OptimizerError(
                        f"{name} takes no sparse gradients: give that parameter to torch.optim.SparseAdam or"
                        " torch.optim.SGD"
                    )
                if not parameter.is_floating_point():
                    raise OptimizerError(f"{type(self).__name__} takes real floating parameters, not {parameter.dtype}")
            if params:
                work.append((group, params, [parameter.grad for parameter in params]))
        return work

    def _moments(self, params: Iterable[Tensor], name: str) -> list[Tensor]:
        """Return the entry `name` of each parameter's state: a tensor of the parameter's shape.

        Its dtype is float32, or float64 for a float64 parameter. An entry that does not exist yet is created as zeros.
        """
        moments = []
        for parameter in params:
            state, dtype = self.state[parameter], full_dtype(parameter)
            moment = state.get(name)
            if moment is None:
                moment = state[name] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
            elif moment.dtype is not dtype:  # without masters, amp.initialize casts state with the parameters
                moment = state[name] = moment.to(dtype)
            moments.append(moment)
        return moments

    # ---- masters in the state ----------------------------------------------------------------------------------------

    def _has_master(self, parameter: Tensor) -> bool:
        """Return whether the optimizer updates a *master* of a 16-bit parameter: a float32 copy in its state."""
        return False

    def _get_masters(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Return the tensor to update for each parameter: its master (see `_has_master`), or else the parameter itself.

        In the first step of a parameter, its master is created. Elements of a parameter that differ from the rounded
        master, for example because the script has changed them, are copied to the master.
        """
        targets = []
        for parameter in params:
            if not self._has_master(parameter) or parameter.dtype is full_dtype(parameter):
                targets.append(parameter)
                continue
            state, values = self.state[parameter], parameter.detach().to(full_dtype(parameter))
            master = state.get("master", values)
            is_unchanged = master.to(parameter.dtype) == parameter
            state["master"] = torch.where(is_unchanged, master, values)
            targets.append(state["master"])
        return targets

    @staticmethod
    def _copy_masters(params: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy masters to their parameters, which rounds them."""
        for parameter, target in zip(params, targets, strict=True):
            if target is not parameter:
                parameter.copy_(target)

    def _count_step(self, group: dict[str, Any]) -> int | Tensor:
        """Count a step in `group["step"]`, unless `found_inf` skips it, and return the number of this step, from 1.

        The numbers are ints, or 0-dim float32 tensors after a `found_inf` on a GPU. Raises OptimizerError while a CUDA
        graph is captured.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise OptimizerError(
                f"{type(self).__name__} counts steps in Python, which a CUDA graph would freeze: use"
                " torch.optim.AdamW(capturable=True) in a graph"
            )
        step: int | Tensor = group.get("step", 0) + 1
        # a skipped step does not count, so subtract the flag, which is 0 or 1
        steps_taken = step if self.found_inf is None else step - self.found_inf
        is_on_host = not isinstance(steps_taken, Tensor) or steps_taken.device.type == "cpu"
        group["step"] = int(steps_taken) if is_on_host else steps_taken
        return step

    # ---- copies and checkpoints --------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # torch's Optimizer keeps only defaults, state and groups
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._options}}

    def state_dict(self) -> dict[str, Any]:
        """Return the state in Apex's layout. The `step` of a group is an int, so this may wait for the device."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            if isinstance(group.get("step"), Tensor):
                group["step"] = int(group["step"])
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict that was saved by this class, by Apex's, or by the torch optimizer with the same formula.

        State is kept in float32 (float64 for float64 parameters). Raises CheckpointError if the saved optimizer used
        `maximize`, `amsgrad` or `lr_decay`, and ValueError if the groups differ in number or length.
        """
        saved = self._convert_state_dict(state_dict)
        super().load_state_dict(saved)
        keys = chain.from_iterable(group["params"] for group in saved["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(keys, params, strict=True):
            for name, value in saved["state"].get(key, {}).items():
                # torch's load_state_dict has rounded its copy to the parameter's dtype, so take the saved value
                if isinstance(value, Tensor) and value.is_floating_point():
                    self.state[parameter][name] = value.to(parameter.device, full_dtype(parameter))

    def _convert_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved state in the layout of this optimizer, with missing options filled in from the defaults."""
        groups = []
        for group in state_dict["param_groups"]:
            # options of torch's optimizers that Apex's formulas do not have
            for name in ("maximize", "amsgrad", "lr_decay"):
                if group.get(name):
                    own = type(self).__name__
                    raise CheckpointError(
                        f"the saved optimizer ran with {name}={group[name]!r}, which {own} cannot do: resume it in"
                        " torch.optim"
                    )
            groups.append({**self.defaults, **group})
        state = {
            key: {name: value for name, value in entry.items() if value is not None}
            for key, entry in state_dict["state"].items()
        }
        return {**state_dict, "state": state, "param_groups": groups}
