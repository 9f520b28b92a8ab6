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

_HALF = 0x8000
_UPPER = -0x10000
"""The mask of the upper half of an int32."""

_MAGNITUDE = 0x7FFFFFFF
"""The mask of all bits of an int32 but the sign."""

_BLOCK_ON_CPU = 2**16
"""Elements that a kernel takes at once. The temporary tensors of a block fit into the cache of a core."""

_BLOCK = 2**24
"""The same on other devices, where each kernel costs a launch."""

_Row = tuple[Tensor, Tensor, Tensor]
"""A weight, its low half, and its float32 value: tensors or flat parts of them, of the same shape."""


def split_(values: Sequence[Tensor], weights: Sequence[Tensor], lows: Sequence[Tensor]) -> None:
    """Write float32 values to their bfloat16 weights and int16 low halves, of the same shapes. All are on one device,
    except the weights.
    """
    with torch.inference_mode(False), torch.no_grad():
        for rows in _cut_into_blocks(values, weights, lows):
            _split_block(rows)


def join(weights: Sequence[Tensor], lows: Sequence[Tensor]) -> list[Tensor]:
    """Return the float32 values of weights and low halves, in the layout of the low halves.

    Values are views of few tensors. The low halves are dense and on one device.
    """
    with torch.inference_mode(False), torch.no_grad():
        values: list[Tensor] = []
        buffer = torch.empty(sum(map(Tensor.numel, lows)), dtype=torch.float32, device=lows[0].device)
        start = 0
        for low in lows:
            values.append(buffer.as_strided(low.size(), low.stride(), start))
            start += low.numel()
        start = 0
        for rows in _cut_into_blocks(values, weights, lows):
            length = sum(low.numel() for _, low, _ in rows)
            _join_block(rows, buffer[start : start + length])
            start += length
        return values


def _split_block(rows: Sequence[_Row]) -> None:
    weights, lows, values = map(list, zip(*rows, strict=True))
    bits, parts = _flat_like(values, torch.int32)
    floats = bits.view(torch.float32)
    _copy([part.view(torch.float32) for part in parts], values)
    floats.nan_to_num_(torch.nan, torch.inf, -torch.inf)  # rounding could carry the bits of another NaN into the sign
    _copy(lows, parts)
    bits.add_(_HALF).bitwise_and_(_UPPER)
    _copy(weights, [part.view(torch.float32) for part in parts])


def _join_block(rows: Sequence[_Row], buffer: Tensor) -> None:
    """Fill `buffer`, the memory of the values of `rows`."""
    weights, lows, values = map(list, zip(*rows, strict=True))
    bits = buffer.view(torch.int32)
    halves, parts = _flat_like(lows, torch.int32)
    _copy(values, weights)
    _copy(parts, lows)
    # a low half of at least minus the magnitude of the weight leaves the sign bit alone
    lowest = bits.bitwise_and(_MAGNITUDE).neg_()
    torch.maximum(halves, lowest, out=halves)
    bits.add_(halves)


def _flat_like(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Return a flat, uninitialized tensor, and views of it in the layouts of dense tensors, one after another."""
    flat = torch.empty(sum(map(Tensor.numel, tensors)), dtype=dtype, device=tensors[0].device)
    views: list[Tensor] = []
    start = 0
    for tensor in tensors:
        views.append(flat.as_strided(tensor.size(), tensor.stride(), start))
        start += tensor.numel()
    return flat, views


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    copy_(group(targets, sources))


def _cut_into_blocks(
    values: Sequence[Tensor], weights: Sequence[Tensor], lows: Sequence[Tensor]
) -> Iterator[list[_Row]]:
    """Yield the rows in blocks of bounded size and in order. Larger tensors are cut, if all of a row can be."""
    limit = _BLOCK_ON_CPU if lows[0].is_cpu else _BLOCK
    block: list[_Row] = []
    size = 0
    for value, weight, low in zip(values, weights, lows, strict=True):
        for row in _cut((weight.detach(), low, value.detach()), limit):
            if block and size + row[1].numel() > limit:
                yield block
                block, size = [], 0
            block.append(row)
            size += row[1].numel()
    if block:
        yield block


def _cut(row: _Row, limit: int) -> Iterator[_Row]:
    """Yield a row, or flat parts of it if it is larger than `limit` and its tensors have the same dense layout."""
    _, low, _ = row
    count = low.numel()
    if count <= limit or any(tensor.stride() != low.stride() for tensor in row):
        yield row
        return
    weight, low, value = (tensor.as_strided((count,), (1,)) for tensor in row)
    for start in range(0, count, limit):
        stop = start + limit
        yield weight[start:stop], low[start:stop], value[start:stop]
