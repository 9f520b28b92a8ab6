"""Where lists and presets are: those that come with the package, and those that a name stands for. Imports no torch."""

import os
import re
from pathlib import Path

from ..errors import OpListError, did_you_mean
from .look_alikes import find_look_alike


def lists_dir() -> Path:
    """Return the directory of the shipped lists: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    candidates = (package / "lists", package.parent / "lists")
    for path in candidates:
        if (path / "presets.yaml").is_file() or (path / "float16.yaml").is_file():
            return path
    raise OpListError(
        f"the shipped lists are missing here and in {candidates[1]}; reinstall amp_patch", candidates[0], 1, 1
    )


def shipped_names() -> tuple[str, ...]:
    """Return the names of the shipped lists, sorted."""
    return tuple(sorted(path.stem for path in lists_dir().glob("*.yaml") if path.stem != "presets"))


def shipped_presets() -> Path:
    """Return the path of the presets that come with the package."""
    return lists_dir() / "presets.yaml"


def shipped_levels() -> tuple[str, ...]:
    """Return the names of the levels that come with the package, in the order of the file."""
    return tuple(re.findall(r"^(\w+):", shipped_presets().read_text(encoding="utf-8"), re.MULTILINE))


def find_list_of(level: str) -> str | None:
    """Return the name of the list that a level takes, "" for one that casts no ops, and None for what is no level."""
    text = shipped_presets().read_text(encoding="utf-8")
    parts = re.split(r"^(\w+):$", text, flags=re.MULTILINE)
    for name, properties in zip(parts[1::2], parts[2::2], strict=True):
        if name.casefold() == level.casefold():
            found = re.search(r"^  patch_torch_functions_type: (\w+)", properties, re.MULTILINE)
            return "" if found is None or found[1] == "null" else found[1]
    return None


def locate(spec: str | os.PathLike[str], base: Path) -> Path:
    """Return the shipped list, or the path from `base`, that a spec names; OpListError without a place."""
    text = str(os.fspath(spec))
    separators = tuple(filter(None, (os.sep, os.altsep)))
    if (
        isinstance(spec, os.PathLike)
        or text.endswith((".yaml", ".yml"))
        or any(separator in text for separator in separators)
    ):
        return base / text
    known = shipped_names()
    if text in known:
        return lists_dir() / f"{text}.yaml"
    beside = [name for name in (f"{text}.yaml", f"{text}.yml") if text and os.path.isfile(base / name)]
    hint = did_you_mean(text, beside, cutoff=0.0) if beside else did_you_mean(text, known)
    own = find_list_of(text)
    if own:
        raise OpListError(f"{text!r} is a level, and not a list; its list is {own!r}")
    if own is not None:
        raise OpListError(f"{text!r} is a level that uses no list of ops; give a shipped list ({', '.join(known)})")
    found = find_look_alike(text)
    if found is not None:
        hint = f" Note: {found[1]}."
    raise OpListError(f"{text!r} is not a shipped list ({', '.join(known)}), and a path ends in .yaml or .yml.{hint}")
