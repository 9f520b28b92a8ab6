"""`match_lines`: finds the lines of a script that correspond in two runs, although the script may have been edited.

As in a diff, equal lines are *anchors*, and lines between two anchors may correspond by their order. A recording has no
text of lines, so two lines are equal if they call the same ops, whatever the dtypes. Importing this module does not
import torch.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..op_constants import strip_spelling
from .contract import ContractOp

_Pairs = list[tuple[int, int]]
"""Places of lines in the first run, each with the place of its partner in the second. Places rise in both runs."""


class Line(NamedTuple):
    """A line of a script.

    Attributes:
        number: a number that the line shares with its partner in the other run, if it has one, and with no third line.
        gap: a number that the line shares with all lines of both runs that stand between the same anchors. An anchor
            shares its gap with its partner alone.
    """

    number: int
    gap: int


def match_lines(before: Sequence[ContractOp], after: Sequence[ContractOp]) -> tuple[dict[str, Line], dict[str, Line]]:
    """Return a dict for each of two runs: its lines by `ContractOp.site` (file and number).

    Ops without a site have no line. Lines with the same site are partners, and the equal lines among them are anchors,
    unless a diff finds more pairs of equal lines. In that case, the pairs of the diff are the anchors. Lines between
    two anchors are then partners, in order, if both runs have equally many of them.
    """
    old, new = _list_lines(before), _list_lines(after)
    old_sites, new_sites = list(old), list(new)
    places = {site: place for place, site in enumerate(new_sites)}
    in_place = [(place, places[site]) for place, site in enumerate(old_sites) if site in places]
    anchors = [(place, partner) for place, partner in in_place if old[old_sites[place]] == new[new_sites[partner]]]
    by_diff = _find_anchors(list(old.values()), list(new.values()))
    if len(anchors) >= len(by_diff):
        pairs = in_place
    else:
        anchors = by_diff
        pairs = [*anchors, *_pair_edited(anchors, len(old), len(new))]
    partners = {new_place: old_place for old_place, new_place in pairs}
    old_gaps = _number_gaps([old_place for old_place, _ in anchors], len(old))
    new_gaps = _number_gaps([new_place for _, new_place in anchors], len(new))
    old_lines = {site: Line(place, old_gaps[place]) for place, site in enumerate(old_sites)}
    new_lines = {
        site: Line(partners.get(place, len(old) + place), new_gaps[place]) for place, site in enumerate(new_sites)
    }
    return old_lines, new_lines


def _list_lines(ops: Iterable[ContractOp]) -> dict[str, frozenset[str]]:
    """Return the names of the ops on each line, by its site, in the order of the source."""
    names: dict[str, set[str]] = {}
    for op in ops:
        if op.site:
            names.setdefault(op.site, set()).add(strip_spelling(op.op))
    return {site: frozenset(names[site]) for site in sorted(names, key=_split_site)}


def _split_site(site: str) -> tuple[str, int]:
    file, _, number = site.rpartition(":")
    return file, int(number) if number.isdecimal() else 0


def _find_anchors(old: Sequence[frozenset[str]], new: Sequence[frozenset[str]]) -> _Pairs:
    """Return the pairs of equal lines that a diff finds."""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    blocks = matcher.get_matching_blocks()
    return [(block.a + place, block.b + place) for block in blocks for place in range(block.size)]


def _pair_edited(anchors: _Pairs, old_count: int, new_count: int) -> _Pairs:
    """Return pairs of the lines between two anchors, in order, where both runs have equally many such lines."""
    pairs: _Pairs = []
    old_start, new_start = 0, 0
    for old_end, new_end in (*anchors, (old_count, new_count)):
        if old_end - old_start == new_end - new_start:
            pairs.extend(zip(range(old_start, old_end), range(new_start, new_end), strict=True))
        old_start, new_start = old_end + 1, new_end + 1
    return pairs


def _number_gaps(anchors: Iterable[int], count: int) -> list[int]:
    """Return the gap of each of `count` lines: odd for anchors, even for the lines between two anchors."""
    is_anchor = set(anchors)
    gaps, passed = [], 0
    for place in range(count):
        gaps.append(2 * passed + (place in is_anchor))
        passed += place in is_anchor
    return gaps
