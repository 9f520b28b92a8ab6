"""`FusedNovoGrad`: NovoGrad with Apex's arguments."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import CheckpointError, OptimizerError
from ..updates import full_dtype, norms, novograd_
from .base import FusedOptimizer, Work


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad. `updates.novograd_` has the formula.

    The set of parameters that have gradients may change from step to step.

    In the state dict, the second moments are in the groups, as in Apex: `exp_avg_sq` is a list of two 1-dim float32
    tensors. The first is for the 16-bit parameters of the group, the second for all others. Both have the order of the
    group, and leave out parameters without a step so far. A group without any step has no `exp_avg_sq`.

    Args:
        reg_inside_moment: divide the gradient by the second moment, and add weight decay, before it enters the first
            moment.
        grad_averaging: weigh the gradient by 1 - beta1 in the first moment.
        norm_type: the norm of gradients in the second moment: 2 for the L2 norm, 0 for the largest absolute value.
        init_zero: start the second moment at 0 instead of the norm of the first gradient.
        amsgrad: raises OptimizerError if true.
    """

    _options: ClassVar[tuple[str, ...]] = ("set_grad_none", "moment_mode")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if norm_type not in (0, 2):
            raise OptimizerError(f"FusedNovoGrad: norm_type={norm_type!r} must be 2 (the L2 norm) or 0 (the maximum)")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults, set_grad_none, amsgrad)
        self.moment_mode = 0 if reg_inside_moment else 1

    def _update(self, work: Work) -> None:
        for group, params, gradients in work:
            novograd_(
                gradients,
                params,
                self._moments(params, "exp_avg"),
                self._norm_averages(group, params, gradients),
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=group["eps"],
                step=int(self._count_step(group)),
                weight_decay=group["weight_decay"],
                decays_inside=self.moment_mode == 0,
                corrects_bias=bool(group["bias_correction"]),
                averages_gradients=bool(group["grad_averaging"]),
                norm_type=group["norm_type"],
            )

    def _norm_averages(self, group: dict[str, Any], params: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """Return the second moment of each parameter: a 0-dim running average of the norms of its gradients.

        In the first step of a parameter, the average starts as the norm of the gradient, or as 0 with `init_zero`.
        """
        without_moment = [index for index, parameter in enumerate(params) if "exp_avg_sq" not in self.state[parameter]]
        order = 2.0 if group["norm_type"] == 2 else float("inf")
        first_norms = norms([gradients[index] for index in without_moment], order)
        for index, norm in zip(without_moment, first_norms, strict=True):
            self.state[params[index]]["exp_avg_sq"] = torch.zeros_like(norm) if group["init_zero"] else norm
        for parameter in params:
            state = self.state[parameter]
            state["exp_avg_sq"] = state["exp_avg_sq"].to(full_dtype(parameter))
        return [self.state[parameter]["exp_avg_sq"] for parameter in params]

    def state_dict(self) -> dict[str, Any]:
        """Return the state in Apex's layout. The second moments are copies."""
        saved = super().state_dict()
        # the second moments move from the state of the parameters to the groups
        state = {
            key: {name: value for name, value in entry.items() if name != "exp_avg_sq"}
            for key, entry in saved["state"].items()
        }
        for own_group, group in zip(self.param_groups, saved["param_groups"], strict=True):
            params = own_group["params"]
            parts = self._split(params, [parameter in self.state for parameter in params])
            if any(parts):
                group["exp_avg_sq"] = [
                    (
                        torch.stack([self.state[parameter]["exp_avg_sq"].float() for parameter in part])
                        if part
                        else torch.empty(0)
                    )
                    for part in parts
                ]
        return {**saved, "state": state}

    def _convert_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        saved = super()._convert_state_dict(state_dict)
        for own_group, group in zip(self.param_groups, saved["param_groups"], strict=False):
            averages = group.pop("exp_avg_sq", None)
            if averages is None:
                continue
            averages = [torch.empty(0) if values is None else values for values in averages]
            has_state = [key in saved["state"] for key in group["params"]]
            parts = self._split(own_group["params"], has_state, group["params"])
            if [len(part) for part in parts] != [len(values) for values in averages]:
                raise CheckpointError(
                    f"the saved group has second moments for {len(averages[0])} 16-bit and {len(averages[1])} other"
                    f" parameters, but this one has {len(parts[0])} and {len(parts[1])} with state: load it into the"
                    " model and opt_level that it was saved from"
                )
            for part, values in zip(parts, averages, strict=True):
                for key, value in zip(part, values.unbind(), strict=True):
                    # a copy, because `unbind` returns views of the saved tensor
                    saved["state"][key]["exp_avg_sq"] = value.clone()
        return saved

    @staticmethod
    def _split(
        params: list[Tensor], is_chosen: list[bool], keys: list[Any] | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Return the chosen parameters in two lists: 16-bit parameters, and others. With `keys`, return their keys."""
        low: list[Any] = []
        wide: list[Any] = []
        for parameter, chosen, key in zip(params, is_chosen, params if keys is None else keys, strict=True):
            if chosen:
                (low if parameter.dtype in (torch.float16, torch.bfloat16) else wide).append(key)
        return low, wide
