"""Packaging of amp_patch; the settings of the tools are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).with_name("README.md")

setup(
    name="amp_patch",
    version="0.1.0",
    description="Apex-style mixed precision for today's PyTorch by reversible monkey-patching",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    author="The amp_patch authors",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    install_requires=["torch>=2.6", "wrapt>=2.4", "PyYAML>=6"],
    extras_require={
        "demo": ["scikit-learn", "matplotlib", "tqdm"],
        "dev": [
            *(
                "expecttest",
                "hypothesis",
                "jsonschema",
                "mypy",
                "numpy",
                "pytest",
                "pytest-xdist",
                "ruff",
                "types-PyYAML",
            ),
            *("scikit-learn", "matplotlib", "tqdm"),
        ],
    },
    packages=[*find_packages(include=["amp_patch", "amp_patch.*"]), "amp_patch.lists"],
    package_dir={"amp_patch.lists": "lists"},
    package_data={"amp_patch": ["py.typed"], "amp_patch.lists": ["*.yaml", "*.json"]},
    entry_points={"console_scripts": ["amp-patch = amp_patch.cli:main"]},
    zip_safe=False,
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
