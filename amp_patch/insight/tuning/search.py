"""Searches for few units that pass a test: pure algorithms over `test(units) -> bool`.

A test may be anything; where more units than pass never fail, what is found is a smallest set in the sense that no unit
can be left out. Units keep their order.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

Unit = TypeVar("Unit", bound=Hashable)
Test = Callable[[tuple[Unit, ...]], bool]

FEW = 4
"""Up to so many units that ranking has added are dropped one by one, more by delta debugging."""


def find_fewest(test: Test[Unit], forced: Sequence[Unit], ranked: Sequence[Unit]) -> tuple[Unit, ...] | None:
    """Return units that pass, none of which can be left out; None if all together do not pass.

    `forced` are tested first, alone; if they do not pass, as many of `ranked` join them as it takes.
    """
    base = tuple(forced)
    if test(base):
        return drop_one_by_one(test, base)
    count = find_prefix(lambda number: test((*base, *ranked[:number])), len(ranked))
    if count is None:
        return None
    found = (*base, *ranked[:count])
    if count <= FEW:
        return drop_one_by_one(test, found)
    return minimize(test, found)


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


def drop_one_by_one(test: Test[Unit], units: Iterable[Unit]) -> tuple[Unit, ...]:
    """Return what is left of units that pass when each that is not needed is left out, the last ones first."""
    kept = tuple(units)
    for unit in reversed(kept):
        rest = tuple(one for one in kept if one != unit)
        if test(rest):
            kept = rest
    return kept


def minimize(test: Test[Unit], units: Sequence[Unit]) -> tuple[Unit, ...]:
    """Return units that pass, none of which can be left out, of units that pass: delta debugging (Zeller's ddmin)."""
    kept, parts = tuple(units), 2
    while len(kept) > 1:
        chunks = [kept[len(kept) * i // parts : len(kept) * (i + 1) // parts] for i in range(parts)]
        passing = next(filter(test, chunks), None)
        if passing is not None:
            kept, parts = passing, 2
            continue
        if parts > 2:  # of two parts each is the rest of the other
            rests = [tuple(unit for unit in kept if unit not in chunk) for chunk in chunks]
            passing = next(filter(test, rests), None)
        if passing is not None:
            kept, parts = passing, max(parts - 1, 2)
        elif parts < len(kept):
            parts = min(2 * parts, len(kept))
        else:
            return kept
    if test(()):
        return ()
    return kept
