"""Searches for few units that pass a test: pure algorithms over `test(units) -> bool`.

A test may be anything; where more units than pass never fail, what is found is a smallest set in the sense that no unit
can be left out. Units keep their order.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Unit = TypeVar("Unit", bound=Hashable)
Test = Callable[[tuple[Unit, ...]], bool]


def find_fewest(test: Test[Unit], forced: Sequence[Unit], ranked: Sequence[Unit]) -> tuple[Unit, ...] | None:
    """Return units that pass, none of which can be left out; None if all together do not pass.

    `forced` are tested first, alone; if they do not pass, those of `ranked` join them that it takes. The last unit of
    the shortest passing row of `ranked` is needed, whatever else is. With that one kept, the same holds of the row
    before it, and so on: a number of tests that grows with the logarithm of the row for each unit that is needed.
    """
    base, left = tuple(forced), tuple(ranked)
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
        rest = tuple(one for one in base if one != unit)
        if test((*rest, *needed)):
            base = rest
    return (*base, *needed)


def find_prefix(test: Callable[[int], bool], length: int) -> int | None:
    """Return a number from 1 up to `length` that passes while the one below does not, by doubling and bisection.

    0 is known not to pass. None if none of those that doubling tries passes, the last of which is `length`.
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
