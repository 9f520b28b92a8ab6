"""Splits float32 values into bfloat16 weights and the 16 bits that the weights lack, and joins them again.

A weight is its float32 value, rounded to bfloat16, and at a tie away from zero. The low half is the lower 16 bits of
the value, as int16. With the bits of the value read as int32, and those of the weight as int16, the value is `weight *
2**16 + low`. A low half is negative exactly where the weight was rounded away from zero. So `join(split(x)) == x`, bit
for bit, except that a NaN may come back as another NaN. torch's own rounding goes half to even, and would lose the
direction at a tie.

If a script edits a weight, the low half stays, so `join` returns the edited weight with an error of at most half the
spacing of bfloat16. A weight of 0 with a negative low half was edited: `join` returns 0 for it.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..multi_tensor import copy_, group
from ..torch_private import flatten_dense_tensors, unflatten_dense_tensors

_BLOCK_ON_CPU = 2**16
"""The most elements that a kernel takes at once, unless a larger tensor cannot be cut (`_cut`). Their temporary tensors
fit into the cache of a core."""

_BLOCK = 2**24
"""The limit on other devices, where each kernel costs a launch."""


def split_(values: Sequence[Tensor], weights: Sequence[Tensor], lows: Sequence[Tensor]) -> None:
    """Write float32 values to their bfloat16 weights and int16 low halves, of the same shapes.

    Values and low halves are on one device. The low halves have no gaps in memory. The values do not change, even if an
    interrupt ends the call.
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
                _split_flat(value, low, room)
                weight.copy_(room)


def join(weights: Sequence[Tensor], lows: Sequence[Tensor], room: Tensor | None = None) -> list[Tensor]:
    """Return the float32 values of weights and low halves, in the layout of the low halves.

    The low halves are on one device, and have no gaps in memory.

    `room`: a flat float32 tensor on this device, with at least as many elements as all low halves. The values become
    views of it. None: allocate memory; small values share a block of it.
    """
    joined: list[Tensor] = []
    start = 0
    with torch.inference_mode(False), torch.no_grad():
        for chosen in _choose_blocks(lows):
            block = _pick(weights, chosen), _pick(lows, chosen)
            size = sum(low.numel() for low in block[1])
            if room is None:
                flat = torch.empty(size, dtype=torch.float32, device=block[1][0].device)
            else:
                flat = room[start : start + size]
                start += size
            values = _unflatten(flat, block[1])
            joined += values
            if len(chosen) > 1:
                copy_(group(values, block[0]))
                _join_flat(flat, _flatten(block[1], block[1]))
                continue
            for value, weight, low in _cut(values, *block):
                _join_flat(value.copy_(weight), low)
    return joined


def _split_flat(values: Tensor, low: Tensor, rounded: Tensor) -> None:
    """Write the low half of values to `low`, and the weight, in float32, to `rounded`."""
    # makes each NaN the usual one: a NaN has many bit patterns, and rounding could carry some into the sign
    torch.nan_to_num(values, torch.nan, torch.inf, -torch.inf, out=rounded)
    bits = rounded.view(torch.int32)
    low.copy_(bits)
    bits.sub_(low)


def _join_flat(weight: Tensor, low: Tensor) -> None:
    """Add the low half to a weight in float32, in place."""
    bits = weight.view(torch.int32)
    if weight.is_cpu:
        bits.add_(low)
        if math.isfinite(weight.sum().item()):
            return
        bits.sub_(low)  # the sum may be NaN because a weight of 0 has a negative low half
    bits.add_(torch.maximum(low, low.mul(weight.bool())))


def _split_small(values: list[Tensor], weights: list[Tensor], lows: list[Tensor]) -> None:
    flat = _flatten(values, lows)
    low = torch.empty_like(flat, dtype=torch.int16)
    _split_flat(flat, low, flat)
    copy_(group(lows, _unflatten(low, lows)))
    copy_(group(weights, _unflatten(flat, lows)))


def _choose_blocks(lows: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of the tensors that kernels take at once: several small ones, or one alone."""
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
    return [tensors[index] for index in chosen]


def _cut(*row: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the only tensor of each list, all together. If they are large and have equal strides, yield flat parts."""
    tensors = [tensor for (tensor,) in row]
    low = tensors[-1]
    limit = _BLOCK_ON_CPU if low.is_cpu else _BLOCK
    if low.numel() <= limit or any(tensor.stride() != low.stride() for tensor in tensors):
        yield tuple(tensors)
        return
    parts = [tensor.as_strided((tensor.numel(),), (1,)).split(limit) for tensor in tensors]
    yield from zip(*parts, strict=True)


def _flatten(tensors: list[Tensor], layouts: Sequence[Tensor]) -> Tensor:
    """Return a flat copy of tensors, each in the memory order of its tensor in `layouts`."""
    if all(layout.is_contiguous() for layout in layouts):
        return flatten_dense_tensors(tensors)
    flat = torch.empty(sum(map(Tensor.numel, layouts)), dtype=tensors[0].dtype, device=tensors[0].device)
    copy_(group(_unflatten(flat, layouts), tensors))
    return flat


def _unflatten(flat: Tensor, layouts: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat tensor, one after another, with the shapes and strides of `layouts`."""
    if all(layout.is_contiguous() for layout in layouts):
        return list(unflatten_dense_tensors(flat, layouts))
    views: list[Tensor] = []
    start = 0
    for layout in layouts:
        views.append(flat.as_strided(layout.size(), layout.stride(), start))
        start += layout.numel()
    return views
