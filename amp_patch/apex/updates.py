"""The update formulas of Apex's optimizers, over lists of tensors, through `torch._foreach_*`.

`sgd_`, `adam_`, `adagrad_`, `lamb_` and `novograd_` take lists of equal length, gradients first. They read the
gradients, and change the tensors of the other lists in place. They compute in float32 (*full precision*), or in float64
for float64 tensors. 16-bit tensors are copied to float32, and changed tensors are rounded once, when they are copied
back. Call them under `torch.no_grad()`.

`sgd_` and `adam_` use the kernels behind `torch.optim.SGD(fused=True)` and `AdamW(fused=True)` where a kernel supports
the tensors: one launch updates many tensors. They take a flag `found_inf`, a 0-dim float32 tensor or None: if it is 1,
they change no values. Where no kernel supports the tensors, `sgd_` and `adam_` read the flag on the host, and `adam_`
also a `step` that is a tensor. Nothing else here waits for the device.

Formulas use these letters: p parameters, g gradients, m and v the first and second moments, n norms, wd weight decay,
b1 and b2 betas, |x| the L2 norm of a tensor. A hat means that the bias is corrected: m^ = m / (1 - b1^step),
v^ = v / (1 - b2^step). Without `corrects_bias`, m^ = m and v^ = v.
"""

__role__ = "optimizer"  # the role of this code in reports; `insight/sites.py` lists the roles

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..multi_tensor import group
from ..torch_private import (
    foreach_add,
    foreach_add_,
    foreach_addcdiv_,
    foreach_addcmul_,
    foreach_copy_,
    foreach_div,
    foreach_div_,
    foreach_mul,
    foreach_mul_,
    foreach_norm,
    foreach_sqrt,
    fused_adam_,
    fused_adamw_,
    fused_sgd_,
)

Tensors = Sequence[Tensor]
Part = list[Tensor] | tuple[Tensor, ...]
"""Tensors that are all of one device and one dtype."""


def full_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to compute in for `tensor`: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def at_full_precision(read: Tensors, *changed: Tensors) -> Iterator[list[Part]]:
    """Split the lists into parts of one device, and of one dtype for each list. Yield the lists of each part.

    All yielded tensors are at full precision; 16-bit tensors are copied for that. Write
    `for g, p in at_full_precision(gradients, params):` and change the tensors of `p` in place. At the end of the body,
    the copies of 16-bit `changed` tensors are copied back to them, unless the body leaves the loop.
    """
    for sources, *targets in group(read, *changed):
        values: list[Part] = [_to_full(tensors) for tensors in targets]
        yield [_to_full(sources), *values]
        for target, value in zip(targets, values, strict=True):
            # if a list was at full precision already, the body has changed it in place
            if target is not value:
                foreach_copy_(target, value)


def _to_full(tensors: list[Tensor]) -> list[Tensor]:
    if tensors[0].dtype is full_dtype(tensors[0]):
        return tensors
    copies = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    foreach_copy_(copies, tensors)
    return copies


def norms(tensors: Tensors, order: float = 2.0) -> list[Tensor]:
    """Return the norm of each tensor, 0-dim, at full precision. The norm of an empty tensor is 0."""
    results: dict[int, Tensor] = {}  # by the tensor's id
    for (part,) in group(tensors):
        # torch raises an error for the maximum of an empty tensor
        nonempty = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in part]
        results.update(zip(map(id, part), foreach_norm(nonempty, order, dtype=full_dtype(part[0])), strict=True))
    return [results[id(tensor)] for tensor in tensors]


def total_norm(tensors: Tensors, device: torch.device | None = None) -> Tensor:
    """Return the L2 norm of all elements of all tensors, 0-dim and at full precision; 0 without tensors.

    The result is on `device`, by default the device of the first tensor.
    """
    tensor_norms = norms(tensors)
    if not tensor_norms:
        return torch.zeros((), device=device)
    target = tensor_norms[0].device if device is None else device
    dtype = torch.float64 if any(norm.dtype is torch.float64 for norm in tensor_norms) else torch.float32
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(target, dtype) for norm in tensor_norms]))
    return total


