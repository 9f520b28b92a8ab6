"""Finds the file of an op list by its name or path, and reads the version of torch in "autocast-cuda@2.11".

Imports no torch.
"""

import os
import re
from pathlib import Path

from ..errors import OpListError, did_you_mean
from .levels import read_levels
from .look_alikes import find_look_alike
from .shipped import lists_dir, shipped_names

Version = tuple[int, ...]
"""The three numbers of a version of torch."""

OLDEST_TORCH, NEWEST_TORCH = (2, 6, 0), (2, 15, 0)
"""The oldest and the newest version of torch whose rules the shipped lists know. OLDEST_TORCH is also the oldest that
amp_patch supports."""

_WITH_VERSION = re.compile(r"(?P<list>.+)@(?P<version>[0-9][0-9.]*)")


def split_version(spec: str | os.PathLike[str]) -> tuple[str | os.PathLike[str], Version | None]:
    """Return the list that `spec` names, and the version of torch after its `@`.

    "autocast-cuda@2.11" gives "autocast-cuda" and (2, 11, 0): the rules that the list has for torch 2.11. Without an
    `@`, the version is None: the rules for the running torch. Raises OpListError, which names no file and line, for a
    version that the lists do not know.
    """
    named = _WITH_VERSION.fullmatch(str(os.fspath(spec)))
    if named is None:
        return spec, None
    version = parse_version(named["version"])
    if version is None or not _is_known(version):
        oldest, newest = (".".join(map(str, known[:2])) for known in (OLDEST_TORCH, NEWEST_TORCH))
        major_minor = ".".join(named["version"].split(".")[:2])  # "2.12" of "2.12.0.1", which is no version
        shortened = parse_version(major_minor)
        nearest = oldest if shortened is not None and shortened < OLDEST_TORCH else newest
        if shortened is not None and _is_known(shortened):
            nearest = major_minor
        known_name = f"{named['list']}@{nearest}"
        raise OpListError(f"the lists know torch {oldest} to {newest}, not {named['version']}; give {known_name}")
    return named["list"], version


def _is_known(version: Version) -> bool:
    return OLDEST_TORCH <= version < (NEWEST_TORCH[0], NEWEST_TORCH[1] + 1, 0)


def is_shipped(spec: str) -> bool:
    """Return whether a text names a shipped list, with or without a version: "float16" or "autocast-cuda@2.11"."""
    named = _WITH_VERSION.fullmatch(spec)
    return (spec if named is None else named["list"]) in shipped_names()


def parse_version(text: str) -> Version | None:
    """Return the three numbers of a version: (2, 12, 0) for "2.12". Return None for text that is no version."""
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4}){0,2}", text):
        return None
    parts = [int(part) for part in text.split(".")]
    return (*parts, 0, 0, 0)[:3]


def locate(spec: str | os.PathLike[str], base: Path) -> Path:
    """Return the file that `spec` names: a shipped list by its name, or a path relative to the folder `base`.

    The path need not exist. Raises OpListError, which names no file and line, for text that is neither a shipped name
    nor a path, and for an unknown version after `@`.
    """
    named, _ = split_version(spec)
    text = str(os.fspath(named))
    separators = tuple(filter(None, (os.sep, os.altsep)))
    is_path = text.endswith((".yaml", ".yml")) or any(separator in text for separator in separators)
    if is_path or isinstance(named, os.PathLike):
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
        f"{text!r} is not a shipped list ({', '.join(known)}); a path must end in .yaml or .yml.{_suggest(text, base)}"
    )


def _suggest(text: str, base: Path) -> str:
    """Return a hint about an unknown name, or "": a look-alike character in it, a file of this name in `base` with
    .yaml or .yml at its end, or a shipped list with a similar name.
    """
    look_alike = find_look_alike(text)
    if look_alike is not None:
        return f" Note: {look_alike[1]}."
    files = [name for name in (f"{text}.yaml", f"{text}.yml") if text and os.path.isfile(base / name)]
    if files:
        return did_you_mean(text, files, cutoff=0.0)
    return did_you_mean(text, shipped_names())
