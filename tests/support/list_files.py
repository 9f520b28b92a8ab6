"""Writes op lists for a test."""

from pathlib import Path


def write_list(folder: Path, text: str) -> str:
    """Write `mine.yaml` into a folder, and return its path."""
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)
