"""Functions on lists of gradients, in few kernels: multiply or divide them by a loss scale, check them for inf and NaN,
and add them to the gradients of float32 masters.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..multi_tensor import copy_, group
from ..torch_private import (
    foreach_add_,
    foreach_mul_,
    foreach_non_finite_check_and_unscale_,
    foreach_norm,
    get_local_tensor,
    get_sparse_values,
    get_storage_address,
    get_storage_uses,
    view_negated,
)
from .split_masters import ClosedMaster, get_gradient, has_gradient, open_gradients

# op lists may patch torch.reciprocal and torch.div, but cannot patch these
_reciprocal, _divide = torch.ops.aten.reciprocal.default, torch.ops.aten.div.Tensor


def unscale_(gradients: Sequence[Tensor], scale: Tensor, found_inf: Tensor | None) -> None:
    """Divide `gradients` by `scale`, and set `found_inf` (None: no check) to 1.0 if an element is inf or NaN. Reads and
    writes each gradient once.

    Gradients may be of any floating (16 bits or more) or complex dtype, dense or sparse (COO), on any devices. `scale`
    and `found_inf` are 0-dim float32. Waits for a device only to copy `scale` or a flag from the device to
    a CPU, or back.
    """
    groups = _group_values(gradients)
    if not groups:
        return
    inverse = _reciprocal(scale)
    for values in groups:
        device = values[0].device
        # the kernel needs its flag on the device of the gradients
        is_same_device = found_inf is not None and found_inf.device == device
        flag = found_inf if is_same_device else torch.zeros((), dtype=torch.float32, device=device)
        assert flag is not None
        foreach_non_finite_check_and_unscale_(values, flag, inverse.to(device))
        if found_inf is not None and not is_same_device:
            found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device)))


def rescale_(gradients: Sequence[Tensor], scale: Tensor) -> None:
    """Multiply `gradients` by `scale` (0-dim float32), so that a backward pass of a loss scaled by it may add to them.

    Waits for a device only if gradients are on a GPU and `scale` on the CPU, or the other way round.
    """
    for values in _group_values(gradients):
        foreach_mul_(values, scale.to(values[0].device))


def change_scale_(gradients: Iterable[Tensor | None], before: Tensor | None, after: Tensor | None) -> None:
    """Change the loss scale that gradients are multiplied by (0-dim; None: 1). Waits as `rescale_` does."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not present or before is after:
        return
    factor = after
    if before is not None:
        factor = _reciprocal(before) if after is None else _divide(after.to(before.device), before)
    assert factor is not None
    rescale_(present, factor)


def drop_gradients(holders: Iterable[Tensor]) -> None:
    """Set the gradients of parameters and masters to None."""
    for holder in holders:
        if type(holder) is ClosedMaster:
            holder.low_half.gradient = None
        holder.grad = None


def either(left: Tensor | None, right: Tensor) -> Tensor:
    """Return the larger of two flags, on the device of `left`. Return `right` if `left` is None."""
    return right if left is None else torch.maximum(left, right.to(left.device))


