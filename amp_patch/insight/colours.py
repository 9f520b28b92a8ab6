"""A colour for each run, the same in the picture and on the page."""

import itertools
from collections.abc import Iterable

# Okabe and Ito's palette without its yellow: distinct for colour-blind readers and dark enough on white; and some more.
COLOURS = (
    *("#000000", "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7"),
    *("#56B4E9", "#7F7F7F", "#8C564B", "#6A3D9A"),
)


def pick_colours(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each run, of its own as long as there are any."""
    return dict(zip(names, itertools.cycle(COLOURS), strict=False))
