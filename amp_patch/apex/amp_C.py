"""`amp_C`, a compiled extension of Apex, rebuilt on `torch._foreach_*`.

Tensors may be on any device, of any floating dtype, contiguous or not. The functions named `multi_tensor_...` take a
chunk size (ignored), a flag (one integer element) and `tensor_lists`. They write results into the tensors of these
lists, but `multi_tensor_l2norm` returns its results. Functions that check a list set the flag to 1 if a tensor in it
holds inf or NaN; no function sets the flag back to 0. A docstring that begins with "[inputs, outputs]" says that
`tensor_lists` is a list of inputs and a list of outputs.

Some functions are left out: see `_gone`. Unlike Apex's, `multi_tensor_lamb` does not change gradients.
`multi_tensor_sgd` waits for the device, because it reads the flag.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import OptimizerError
from ..multi_tensor import group
from ..torch_private import foreach_add_, foreach_copy_, foreach_mul, foreach_non_finite_check_and_unscale_
from . import _gone, updates
from .updates import Tensors

Lists = Sequence[Tensors]


def _multiply(tensors: Tensors, factor: float, flag: Tensor | None = None) -> list[Tensor]:
    """Return copies in float32 (float64 for float64), times `factor`. Set `flag`, if given, for inf and NaN."""
    copies = [torch.empty_like(tensor, dtype=updates.full_dtype(tensor)) for tensor in tensors]
    if copies:
        # few launches for all tensors, where `Tensor.to` would take one for each
        foreach_copy_(copies, list(tensors))
    for (part,) in group(copies):
        found_inf = torch.zeros((), dtype=torch.float32, device=part[0].device)
        # the kernel multiplies by its last argument, which torch.amp sets to 1 / scale
        foreach_non_finite_check_and_unscale_(part, found_inf, torch.full_like(found_inf, float(factor)))
        if flag is not None:
            _set_flag(flag, found_inf)
    return copies


def _set_flag(flag: Tensor, is_overflow: Tensor) -> None:
    flag.copy_(torch.maximum(flag, is_overflow.to(flag)))


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float) -> None:
    """[inputs, outputs]: output = scale * input, in the dtype of the output. Checks the inputs."""
    inputs, outputs = tensor_lists
    _copy(outputs, _multiply(inputs, scale, noop_flag))


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, a: float, b: float, arg_to_check: int
) -> None:
    """[xs, ys, outputs]: output = a x + b y. Checks the xs (`arg_to_check` 0), the ys (1) or both (-1)."""
    xs, ys, outputs = tensor_lists
    terms = _multiply(xs, a, None if arg_to_check == 1 else noop_flag)
    y_terms = _multiply(ys, b, None if arg_to_check == 0 else noop_flag)
    if terms:
        foreach_add_(terms, y_terms)
    _copy(outputs, terms)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """[xs]: return the L2 norm of all tensors together, of shape (1,), and of each tensor, of shape (n,), in float32.

    Without `per_tensor`, the second has shape (0,). Sets the flag if the norm of all tensors together is not finite.
    """
    xs = tensor_lists[0]
    total = updates.total_norm(xs, noop_flag.device).float()
    _set_flag(noop_flag, ~torch.isfinite(total))
    norms = [norm.to(noop_flag.device, torch.float32) for norm in updates.norms(xs)] if per_tensor else []
    return total.reshape(1), torch.stack(norms) if norms else torch.empty(0, device=noop_flag.device)


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """[gradients, params, momenta, optionally copies of params]: `updates.sgd_` on scale * gradient.

    Writes the new params to the copies, too. Does nothing if the flag is set. `wd_after_momentum` raises OptimizerError
    if true.
    """
    if wd_after_momentum:
        raise OptimizerError("multi_tensor_sgd: wd_after_momentum is not offered: leave it out")
    if bool(noop_flag.any()):
        return
    gradients, params, momenta, *copies = tensor_lists
    updates.sgd_(
        gradients,
        params,
        momenta,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=wd,
        is_nesterov=nesterov,
        is_first=first_run,
        gradient_factor=scale,
    )
    for outputs in copies:
        _copy(outputs, params)


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """[gradients, params, exp_avgs, exp_avg_sqs]: `updates.adam_`, with decoupled weight decay if `mode` is 1."""
    updates.adam_(
        *tensor_lists,
        lr=lr,
        betas=(beta1, beta2),
        eps=epsilon,
        step=step,
        weight_decay=weight_decay,
        is_decoupled=mode == 1,
        corrects_bias=bool(bias_correction),
    )


@torch.no_grad()
def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool | None = False,
) -> None:
    """[gradients, params, exp_avgs, exp_avg_sqs]: `updates.lamb_`, with decoupled weight decay if `mode` is 1."""
    updates.lamb_(
        *tensor_lists,
        lr=lr,
        betas=(beta1, beta2),
        eps=epsilon,
        step=step,
        weight_decay=weight_decay,
        is_decoupled=mode == 1,
        corrects_bias=bool(bias_correction),
        averages_gradients=bool(grad_averaging),
        gradient_norm=global_grad_norm.reshape(()),
        max_gradient_norm=max_grad_norm,
        always_adapts=bool(use_nvlamb),
    )


@torch.no_grad()
def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    per_tensor_decay: Tensor,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    global_grad_norm: Tensor,
    max_global_grad_norm: float,
) -> None:
    """[gradients, params, exp_avgs, exp_avg_sqs, directions]: the first half of `updates.lamb_`.

    Writes u of the formula of `lamb_` to the directions. `per_tensor_decay` has shape (n,): the weight decay of each
    tensor. `step` counts from 0.
    """
    norm, betas = global_grad_norm.reshape(()), (beta1, beta2)
    corrections = updates.bias_corrections(betas, step + 1, True)
    for g, p, m, v, target, decay in updates.at_full_precision(*tensor_lists, per_tensor_decay.unbind()):
        updates.update_moments_(m, v, updates.clip(g, norm, max_global_grad_norm), betas, 1 - beta1)
        update = updates.adam_direction(m, v, corrections, epsilon)
        foreach_add_(update, foreach_mul(p, decay))
        foreach_copy_(target, update)


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    lr: float,
    weight_decay: float,
    use_nvlamb: bool | None = False,
) -> None:
    """[params, directions]: the second half of `updates.lamb_`, p -= lr (|p| / |u|) u, where u is the direction.

    The norms have shape (n,). If `weight_decay` is 0 and `use_nvlamb` is false, p -= lr u.
    """
    params, directions = tensor_lists
    norms = (per_tensor_param_norm.unbind(), per_tensor_update_norm.unbind())
    for direction, p, param_norms, direction_norms in updates.at_full_precision(directions, params, *norms):
        update = direction
        if weight_decay != 0 or use_nvlamb:
            update = updates.adapt(direction, torch.stack(param_norms), torch.stack(direction_norms))
        foreach_add_(p, update, alpha=-lr)


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Update a loss scale (float32) and its two counters (int32) in place, one element each. Return the scale.

    Does not wait for the device. From the `hysteresis`-th overflow in a row on, each overflow multiplies the scale by
    `backoff_factor`. `growth_interval` good steps in a row multiply it by `growth_factor`, unless that gives inf. A
    scale that falls below the smallest normal number becomes 0, as in Apex.
    """
    # `torch.where` instead of `if`, which would wait for the device
    is_overflow = found_inf > 0
    overflows_left = torch.where(is_overflow, hysteresis_tracker - 1, hysteresis)
    good_steps = torch.where(is_overflow, 0, growth_tracker + 1)
    grows = ~is_overflow & (good_steps == growth_interval)
    grown = current_scale * growth_factor
    backed_off = current_scale * backoff_factor
    backed_off = torch.where(backed_off < torch.finfo(torch.float32).tiny, 0.0, backed_off)
    scale = torch.where(is_overflow & (overflows_left <= 0), backed_off, current_scale)
    current_scale.copy_(torch.where(grows & torch.isfinite(grown), grown, scale))
    growth_tracker.copy_(torch.where(grows, 0, good_steps))
    hysteresis_tracker.copy_(overflows_left)
    return current_scale


def _copy(targets: Tensors, sources: Tensors) -> None:
    if targets:
        foreach_copy_(list(targets), list(sources))


def __getattr__(name: str) -> Any:
    raise AttributeError(_gone.advise(f"amp_C.{name}") or f"module 'amp_C' has no attribute {name!r}")
