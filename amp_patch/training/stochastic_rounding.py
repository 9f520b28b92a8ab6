"""`StochasticRounding`: rounds float32 tensors to bfloat16, up or down at random.

A value that lies at 0.3 of the way from one bfloat16 number to the next is rounded to the next with a probability of
0.3, so the mean of many roundings is the value itself. A running average that changes by less than half the spacing of
bfloat16 in each step keeps moving. Rounding to nearest would leave it as it is.

The random number for an element is a function of the number of the step and of the element's *position*, a number that
the caller gives it. So it is the same on each rank with the same type of device, and the random numbers of the script
are not used. Positions are divided into blocks of equal size. Position i of a block gets the upper 16 bits of
`a * t[i] + b` in 32 bits. The table `t` has random numbers, and `a` and `b` are drawn anew for each block. So each
number is uniform, and two numbers are independent if their elements of the table differ by an odd number, and nearly
independent if not (Dietzfelbinger 1996, "Universal hashing and k-wise independent random variables via integer
arithmetic without primes").
"""

import itertools
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..multi_tensor import copy_, group

_UPPER = -0x10000
"""The mask of the upper half of an int32."""

_LARGEST = torch.finfo(torch.bfloat16).max
_MIDDLE = 0x7FFF
"""Just below half the spacing of bfloat16, in the bits of a float32."""

_MINUTE = 2.0**-120
"""A finite float32 value exceeds `_LARGEST` by less than 2**120. Times this, the excess vanishes in a sum."""

_BLOCK_ON_CPU = 2**17
"""The number of positions in a block on a CPU. The temporary tensors of a block fit into the cache of a core."""

_BLOCK = 2**22
"""The number on other devices. Blocks are larger there, because each block costs kernel launches."""

_WORD = 0xFFFFFFFFFFFFFFFF
"""The mask of the lower 64 bits."""


class StochasticRounding:
    """Rounds tensors, with random numbers that depend on the number of steps so far.

    Attributes:
        steps: the number of steps that have begun, taken or skipped.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._tables: dict[torch.device, Tensor] = {}
        self._room: _Room | None = None

    def begin_step(self) -> None:
        """From now on, use the random numbers of the next step."""
        self.steps += 1

    def end_step(self) -> None:
        """Free temporary tensors."""
        self._room = None

    def state_dict(self) -> dict[str, int]:
        """Return the state for a checkpoint."""
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. Raises ValueError if it is not one."""
        steps = state_dict.get("steps") if isinstance(state_dict, Mapping) else None
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise ValueError(f"the state of stochastic rounding is {state_dict!r}, without a number of steps")
        self.steps = steps

    def round_(self, values: Sequence[Tensor], rounded: Sequence[Tensor], positions: Sequence[int]) -> None:
        """Write values (float32) to `rounded` (bfloat16, of the same shapes and strides). All are on one
        device, and have no gaps in memory. A finite value stays finite, and inf and NaN stay what they are.

        `positions`: the position of the first element of each tensor. The further elements follow it, and no two
        elements may have the same position in a step.

        Does not wait for the device, unless its table of random numbers has to grow.
        """
        self._round_blocks(values, rounded, positions, is_random=True)

    def round_to_nearest_(self, values: Sequence[Tensor], rounded: Sequence[Tensor]) -> None:
        """Like `round_`, but to the nearest number, and at a tie to the one of smaller magnitude."""
        positions = itertools.accumulate(map(Tensor.numel, values), initial=0)
        self._round_blocks(values, rounded, list(positions)[:-1], is_random=False)

    def _round_blocks(
        self, values: Sequence[Tensor], rounded: Sequence[Tensor], positions: Sequence[int], *, is_random: bool
    ) -> None:
        with torch.inference_mode(False), torch.no_grad():
            room = self._get_room(values)
            for number, pieces in _cut_into_blocks(values, rounded, positions).items():
                sources = [piece.source for piece in pieces]
                source = sources[0] if len(sources) == 1 else torch.cat(sources)
                numbers, clamped = room.take(source.numel())
                if is_random:
                    self._draw_(numbers, number, pieces)
                else:
                    numbers.zero_()
                result = _round(source, numbers, clamped)
                results = result.split([piece.target.numel() for piece in pieces])
                copy_(group([piece.target for piece in pieces], results))

    def _get_room(self, values: Sequence[Tensor]) -> "_Room":
        """Return temporary tensors for a call, from an earlier call in this step if they are large enough."""
        size = min(_get_limit(values[0]), sum(map(Tensor.numel, values)))  # no block has more elements
        if self._room is None or self._room.size < size or self._room.device != values[0].device:
            self._room = None  # freed before the next one is taken
            self._room = _Room(size, values[0].device)
        return self._room

    def _draw_(self, numbers: Tensor, block: int, pieces: Sequence["_Piece"]) -> None:
        """Fill an int32 tensor with the random numbers for pieces of a block, each from -2**15 to 2**15 - 1."""
        key = _mix(self.steps << 32 | block)
        factor, addend = _to_int32(key), torch.tensor(_to_int32(key >> 32), dtype=torch.int32, device="cpu")
        table = self._get_table(numbers.device, max(piece.start + piece.source.numel() for piece in pieces))
        ranges: list[tuple[int, int]] = []
        for piece in pieces:
            start, stop = piece.start, piece.start + piece.source.numel()
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, stop))
        slices = [table[start:stop] for start, stop in ranges]
        entries = slices[0] if len(slices) == 1 else torch.cat(slices)
        torch.add(addend, entries, alpha=factor, out=numbers).bitwise_right_shift_(16)

    def _get_table(self, device: torch.device, size: int) -> Tensor:
        """Return a table of `size` or more random numbers, which are the same in each process."""
        table = self._tables.get(device)
        if table is None or table.numel() < size:
            generator = torch.Generator("cpu").manual_seed(0)
            # the first numbers do not depend on how many follow
            table = torch.empty(size, dtype=torch.int32, device="cpu").random_(-(2**31), 2**31, generator=generator)
            table = self._tables[device] = table.to(device)
        return table


