"""Rules of the doctor about imports from `apex`, and about names that amp_patch or its stand-in for `apex` lacks."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import amp_patch

from ..apex import GONE_EXTENSIONS, describe_gone
from ..errors import did_you_mean
from .rules import Fault, rule
from .script import Script

EXTENSIONS = {"amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda", *GONE_EXTENSIONS}
"""Apex's compiled modules, which scripts import without `apex.` in front: `import amp_C`."""

_APEX_PACKAGES = {"apex", *EXTENSIONS}
_STAND_IN = "amp_patch.apex"


@rule(
    "AMP101",
    "an import of apex that the stand-in covers",
    bad="from apex import amp  # AMP101",
    good="import amp_patch as amp",
)
def covered_imports(script: Script) -> Iterator[Fault]:
    """Under `amp-patch run`, the import finds the stand-in, unless NVIDIA's apex with `amp` is installed. Under plain
    `python`, the import finds an installed apex, or fails.
    """
    for node in script.nodes:
        names = _apex_names(node)
        if names and not any(map(_find_missing, names)):
            advice = f"Run it with `amp-patch run {script.path}`"
            if any(name == "apex.amp" or name.startswith("apex.amp.") for name in names):
                advice += ", or write `import amp_patch as amp`"
            yield Fault(node, "note", f"{', '.join(names)}: covered by amp_patch's stand-in for apex", f"{advice}.")


@rule(
    "AMP102",
    "a name that the stand-in, or amp_patch, does not have",
    bad="""
        import amp_patch as amp

        amp.initialise(model, optimizer)  # AMP102
    """,
    good="""
        import amp_patch as amp

        amp.initialize(model, optimizer)
    """,
)
def uncovered_names(script: Script) -> Iterator[Fault]:
    """Without NVIDIA's apex, the script fails where it imports or uses the name, perhaps late in a run."""
    reported = set[str]()
    for node in script.nodes:
        for name in _apex_names(node):
            missing = _find_missing(name)
            if missing is not None:
                reported.add(name)
                yield _uncovered(script, node, name, missing)
        if isinstance(node, ast.ImportFrom) and node.module == "amp_patch" and not node.level:
            for alias in node.names:
                if alias.name != "*" and alias.name not in _public_names():
                    yield _absent(node, alias.name)
    for attribute in script.nodes:
        if not isinstance(attribute, ast.Attribute) or isinstance(script.parent(attribute), ast.Attribute):
            continue  # `amp.x` in `amp.x.y`: the whole chain is looked up instead
        names = script.names.dotted(attribute)
        name = next(iter(names), "")
        # a name with several meanings has a fallback: `try` imports one thing, `except ImportError` another
        if len(names) != 1 or any(f"{name}.".startswith(f"{known}.") for known in reported):
            continue
        root, _, rest = name.partition(".")
        if root in _APEX_PACKAGES:
            missing = _find_missing(name, is_imported=False)
            if missing is not None:
                reported.add(name)
                yield _uncovered(script, attribute, name, missing)
        elif root == "amp_patch" and rest.partition(".")[0] not in _public_names():
            reported.add(name)
            yield _absent(attribute, rest.partition(".")[0])


def _apex_names(node: ast.AST) -> list[str]:
    """Return the dotted names of Apex that a statement imports: "apex.amp" for `from apex import amp`. A star import
    gives the name of the module.
    """
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        names = [f"{node.module}.{alias.name}".removesuffix(".*") for alias in node.names]
    return [name for name in names if name.partition(".")[0] in _APEX_PACKAGES]


def _uncovered(script: Script, node: ast.AST, name: str, missing: tuple[str, list[str]]) -> Fault:
    """Return the fault of a name that the stand-in lacks. `missing` is the result of `_find_missing`."""
    part, names_in_its_place = missing
    advice = did_you_mean(part, names_in_its_place).strip() or "It has no replacement here: look for one in torch."
    gone = describe_gone(name)
    if gone is not None:
        _, purpose_and_remedy = gone
        advice = f"It was {purpose_and_remedy}."
    for outer, field in script.around(node):
        if isinstance(outer, ast.Try) and outer.handlers and field == "body":
            message = f"{name}: not in the stand-in for apex; the `except` around it may be a fallback"
            return Fault(node, "note", message, advice)
    return Fault(node, "error", f"{name}: not in amp_patch's stand-in for apex", advice)


def _absent(node: ast.AST, name: str) -> Fault:
    """Return the fault of a name that amp_patch does not have."""
    advice = did_you_mean(name, _public_names()).strip() or "See `help(amp_patch)` for the names there are."
    return Fault(node, "error", f"amp_patch has no {name!r}", advice)


# ---- names of the stand-in, which is imported as `amp_patch.apex` ----------------------------------------------------


def _find_missing(dotted: str, *, is_imported: bool = True) -> tuple[str, list[str]] | None:
    """Return the part of a dotted name that the stand-in lacks, and the names that exist in its place.

    For "apex.optimizers.FusedAdan", these are "FusedAdan" and the names in `apex.optimizers`. Returns None if the
    stand-in has the name. Attributes of an object that is not a module are not checked, because they are known only
    when the script runs.

    Args:
        is_imported: whether the name is in an import statement. `import apex.amp._amp_state` finds the submodule, but
            the attribute `amp._amp_state` is another object.
    """
    module = importlib.import_module(_STAND_IN)
    if dotted == "apex":
        return None
    # `amp_C` is `amp_patch.apex.amp_C` here, beside `amp_patch.apex.amp`
    for part in dotted.removeprefix("apex.").split("."):
        if part.startswith("__"):
            return None  # every module has a __dict__ and a __name__
        submodule = _import(f"{module.__name__}.{part}")
        value = getattr(module, part, None)
        is_object = value is not None and value is not submodule  # an attribute that is not the submodule
        if is_object and (submodule is None or not is_imported):
            return None
        if submodule is None:
            return part, [name for name in dir(module) if not name.startswith("_")]
        module = submodule
    return None


def _public_names() -> list[str]:
    """Return the names and modules that a script may import from amp_patch."""
    folder = Path(amp_patch.__file__).parent
    return ["__all__", *dir(amp_patch), *(path.stem for path in folder.iterdir())]


def _import(name: str) -> ModuleType | None:
    """Return a module of the stand-in, or None if there is none of that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, None):
            raise  # the module exists, but a module that it imports does not
        return None
