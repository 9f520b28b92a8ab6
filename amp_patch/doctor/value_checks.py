"""Rules of `amp-patch doctor` about sums and counts in 16 bits, and about positions and timesteps in 16 bits."""

import ast
import re
from collections.abc import Iterator

from .flow import Flow
from .precision_checks import grade_by, may_be_low
from .rules import Fault, Severity, rule
from .script import Script
from .tree import LOOPS, argument_of, function_of, names_in, text_of

LARGEST = {"float16": 2048, "bfloat16": 256}
"""A dtype holds all whole numbers from 0 to this one, and only some of the larger ones."""

_FACTORIES = tuple(f"torch.{name}" for name in ("zeros", "ones", "full", "empty", "tensor", "zeros_like", "ones_like"))
_GROWING = ("add_", "sub_", "index_add_", "scatter_add_", "lerp_")


@rule(
    "AMP604",
    "a running value in 16 bits",
    bad="""
        total = torch.zeros((), dtype=torch.bfloat16)  # AMP604
        for batch in batches:
            total += loss_of(batch).detach()
    """,
    good="""
        total = torch.zeros(())
        for batch in batches:
            total += loss_of(batch).detach()
    """,
)
def grows_in_low(script: Script) -> Iterator[Fault]:
    """A count in bfloat16 stops at 256, because 256 + 1 rounds to 256; a count in float16 stops at 2048. Sums and
    statistics stop once each added value is too small to change the rounded sum.
    """
    if not may_be_low(script):
        return
    flow = Flow(script)
    for target, value in _find_made(script):
        verdict = flow.judge(value, value)
        growth = None if verdict is None else _grade_growth(script, target, value)
        if verdict is not None and growth is not None:
            message = f"{target} grows in {verdict.dtype}, where counting by one stops at {LARGEST[verdict.dtype]}"
            severity, message = grade_by(verdict, message)
            if growth == "note":
                severity, message = growth, f"if many additions are to the same elements: {message}"
            yield Fault(verdict.node, severity, message, "Make it in float32, or a count in an integer dtype.")


def _find_made(script: Script) -> Iterator[tuple[str, ast.expr]]:
    """Yield each name or buffer that gets a tensor from a function such as `torch.zeros`, with the expression."""
    for target, value in script.assignments:
        if _is_from(script, value, _FACTORIES):
            yield target, value
    for call, receiver in script.method_calls("register_buffer"):
        name, tensor = argument_of(call, "name", 0), argument_of(call, "tensor", 1)
        if isinstance(name, ast.Constant) and tensor is not None and _is_from(script, tensor, _FACTORIES):
            yield f"{text_of(receiver)}.{name.value!s}", tensor


def _is_from(script: Script, value: ast.expr, factories: tuple[str, ...]) -> bool:
    """Return whether an expression calls one of these functions, or calls methods on the result of one.

    For example, `torch.zeros(3).cuda()` is from `torch.zeros`.
    """
    while isinstance(value, ast.Call):
        if not script.names.resolve(value.func).isdisjoint(factories):
            return True
        if not isinstance(value.func, ast.Attribute):
            return False
        value = value.func.value
    return False


def _grade_growth(script: Script, target: str, made: ast.expr) -> Severity | None:
    """Return the severity of repeated additions to the tensor `target`, which the expression `made` makes.

    It is "note" if all additions are to a part of the tensor, such as a window of an image, because each element may
    get only a few additions. Else it is "warning". None if there are no repeated additions.
    """
    growth: Severity | None = None
    for node in script.nodes:
        if not _adds_to(node, target) or not _is_repeated(script, node, target, made):
            continue
        if not _adds_to_part(node):
            return "warning"
        growth = "note"
    return growth


