"""Searches for few units that pass a test. A unit is anything; `test(units)` returns whether these units pass.

`tune` searches for list entries with which a training passes. If adding units never makes a test fail, no unit of the
result can be left out.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Unit = TypeVar("Unit", bound=Hashable)
Test = Callable[[tuple[Unit, ...]], bool]


def find_fewest(test: Test[Unit], forced: Sequence[Unit], ranked: Sequence[Unit]) -> tuple[Unit, ...] | None:
    """Return units that pass: units of `forced`, then units of `ranked`. None if all units together do not pass.

    `forced` is tested first. If it does not pass, the search finds a prefix of `ranked` that passes with it, and does
    not pass without its last unit. This unit is in the result, and the search goes on in the prefix before it. At the
    end, units of `forced` are tried one by one, and left out if they are not needed. The number of tests for each unit
    of `ranked` in the result grows with the logarithm of the length of `ranked`.
    """
    kept, candidates = tuple(forced), tuple(ranked)
    needed: tuple[Unit, ...] = ()  # units of `ranked`

    def passes(count: int) -> bool:
        return test((*kept, *candidates[:count], *needed))

    while not passes(0):
        count = find_prefix(passes, len(candidates))
        if count is None:
            return None
        needed = (candidates[count - 1], *needed)
        candidates = candidates[: count - 1]
    for unit in reversed(kept):
        without_unit = tuple(kept_unit for kept_unit in kept if kept_unit != unit)
        if test((*without_unit, *needed)):
            kept = without_unit
    return (*kept, *needed)


def find_prefix(test: Callable[[int], bool], length: int) -> int | None:
    """Return a number from 1 to `length` that passes while the next smaller one does not.

    The numbers 1, 2, 4, ... and at last `length` are tested until one passes. Bisection between that number and the
    one before it finds the result. Returns None if none of the tested numbers passes.

    The caller must know that 0 does not pass.
    """
    low, high = 0, 1
    while low < length:
        high = min(high, length)
        if test(high):
            break
        low, high = high, 2 * high
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if test(middle):
            high = middle
        else:
            low = middle
    return high
