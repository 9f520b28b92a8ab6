"""Functions that cast networks to float16, and copy values between their parameters and float32 masters."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from ...torch_private import (
    BatchNormBase,
    flatten_dense_tensors,
    foreach_copy_,
    get_own_buffers,
    get_own_parameters,
    unflatten_dense_tensors,
)

clip_grad_norm = clip_grad_norm_


class tofp16(nn.Module):
    """Returns its input as float16."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `input` as float16."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Cast affine BatchNorm layers back to float32, in place: in `module`, or `module` itself. Return `module`."""
    for layer in module.modules():
        if isinstance(layer, BatchNormBase) and layer.affine:
            layer.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Cast `network` to float16 in place, and its affine BatchNorm layers back to float32.

    Returns an nn.Sequential that casts its input to float16, and then calls the network.
    """
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating parameters, gradients and buffers of a module to `dtype`, in place. Submodules stay as they are."""
    for parameter in get_own_parameters(module).values():
        if parameter is not None and parameter.is_floating_point():
            # torch refuses a gradient whose dtype differs from its parameter's
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None if gradient is None else gradient.to(dtype)
    for buffer in get_own_buffers(module).values():
        if buffer is not None and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast `network` to `dtype` in place, except affine BatchNorm layers, and return it."""
    for module in network.modules():
        if isinstance(module, BatchNormBase) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            # cuDNN wants the weights in one piece of memory, which the cast has split
            module.flatten_parameters()
    return network


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Return the trainable parameters, and their float32 masters: a copy of each parameter.

    With `flat_master`, there is a single master of shape (n,), which holds the values of all n elements. Its gradient
    is zeros. Parameters of several dtypes raise RuntimeError with `flat_master`.
    """
    params: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not flat_master:
        return params, [nn.Parameter(parameter.detach().clone().float()) for parameter in params]
    dtypes = {parameter.dtype for parameter in params}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise RuntimeError(
            f"one flat master needs parameters of one dtype, not {names}: leave out flat_master, or BN_convert_float"
        )
    master = nn.Parameter(flatten_dense_tensors([parameter.detach() for parameter in params]).float())
    master.grad = torch.zeros_like(master)
    return params, [master]


def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy gradients of parameters to the gradients of masters. If a parameter has no gradient, the gradient of its
    master becomes None, or zeros in a flat master.
    """
    if flat_master:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        flat = flatten_dense_tensors(gradients).to(master_params[0].dtype)
        master_params[0].grad = flat
        return
    for parameter, master in zip(model_params, master_params, strict=True):
        if parameter.grad is None or master.grad is None:
            # `_copy` below fills the empty gradient
            master.grad = None if parameter.grad is None else torch.empty_like(master, requires_grad=False)
    _copy([m.grad for m in master_params if m.grad is not None], [p.grad for p in model_params if p.grad is not None])


def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the masters' values to the parameters."""
    sources = unflatten_dense_tensors(master_params[0].detach(), model_params) if flat_master else master_params
    _copy(model_params, sources)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    with torch.no_grad():
        if targets:
            foreach_copy_(list(targets), list(sources))


def to_python_float(t: Any) -> float:
    """Return the value of a one-element tensor, or the first element of a sequence. Waits for the device."""
    return float(t.item() if hasattr(t, "item") else t[0])
