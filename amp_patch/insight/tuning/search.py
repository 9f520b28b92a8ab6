"""Searches for few units that pass a test: pure algorithms over `test(units) -> bool`.

If adding units never makes a test fail, no unit of the result can be left out. Units keep their order.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Unit = TypeVar("Unit", bound=Hashable)
Test = Callable[[tuple[Unit, ...]], bool]


def find_fewest(test: Test[Unit], forced: Sequence[Unit], ranked: Sequence[Unit]) -> tuple[Unit, ...] | None:
    """Return units that pass, none of them needless, or None if all units together do not pass.

    `forced` is tested first. If it does not pass, the search finds the shortest prefix of `ranked` that passes with it.
    The last unit of this prefix is needed: it is kept, and the search goes on in the prefix before it. At the end,
    needless units of `forced` are left out. The number of tests for each needed unit grows with the logarithm of the
    length of `ranked`.
    """
    base, left = tuple(forced), tuple(ranked)  # `left`: where further needed units may be
    needed: tuple[Unit, ...] = ()

    def passes(number: int) -> bool:
        return test((*base, *left[:number], *needed))

    while not passes(0):
        count = find_prefix(passes, len(left))
        if count is None:
            return None
        needed = (left[count - 1], *needed)
        left = left[: count - 1]
    for unit in reversed(base):
        rest = tuple(kept for kept in base if kept != unit)
        if test((*rest, *needed)):
            base = rest
    return (*base, *needed)


def find_prefix(test: Callable[[int], bool], length: int) -> int | None:
    """Return a number from 1 to `length` that passes while the next smaller one does not, by doubling and bisection.

    The caller must know that 0 does not pass. Returns None if none of the doubled numbers passes, nor `length`.
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