class _Piece(NamedTuple):
    """A part of a tensor that lies in one block.

    Attributes:
        source: float32, flat.
        target: bfloat16, flat, of the same size.
        start: the position of the first element, counted from the beginning of the block.
    """

    source: Tensor
    target: Tensor
    start: int


class _Room:
    """Temporary tensors for blocks of up to `size` elements, because fresh memory costs as much time as the kernels."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.device = device
        self._numbers = torch.empty(size, dtype=torch.int32, device=device)
        self._clamped = torch.empty_like(self._numbers, dtype=torch.float32)

    def take(self, size: int) -> tuple[Tensor, Tensor]:
        """Return an int32 and a float32 tensor with undefined elements."""
        return self._numbers[:size], self._clamped[:size]


def _round(values: Tensor, numbers: Tensor, clamped: Tensor) -> Tensor:
    """Return the rounded values, as float32 values that bfloat16 can hold, in the memory of `numbers`. Number n (from
    -2**15 to 2**15 - 1) adds 0x7fff - n to the bits of its value, and the lower 16 bits of the sum are dropped.
    `clamped` is memory for temporary values.
    """
    torch.clamp(values, -_LARGEST, _LARGEST, out=clamped)  # else larger finite numbers could become inf
    torch.sub(clamped.view(torch.int32), numbers, out=numbers).add_(_MIDDLE).bitwise_and_(_UPPER)
    # inf and NaN come back by a sum that leaves finite numbers as they are, even -0
    beyond = torch.sub(clamped, values, out=clamped)
    return numbers.view(torch.float32).add_(beyond, alpha=-_MINUTE)


def _get_limit(tensor: Tensor) -> int:
    return _BLOCK_ON_CPU if tensor.is_cpu else _BLOCK


def _flatten(tensor: Tensor) -> Tensor:
    """Return a flat view of a tensor without gaps in memory, in its memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _cut_into_blocks(
    values: Sequence[Tensor], rounded: Sequence[Tensor], positions: Sequence[int]
) -> dict[int, list[_Piece]]:
    """Return the pieces in each block of positions, by the number of the block."""
    blocks: dict[int, list[_Piece]] = {}
    for value, target, first in sorted(zip(values, rounded, positions, strict=True), key=itemgetter(2)):
        limit = _get_limit(value)
        source, target = _flatten(value), _flatten(target)
        position, stop = first, first + value.numel()
        while position < stop:
            size = min(limit - position % limit, stop - position)
            piece = slice(position - first, position - first + size)
            blocks.setdefault(position // limit, []).append(_Piece(source[piece], target[piece], position % limit))
            position += size
    return blocks


def _mix(key: int) -> int:
    """Return 64 bits that depend on all bits of a key (the generator SplitMix64, by Steele, Lea and Flood 2014)."""
    key = (key + 1) * 0x9E3779B97F4A7C15 & _WORD
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    key = (key ^ key >> 27) * 0x94D049BB133111EB & _WORD
    return key ^ key >> 31


def _to_int32(bits: int) -> int:
    """Return the lower 32 bits as a signed number."""
    return (bits + 2**31) % 2**32 - 2**31
