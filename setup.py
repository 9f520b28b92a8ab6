"""The packages, of which one lies beside the others, and one is a folder that no package imports; and the README
without links into the repository, which lead nowhere from a package index. pyproject.toml says all else.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

LINK = re.compile(r"!?\[([^\]]+)\]\((?!https?:)([^)]+)\)")
readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")

setup(
    packages=[*find_packages(include=["amp_patch", "amp_patch.*"]), "amp_patch.cli.startup", "amp_patch.lists"],
    long_description=LINK.sub(r"\1 (`\2`)", readme),
    long_description_content_type="text/markdown",
)