def _adds_to(node: ast.AST, target: str) -> bool:
    """Return whether a node adds to the tensor `target`, or subtracts from it.

    It does so by `x += y`, `x = x + y`, `x[i] += y`, or a method in `_GROWING`, such as `x.add_(y)`.
    """
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, (ast.Add, ast.Sub)) and _root(node.target) == target
    if isinstance(node, ast.Assign):
        return text_of(node.targets[0]) == target and _is_increment(node.value, target)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _GROWING and _root(node.func.value) == target
    return False


def _is_repeated(script: Script, node: ast.AST, target: str, made: ast.expr) -> bool:
    """Return whether the addition `node` may run several times on the same element of the tensor that `made` makes."""
    is_same_function = script.frame(node) is script.frame(made)
    if not is_same_function:
        # an attribute, such as `self.total`, is the same tensor in each call of the function; a local variable of the
        # same name as `target` is another tensor
        return "." in target
    loops = _loops_without(script, node, made)
    return bool(loops) and not _adds_once(node, loops)


def _adds_to_part(node: ast.AST) -> bool:
    """Return whether a statement may add a tensor to a part of another: `x[a:b] += y` may, `x[i] += 1` does not."""
    if not isinstance(node, ast.AugAssign) or not isinstance(node.target, ast.Subscript):
        return False
    return not isinstance(node.value, ast.Constant)


def _loops_without(script: Script, node: ast.AST, made: ast.expr) -> list[ast.AST]:
    """Return the loops whose body holds `node`, in the same function, and does not hold `made`."""
    around_made = {outer for outer, _ in script.around(made)}
    frame = script.frame(node)
    loops: list[ast.AST] = []
    for outer, field in script.around(node):
        if outer is frame:
            break
        if isinstance(outer, LOOPS) and field == "body" and outer not in around_made:
            loops.append(outer)
    return loops


def _adds_once(node: ast.AST, loops: list[ast.AST]) -> bool:
    """Return whether the loops around an addition add to an element once or a few times, as does
    `for i in range(n): x[i] += y`.

    They do if the counter of each loop occurs in an index.
    """
    index_names = set[str]()
    for part in ast.walk(node):
        if isinstance(part, ast.Subscript):
            index_names |= names_in(part.slice)
    return all(index_names & set(_counters_of(loop)) for loop in loops)


def _counters_of(loop: ast.AST) -> Iterator[str]:
    """Yield the name that counts the iterations of a loop, if it has one: `i` in `for i in range(n)`, or in
    `for i, x in enumerate(xs)`.
    """
    if not isinstance(loop, (ast.For, ast.AsyncFor)) or not isinstance(loop.iter, ast.Call):
        return
    name, target = function_of(loop.iter), loop.target
    if name == "enumerate" and isinstance(target, ast.Tuple):
        target = target.elts[0]
    if name in ("range", "trange", "enumerate") and isinstance(target, ast.Name):
        yield target.id


def _root(node: ast.expr) -> str:
    """Return the text of the tensor that an expression indexes or changes in place: "x" for `x[i]` and `x.mul_(2)`."""
    while True:
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
            node = node.func.value
        else:
            return text_of(node)


def _is_increment(value: ast.expr, target: str) -> bool:
    """Return whether a value is `target + x` or `target - x`, without the target in `x`.

    `h = h + f(h)` is a layer of a network, and no sum that grows.
    """
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, (ast.Add, ast.Sub)):
        return False
    return text_of(value.left) == target and target not in names_in(value.right)


_POSITIONS = re.compile(r"(?:\w+_)?(?:time_?steps?|positions?|position_ids|pos_ids)$")
_ARANGE = ("torch.arange",)


