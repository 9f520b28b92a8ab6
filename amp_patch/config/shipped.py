"""Finds the files that come with the package: op lists and presets. Imports no torch."""

from pathlib import Path

from ..errors import OpListError


def lists_dir() -> Path:
    """Return the directory of the shipped lists: `amp_patch/lists` once installed, `lists` in a checkout.

    Raises OpListError if neither exists.
    """
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
