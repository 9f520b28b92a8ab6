"""The result of `importlib.metadata.distribution("apex")` while `amp_patch.apex` stands in for NVIDIA's package."""

import importlib.metadata
import pathlib
from typing import Any


class Metadata(importlib.metadata.Distribution):
    """A distribution with the name `apex` and the version 0.1, which Apex has never changed."""

    def read_text(self, filename: str) -> str | None:
        """Return the text of the file METADATA; None for another name, because there is no other file."""
        return "Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        """Return where a file of the distribution, such as `apex/amp/__init__.py`, is in the folder of amp_patch."""
        return pathlib.Path(__file__).parent.parent / path
