"""Checks of patched functions that are kept where patching cannot reach them, and of losses that the lists ban.

`initialize` rebinds every module global that holds a listed function, so a by-name import is no fault. What it cannot
rebind is a function that was put away before: in a container, a default argument, an attribute, a partial, a closure.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

from ..api import get_original
from ..config import OpLists, load_oplists
from .context import Context
from .findings import Fault
from .names import canonical
from .structure import FUNCTIONS, Structure, text_of

_CONTAINERS = (ast.Dict, ast.List, ast.Tuple, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
_TRANSPARENT = (ast.IfExp, ast.BoolOp, ast.Subscript, ast.Starred, ast.keyword, ast.NamedExpr)
_PARTIALS = frozenset({"functools.partial", "functools.partialmethod"})
_KEEPERS = frozenset({"dict", "list", "tuple", "set", "staticmethod"})
_BCE = frozenset({"torch.nn.functional.binary_cross_entropy", "torch.nn.BCELoss"})


@cache
def _load(name: str) -> OpLists:
    return load_oplists(name)


@cache
def captured_originals(lists: tuple[str, ...]) -> frozenset[str]:
    """Return the dotted names of listed functions whose originals cast nothing once they are captured.

    Only whitelists and blacklists count. Not among them: functions in Python that only pass their arguments on to the
    op of the same name in another namespace, which is patched too (`F.softmax` calls `Tensor.softmax`).
    """
    found: set[str] = set()
    for name in lists:
        kinds: dict[tuple[str, str], str] = {(one.owner_name, one.name): one.kind for one in _load(name).spellings}
        for spelling in _load(name).spellings:
            if spelling.kind not in ("whitelist", "blacklist"):
                continue
            original = get_original(spelling.owner, spelling.name)
            if not _calls_patched_namesake(original, spelling.name, spelling.kind, kinds):
                found.add(canonical(f"{spelling.owner_name}.{spelling.name}"))
    return frozenset(found)


def _calls_patched_namesake(function: Any, name: str, kind: str, kinds: dict[tuple[str, str], str]) -> bool:
    """Whether a Python function calls `torch.name` or `tensor.name`, and that is patched by the same rule."""
    if not inspect.isfunction(function):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    except (OSError, SyntaxError):
        return False
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == name
            and isinstance(node.func.value, ast.Name)
        ):
            owner = "torch" if node.func.value.id == "torch" else "torch.Tensor"
            if kinds.get((owner, name)) == kind:
                return True
    return False


def captured_functions(context: Context) -> Iterator[Fault]:
    """A listed function put away where `initialize` cannot rebind it."""
    if not context.expected.may_patch:
        return
    script, structure = context.script, context.script.structure
    originals = captured_originals(context.expected.lists)
    for node in script.nodes:
        if (
            not isinstance(node, (ast.Name, ast.Attribute))
            or not isinstance(node.ctx, ast.Load)
            or not script.names.resolve(node) & originals
        ):
            continue
        holder = _holder(context, node)
        if (
            holder is None
            or any(structure.is_before(call, node) for call in script.initializations)
            or script.is_without_amp(node)
        ):
            continue
        name = text_of(node)
        message = (
            f"{name} is kept in {holder}, where initialize cannot replace it: what is called there is the original,"
            " which casts nothing"
        )
        fix = (
            f"Look it up at each call: `lambda *args, **kwargs: {name}(*args, **kwargs)`, or keep the name and use"
            " getattr."
        )
        yield Fault(node, "warning", message, fix)


def _holder(context: Context, node: ast.AST) -> str | None:
    """Return what keeps a function that is read at `node`, unpatched by then; None if nothing does."""
    structure = context.script.structure
    function = structure.function_name(node)
    runs_late = function.startswith("forward") or function == "__call__"
    kept: str | None = None
    child = node
    for outer in structure.around(node):
        field = structure.field(child)
        if isinstance(outer, ast.arguments):
            return "a default argument" if field in ("defaults", "kw_defaults") else None
        if isinstance(outer, ast.Call):
            keeper = None if field == "func" else _keeper(context, outer)
            if keeper is None:
                return None
            kept = kept or keeper
        elif isinstance(outer, _CONTAINERS):
            kept = kept or (None if _target_of(structure, outer, child) is not None else "a container")
        elif isinstance(outer, (ast.Assign, ast.AnnAssign)):
            target = _target_of(structure, child, node) or (
                outer.targets[0] if isinstance(outer, ast.Assign) else outer.target
            )
            return None if runs_late else _assigned_holder(context, outer, target, kept)
        elif isinstance(outer, ast.Return):
            return None if runs_late or kept == "an object" else (kept or "what the function returns")
        elif not isinstance(outer, _TRANSPARENT):
            return (
                kept
                if kept and not runs_late and isinstance(outer, ast.stmt) and _runs_before_initialize(context, node)
                else None
            )
        child = outer
    return None


def _keeper(context: Context, call: ast.Call) -> str | None:
    """Return what keeps a function that `call` is given, if anything: classes do, as far as the case of names tells."""
    name = text_of(call.func).rpartition(".")[2]
    if context.script.is_call_of(call, _PARTIALS) or name == "partial":
        return "a partial"
    if name in _KEEPERS:
        return "an attribute of the class" if name == "staticmethod" else "a container"
    return "an object" if name[:1].isupper() or text_of(call.func) == "super().__init__" else None


def _runs_before_initialize(context: Context, node: ast.AST) -> bool:
    """Whether code runs on import, when a model is made, or in a function that calls `initialize` later on."""
    structure = context.script.structure
    if isinstance(structure.scope(node), (ast.Module, ast.ClassDef)) or structure.function_name(node) == "__init__":
        return True
    return any(structure.is_before(node, call) for call in context.script.initializations)


def _target_of(structure: Structure, values: ast.AST, part: ast.AST) -> ast.expr | None:
    """Return what is assigned `part` of the tuple `values` in `a, b = values`.

    None where that is no such assignment, or `part` is deeper inside.
    """
    statement = structure.parent(values)
    if not (isinstance(statement, ast.Assign) and isinstance(values, (ast.Tuple, ast.List)) and part in values.elts):
        return None
    target = statement.targets[0]
    if not isinstance(target, (ast.Tuple, ast.List)) or len(target.elts) != len(values.elts):
        return None
    return target.elts[values.elts.index(part)]


def _assigned_holder(context: Context, statement: ast.stmt, target: ast.expr, kept: str | None) -> str | None:
    structure = context.script.structure
    scope = structure.scope(statement)
    if isinstance(target, ast.Attribute):
        return kept or "an attribute"
    if isinstance(target, ast.Subscript):
        return kept or "a container"
    if isinstance(scope, ast.ClassDef):
        return kept or "an attribute of the class"
    if isinstance(scope, ast.Module):
        return kept  # a bare global is rebound
    if isinstance(target, ast.Name) and _is_read_inside(scope, target.id):
        return "a closure"
    return kept if _runs_before_initialize(context, statement) else None


def _is_read_inside(scope: ast.AST, name: str) -> bool:
    """Whether a function inside `scope` reads a variable of it."""
    inner = [node for node in ast.walk(scope) if isinstance(node, FUNCTIONS) and node is not scope]
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for one in inner
        for node in ast.walk(one)
    )


def probability_losses(context: Context) -> Iterator[Fault]:
    """`binary_cross_entropy` or `BCELoss`, which takes probabilities."""
    script, levels = context.script, context.expected
    if not levels.may_use_low:
        return
    bans = [_bans_bce(name) for name in levels.lists]
    for call in script.calls:
        if not script.names.resolve(call.func) & _BCE or script.is_without_amp(call) or _is_widened(call):
            continue
        name = text_of(call.func)
        fix = "Leave the sigmoid out of the model and use F.binary_cross_entropy_with_logits or nn.BCEWithLogitsLoss."
        if bans and all(bans):
            yield Fault(
                call, "error", f"{name} takes probabilities, and the op lists in use ban it on 16-bit tensors", fix
            )
        else:
            banned = ", and Apex's list bans it" if any(bans) else ""
            message = f"{name} takes probabilities: 16 bits round them to 0 and 1, and their gradients to 0{banned}"
            yield Fault(call, "warning", message, fix)


def _bans_bce(name: str) -> bool:
    return any(
        spelling.kind == "banned" and spelling.name == "binary_cross_entropy" for spelling in _load(name).spellings
    )


def _is_widened(call: ast.Call) -> bool:
    """Whether the first argument is made float32 on the spot."""
    first = call.args[0] if call.args else None
    return (
        isinstance(first, ast.Call) and isinstance(first.func, ast.Attribute) and first.func.attr in ("float", "double")
    )
