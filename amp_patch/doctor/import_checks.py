"""Rules of what a script imports from `apex`, and of names that amp_patch does not have."""

import ast
from collections.abc import Iterator

from ..apex import describe_gone
from ..errors import did_you_mean
from .coverage import EXTENSIONS, covers, find_missing, public_names
from .rules import Context, Fault, rule
from .script import Script

_ROOTS = {"apex", "amp_patch", *EXTENSIONS}


@rule(
    "AMP101",
    "an import of apex that the stand-in covers",
    bad="from apex import amp  # AMP101",
    good="import amp_patch as amp",
)
def covered_imports(context: Context) -> Iterator[Fault]:
    """Under `amp-patch run`, the import finds the stand-in. Plain `python` imports an installed apex, or fails."""
    for node in _import_statements(context.script):
        names = _apex_names(node)
        if names and all(map(covers, names)):
            advice = f"Run it with `amp-patch run {context.script.path}`"
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
def uncovered_names(context: Context) -> Iterator[Fault]:
    """The script would fail where it imports or uses the name, perhaps late in a run."""
    script, told = context.script, set[str]()
    for node in _import_statements(script):
        for name in _apex_names(node):
            if not covers(name):
                told.add(name)
                yield _uncovered(script, node, name)
        if isinstance(node, ast.ImportFrom) and node.module == "amp_patch" and not node.level:
            for alias in node.names:
                if alias.name != "*" and alias.name not in public_names():
                    yield _absent(node, alias.name)
    for attribute in script.nodes:
        if not isinstance(attribute, ast.Attribute) or isinstance(script.parent(attribute), ast.Attribute):
            continue  # the whole of a chain is looked up, or nothing
        names = script.names.dotted(attribute)
        name = next(iter(names), "")
        if len(names) != 1 or any(f"{name}.".startswith(f"{one}.") for one in told):
            continue
        root, _, rest = name.partition(".")
        if root in {"apex", *EXTENSIONS} and not covers(name, is_imported=False):
            told.add(name)
            yield _uncovered(script, attribute, name)
        elif root == "amp_patch" and rest.partition(".")[0] not in public_names():
            told.add(name)
            yield _absent(attribute, rest.partition(".")[0])


def _import_statements(script: Script) -> Iterator[ast.Import | ast.ImportFrom]:
    if _ROOTS & {name.partition(".")[0] for name in script.names.imported}:
        yield from (node for node in script.nodes if isinstance(node, (ast.Import, ast.ImportFrom)))


def _apex_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the dotted names of Apex that an import asks for; of a star import, the module."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif node.level or not node.module:
        return []
    else:
        names = [node.module if alias.name == "*" else f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.partition(".")[0] in {"apex", *EXTENSIONS}]


def _uncovered(script: Script, node: ast.AST, name: str) -> Fault:
    known = describe_gone(name)
    if known is not None:
        advice = f"It was {known[1]}."
    else:
        advice = did_you_mean(*find_missing(name)).strip() or "It has no replacement here: look for one in torch."
    if _has_fallback(script, node):
        message = f"{name}: not in the stand-in for apex, so the script uses its own fallback"
        return Fault(node, "note", message, advice)
    return Fault(node, "error", f"{name}: not in amp_patch's stand-in for apex", advice)


def _has_fallback(script: Script, node: ast.AST) -> bool:
    """Whether a node stands in a `try` that catches what it raises."""
    child = node
    for outer in script.around(node):
        if isinstance(outer, ast.Try) and outer.handlers and script.field(child) == "body":
            return True
        child = outer
    return False


def _absent(node: ast.AST, name: str) -> Fault:
    advice = did_you_mean(name, public_names()).strip() or "See `help(amp_patch)` for the names there are."
    return Fault(node, "error", f"amp_patch has no {name!r}", advice)
