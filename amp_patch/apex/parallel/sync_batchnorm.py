"""`SyncBatchNorm` with Apex's arguments on top of torch's, and functions that convert a model and make process
groups.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ModelError
from ...torch_private import (
    BatchNormBase,
    check_sync_batchnorm_channels,
    check_sync_batchnorm_dim,
    get_own_buffers,
    get_own_children,
    get_own_parameters,
)


class SyncBatchNorm(BatchNormBase):
    """torch.nn.SyncBatchNorm with Apex's `channel_last`, `fuse_relu` and `z`, also on the CPU.

    In training, the statistics are computed over the batches of all ranks of `process_group` together. Batches may
    differ in size; on the CPU, some may be empty. The output has the dtype of the input. `momentum=None` and
    `track_running_stats=False` work as in torch.

    Where torch has kernels, it calls `torch.nn.SyncBatchNorm.forward`. It is no subclass of `torch.nn.SyncBatchNorm`,
    because torch's DistributedDataParallel refuses subclasses on the CPU.

    Args:
        channel_last: inputs are (N, ..., C) instead of (N, C, ...).
        fuse_relu: apply ReLU to the output, after `z` is added.
        process_group: the ranks whose batches are normalized together. Default: all ranks.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize `input`, of at least two dimensions, and add `z`, of the same shape and dtype, to the result.

        With `fuse_relu`, then apply ReLU. The result has the shape and dtype of `input`.
        """
        moves_channels = self.channel_last and input.dim() > 2
        x = input.movedim(-1, 1) if moves_channels else input
        if self.training and x.device.type == "cpu" and dist.is_available() and dist.is_initialized():
            output = self._normalize_on_cpu(x)
        else:
            output = nn.SyncBatchNorm.forward(self, x)  # type: ignore[arg-type]
        output = output.to(input.dtype)
        if moves_channels:
            output = output.movedim(1, -1)
        if z is not None:
            output = output + z
        return F.relu(output) if self.fuse_relu else output

    _check_input_dim: Any = check_sync_batchnorm_dim
    _check_non_zero_input_channels: Any = check_sync_batchnorm_channels

    def _normalize_on_cpu(self, input: Tensor) -> Tensor:
        """Normalize by sums over the ranks, in float32 or float64, because torch has no kernels for this on the CPU."""
        self._check_input_dim(input)
        if input.size(1) != self.num_features:
            raise ValueError(f"SyncBatchNorm expects {self.num_features} channels, not {input.size(1)}")
        x = input.double() if input.dtype is torch.float64 else input.float()
        dims = [0, *range(2, x.dim())]
        # sum the counts together with the values, because batches may differ in size
        count = x.new_tensor([x.numel() / x.size(1)])
        sums = _sum_over_ranks(torch.cat([x.sum(dims), count]), self.process_group)
        total = sums[-1].detach()
        # a single value has no variance; torch's BatchNorm raises ValueError for it, too
        if total <= 1:
            raise ValueError(
                f"SyncBatchNorm expects more than 1 value per channel when training, not {total.item():.0f} on all"
                " ranks together"
            )
        shape = (1, -1, *(1 for _ in dims[1:]))
        centered = x - (sums[:-1] / total).view(shape)
        variance = _sum_over_ranks(centered.square().sum(dims), self.process_group) / total
        # running statistics have the unbiased variance, as in torch
        self._track(sums[:-1].detach() / total, variance.detach() * total / (total - 1))
        output = centered * (variance + self.eps).rsqrt().view(shape)
        return output * self.weight.view(shape) + self.bias.view(shape) if self.affine else output

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics, if there are any."""
        if (
            not self.track_running_stats
            or self.running_mean is None
            or self.running_var is None
            or self.num_batches_tracked is None
        ):
            return
        self.num_batches_tracked.add_(1)
        # if `momentum` is None, running statistics are the mean over all batches, as in torch
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            running.copy_(running * (1 - factor) + value * factor)


class SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over the ranks of a group.

    The gradient is summed, too, because the output of every rank depends on the input of every rank.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum_over_ranks(gradient, ctx.group), None


def _sum_over_ranks(tensor: Tensor, group: Any) -> Tensor:
    total: Tensor = SumOverRanks.apply(tensor, group)  # type: ignore[no-untyped-call]
    return total


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Return `module` with every BatchNorm layer replaced by a SyncBatchNorm.

    torch's SyncBatchNorm counts as a BatchNorm layer, InstanceNorm does not. Layers inside `module` are replaced in
    place. If `module` is a BatchNorm itself, a new layer is returned. New layers hold the same parameters and buffers,
    so optimizers stay valid. New layers keep the training mode and `requires_grad`. If a SyncBatchNorm of this file is
    replaced, the new layer also keeps its `fuse_relu`, and its `channel_last` if that is True. Hooks are lost, so call
    this before `amp.initialize`. Raises ModelError for a lazy layer that has not been called yet, and for a BatchNorm
    with layers inside, such as timm's BatchNormAct2d with its activation: a SyncBatchNorm would not run them. If it
    raises, nothing has changed.
    """
    for layer in module.modules():
        if isinstance(layer, BatchNormBase):
            _check(layer)
    return _convert(module, process_group, channel_last, {})


def _check(layer: BatchNormBase) -> None:
    """Raise ModelError for a layer that a SyncBatchNorm cannot replace."""
    name = type(layer).__name__
    if any(nn.parameter.is_lazy(tensor) for tensor in (*layer.parameters(), *layer.buffers())):
        raise ModelError(f"{name} has uninitialized parameters: run one forward pass before convert_syncbn_model")
    children = get_own_children(layer).items()
    # timm's BatchNormAct2d, for example, runs its children `drop` and `act` in a forward of its own
    lost = [child_name for child_name, child in children if child is not None and not isinstance(child, nn.Identity)]
    if lost:
        raise ModelError(
            f"{name} also runs its {' and '.join(lost)}, which a SyncBatchNorm would leave out: convert the model with"
            " the library of this layer, such as timm.layers.convert_sync_batchnorm"
        )


def _convert(
    module: nn.Module, process_group: Any, channel_last: bool, converted: dict[nn.Module, nn.Module]
) -> nn.Module:
    if module in converted:  # the module is used in several places
        return converted[module]
    result = module
    if isinstance(module, BatchNormBase):
        settings = (module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
        result = SyncBatchNorm(*settings, process_group, channel_last=channel_last)
        if isinstance(module, SyncBatchNorm):
            result.channel_last, result.fuse_relu = channel_last or module.channel_last, module.fuse_relu
        # the tensors themselves, not copies: optimizers hold them
        get_own_parameters(result).update(get_own_parameters(module))
        get_own_buffers(result).update(get_own_buffers(module))
        result.train(module.training)
    converted[module] = result
    for name, child in list(get_own_children(module).items()):
        if child is not None:
            get_own_children(result)[name] = _convert(child, process_group, channel_last, converted)
    return result


def create_syncbn_process_group(group_size: int) -> Any:
    """Split the ranks into consecutive groups of `group_size`, and return the process group of this rank.

    If `group_size` is 0, return None, which means all ranks. Every rank must call this. Raises ValueError if
    `group_size` is negative, or does not divide the number of ranks.
    """
    if group_size == 0:
        return None
    world_size = dist.get_world_size()
    if group_size < 0 or world_size % group_size:
        raise ValueError(
            f"group_size={group_size} must divide the number of ranks, {world_size}, or be 0 for one group of all"
        )
    # torch requires every rank to make every group, in the same order
    groups = [dist.new_group(list(range(first, first + group_size))) for first in range(0, world_size, group_size)]
    return groups[dist.get_rank() // group_size]