def find_nonfinite(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters whose gradients hold inf or NaN.

    Waits once for the device. If the sum of a gradient is not finite, waits once more for each gradient.
    """
    with_values: list[tuple[Tensor, Tensor]] = []
    for parameter in parameters:
        gradient = get_gradient(parameter)
        if gradient is not None:
            with_values.append((parameter, dense_values(gradient)))
    if not with_values:
        return []
    # A sum over inf or NaN is inf or NaN, and takes a tenth of the time of isfinite. If the sum is not finite, look at
    # each element: a sum of finite values can overflow, too.
    device = with_values[0][1].device
    sums = torch.stack([values.sum().to(device, torch.float32) for _, values in with_values])
    if bool(torch.isfinite(sums).all()):
        return []
    return [parameter for parameter, values in with_values if not bool(torch.isfinite(values).all())]


def sum_norms(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the sum of the L2 norms of all gradients of each device and dtype: 0-dim float32. Waits for nothing.

    The sum is inf or NaN if a gradient has such a value. It can also be inf if finite values are above 1e19, because
    their squares overflow in float32.
    """
    groups = _group_values([gradient for gradient in map(get_gradient, parameters) if gradient is not None])
    return [_sum_norms_of(values) for values in groups]


def _sum_norms_of(values: list[Tensor]) -> Tensor:
    # At least float32, because squares of finite 16-bit values may overflow. float64 stays float64: torch raises an
    # error if a norm is to have a narrower dtype than its input.
    dtype = torch.promote_types(values[0].dtype, torch.float32)
    return torch.stack(foreach_norm(values, 2, dtype=dtype)).sum().to(torch.float32)


def _group_values(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the values that gradients store, in lists of one device and dtype each."""
    if not gradients:
        return []
    # nearly every model has dense, real gradients of one device and dtype: they need no grouping
    dtype, device = gradients[0].dtype, gradients[0].device
    for gradient in gradients:
        is_plain = type(gradient) is Tensor and gradient.layout is torch.strided and not gradient.is_neg()
        if not is_plain or gradient.dtype is not dtype or gradient.device != device or dtype.is_complex:
            return [values for (values,) in group(map(dense_values, gradients))]
    return [list(gradients)]


def dense_values(gradient: Tensor) -> Tensor:
    """Return the values that a gradient stores, as a real tensor in the same memory.

    Of a sparse gradient (COO), these are the entries that it stores; of a DTensor, the part on this rank.

    If the gradient is a lazy conjugate or negative, the values in memory have other signs than the gradient. Signs
    matter neither for dividing by a scale nor for the check.
    """
    if type(gradient) is not Tensor and (local := get_local_tensor(gradient)) is not None:
        gradient = local
    values = get_sparse_values(gradient) if gradient.layout == torch.sparse_coo else gradient
    if values.is_complex():
        values = torch.view_as_real(values.conj() if values.is_conj() else values)
    return view_negated(values) if values.is_neg() else values


# ---- into the gradients of masters -----------------------------------------------------------------------------------


def have_gradients(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Return whether some 16-bit parameter has a gradient that has not been moved to its master yet."""
    unmoved = [parameter for parameter, _ in pairs if parameter.grad is not None]
    return bool(unmoved)


def move_to_masters_(pairs: Iterable[tuple[Tensor, Tensor]], scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Divide the gradients of 16-bit parameters by `scale` (0-dim; None: 1), add them to the gradients of their float32
    masters, and set the parameters' gradients to None.

    A `ClosedMaster` (a master without float32 values at present) may keep the 16-bit gradient as it is. It does so only
    without a scale, and if it has no gradient yet.

    Args:
        pairs: each parameter with its master.
        found_inf: 0-dim float32, set to 1.0 if an element of a gradient is inf or NaN. None, or no scale: do not check.

    Waits as `unscale_` does.
    """
    unmoved = [pair for pair in pairs if pair[0].grad is not None]
    sizes = [master.numel() for _, master in unmoved]
    # On a CPU without a scale, each gradient is converted to float32 and freed before the next one. The peak memory is
    # lowest if the largest comes first, while the others are still in 16 bits.
    largest_first = sorted(range(len(unmoved)), key=sizes.__getitem__, reverse=True)
    masters: list[Tensor] = []
    gradients: list[Tensor] = []
    for index in largest_first:
        parameter, master = unmoved[index]
        assert parameter.grad is not None
        gradient = parameter.grad.detach()
        parameter.grad = None
        closed = master if type(master) is ClosedMaster else None
        layout = master if closed is None else closed.low_half.low
        is_same_layout = gradient.layout is torch.strided and gradient.stride() == layout.stride()
        has_sum = master.grad is not None if closed is None else has_gradient(closed)
        is_first = scale is None and is_same_layout and not has_sum
        if is_first and closed is not None and _is_alone(gradient):
            closed.low_half.gradient = gradient
        elif is_first and gradient.is_cpu:
            master.grad = gradient.float()  # frees the 16-bit gradient before the next one is converted
        else:
            masters.append(master)
            gradients.append(gradient)
    if not gradients:
        return
    if scale is not None or not all(gradient.is_cpu for gradient in gradients):
        gradients = _to_float32(gradients, masters)  # on a CPU without a scale, `_add_all` adds the 16-bit gradients
    if scale is not None:
        unscale_(gradients, scale, found_inf)
    _add_all(masters, gradients)


def _is_alone(gradient: Tensor) -> bool:
    """Return whether no other tensor uses the memory of a gradient.

    A gradient may be a view of a bucket of DistributedDataParallel, which overwrites the bucket in the next pass.
    """
    lone = torch.empty((), device="cpu")
    own_uses = get_storage_uses(get_storage_address(lone))  # of a tensor that alone uses its memory
    return get_storage_uses(get_storage_address(gradient)) <= own_uses


def _add_all(masters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add gradients to the gradients of masters. All sums of two dense tensors take one call."""
    sums: list[Tensor] = []
    addends: list[Tensor] = []
    open_gradients(masters)
    for master, gradient in zip(masters, gradients, strict=True):
        total = master.grad
        layout = master.low_half.low if type(master) is ClosedMaster else master
        if gradient.is_sparse or (total is not None and total.is_sparse):
            _add(master, gradient)
        elif total is not None:
            sums.append(total)
            addends.append(gradient)
        elif gradient.dtype is torch.float32 and gradient.stride() == layout.stride():
            master.grad = gradient
        else:
            _add(master, gradient)
    if sums:
        foreach_add_(sums, addends)


def _add(master: Tensor, gradient: Tensor) -> None:
    """Add a gradient of any dtype to the gradient of a master in float32. The master has no gradient yet, or one of the
    two is sparse.
    """
    total = master.grad
    if total is None:
        master.grad = _to_float32([gradient], [master])[0]
    elif total.is_sparse:
        # torch adds a sparse tensor to a dense one, but raises an error if the sparse one comes first
        master.grad = gradient.to(total.dtype) + total
    else:
        master.grad = total + gradient


def _to_float32(gradients: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients in float32. Dense gradients are copied into the layout of their masters, with one kernel for
    each (device, dtype). A sparse gradient that is float32 is returned itself.
    """
    converted: list[Tensor] = []
    copies: list[Tensor] = []
    sources: list[Tensor] = []
    for gradient, master in zip(gradients, masters, strict=True):
        if gradient.layout != torch.strided:
            converted.append(gradient.float())
            continue
        layout = master.low_half.low if type(master) is ClosedMaster else master
        copies.append(torch.empty_like(layout, dtype=torch.float32, requires_grad=False))
        sources.append(gradient)
        converted.append(copies[-1])
    copy_(group(copies, sources))  # fills them all
    return converted
