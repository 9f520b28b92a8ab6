"""`fused_adam_cuda`, the extension module of Apex's FusedAdam of 2019. OpenNMT-py and others call it directly."""

import math

import torch
from torch import Tensor

from ..errors import OptimizerError
from . import updates


@torch.no_grad()
def adam(
    p: Tensor,
    out_p: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    g: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    grad_scale: float,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """Take one Adam step on the parameter `p`. Copy the new `p` to `out_p` unless that is an empty tensor.

    h = g / grad_scale; m = b1 m + (1 - b1) h; v = b2 v + (1 - b2) h^2; p -= s (m / (sqrt(v) + eps) + decay p), where s
    is lr sqrt(1 - b2^step) / (1 - b1^step) with `bias_correction`, else lr.

    Args:
        p, exp_avg, exp_avg_sq: p, m and v: tensors of one shape and any floating dtype, changed in place.
        g: the gradient, of any floating dtype. Not changed.
        mode: must be 1. Any other, such as 0 for eps inside the root, raises OptimizerError.
    """
    if mode != 1:
        raise OptimizerError("fused_adam_cuda.adam: eps_inside_sqrt is not offered: leave it out")
    factor = math.sqrt(1 - beta2**step) / (1 - beta1**step) if bias_correction else 1.0
    updates.adam_(
        [g.to(updates.full_dtype(g)) / grad_scale],
        [p],
        [exp_avg],
        [exp_avg_sq],
        lr=lr * factor,
        betas=(beta1, beta2),
        eps=eps,
        step=step,
        weight_decay=decay,
        is_decoupled=True,
        corrects_bias=False,
    )
    if out_p.numel():
        out_p.copy_(p)