@rule(
    "AMP605",
    "positions or timesteps in 16 bits",
    bad="""
        positions = torch.arange(length).to(torch.bfloat16)  # AMP605
        loss = model(x, positions)
    """,
    good="""
        positions = torch.arange(length).float()
        loss = model(x, positions)
    """,
)
def positions_in_low(script: Script) -> Iterator[Fault]:
    """bfloat16 holds all whole numbers up to 256, float16 up to 2048. Several larger ones become the same number: in
    bfloat16, 257 becomes 256, and the timesteps 998 to 1002 become 1000. Tables of sines and rotary angles that are
    computed from such positions repeat.
    """
    if not may_be_low(script):
        return
    flow = Flow(script)
    for call in script.calls:
        is_made = not script.names.resolve(call.func).isdisjoint(_ARANGE)
        positions: ast.expr = call
        if not is_made:
            if not isinstance(call.func, ast.Attribute) or function_of(call) not in ("to", "half", "bfloat16", "type"):
                continue
            positions = call.func.value
            if not _holds_positions(script, positions, call):
                continue
        verdict = flow.judge(call, call)
        if verdict is None or verdict.node is not call or _is_small(script, positions, LARGEST[verdict.dtype]):
            continue
        name = "torch.arange" if is_made else text_of(positions)
        severity, message = grade_by(
            verdict, f"{name} in {verdict.dtype}: some whole numbers above {LARGEST[verdict.dtype]} become equal"
        )
        yield Fault(
            call, severity, message, "Keep it in an integer dtype or float32, and cast values computed from it."
        )


def _holds_positions(script: Script, node: ast.expr, cast: ast.Call) -> bool:
    """Return whether the tensor `node` that the call `cast` casts seems to hold positions or timesteps.

    It does if `torch.arange` makes it, or if it or the result of the cast has a name such as `position_ids`. It does
    not if it may be scaled to another range.
    """
    # timesteps that are scaled to 0..1 are no whole numbers
    if _is_scaled_down(script, node):
        return False
    parent = script.parent(cast)
    names = [text_of(target) for target in parent.targets] if isinstance(parent, ast.Assign) else []
    is_variable = isinstance(node, (ast.Name, ast.Attribute))
    if is_variable:
        names.append(text_of(node))
    if any(_POSITIONS.match(name.rpartition(".")[2]) for name in names):
        # another expression, such as `embed(timesteps)`, is computed from positions and holds none
        return is_variable or isinstance(node, ast.Subscript) or _is_from(script, node, _ARANGE)
    return any(_is_from(script, value, _ARANGE) for value in (node, *_own_values(script, node)))


def _is_scaled_down(script: Script, node: ast.expr) -> bool:
    """Return whether a tensor may be computed by a division or subtraction, or is divided by `/=`."""
    parts = [part for value in _own_values(script, node) for part in ast.walk(value)]
    if any(isinstance(part, ast.BinOp) and isinstance(part.op, (ast.Div, ast.Sub)) for part in parts):
        return True
    changes = (part for part in script.nodes if isinstance(part, ast.AugAssign) and isinstance(part.op, ast.Div))
    return any(text_of(change.target) == text_of(node) for change in changes)


def _own_values(script: Script, node: ast.expr) -> list[ast.expr]:
    """Return the values that are assigned to `node`, such as a name, in the function around it."""
    return [value for value in script.values_of(text_of(node)) if script.frame(value) is script.frame(node)]


def _is_small(script: Script, node: ast.expr, largest: int) -> bool:
    """Return whether an expression, or the value of a name, is a `torch.arange` of constants that holds no number above
    `largest`.
    """
    for value in (node, *_own_values(script, node)):
        # go from `torch.arange(9).cuda()` to `torch.arange(9)`
        while isinstance(value, ast.Call) and script.names.resolve(value.func).isdisjoint(_ARANGE):
            value = value.func.value if isinstance(value.func, ast.Attribute) else value.func
        if isinstance(value, ast.Call):
            # arange(end), or arange(start, end, step)
            bounds = value.args[:2] if len(value.args) > 1 else value.args
            numbers: list[int | float] = []
            for bound in bounds:
                if isinstance(bound, ast.Constant) and isinstance(bound.value, (int, float)):
                    numbers.append(bound.value)
            # the end itself is not in the range
            return bool(bounds) and len(numbers) == len(bounds) and max(numbers) <= largest + 1
    return False
