"""A fault as text: what does not fit, where it came from, and what to try."""

import math
from collections.abc import Iterator

from ..tables import align
from .records import FaultRecord, RunRecord

_LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38}
_NAMES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}


def find_scale(fault: FaultRecord) -> float | None:
    """Return the largest power of two as a loss scale under which the value of a backward pass fits; None where the
    scale has no part in it.
    """
    largest = _LARGEST.get(fault.out)
    is_too_large = fault.phase == "backward" and fault.cause == "precision" and fault.value != "zero"
    if not is_too_large or largest is None or not 0 < fault.in_float32 < math.inf:
        return None
    return float(2.0 ** math.floor(math.log2(fault.loss_scale * largest / fault.in_float32)))


def format_fault(fault: FaultRecord, run: RunRecord) -> str:
    """Return a fault as some lines."""
    rank = f"rank {fault.rank}, " if fault.rank else ""
    what = "first value that does not fit" if fault.value != "zero" else "first value lost to zero"
    rows = [(f"  {name}", text) for name, text in _lines(fault, run)]
    return "\n".join([f"{rank}step {fault.step}, {fault.phase}: {what}", *align(rows)])


def _lines(fault: FaultRecord, run: RunRecord) -> Iterator[tuple[str, str]]:
    if fault.aten:
        yield "op", _describe_op(fault)
        yield "call", f"{fault.op} at {fault.site or 'no line of the script'}, module {fault.module or '(none)'}"
        region = f" ({fault.region})" if fault.region else ""
        yield "rule", f"{fault.rule or 'on no list'}{region}{', ' + fault.entry if fault.entry else ''}"
    yield "cause", _describe_cause(fault)
    yield "reach", _describe_reach(fault)
    if fault.trail:
        steps = [f"{label} {largest:.3g}" for label, largest in reversed(fault.trail)]
        yield "trail", f"max |x|: {' -> '.join([*steps, f'{fault.aten} {fault.value}'])}"
    for index, line in enumerate(_advise(fault, run)):
        yield "try" if not index else "", line


def _describe_op(fault: FaultRecord) -> str:
    dtypes = f"{', '.join(map(_long, fault.given)) or 'nothing'} -> {_long(fault.out)}"
    node = f", in {fault.node}, the backward of" if fault.node and fault.phase == "backward" else ""
    return f"aten::{fault.aten} {dtypes}{node}"


def _long(dtype: str) -> str:
    return _NAMES.get(dtype, dtype)


def _describe_cause(fault: FaultRecord) -> str:
    share = f"{fault.value} in {_percent(fault.share)} of the values"
    scale = f"; loss scale {_power(fault.loss_scale)}" if fault.phase == "backward" and fault.loss_scale != 1 else ""
    if not fault.aten:
        of = f"the gradient of {fault.parameter} is not finite, and no op that was seen made it so"
        return f"came in: {of} (a kernel that torch does not dispatch, compiled code, or another rank)"
    if fault.cause == "came in":
        return f"came in: {fault.parameter or 'an input that no op made'} held {fault.value} before ({share})"
    if fault.cause == "mathematics":
        return f"mathematics: not finite in float32 either ({share}; inputs up to {fault.largest:.3g})"
    held = f"float32 holds up to {fault.in_float32:.3g} there" if fault.value != "zero" else "float32 holds them"
    return f"precision: {share}; {held}{scale}"


def _power(scale: float) -> str:
    exponent = math.log2(scale)
    return f"2**{exponent:.0f}" if exponent.is_integer() and exponent > 3 else f"{scale:g}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "less than 0.1%"


def _describe_reach(fault: FaultRecord) -> str:
    skipped = "" if fault.skipped is None else "; the step was skipped" if fault.skipped else "; the step was taken"
    if fault.reach == "gradients":
        names = ", ".join(fault.gradients[:3]) + (", ..." if len(fault.gradients) > 3 else "")
        return f"gradients of {len(fault.gradients)} of {fault.of} parameters ({names}){skipped}"
    if fault.reach == "loss":
        return f"the loss{skipped}"
    if fault.reach == "swallowed" and fault.gradients:
        return f"none that was seen: the gradients that are not finite come of another fault{skipped}"
    if fault.reach == "swallowed":
        return f"swallowed: loss and gradients are finite, and not those of float32{skipped}"
    return "not known: the step did not end"


def _advise(fault: FaultRecord, run: RunRecord) -> Iterator[str]:
    is_low = bool({"f16", "bf16"} & {*fault.given})
    if fault.cause == "came in" and is_low and fault.parameter:
        yield "look at the weights, and what made them; where float32 holds them, the module may run in it,"
        yield from _advise_list(fault, run, by_op=False)
        return
    if fault.cause == "came in":
        yield "look at the data, the weights, or what made them: no list and no loss scale changes this"
        return
    if fault.cause == "mathematics" and is_low:
        yield f"look at what {fault.op} is given there; where 16 bits made it so, as of 1e-8 a zero, the module may run"
        yield from _advise_list(fault, run, by_op=False)
        return
    if fault.cause == "mathematics":
        yield f"look at what {fault.op} is given there: no list and no loss scale changes this"
        return
    if fault.phase == "backward" and fault.value == "zero":
        yield f"a larger loss scale than {_power(fault.loss_scale)}"
        return
    scale = find_scale(fault)
    if scale is not None and scale >= 1:
        written = f", as by GradScaler(init_scale={_power(scale)})" if run.is_native else ""
        yield f"a smaller loss scale, {_power(scale)} at most{written}: no op list changes this"
        return
    if fault.phase == "backward" and fault.rule.startswith("border"):
        yield "look at what made the gradients: the module is cast, and no loss scale makes them fit; bfloat16 does"
        return
    yield from _advise_list(fault, run)


def _advise_list(fault: FaultRecord, run: RunRecord, *, by_op: bool = True) -> Iterator[str]:
    """Yield the lines of a list that keep the op, where that is of use, or the module in float32."""
    extends = run.lists[-1] if run.lists else _NAMES.get(run.low, "float16")
    lines = []
    if by_op and fault.listed and fault.rule in ("whitelist", "promote"):
        lines.append(f"blacklist: [{fault.listed}]")
    if fault.module and not fault.module.startswith("("):
        lines.append(f'modules: [{{match: "{fault.module}", run: float32}}]')
    if not lines or (run.is_native and not run.low):
        yield f"float32 for what {fault.op} is given at {fault.site or 'that line'}: .float() before it"
        return
    if run.is_native:
        yield "in a list of your own, fix.yaml:"
        yield "  " + "   or   ".join(lines)
        yield "and amp-patch run --lists fix.yaml, which leaves the script as it is; or in the script, at"
        disabled = f'torch.autocast("{run.device}", enabled=False)'
        yield f"{fault.site}: with {disabled}, and .float() on what {fault.op} is given"
        return
    yield "in a list of your own" + (f", below `extends: {extends}`" if fault.listed else "") + ":"
    yield "  " + "   or   ".join(lines)
    yield "and give it as lists=... to amp.initialize, or as --lists"
