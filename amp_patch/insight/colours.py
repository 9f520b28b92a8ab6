"""A colour for each run, the same in every picture and page."""

from collections.abc import Iterable

# Okabe and Ito's palette without its yellow: distinct for colour-blind readers and dark enough on white.
COLOURS = {"O0": "#000000", "O1": "#0072B2", "O2": "#D55E00", "O3": "#CC79A7", "O4": "#009E73", "O5": "#E69F00"}
OTHERS = ("#56B4E9", "#7F7F7F", "#8C564B", "#6A3D9A")


def pick_colours(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each run: that of its level for the first of a level, and for others one that is free, as
    long as there are any.
    """
    names = list(names)
    levels = [name.partition("+")[0].partition(" ")[0] for name in names]
    first = {level: name for level, name in reversed(list(zip(levels, names, strict=True))) if level in COLOURS}
    found = {name: COLOURS[level] for level, name in first.items()}
    free = [colour for colour in (*OTHERS, *COLOURS.values()) if colour not in found.values()]
    others = [name for name in names if name not in found]
    cycle = free or list(OTHERS)
    found.update((name, cycle[number % len(cycle)]) for number, name in enumerate(others))
    return {name: found[name] for name in names}
