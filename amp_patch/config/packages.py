"""Packages that ops on a list belong to: whether they are imported, may yet be, and exist at all."""

import contextlib
import importlib.util
import sys
from collections.abc import Mapping

from ..errors import OpListError, did_you_mean
from .op_namespaces import OWNERS, get_op_names

_KNOWN = (
    *("torch", "torchvision", "torchaudio", "torchtext", "torch_geometric", "torch_scatter", "torch_sparse"),
    *("transformers", "diffusers", "timm", "xformers", "flash_attn", "detectron2", "mmcv", "einops", "peft"),
)


def find_doubt(spellings: Mapping[tuple[str, str], object | None]) -> str | None:
    """Return what is the matter with the package of ops that are not imported: it is not installed. None if nothing is.

    Looks for the package by name, and runs nothing of it.
    """
    for (owner_name, name), owner in spellings.items():
        root = owner_name.partition(".")[0]
        if owner is None and sys.modules.get(root) is None and not _is_installed(root):
            return f"there is no package {root!r} installed.{_find_op(owner_name, name) or did_you_mean(root, _KNOWN)}"
    return None


def _find_op(owner_name: str, name: str) -> str:
    """Return a hint for a name that leaves out how an op of torch begins, such as `linalg.norm`."""
    for owner in OWNERS:
        if owner.casefold().endswith(f".{owner_name.casefold()}"):
            prefix = f"{owner}."
            return did_you_mean(
                name, (op.removeprefix(prefix) for op in get_op_names() if op.startswith(prefix)), prefix=prefix
            )
    return ""


def _is_installed(root: str) -> bool:
    with contextlib.suppress(ImportError, ValueError):  # a module without a spec
        return importlib.util.find_spec(root) is not None
    return False


def count_imported(path: list[str]) -> int:
    """Return how many parts of a path lead to the last module on it that is imported."""
    return next((n for n in range(len(path), 0, -1) if sys.modules.get(".".join(path[:n])) is not None), 0)


def is_being_imported(module_name: str) -> bool:
    """Tell whether the import of a module has begun and not ended."""
    spec = getattr(sys.modules.get(module_name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def check_that_it_may_come(path: list[str]) -> None:
    """Raise OpListError if the first module on the path that is not imported does not exist."""
    imported = count_imported(path)
    if imported in (0, len(path)):
        return  # nothing is imported yet, or everything is, and the last module serves names when it is asked for them
    parent, part = sys.modules[".".join(path[:imported])], path[imported]
    if hasattr(type(parent), "__getattr__") or "__getattr__" in vars(parent) or part in vars(parent):
        return
    if "__path__" in vars(parent) and importlib.util.find_spec(".".join(path[: imported + 1])) is not None:
        return
    raise OpListError(f"{'.'.join(path[:imported])!r} has no {part!r}.{did_you_mean(part, vars(parent))}")
