"""`fused_adam_cuda`, the extension behind the FusedAdam of 2019, which OpenNMT-py and others call by themselves."""

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
    """Take one Adam step on one parameter, with the gradient g / `grad_scale`. Copy the result to `out_p` unless that
    is empty.

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p -= s (m / (sqrt(v) + eps) + decay p), where s is
    lr sqrt(1 - b2^step) / (1 - b1^step) with `bias_correction`, else lr.

    Args:
        p, exp_avg, exp_avg_sq: tensors of one shape and any floating dtype, changed in place.
        g: the gradient, of any floating dtype. Not changed.
        mode: must be 1. 0, which puts eps inside the root, raises OptimizerError.
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
