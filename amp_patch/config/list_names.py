"""Finds the file of an op list by its name or path. Imports no torch."""

import os
from pathlib import Path

from ..errors import OpListError, did_you_mean
from .levels import read_levels
from .look_alikes import find_look_alike
from .shipped import lists_dir, shipped_names


def locate(spec: str | os.PathLike[str], base: Path) -> Path:
    """Return the file that a user means by a list: a shipped list by its name, or a path relative to `base`.

    The path need not exist. Raises OpListError, without a location, for text that is neither.
    """
    text = str(os.fspath(spec))
    separators = tuple(filter(None, (os.sep, os.altsep)))
    is_path = text.endswith((".yaml", ".yml")) or any(separator in text for separator in separators)
    if is_path or isinstance(spec, os.PathLike):
        return base / text
    known = shipped_names()
    if text in known:
        return lists_dir() / f"{text}.yaml"
    # a common mistake: `lists="O1"`
    for level in read_levels():
        if level.name.casefold() == text.casefold():
            if level.lists:
                raise OpListError(f"{text!r} is a level, and not a list; its list is {level.lists!r}")
            raise OpListError(f"{text!r} is a level that uses no list of ops; give a shipped list ({', '.join(known)})")
    raise OpListError(
        f"{text!r} is not a shipped list ({', '.join(known)}), and a path ends in .yaml or .yml.{_suggest(text, base)}"
    )


def _suggest(text: str, base: Path) -> str:
    """Return a hint for an unknown name: a look-alike in it, a file of that name in `base`, or a similar list."""
    look_alike = find_look_alike(text)
    if look_alike is not None:
        return f" Note: {look_alike[1]}."
    files = [name for name in (f"{text}.yaml", f"{text}.yml") if text and os.path.isfile(base / name)]
    if files:
        return did_you_mean(text, files, cutoff=0.0)
    return did_you_mean(text, shipped_names())
