"""Edits of the script that repair a call which raised, such as `train.py:12: h.float() in place of h`."""

import ast
import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .dtype_trials import Trial, Trials
from .expressions import CAST_METHODS, find_expression
from .failing_call import FailingCall, Level
from .module_casts import casts

_SIMPLE = re.compile(r"[A-Za-z_][\w.]*")  # a name or an attribute
_ORDER = (Trial.WEIGHT, Trial.MODEL, Trial.WIDEST, Trial.SINGLE, Trial.FLOAT32, Trial.WRITTEN, Trial.LOW)
"""The trials, the one with the best edit first."""

_FIRST_OF_LOSSES = (Trial.WIDEST, Trial.FLOAT32)
"""The trials to prefer for a call whose backward pass raised: most often a loss function, which is better in float32.
"""


@dataclass(frozen=True)
class Spelling:
    """How to name the operands of a call, in the order of `FailingCall.operands`.

    Attributes:
        names: the name of each operand in reports.
        texts: the text of each operand in the line of the script; "" if it is not known.
        weights: for each operand, whether it is a parameter, a buffer or a gradient of a model.
    """

    names: Sequence[str]
    texts: Sequence[str]
    weights: Sequence[bool]


@dataclass(frozen=True)
class CallSite:
    """The place where a call raised.

    Attributes:
        site: the line of the call; "" if it is not known.
        called_from: the line of the user's own code, if `site` is in an installed package; else None.
        level: the frame of `site`, with the instruction in it; None if it is not known.
        region: the edit that calls the model under torch.autocast; "" if there is none that repairs the call.
        module: the name of the module in which the call raised; "" outside of modules.
    """

    site: str
    called_from: str | None
    level: Level | None
    region: str
    module: str


def choose_edits(call: FailingCall, trials: Trials, spelling: Spelling, place: CallSite) -> Iterator[str]:
    """Yield edits of the script, the best first, such as `train.py:12: h.float() in place of h`. Each edit repairs the
    call by itself. Yield none if the line to edit is not known. If only weights are to be cast, this is the line that
    has cast them to 16 bits.
    """
    trial = _choose_trial(call, trials)
    targets, low = trials.targets[trial], trials.low
    tensors = [tensor for _, tensor in call.operands]
    changed = [index for index, tensor in enumerate(tensors) if tensor.dtype is not targets[index]]
    if call.forward is not None:  # the script has no name for gradients
        named = [bool(spelling.texts[index]) for index in range(len(tensors))]
        changed = [index for index in changed if named[index] or not spelling.names[index].startswith("grad")]
    if trial is not Trial.WRITTEN and all(spelling.weights[index] for index in changed):
        yield from _advise_weights(
            [tensor for tensor, is_weight in zip(tensors, spelling.weights, strict=True) if is_weight]
        )
        return
    if not place.site:
        return
    # With operands in a wider dtype, the result is wider, too, and the 16-bit layers after the call would refuse it.
    if low is not None and low not in targets and Trial.MODEL in trials.targets:
        yield from _keep_low(low, spelling, place)
    if place.called_from is not None:
        yield f"{place.called_from}: {CAST_METHODS[targets[changed[0]]]} on the tensors that this line passes on"
        return
    written = _find_written(call, spelling)
    writes_to_model = any(spelling.weights[index] for index, tensor in enumerate(tensors) if tensor is call.written)
    is_attribute = "." in written  # a new value of a local name would not reach other references to the tensor
    if is_attribute and writes_to_model and low is not None and Trial.MODEL in trials.targets and low is not targets[0]:
        yield f"{place.site}: before this line, {written} = {written}{CAST_METHODS[low]}"
    if low is not None and trials.results.get(trial) is torch.float32 and not trials.is_mixed:
        text = _cast_back(spelling, changed, low, place)
        if text:
            yield f"{place.site}: {text}"
            return
    parts, casts_of = [], {}
    for index in changed:
        method = CAST_METHODS[targets[index]]
        if trial is Trial.WRITTEN and written:
            method = f".to({written}.dtype)"
        text = spelling.texts[index]
        if text:
            casts_of[text] = f"{_enclose(text)}{method}"
            parts.append(f"{casts_of[text]} in place of {text}")
        else:
            dtype = str(tensors[index].dtype).removeprefix("torch.")
            parts.append(f"{method} on the {dtype} tensor ({spelling.names[index]})")
    of_call = _cast_in_call(casts_of, place) if len(casts_of) == len(dict.fromkeys(parts)) else ""
    yield f"{place.site}: {of_call or ', and '.join(dict.fromkeys(parts))}"


