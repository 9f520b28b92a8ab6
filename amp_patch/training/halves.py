"""Splits float32 values into bfloat16 weights and the 16 bits that the weights lack, and joins them again.

A weight is the upper half of its float32 value, rounded half away from zero. The low half is the lower 16 bits of the
value, as int16. Read as int32, the value is `weight * 2**16 + low`: a low half is negative exactly where the weight was
rounded away from zero. So `join(split(x)) == x`, bit for bit; a NaN comes back as torch's default NaN. torch's own
rounding goes half to even, and would lose the direction at a tie.

After an edit of a weight, the low half stays, so the value is off by at most half the spacing of bfloat16. A weight of
0 with a negative low half can only be an edit. It joins to 0.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..multi_tensor import copy_, group
from ..torch_private import flatten_dense_tensors, unflatten_dense_tensors

_HALF = 0x8000
_UPPER = -0x10000
"""The mask of the upper half of an int32."""

_MAGNITUDE = 0x7FFFFFFF
"""The mask of all bits of an int32 but the sign."""

_BLOCK_ON_CPU = 2**17
"""Elements that a kernel takes at once. The temporary tensors of a block fit into the cache of a core."""

_BLOCK = 2**24
"""The same on other devices, where each kernel costs a launch."""


def split_(values: Sequence[Tensor], weights: Sequence[Tensor], lows: Sequence[Tensor]) -> None:
    """Write float32 values to their bfloat16 weights and int16 low halves, of the same shapes. All are on one device,
    except the weights. The low halves are dense.
    """
    with torch.inference_mode(False), torch.no_grad():
        for chosen in _choose_blocks(lows):
            block = _pick(values, chosen), _pick(weights, chosen), _pick(lows, chosen)
            if len(chosen) > 1:
                _split_small(*block)
                continue
            room = torch.empty(0)
            for value, weight, low in _cut(*block):
                if room.shape != value.shape or room.stride() != value.stride():
                    room = torch.empty_like(value)  # taken once: fresh memory costs as much time as the kernels
                _split_flat(room.copy_(value), low)
                weight.copy_(room)


def join(weights: Sequence[Tensor], lows: Sequence[Tensor]) -> list[Tensor]:
    """Return the float32 values of weights and low halves, in the layout of the low halves.

    Small values are views of one tensor. The low halves are dense and on one device.
    """
    joined: list[Tensor] = []
    with torch.inference_mode(False), torch.no_grad():
        for chosen in _choose_blocks(lows):
            block = _pick(weights, chosen), _pick(lows, chosen)
            if len(chosen) > 1:
                joined += _join_small(*block)
                continue
            value = torch.empty_like(block[1][0], dtype=torch.float32)
            room = torch.empty(0), torch.empty(0)
            for part, weight, low in _cut([value], *block):
                if room[0].shape != low.shape or room[0].stride() != low.stride():
                    room = torch.empty_like(low, dtype=torch.int32), torch.empty_like(low, dtype=torch.int32)
                _join_flat(part, weight, low, room)
            joined.append(value)
    return joined


def _split_flat(values: Tensor, low: Tensor) -> None:
    """Write the low half of values, and replace the values by the weight in float32."""
    values.nan_to_num_(torch.nan, torch.inf, -torch.inf)  # rounding could carry the bits of another NaN into the sign
    bits = values.view(torch.int32)
    low.copy_(bits)
    bits.add_(_HALF).bitwise_and_(_UPPER)


def _join_flat(values: Tensor, weight: Tensor, low: Tensor, room: tuple[Tensor, Tensor]) -> None:
    """Write the values of a weight and a low half to `values`. `room`: two int32 tensors for temporary values."""
    values.copy_(weight)
    bits = values.view(torch.int32)
    half, lowest = room
    half.copy_(low)
    # a low half of at least minus the magnitude of the weight leaves the sign bit alone
    torch.bitwise_and(bits, _MAGNITUDE, out=lowest).neg_()
    bits.add_(torch.maximum(half, lowest, out=half))


def _split_small(values: list[Tensor], weights: list[Tensor], lows: list[Tensor]) -> None:
    flat = _flatten(values, lows)
    low = torch.empty_like(flat, dtype=torch.int16)
    _split_flat(flat, low)
    copy_(group(lows, _unflatten(low, lows)))
    copy_(group(weights, _unflatten(flat, lows)))


def _join_small(weights: list[Tensor], lows: list[Tensor]) -> list[Tensor]:
    low = _flatten(lows, lows)
    flat = torch.empty_like(low, dtype=torch.float32)
    room = torch.empty_like(low, dtype=torch.int32), torch.empty_like(low, dtype=torch.int32)
    _join_flat(flat, _flatten([weight.to(low.device) for weight in weights], lows), low, room)
    return _unflatten(flat, lows)


def _choose_blocks(lows: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of the tensors that kernels take at once: several small ones, or a large one alone."""
    limit = _BLOCK_ON_CPU if lows[0].is_cpu else _BLOCK
    chosen: list[int] = []
    size = 0
    for index, low in enumerate(lows):
        if chosen and size + low.numel() > limit:
            yield chosen
            chosen, size = [], 0
        chosen.append(index)
        size += low.numel()
    yield chosen


def _pick(tensors: Sequence[Tensor], chosen: Sequence[int]) -> list[Tensor]:
    return [tensors[index].detach() for index in chosen]


def _cut(*row: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors of lists with one tensor each, or flat parts of them if they are large and have one layout."""
    tensors = [tensor for (tensor,) in row]
    low = tensors[-1]
    limit = _BLOCK_ON_CPU if low.is_cpu else _BLOCK
    if low.numel() <= limit or any(tensor.stride() != low.stride() for tensor in tensors):
        yield tuple(tensors)
        return
    parts = [tensor.as_strided((tensor.numel(),), (1,)).split(limit) for tensor in tensors]
    yield from zip(*parts, strict=True)


def _flatten(tensors: list[Tensor], layouts: Sequence[Tensor]) -> Tensor:
    """Return a flat copy of tensors, each in the order in which its layout lies in memory."""
    if all(layout.is_contiguous() for layout in layouts):
        return flatten_dense_tensors(tensors)
    flat = torch.empty(sum(map(Tensor.numel, layouts)), dtype=tensors[0].dtype, device=tensors[0].device)
    copy_(group(_unflatten(flat, layouts), tensors))
    return flat


def _unflatten(flat: Tensor, layouts: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat tensor in the given layouts, one after another."""
    if all(layout.is_contiguous() for layout in layouts):
        return list(unflatten_dense_tensors(flat, layouts))
    views: list[Tensor] = []
    start = 0
    for layout in layouts:
        views.append(flat.as_strided(layout.size(), layout.stride(), start))
        start += layout.numel()
    return views