def sgd_(
    gradients: Tensors,
    params: Tensors,
    momenta: Tensors | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    is_nesterov: bool,
    is_first: bool,
    gradient_factor: float = 1.0,
    found_inf: Tensor | None = None,
) -> None:
    """SGD with momentum, as in torch.optim.SGD.

    g = gradient_factor g + wd p
    m = g if `is_first`, else momentum m + (1 - dampening) g
    p -= lr m, or with `is_nesterov` p -= lr (g + momentum m)

    If `momentum` is 0, p -= lr g, and `momenta` may be None.
    """
    options: dict[str, Any] = {
        "lr": lr,
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": is_nesterov,
        "is_first_step": is_first,
    }
    changed = [params]
    if momentum != 0 and momenta is not None:
        changed.append(momenta)
    else:
        options["momentum_buffer_list"] = []  # a required argument of the kernel
    for g, p, *rest in at_full_precision(gradients, *changed):
        if gradient_factor != 1.0:
            g = foreach_mul(g, gradient_factor)
        if _run_kernel(fused_sgd_, (p, g, *rest), found_inf, **options):
            continue
        # no kernel takes these tensors, so the flag is read on the host
        if found_inf is not None and bool(found_inf):
            return
        if weight_decay:
            g = foreach_add(g, p, alpha=weight_decay)
        step = g
        for m in rest:  # the momentum, if there is any
            if is_first:
                foreach_copy_(m, g)
            else:
                foreach_mul_(m, momentum)
                foreach_add_(m, g, alpha=1 - dampening)
            step = foreach_add(g, m, alpha=momentum) if is_nesterov else m
        foreach_add_(p, step, alpha=-lr)


