"""The metadata of the stand-in as the distribution `apex`, for `importlib.metadata`."""

import importlib.metadata
import pathlib
from typing import Any


class Metadata(importlib.metadata.Distribution):
    """The name `apex` and the version 0.1, which Apex has never changed."""

    def read_text(self, filename: str) -> str | None:
        """Return the only file of the metadata, or None for another name."""
        return "Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        """Return where a file of the distribution would be."""
        return pathlib.Path(__file__).parent.parent / path
