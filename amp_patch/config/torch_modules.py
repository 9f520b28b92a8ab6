"""Finds ops in modules of torch outside of `op_namespaces.NAMESPACES`, such as `torch.nn.attention.flex_attention`.

`import torch` does not import all of these modules. Looking up an op imports none of them: for a module that is not
imported yet, the definitions are read from its source file.
"""

import functools
import importlib.machinery
import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

import torch

from ..errors import OpListError, did_you_mean
from .op_namespaces import NAMESPACES, explain_non_op

_WITHOUT_OPS = {
    "other processes": "distributed futures multiprocessing nn.parallel",
    "devices": "accelerator backends cpu cuda mps mtia nn.backends numa xpu",
    "gradients and transforms of functions": "autograd func overrides",
    "models and optimizers": "hub nn.modules nn.parameter nn.utils optim utils",
    "compiling, exporting and measuring programs": (
        "compiler export fb fx jit library monitor nativert onnx package profiler"
    ),
    "mixed precision": "amp",
    "initial values": "nn.init",
    "kernels and classes written in C++": "classes contrib nn.cpp ops",
    "quantized tensors": "ao nn.intrinsic nn.qat nn.quantizable nn.quantized quantization",
    "random numbers and new tensors": "distributions quasirandom random signal",
    "files and memory": "serialization storage",
    "types": "return_types types",
    "tests": "testing",
    "the version of torch": "version",
}
_TOPICS = {f"torch.{name}": topic for topic, names in _WITHOUT_OPS.items() for name in names.split()}
"""Modules of torch whose functions are not ops, each with its topic, for errors."""

_DEFINITION = re.compile(r"^(def|class) (\w+)", re.MULTILINE)


def find_in_module(op: str, owner_name: str, name: str) -> object | None:
    """Return the module that has an op of torch, or None if that module exists and is not imported yet.

    Args:
        op: the name as an op list has it, for messages.
        owner_name: the module, such as "torch.nn.attention.flex_attention". It is not in `NAMESPACES`.
        name: the function in it, such as "flex_attention".

    Raises LookupError if torch has no such module or function. Raises OpListError if the function is no op, or is a
    class, or if its module is private or in `_TOPICS`. In any other module that is not imported yet, every function
    counts as an op.
    """
    _check_module(op, owner_name)
    module: Any = torch
    path = "torch"
    for part in owner_name.split(".")[1:]:
        path = f"{path}.{part}"
        if path not in sys.modules:
            source = _find_source(path)
            if source is None:
                _check_attribute(op, path, inspect.getattr_static(module, part, None))
                raise LookupError(f"torch {torch.__version__} has no {path!r}.")
            _check_source(op, owner_name, name)
            return None
        module = sys.modules[path]
    value = vars(module).get(name)
    if value is None:
        if _find_source(f"{owner_name}.{name}") is not None:
            raise OpListError(f"{op!r} is a module, so no rule can apply to it; name a function in it")
        raise LookupError(f"{owner_name!r} has no {name!r}.{did_you_mean(name, _get_public(module))}")
    reason = explain_non_op_in(value, name, owner_name)
    if reason:
        raise OpListError(f"{op!r} is {reason}, so no rule can apply to it; name a function that computes with tensors")
    return module  # type: ignore[no-any-return]


def find_short_name(name: str) -> dict[tuple[str, str], object | None]:
    """Find an op by its bare name, such as "flex_attention", in the modules that are not in `NAMESPACES`.

    Returns {("torch.nn.attention.flex_attention", "flex_attention"): module}, with an entry for each module that has
    the op. The value is None for a module that is not imported yet. Empty if no module defines the name. Raises
    OpListError if modules define it, but only as a class, a context manager and the like.
    """
    owners: dict[tuple[str, str], object | None] = {}
    reasons: list[str] = []
    for module_name in _list_op_modules():
        kind = _classify(module_name, name)
        if kind == _AN_OP:
            owners[module_name, name] = sys.modules.get(module_name)
        elif kind != _NOT_DEFINED:
            reasons.append(f"{module_name}.{name} is {kind}")
    if reasons and not owners:
        raise OpListError(f"{reasons[0]}, so no rule can apply to it; name a function that computes with tensors")
    return owners


def get_op_names() -> tuple[str, ...]:
    """Return the full names of the ops in imported modules that are not in `NAMESPACES`, sorted. Private names are left
    out.
    """
    names: list[str] = []
    for module_name in _list_op_modules():
        module = sys.modules.get(module_name)
        for name in () if module is None else _get_public(module):
            if _classify(module_name, name) == _AN_OP:
                names.append(f"{module_name}.{name}")
    return tuple(sorted(names))


def has_op(module_name: str, name: str) -> bool:
    """Return whether a module of torch, imported or not, defines an op of that name."""
    return _may_have_ops(module_name) and _classify(module_name, name) == _AN_OP


_AN_OP = "an op"
_NOT_DEFINED = "not defined"
_KINDS = {"def": _AN_OP, "class": "a class"}
"""The result of `_classify` for a definition in a source file, by the keyword that begins it."""


