"""The packages, of which one lies beside the others; pyproject.toml says all else."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["amp_patch", "amp_patch.*"]), "amp_patch.lists"])
