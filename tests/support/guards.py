"""Reads the `Guards:` lines at the end of test files, which name the modules that each file tests.

A name is the path of a module below amp_patch, without `.py` (`training/masters`), or a folder of them with `/*`
(`apex/amp/*`, without the folders inside). A test of other files names these by their path in the repository
(`lists/fast.yaml`, `docs/*`). A long line is split into several, each of which begins with `Guards:`.
"""

import ast
from collections.abc import Iterable
from pathlib import Path

WORD = "Guards: "


def read_guards(path: Path) -> list[str]:
    """The names in the last lines of the docstring of a test file. The list is empty if it does not end in
    `Guards: name, name.`
    """
    lines = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
    names: list[str] = []
    while lines and lines[-1].startswith(WORD) and lines[-1].endswith("."):
        names = lines.pop().removeprefix(WORD).removesuffix(".").split(", ") + names
    return names


def is_named(module: str, names: Iterable[str]) -> bool:
    """True if one of the names is the module or its folder. A module is "training/masters"."""
    return any(name == module or (name.endswith("/*") and name[:-2] == module.rpartition("/")[0]) for name in names)


def find_guards(module: str, tests: Path) -> list[Path]:
    """The test files that name a module, the ones with the fewest names first: they say most about it."""
    names = {path: read_guards(path) for path in sorted(tests.rglob("test_*.py"))}
    return sorted((path for path in names if is_named(module, names[path])), key=lambda path: len(names[path]))


def exists(name: str, root: Path) -> bool:
    """True if a name stands for a module of the package, or for a file of the repository."""
    return bool(name) and (any((root / "amp_patch").glob(f"{name}.py")) or any(root.glob(name)))