def _classify(module_name: str, name: str) -> str:
    """Return `_AN_OP` for an op, else why it is none, such as "a class" or "a context manager".

    Returns `_NOT_DEFINED` if the module has no such attribute, or if it only imports the attribute and does not list it
    in `__all__`.
    """
    module = sys.modules.get(module_name)
    if module is None:
        keyword = _read_definitions(module_name).get(name)
        return _NOT_DEFINED if keyword is None else _KINDS[keyword]
    value = vars(module).get(name)
    is_own = value is not None and getattr(value, "__module__", None) == module_name
    if not is_own and name not in getattr(module, "__all__", ()):
        return _NOT_DEFINED
    return explain_non_op_in(value, name, module_name) or _AN_OP


def explain_non_op_in(value: Any, name: str, owner_name: str) -> str | None:
    """Return why an attribute of a module of torch is not an op, such as "a context manager"; None if it is an op."""
    reason = explain_non_op(value, name, module_name=owner_name)
    if reason or not isinstance(value, types.FunctionType):
        return reason
    function = inspect.unwrap(value)
    if inspect.isgeneratorfunction(function):
        return "a context manager"
    annotations = [parameter.annotation for parameter in inspect.signature(function).parameters.values()]
    # a first argument without an annotation may be a tensor
    may_be_tensor = bool(annotations) and annotations[0] is inspect.Parameter.empty
    if may_be_tensor or any("Tensor" in str(annotation) for annotation in annotations):
        return None
    return "a function that takes no tensors"


def _check_module(op: str, owner_name: str) -> None:
    """Raise OpListError if a module or a package around it is private, or is in `_TOPICS`."""
    parts = owner_name.split(".")
    for length in range(2, len(parts) + 1):
        path = ".".join(parts[:length])
        if parts[length - 1].startswith("_"):
            raise OpListError(f"{op!r} is not an op: {path!r} is private to torch. Name a public function")
        if path in _TOPICS:
            raise OpListError(f"{op!r} is not an op: {path!r} is for {_TOPICS[path]}. Leave it out")


def _check_attribute(op: str, path: str, value: object) -> None:
    """Raise OpListError if `value`, the object at `path`, is a class: no rule applies to its methods."""
    if isinstance(value, type) and issubclass(value, torch.nn.Module):
        raise OpListError(
            f"{op!r} is a method of a class of torch.nn.Module, and a rule for an op applies to functions. Choose these"
            f" modules by `modules: [{{type: {path}, run: float32}}]`, or with `run: low`"
        )
    if isinstance(value, type):
        raise OpListError(f"{op!r} is a method of the class {path!r}, so no rule can apply to it; name a function")


# ---- modules that are not imported yet -------------------------------------------------------------------------------


def _check_source(op: str, owner_name: str, name: str) -> None:
    """Raise an error if the source file of a module does not define a function `name`.

    For a module that is not imported. Raises LookupError and OpListError as `find_in_module` does.
    """
    source = _find_source(owner_name)
    if source is None:
        raise LookupError(f"torch {torch.__version__} has no {owner_name!r}.")
    definitions = _read_definitions(owner_name)
    if definitions.get(name) == "class":
        raise OpListError(f"{op!r} is a class, so no rule can apply to it; name a function")
    if name not in definitions:
        public = [known for known in definitions if not known.startswith("_")]
        raise LookupError(f"{owner_name!r} has no {name!r}.{did_you_mean(name, public)}")


@functools.cache
def _find_source(module_name: str) -> str | None:
    """Return the file of a module of torch, or None if there is no such module or file. Imports nothing."""
    parts = module_name.split(".")
    search_path: Any = torch.__path__
    spec = None
    for length in range(2, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:length]), search_path)
        if spec is None:
            return None
        search_path = spec.submodule_search_locations or []
    return None if spec is None else spec.origin


@functools.cache
def _read_definitions(module_name: str) -> dict[str, str]:
    """Return the functions and classes at the top level of a module's source file: {"flex_attention": "def", ...}."""
    source = _find_source(module_name)
    if source is None or not source.endswith(".py"):
        return {}
    text = Path(source).read_text(encoding="utf-8")
    return {name: kind for kind, name in _DEFINITION.findall(text)}


def _list_op_modules() -> list[str]:
    """Return the names of the modules that may have ops: imported modules, and the files of imported packages."""
    names: dict[str, None] = {}
    for name, module in list(sys.modules.items()):
        if _may_have_ops(name) and module is not None:
            names[name] = None
            for below in _list_below(name):
                names[below] = None
    return list(names)


@functools.cache
def _list_below(package_name: str) -> tuple[str, ...]:
    """Return the modules that may have ops among the files in the folder of an imported package of torch."""
    names = [
        f"{package_name}.{file.stem}"
        for folder in getattr(sys.modules[package_name], "__path__", ())
        for file in sorted(Path(folder).glob("*.py"))
    ]
    return tuple(name for name in names if _may_have_ops(name))


def _may_have_ops(name: str) -> bool:
    """Return whether a name is a public module of torch, not in `NAMESPACES`, and not in a package of `_TOPICS`."""
    # all ops of torch.functional are in the namespace `torch`, too
    if not name.startswith("torch.") or name in NAMESPACES or name == "torch.functional":
        return False
    parts = name.split(".")
    if any(part.startswith("_") for part in parts):
        return False
    return not any(".".join(parts[:length]) in _TOPICS for length in range(2, len(parts) + 1))


def _get_public(module: types.ModuleType) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_")]
