"""Checks of what a script imports from `apex`, and of names that amp_patch does not have."""

import ast
from collections.abc import Iterator

import amp_patch

from ..errors import did_you_mean
from .context import Context
from .coverage import EXTENSIONS, has_public_name
from .findings import Fault
from .script import Script

_RUN = "Run the script by `amp-patch run script.py`"


def covered_imports(context: Context) -> Iterator[Fault]:
    """An import of Apex all of whose names the stand-in has."""
    for node in _import_statements(context.script):
        names = _apex_names(node)
        if names and all(map(context.coverage.has, names)):
            is_amp = any(name == "apex.amp" or name.startswith("apex.amp.") for name in names)
            fix = f"{_RUN}, or write `import amp_patch as amp`." if is_amp else f"{_RUN}."
            yield Fault(node, "note", f"{_listed(names)}: covered by amp_patch's stand-in for apex", fix)


def uncovered_names(context: Context) -> Iterator[Fault]:
    """A name of Apex, imported or used, that the stand-in lacks; a name of amp_patch that it lacks."""
    told: set[str] = set()
    if not any(
        name.partition(".")[0] in {"apex", "amp_patch", *EXTENSIONS} for name in context.script.imported_modules
    ):
        return
    for node in _import_statements(context.script):
        for name in _apex_names(node):
            if not context.coverage.has(name):
                told.add(name)
                yield _uncovered(context, node, name)
        if isinstance(node, ast.ImportFrom) and node.module == "amp_patch" and not node.level:
            for alias in node.names:
                if alias.name != "*" and not has_public_name(alias.name):
                    yield _absent(node, alias.name)
    for attribute in context.script.nodes:
        if not isinstance(attribute, ast.Attribute) or isinstance(
            context.script.structure.parent(attribute), ast.Attribute
        ):
            continue  # the whole of a chain is looked up, or nothing
        names = context.script.names.dotted(attribute)
        name = next(iter(names), "")
        if len(names) != 1 or name in told:
            continue
        if (
            name.startswith("apex.")
            and not context.coverage.has(name, is_imported=False)
            and not any(name.startswith(f"{one}.") for one in told)
        ):
            told.add(name)
            yield _uncovered(context, attribute, name)
        elif name.startswith("amp_patch.") and not has_public_name(name.split(".")[1]):
            told.add(name)
            yield _absent(attribute, name.split(".")[1])


def _import_statements(script: Script) -> Iterator[ast.Import | ast.ImportFrom]:
    return (node for node in ast.walk(script.tree) if isinstance(node, (ast.Import, ast.ImportFrom)))


def _apex_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the dotted names of Apex that an import asks for; of a star import, the module."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif node.level or not node.module:
        return []
    else:
        names = [node.module if alias.name == "*" else f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.partition(".")[0] in {"apex", *EXTENSIONS}]


def _uncovered(context: Context, node: ast.AST, name: str) -> Fault:
    advice = context.coverage.advice(name)
    fix = (
        f"It was {advice}."
        if advice
        else context.coverage.suggest(name).strip()
        or "The stand-in has no such name, and knows of none in Apex: look in today's torch."
    )
    if _has_fallback(context.script, node):
        return Fault(
            node, "note", f"{name}: not in amp_patch's stand-in for apex, so the script takes its own way round", fix
        )
    return Fault(node, "error", f"{name}: not in amp_patch's stand-in for apex", fix)


def _has_fallback(script: Script, node: ast.AST) -> bool:
    """Whether a node stands in a `try` that catches what it raises."""
    child = node
    for outer in script.structure.around(node):
        if isinstance(outer, ast.Try) and outer.handlers and script.structure.field(child) == "body":
            return True
        child = outer
    return False


def _absent(node: ast.AST, name: str) -> Fault:
    suggestion = did_you_mean(name, dir(amp_patch)).strip()
    return Fault(
        node, "error", f"amp_patch has no {name!r}", suggestion or "See `help(amp_patch)` for the names there are."
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names)
