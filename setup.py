"""The packages, of which one lies beside the others, and one is a folder that no package imports; pyproject.toml says
all else.
"""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["amp_patch", "amp_patch.*"]), "amp_patch.cli.startup", "amp_patch.lists"])
