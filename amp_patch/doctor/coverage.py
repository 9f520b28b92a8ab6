"""Which names of `apex` the stand-in has: read from its source, so that nothing is imported or kept by hand."""

import ast
import itertools
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import amp_patch

from ..errors import find_meant

EXTENSIONS = frozenset(
    {
        *("amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda", "syncbn", "xentropy_cuda", "mlp_cuda"),
        "fused_dense_cuda",
    }
)
"""Apex's compiled modules, which scripts import from the top."""


class Coverage:
    """What a package that stands in for `apex` offers.

    Args:
        package: its directory; a name `apex.x.y` is looked up in the module `x` there, or in the package `x`.
    """

    def __init__(self, package: Path) -> None:
        self._package = package

    def has(self, dotted: str, *, is_imported: bool = True) -> bool:
        """Tell whether a dotted name, such as `apex.optimizers.FusedAdam`, is a module of the stand-in or bound in one.

        `is_imported`: the name is that of an import statement, which goes by modules. A chain of attributes stops at
        the first object that a package binds (`amp._amp_state`), even if there is a module of that name.
        """
        parts = dotted.split(".")
        if parts[0] == "apex":
            parts = parts[1:]
        where = self._package
        if not (where / "__init__.py").is_file():
            return False
        # every module has a __dict__ and a __name__
        parts = list(itertools.takewhile(lambda part: not part.startswith("__"), parts))
        for index, part in enumerate(parts):
            deeper = _module_file(where / part)
            is_chain = not is_imported and where.is_dir()
            if is_chain and part in _bound_names(where / "__init__.py", with_submodules=False):
                return True
            if deeper is None:
                # what is below a bound name is an attribute of an object: nothing the source could tell
                return part in _bound_names(where / "__init__.py" if where.is_dir() else where)
            if index == len(parts) - 1:
                return True
            where = where / part if deeper.name == "__init__.py" else deeper
            if where.is_file():
                return parts[index + 1] in _bound_names(where)
        return True

    def missing(self, dotted: str) -> tuple[str, list[str]]:
        """Return the part of a dotted name that no module of the stand-in has, and the names of that module."""
        parts = dotted.split(".")[1:] or [dotted]
        where = self._package
        while len(parts) > 1 and (file := _module_file(where / parts[0])) is not None:
            where = where / parts.pop(0) if file.name == "__init__.py" else file
        file = where / "__init__.py" if where.is_dir() else where
        modules = [path.stem for path in where.iterdir()] if where.is_dir() else []
        names = _bound_names(file) if file.is_file() else ()
        return parts[0], [name for name in (*sorted(modules), *sorted(names)) if name[0] != "_"]

    def advice(self, dotted: str) -> str | None:
        """Return what the stand-in says of a part of Apex that it has not: what it was, and what to use today.

        None where it says nothing.
        """
        table = self._package / "_gone.py"
        gone = _read_table(table) if table.is_file() else {}
        known = [part for part in gone if f"{dotted}.".startswith(f"{part}.")]
        return gone[max(known, key=len)] if known else None


def get_coverage() -> Coverage:
    """Return what this installation's stand-in covers."""
    return Coverage(Path(amp_patch.__file__).parent / "apex")


def public_names() -> list[str]:
    """Return what a script may import from amp_patch: its names, and the modules that have no other."""
    return [*dir(amp_patch), *(path.name for path in Path(amp_patch.__file__).parent.iterdir() if path.is_dir())]


def has_public_name(name: str) -> bool:
    """Tell whether `amp_patch.name` exists, or is a module."""
    return name in public_names() or _module_file(Path(amp_patch.__file__).parent / name) is not None


def closest(word: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed word that a misspelt one certainly stands for, if any."""
    meant = find_meant(word, allowed, cutoff=0.8)
    return meant[0] if len(meant) == 1 else None


def _module_file(path: Path) -> Path | None:
    """Return the file of the module at `path`, given without suffix: a package's `__init__.py`, its own, or None."""
    for candidate in (path / "__init__.py", path.with_name(f"{path.name}.py")):
        if candidate.is_file():
            return candidate
    return None


@cache
def _read_table(path: Path) -> dict[str, str]:
    """Return the entries of every dictionary of strings that a module writes out."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                    found[str(key.value)] = str(value.value)
    return found


@cache
def _bound_names(path: Path, *, with_submodules: bool = True) -> frozenset[str]:
    """Return the names that a module binds at its top level, those of its star imports from the same package included.

    `with_submodules`: also what `from . import x` binds, and every string that could be a name in a module that answers
    for names by a `__getattr__`.
    """
    tree = ast.parse(path.read_bytes())
    found: set[str] = set()
    for node in _top_level(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import):
            found.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or with_submodules):
            for alias in node.names:
                found |= _star_names(path, node) if alias.name == "*" else {alias.asname or alias.name}
    if with_submodules and any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
        strings = (
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        found.update(value for value in strings if value.isidentifier())
    return frozenset(found)


def _star_names(path: Path, node: ast.ImportFrom) -> frozenset[str]:
    """Return the names behind `from .module import *`, for modules whose source lies where the import says."""
    if node.level:
        base = path.parent
        for _ in range(node.level - 1):
            base = base.parent
    elif (node.module or "").partition(".")[0] == "amp_patch":
        base = Path(amp_patch.__file__).parent.parent
    else:
        return frozenset()
    target = _module_file(base.joinpath(*(node.module or "").split("."))) if node.module else base / "__init__.py"
    if target is None or target == path:
        return frozenset()
    public = _listed_names(target)
    return frozenset(
        name for name in _bound_names(target) if name in public or (not public and not name.startswith("_"))
    )


def _top_level(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when a module is imported: functions and classes, but not their bodies."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _top_level(child)


def _listed_names(path: Path) -> frozenset[str]:
    """Return what a module lists in a literal `__all__`; nothing if it has none."""
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            return frozenset(
                one.value
                for one in ast.walk(node.value)
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
            )
    return frozenset()
