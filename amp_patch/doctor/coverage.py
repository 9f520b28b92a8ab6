"""Which names of `apex` the stand-in has: looked up in the stand-in itself, which is imported under its own name."""

import importlib
from functools import cache
from pathlib import Path
from types import ModuleType

import amp_patch

from ..apex import GONE_EXTENSIONS

EXTENSIONS = {"amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda", *GONE_EXTENSIONS}
"""Apex's compiled modules, which scripts import from the top."""

_PACKAGE = "amp_patch.apex"


def covers(dotted: str, *, is_imported: bool = True) -> bool:
    """Tell whether a dotted name, such as `apex.optimizers.FusedAdam`, is a module of the stand-in or in one.

    `is_imported`: the name is that of an import statement, which goes by modules. A chain of attributes stops at the
    first object that is no module of the stand-in (`amp._amp_state`), even if there is a module of that name: what such
    an object has, only a run shows.
    """
    where = importlib.import_module(_PACKAGE)
    for part in _parts(dotted):
        if part.startswith("__"):
            return True  # every module has a __dict__ and a __name__
        below = _import(f"{where.__name__}.{part}")
        value = getattr(where, part, None)
        if value is not None and value is not below and (below is None or not is_imported):
            return True
        if below is None:
            return False
        where = below
    return True


def find_missing(dotted: str) -> tuple[str, list[str]]:
    """Return the part of a dotted name that no module of the stand-in has, and the names of that module."""
    where = importlib.import_module(_PACKAGE)
    missing = dotted
    for part in _parts(dotted):
        below = _import(f"{where.__name__}.{part}")
        if below is None:
            missing = part
            break
        where = below
    return missing, [name for name in dir(where) if not name.startswith("_")]


def public_names() -> list[str]:
    """Return what a script may take from amp_patch: its names, and its modules."""
    folder = Path(amp_patch.__file__).parent
    return ["__all__", *dir(amp_patch), *(path.stem for path in folder.iterdir())]


def _parts(dotted: str) -> list[str]:
    """Return the parts of a name below the stand-in, where compiled modules lie beside the others."""
    if dotted == "apex":
        return []
    return dotted.removeprefix("apex.").split(".")


@cache
def _import(name: str) -> ModuleType | None:
    """Return a module of the stand-in, or None if there is none of that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, None):
            raise
        return None
