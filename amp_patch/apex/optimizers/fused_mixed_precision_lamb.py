"""`FusedMixedPrecisionLamb`: LAMB with masters of its own, for torch's GradScaler."""

from typing import Any

import torch
from torch import Tensor

from ..updates import full_dtype
from .base import Work
from .fused_lamb import FusedLAMB


class FusedMixedPrecisionLamb(FusedLAMB):
    """`FusedLAMB` that steps on float32 masters of parameters in `reduced_precision_dtype`, and unscales gradients.

    Use it with `torch.amp.GradScaler`, which passes its scale and its flag to the step.

    Args:
        step: the number of steps that an earlier run has taken.
        reduced_precision_dtype: the dtype of the parameters that get masters. None: no parameter gets one.
    """

    _step_supports_amp_scaling = True
    """Tells GradScaler to set `found_inf` and `grad_scale` (None after `unscale_`) for each step."""

    _options = (*FusedLAMB._options, "reduced_precision_dtype")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            params,
            float(lr),
            bias_correction,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode,
            grad_averaging,
            max_grad_norm=max_grad_norm,
            use_nvlamb=use_nvlamb,
        )
        self.reduced_precision_dtype = reduced_precision_dtype
        for group in self.param_groups:
            group.setdefault("step", int(step))

    def _update(self, work: Work) -> None:
        if self.found_inf is not None and bool(self.found_inf):  # waits for the device
            return
        # GradScaler sets `grad_scale` for one step, and deletes it afterwards; without a GradScaler it is missing
        scale = getattr(self, "grad_scale", None)
        unscaled: Work = []
        for group, params, gradients in work:
            if scale is not None:
                gradients = [g.to(full_dtype(g)) / scale.to(g.device) for g in gradients]
            unscaled.append((group, params, gradients))
        super()._update(unscaled)

    def _has_master(self, parameter: Tensor) -> bool:
        return parameter.dtype is self.reduced_precision_dtype