def _choose_trial(call: FailingCall, trials: Trials) -> Trial:
    """Return the trial with the best edit among the trials that worked."""
    first: tuple[Trial, ...] = () if call.forward is None else _FIRST_OF_LOSSES
    if call.written is not None:
        first = (Trial.WRITTEN,)
    return next(trial for trial in (*first, *_ORDER) if trial in trials.targets)


def _keep_low(low: torch.dtype, spelling: Spelling, place: CallSite) -> Iterator[str]:
    """Yield edits for a call in a 16-bit model: they let its result stay in 16 bits, because later layers need that."""
    if place.region:
        yield place.region
    names = [name for name, is_weight in zip(spelling.names, spelling.weights, strict=True) if is_weight]
    if place.module and names and all(name.startswith(f"{place.module}.") for name in names):
        method = CAST_METHODS[low]
        yield f"{method} on module {place.module}, whose weights are in another dtype than the model's"


def _find_written(call: FailingCall, spelling: Spelling) -> str:
    """Return the text of the operand that a call writes to, if it is a name or an attribute; else ""."""
    for text, (_, tensor) in zip(spelling.texts, call.operands, strict=True):
        if tensor is call.written and _SIMPLE.fullmatch(text):
            return text
    return ""


class _Casting(ast.NodeTransformer):
    """Replaces expressions by others.

    Args:
        casts: the replacement of each expression, by its text in the script.
    """

    def __init__(self, casts: dict[str, str]) -> None:
        # the texts as `ast.unparse` writes them, because quotes and spaces in the script may differ
        self._casts = {ast.unparse(ast.parse(text, mode="eval")): cast for text, cast in casts.items()}

    def replaces(self, node: ast.AST) -> bool:
        """Return whether a node is one of the expressions."""
        return isinstance(node, ast.expr) and ast.unparse(node) in self._casts

    def visit(self, node: ast.AST) -> ast.AST:
        if self.replaces(node):
            return ast.parse(self._casts[ast.unparse(node)], mode="eval").body
        return self.generic_visit(node)


def _cast_in_call(casts: dict[str, str], place: CallSite) -> str:
    """Return the edit that replaces a whole call, or "" if it is enough to replace operands, or the call is not found.

    In `a.mm(x) + b.mm(x)`, it is not enough: the edit `x.float() in place of x` would change both calls.
    """
    found = None if place.level is None else find_expression(place.level.frame, place.level.index)
    if found is None or not isinstance(found[0], (ast.Call, ast.BinOp)):
        return ""
    call, source = found
    statement: ast.AST = call
    while not isinstance(statement, ast.stmt) and statement in source.parents:
        statement = source.parents[statement]
    inside = set(ast.walk(call))
    outside = [part for part in ast.walk(statement) if isinstance(part, ast.expr) and part not in inside]
    casting = _Casting(casts)
    if not any(map(casting.replaces, outside)):
        return ""
    after = casting.visit(copy.deepcopy(call))
    return f"{ast.unparse(after)} in place of {source.spell(call)}"


def _cast_back(spelling: Spelling, changed: Sequence[int], low: torch.dtype, place: CallSite) -> str:
    """Return the edit that runs a call in float32 and casts its result back to `low`.

    Returns "" if the source of the call is not known, or the text of an operand that is to be cast.
    """
    expression = None if place.level is None else find_expression(place.level.frame, place.level.index)
    texts = [spelling.texts[index] for index in changed]
    if expression is None or not isinstance(expression[0], (ast.Call, ast.BinOp)) or not all(texts):
        return ""
    call, source = expression
    after = ast.unparse(_Casting({text: f"{_enclose(text)}.float()" for text in texts}).visit(copy.deepcopy(call)))
    return f"{_enclose(after)}{CAST_METHODS[low]} in place of {source.spell(call)}"


def _advise_weights(weights: Sequence[Tensor]) -> Iterator[str]:
    """Yield the edit that keeps weights in float32, if it is known which lines of the script have cast them."""
    lines = dict.fromkeys(filter(None, map(casts.find, weights)))
    if lines:
        yield f"float32 weights: no {' and no '.join(lines)}; put the forward pass under torch.autocast instead"


def _enclose(text: str) -> str:
    """Return an expression to which a method call can be appended: in parentheses unless it is a name, an attribute, a
    call or an item.
    """
    node = ast.parse(text, mode="eval").body
    return text if isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"({text})"