def adam_(
    gradients: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int | Tensor,
    weight_decay: float,
    is_decoupled: bool,
    corrects_bias: bool,
    found_inf: Tensor | None = None,
) -> None:
    """Adam, algorithm 1 of Kingma & Ba (arXiv:1412.6980).

    With `is_decoupled`, weight decay is AdamW's, as in Loshchilov & Hutter (arXiv:1711.05101):

    m = b1 m + (1 - b1) g
    v = b2 v + (1 - b2) g^2
    p -= lr (m^ / (sqrt(v^) + eps) + wd p)

    Without `is_decoupled`, the last line has no wd p, and g += wd p comes first. `step` counts from 1; it may be a
    0-dim tensor.
    """
    kernel = fused_adamw_ if is_decoupled else fused_adam_
    options = {"lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}
    for g, p, m, v in at_full_precision(gradients, params, exp_avgs, exp_avg_sqs):
        # the kernels compute the bias correction from a step on the device; an infinite step means no correction
        kernel_step = step if corrects_bias else math.inf
        if isinstance(kernel_step, Tensor):
            kernel_step = kernel_step.to(p[0].device, torch.float32)
        else:
            kernel_step = torch.full((), kernel_step, dtype=torch.float32, device=p[0].device)
        # the kernels take a step for each parameter, but here all parameters have the same
        lists = {"max_exp_avg_sqs": [], "state_steps": [kernel_step] * len(p)}
        if _run_kernel(kernel, (p, g, m, v), found_inf, amsgrad=False, **lists, **options):
            continue
        if found_inf is not None and bool(found_inf):
            return
        correction1, correction2 = bias_corrections(betas, int(step), corrects_bias)
        if weight_decay and not is_decoupled:
            g = foreach_add(g, p, alpha=weight_decay)
        update_moments_(m, v, g, betas, 1 - betas[0])
        if weight_decay and is_decoupled:
            foreach_mul_(p, 1 - lr * weight_decay)
        foreach_addcdiv_(p, m, _get_denominators(v, correction2, eps), -lr / correction1)


def adagrad_(
    gradients: Tensors,
    params: Tensors,
    sums: Tensors,
    *,
    lr: float,
    eps: float,
    weight_decay: float,
    is_decoupled: bool,
) -> None:
    """Adagrad of Duchi et al. (JMLR 12, 2011), with diagonal matrices. The formulas call the tensors of `sums` h.

    h += g^2
    p -= lr (g / (sqrt(h) + eps) + wd p)

    Without `is_decoupled`, the last line has no wd p, and g += wd p comes first.
    """
    for g, p, h in at_full_precision(gradients, params, sums):
        if weight_decay and not is_decoupled:
            g = foreach_add(g, p, alpha=weight_decay)
        foreach_addcmul_(h, g, g)
        denominators = foreach_sqrt(h)
        foreach_add_(denominators, eps)
        update = foreach_div(g, denominators)
        if weight_decay and is_decoupled:
            foreach_add_(update, p, alpha=weight_decay)
        foreach_add_(p, update, alpha=-lr)


def lamb_(
    gradients: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
    weight_decay: float,
    is_decoupled: bool,
    corrects_bias: bool,
    averages_gradients: bool,
    gradient_norm: Tensor,
    max_gradient_norm: float | None,
    always_adapts: bool,
) -> None:
    """LAMB of You et al. (arXiv:1904.00962), algorithm 2, with the clipping of NVIDIA's BERT.

    g /= max(1, gradient_norm / max_gradient_norm)
    m = b1 m + (1 - b1) g, or without `averages_gradients` m = b1 m + g
    v = b2 v + (1 - b2) g^2
    u = m^ / (sqrt(v^) + eps) + wd p
    p -= lr (|p| / |u|) u, with the norms of each tensor

    `gradient_norm` (0-dim) is the norm of the gradients of all parameters of the optimizer, not only of `gradients`. If
    `max_gradient_norm` is None or 0, gradients are not clipped. Without `is_decoupled`, u has no wd p, and g += wd p
    follows the clipping.

    The ratio |p| / |u| is replaced by 1 where one of the norms is 0. It is replaced everywhere if `weight_decay` is 0
    and `always_adapts` is false.
    """
    corrections = bias_corrections(betas, step, corrects_bias)
    gradient_share = 1 - betas[0] if averages_gradients else 1.0
    for g, p, m, v in at_full_precision(gradients, params, exp_avgs, exp_avg_sqs):
        if max_gradient_norm:
            g = clip(g, gradient_norm, max_gradient_norm)
        if weight_decay and not is_decoupled:
            g = foreach_add(g, p, alpha=weight_decay)
        update_moments_(m, v, g, betas, gradient_share)
        update = adam_direction(m, v, corrections, eps)
        if weight_decay and is_decoupled:
            foreach_add_(update, p, alpha=weight_decay)
        if weight_decay or always_adapts:
            update = adapt(update, torch.stack(norms(p)), torch.stack(norms(update)))
        foreach_add_(p, update, alpha=-lr)


def clip(gradients: Part, norm: Tensor, max_norm: float) -> tuple[Tensor, ...]:
    """Return g / max(1, norm / max_norm), with a 0-dim norm."""
    return foreach_div(gradients, (norm.to(gradients[0].device) / max_norm).clamp(min=1.0))


def adam_direction(m: Part, v: Part, corrections: tuple[float, float], eps: float) -> tuple[Tensor, ...]:
    """Return m^ / (sqrt(v^) + eps). `corrections`: the result of `bias_corrections`."""
    update = foreach_div(m, _get_denominators(v, corrections[1], eps))
    foreach_div_(update, corrections[0])
    return update


def adapt(updates: Part, param_norms: Tensor, update_norms: Tensor) -> tuple[Tensor, ...]:
    """Return each update u times |p| / |u|, where p is its parameter; u itself if one of the two norms is 0."""
    ratios = torch.where((param_norms > 0) & (update_norms > 0), param_norms / update_norms, 1.0)
    return foreach_mul(updates, ratios.unbind())


def novograd_(
    gradients: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    norm_avgs: Tensors,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
    weight_decay: float,
    decays_inside: bool,
    corrects_bias: bool,
    averages_gradients: bool,
    norm_type: int,
) -> None:
    """NovoGrad of Ginsburg et al. (arXiv:1905.11286).

    It is Adam with one averaged norm n for each gradient, in place of a second moment for each element. `norm_avgs`
    holds the n, 0-dim tensors.

    n = sqrt(b2 n^2 + (1 - b2) |g|^2) for `norm_type` 2, n = b2 n + (1 - b2) (largest |element| of g) for `norm_type` 0
    n^ = n / sqrt(1 - b2^step), or without `corrects_bias` n^ = n
    m = b1 m + (1 - b1) g, or without `averages_gradients` m = b1 m + g
    p -= lr (m^ / (n^ + eps) + wd p)

    With `decays_inside`, g / (n^ + eps) + wd p takes the place of g in m, and the last line is p -= lr m^.
    """
    correction1, correction2 = bias_corrections(betas, step, corrects_bias)
    gradient_share = 1 - betas[0] if averages_gradients else 1.0
    for g, p, m, n in at_full_precision(gradients, params, exp_avgs, norm_avgs):
        new_norms = norms(g, 2.0 if norm_type == 2 else math.inf)
        if norm_type == 2:
            blended = foreach_mul(foreach_mul(n, n), betas[1])
            foreach_addcmul_(blended, new_norms, new_norms, 1 - betas[1])
            foreach_copy_(n, foreach_sqrt(blended))
        else:
            foreach_mul_(n, betas[1])
            foreach_add_(n, new_norms, alpha=1 - betas[1])
        denominators = foreach_div(n, math.sqrt(correction2))
        foreach_add_(denominators, eps)
        if decays_inside:
            g = foreach_div(g, denominators)
            if weight_decay:
                foreach_add_(g, p, alpha=weight_decay)
        foreach_mul_(m, betas[0])
        foreach_add_(m, g, alpha=gradient_share)
        update = foreach_div(m, correction1)
        if not decays_inside:
            foreach_div_(update, denominators)
            if weight_decay:
                foreach_add_(update, p, alpha=weight_decay)
        foreach_add_(p, update, alpha=-lr)


def _run_kernel(kernel: Callable[..., Any], lists: Sequence[Part], found_inf: Tensor | None, **options: Any) -> bool:
    """Run a kernel on `lists` (parameters, gradients and moments), and return True.

    Return False, and change nothing, if torch has no such kernel for the device, or if the kernel does not support the
    tensors. A kernel takes one dtype for all lists. It reads memory in order, so a parameter, its gradient and its
    moments must have the same memory layout (`_have_same_layout`).
    """
    if len({tensors[0].dtype for tensors in lists}) > 1 or not all(map(_have_same_layout, *lists)):
        return False
    flag = None if found_inf is None else found_inf.to(lists[0][0].device)
    try:
        kernel(*lists, **options, maximize=False, found_inf=flag)
    except NotImplementedError:  # raised before anything is changed, if the device has no kernel
        return False
    # The kernel does not raise the version of the parameters, by which the cache of 16-bit weights
    # (`casting/weight_cache.py`) knows that they have changed.
    torch.autograd.graph.increment_version(list(lists[0]))
    return True


def _have_same_layout(*tensors: Tensor) -> bool:
    """Return whether all tensors, which have one shape, are contiguous, or all are channels_last.

    False if one is of a subclass of Tensor other than Parameter, or a lazy negative (`Tensor.is_neg`).
    """
    if any(type(tensor) not in (Tensor, nn.Parameter) or tensor.is_neg() for tensor in tensors):
        return False
    return all(map(Tensor.is_contiguous, tensors)) or (
        tensors[0].dim() == 4 and all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors)
    )


def bias_corrections(betas: tuple[float, float], step: int, corrects_bias: bool) -> tuple[float, float]:
    """Return the divisors of the first and second moments: 1 - beta^step each, or 1 without a correction."""
    return (1 - betas[0] ** step, 1 - betas[1] ** step) if corrects_bias else (1.0, 1.0)


def update_moments_(m: Part, v: Part, g: Part, betas: tuple[float, float], gradient_share: float) -> None:
    """m = b1 m + gradient_share g; v = b2 v + (1 - b2) g^2."""
    foreach_mul_(m, betas[0])
    foreach_add_(m, g, alpha=gradient_share)
    foreach_mul_(v, betas[1])
    foreach_addcmul_(v, g, g, 1 - betas[1])


def _get_denominators(v: Part, correction: float, eps: float) -> tuple[Tensor, ...]:
    """Return sqrt(v / correction) + eps."""
    roots = foreach_sqrt(v)
    foreach_div_(roots, math.sqrt(correction))
    foreach_add_(roots, eps)
    return roots
