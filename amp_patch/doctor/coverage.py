"""Which names of `apex` the stand-in has: read from its source, so that nothing is imported or kept by hand."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import amp_patch

EXTENSIONS = {"amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda", "syncbn", "xentropy_cuda", "mlp_cuda"}
EXTENSIONS |= {"fused_dense_cuda"}
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
        where = self._package
        for part in _parts(dotted):
            if part.startswith("__"):
                return True  # every module has a __dict__ and a __name__
            is_bound = part in _bound_names(_source(where))
            deeper = _module(where, part)
            if deeper is None or (is_bound and not is_imported):
                return is_bound  # what is below a bound name is an attribute of an object, which no source tells
            where = deeper
        return _source(where).is_file()

    def missing(self, dotted: str) -> tuple[str, list[str]]:
        """Return the part of a dotted name that no module of the stand-in has, and the names of that module."""
        parts, where = _parts(dotted), self._package
        while len(parts) > 1 and (deeper := _module(where, parts[0])) is not None:
            where = deeper
            del parts[0]
        modules = [path.stem for path in where.iterdir()] if where.is_dir() else []
        return parts[0], [name for name in (*sorted(modules), *sorted(_bound_names(_source(where)))) if name[0] != "_"]

    def advice(self, dotted: str) -> str | None:
        """Return what the stand-in says of a part of Apex that it has not: what it was, and what to use today.

        None where it says nothing.
        """
        gone = _read_table(self._package / "_gone.py")
        known = [part for part in gone if f"{dotted}.".startswith(f"{part}.")]
        return gone[max(known, key=len)] if known else None


def get_coverage() -> Coverage:
    """Return what this installation's stand-in covers."""
    return Coverage(Path(amp_patch.__file__).parent / "apex")


def public_names() -> list[str]:
    """Return what a script may take from amp_patch: its names, and its modules."""
    return ["__all__", *dir(amp_patch), *(path.stem for path in Path(amp_patch.__file__).parent.iterdir())]


def _parts(dotted: str) -> list[str]:
    """Return the parts of a name below the stand-in, where compiled modules lie beside the others."""
    return dotted.removeprefix("apex.").split(".") if dotted != "apex" else []


def _module(package: Path, name: str) -> Path | None:
    """Return the folder or the file of a module in a package, or None."""
    if (package / name / "__init__.py").is_file():
        return package / name
    file = package / f"{name}.py"
    return file if file.is_file() else None


def _source(module: Path) -> Path:
    return module if module.suffix == ".py" else module / "__init__.py"


@cache
def _read_table(path: Path) -> dict[str, str]:
    """Return the entries of every dictionary of strings that a module writes out."""
    found: dict[str, str] = {}
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                    found[str(key.value)] = str(value.value)
    return found


@cache
def _bound_names(path: Path) -> frozenset[str]:
    """Return the names that a module binds to objects at its top level, by star imports from its own package, too.

    Modules that it imports from there by `from . import x` are no objects.
    """
    found: set[str] = set()
    for node in _top_level(_parse(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import):
            found.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found |= _star_names(path, node) if alias.name == "*" else {alias.asname or alias.name}
    return frozenset(found)


def _star_names(path: Path, node: ast.ImportFrom) -> set[str]:
    """Return the names behind `from .module import *`, for modules of the same package."""
    base = path.parents[node.level - 1] if node.level else Path(amp_patch.__file__).parent.parent
    for part in (node.module or "").split("."):
        base = _module(base, part) or base / part
    return {name for name in _bound_names(_source(base)) if not name.startswith("_")}


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes()) if path.is_file() else ast.Module([], [])


def _top_level(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when a module is imported: functions and classes, but not their bodies."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _top_level(child)
