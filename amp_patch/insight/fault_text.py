"""A fault as text: what does not fit, where it came from, and what to try."""

import math
from collections.abc import Iterator, Sequence

from ..tables import align, count_of, natural_order
from .records import FaultRecord, Recording, RunRecord
from .remedies import RULES_ON_A_LINE, Kind, Remedy, find_remedy, format_entries
from .short_dtypes import spell_out

_MOST_FURTHER = 5
_CELL = "Cell In["  # how IPython begins the place of a line


def format_fault(fault: FaultRecord, run: RunRecord | None) -> str:
    """Return a fault as text. `run` names the lists that the suggested list extends; None: the shipped list."""
    rows = [(f"  {name}", text) for name, text in describe_fault(fault, run)]
    return "\n".join([entitle_fault(fault), *align(rows)])


def format_faults(recording: Recording) -> str:
    """Return the faults of a traced run, or how many steps had none."""
    faults = recording.of(FaultRecord)
    found = [fault for fault in faults if not fault.is_search]
    if found:
        return "\n".join([format_fault(found[0], recording.run), *describe_further(found)])
    searched = [fault for fault in faults if fault.is_search]
    lines = [describe_search(searched, is_all=len(searched) >= len(recording.steps))] if searched else []
    skipped = sum(step.skipped is True for step in recording.steps)
    fitting = len(recording.steps) - max(skipped, len(searched))
    if fitting > 0:
        lines.append(f"every value fits, in {count_of(fitting, 'step')}")
    elif not searched:
        lines.append("no fault, and no step of an optimizer")
    return "\n".join(lines)


def describe_search(faults: Sequence[FaultRecord], *, is_all: bool) -> str:
    """Return what there is to say of steps that were skipped as a dynamic loss scale came down, perhaps all."""
    times = count_of(len(faults), "step")
    text = f"no fault: {times} skipped as the dynamic loss scale came down from {_power(faults[0].loss_scale)}"
    if faults[0].summed:
        text += (
            f"\nthe loss is about {faults[0].summed:.3g} times the mean of its terms; with the mean, a larger one fits"
        )
    if is_all:
        text += "\nevery step was skipped, so none was checked completely: run more steps"
    return text


def describe_further(faults: Sequence[FaultRecord]) -> list[str]:
    """Return a line for each fault after the first, without repetition."""
    lines: list[str] = []
    for fault in faults:
        where = f"{fault.phase}, {_describe_call(fault)}" if fault.aten else fault.phase
        lines.append(f"  step {fault.step}, {where}: {fault.value}")
    lines = list(dict.fromkeys(lines))[1:]
    if not lines:
        return []
    shown = lines[:_MOST_FURTHER]
    if len(lines) > len(shown):
        shown.append(f"  and {len(lines) - len(shown)} more")
    return ["also:", *shown]


def describe_briefly(fault: FaultRecord) -> str:
    """Return a fault in one line."""
    what = _describe_call(fault) if fault.aten else fault.op or fault.parameter
    return f"step {fault.step}, {fault.phase}: {fault.value} ({fault.cause}), {what}"


def entitle_fault(fault: FaultRecord) -> str:
    """Return the first line of a fault: when it was, and what."""
    what = "first value that does not fit"
    if fault.value == "zero":
        what = "first value lost to zero"
    title = f"step {fault.step}, {fault.phase}: {what}"
    if fault.rank:
        return f"rank {fault.rank}, {title}"
    return title


def describe_fault(fault: FaultRecord, run: RunRecord | None) -> Iterator[tuple[str, str]]:
    """Yield what there is to say of a fault, each line with its name, "" for one that goes on."""
    if fault.phase == "step":
        yield "op", f"{fault.op}.step(), from finite weights and gradients"
    elif fault.aten:
        yield "op", _describe_op(fault)
        yield "call", _describe_call(fault)
        yield "rule", _describe_rule(fault)
    yield "cause", _describe_cause(fault)
    yield "reach", _describe_reach(fault)
    if fault.trail:
        steps = [f"{label.replace('_to_copy', 'cast')} {largest:.3g}" for label, largest in reversed(fault.trail)]
        yield "trail", f"max |x|: {' -> '.join([*steps, f'{fault.aten} {fault.value}'])}"
    name = "try"
    for line in _advise(find_remedy(fault, run), fault, run):
        yield name, line
        name = ""


def _describe_op(fault: FaultRecord) -> str:
    dtypes = f"{', '.join(map(spell_out, fault.given)) or 'nothing'} -> {spell_out(fault.out)}"
    text = f"aten::{fault.aten} {dtypes}"
    if fault.node and fault.phase == "backward":
        text += f" ({fault.node})"
    return text


def _describe_call(fault: FaultRecord) -> str:
    """Return which call of the script ran an op, where, and in which module."""
    call = fault.op.removeprefix("aten.")  # an op on no list has no other name
    if call == "_to_copy":
        call = "cast"
    if fault.phase == "backward":
        call = f"the backward pass of {call}"
    place = fault.site or "no line of the script"
    module = f"module {fault.module}" if fault.module else "in no submodule"
    return f"{call} at {place}, {module}"


def _describe_rule(fault: FaultRecord) -> str:
    text = fault.rule or "on no list"
    if fault.region:
        text += f" ({fault.region})"
    if fault.entry:
        text += f", {fault.entry}"
    return text


def _describe_cause(fault: FaultRecord) -> str:
    share = f"{fault.value} in {_percent(fault.share)} of the values"
    if fault.cause == "step":
        text = f"step: {fault.parameter or 'a weight'} became {share}"
        if fault.lr is not None:
            text += f", at a learning rate of {fault.lr:g}"
        return text
    if not fault.aten:
        of = f"the gradient of {fault.parameter} is not finite, and no op that trace saw caused it"
        return f"came in: {of} (a kernel that torch does not dispatch, compiled code, or another rank)"
    if fault.cause == "came in":
        return f"came in: {fault.parameter or 'an input that no op made'} held {fault.value} before ({share})"
    if fault.cause == "divergence":
        return f"divergence: losses or weights have grown without bound ({share}; inputs up to {fault.largest:.3g})"
    if fault.cause == "mathematics":
        return f"mathematics: not finite in float32 either ({share}; inputs up to {fault.largest:.3g})"
    if fault.lost:
        return f"precision: {share}; {fault.lost:g} in the script is zero in 16 bits"
    if fault.value == "zero":
        text = f"precision: {share}; float32 holds them"
    elif not math.isfinite(fault.in_float32):
        text = f"precision: {share}, of which some is finite in float32, and the rest reaches no gradient"
    else:
        text = f"precision: {share}; in float32 the largest is {fault.in_float32:.3g}"
    if fault.phase == "backward" and fault.loss_scale != 1:
        text += f"; loss scale {_power(fault.loss_scale)}"
    return text


def _power(scale: float) -> str:
    if not 0 < scale < math.inf:
        return f"{scale:g}"
    exponent = math.log2(scale)
    if exponent.is_integer() and abs(exponent) > 3:
        return f"2**{exponent:.0f}"
    return f"{scale:g}"


def _percent(share: float) -> str:
    if share < 0.001:
        return "less than 0.1%"
    return f"{share:.1%}"


_SKIPPED = {None: "", True: "; the step was skipped", False: "; the step was taken"}


def _describe_reach(fault: FaultRecord) -> str:
    skipped = _SKIPPED[fault.skipped]
    if fault.reach == "weights":
        return f"the weights: {fault.parameter or 'of no model'}"
    if fault.reach == "gradients":
        names = list(fault.gradients[:3])
        if len(fault.gradients) > 3:
            names.append("...")
            if len(fault.gradients) == fault.of:
                return f"gradients of all {fault.of} parameters{skipped}"
        return f"gradients of {len(fault.gradients)} of {fault.of} parameters ({', '.join(names)}){skipped}"
    if fault.reach == "loss":
        return f"the loss{skipped}"
    if fault.reach == "swallowed" and fault.gradients:
        return f"none that was seen: the gradients that are not finite come from another fault{skipped}"
    if fault.reach == "swallowed":
        return f"swallowed: loss and gradients are finite, but may differ from those of float32{skipped}"
    return "not known: the step did not end"


def _advise(remedy: Remedy, fault: FaultRecord, run: RunRecord | None) -> Iterator[str]:
    """Yield the lines that say what to try."""
    if remedy.kind == "list":
        yield from _advise_list(remedy, fault, run)
    elif remedy.kind == "weights":
        yield "look at the weights, and how they were made"
        if remedy.regions:
            yield "if float32 holds them, the module can run in float32:"
            yield from _advise_list(remedy, fault, run)
    elif remedy.kind == "sum":
        yield f"the mean in the place of a sum: the loss is about {fault.summed:.3g} times the mean of its terms"
        yield from _advise_scale(remedy, fault, run, "or ")
    elif remedy.kind == "scale":
        yield from _advise_scale(remedy, fault, run)
    elif remedy.kind == "step":
        yield from _advise_step(remedy, fault, run)
    else:
        yield from _ADVICE[remedy.kind].format(fault=fault).split("\n")


_ADVICE: dict[Kind, str] = {
    "data": "look at the data and the weights, and how they were made: no list and no loss scale helps",
    "mathematics": "look at the arguments of {fault.op}: no list and no loss scale helps",
    "divergence": "training has diverged: a smaller learning rate, a warm-up, or clipped gradients; no list helps",
    "gradients": "look at what made the gradients: the module is cast, and no loss scale makes them fit; bfloat16 does",
    "held": "the module runs in float32 already, by {fault.entry}: look for a buffer or a cast in it that has 16 bits",
    "region": "torch.autocast casts this gradient, whatever a list says:\nwith torch.autocast(..., enabled=False), on"
    " .float() inputs, around the forward pass and the call of torch.autograd.grad",
    "beyond": "look at {fault.beyond}, too: float32 does not hold its result either, so no list is enough",
}


_OF_THIS_STEP = "it fits this step, later steps may need a smaller one"


def _advise_scale(remedy: Remedy, fault: FaultRecord, run: RunRecord | None, before: str = "") -> Iterator[str]:
    written = ""
    if run is not None and run.is_native and remedy.scale is not None:
        written = f", as by GradScaler(init_scale={_power(remedy.scale)})"
    if not remedy.is_larger:
        assert remedy.scale is not None
        yield f"{before}a smaller loss scale, {_power(remedy.scale)} at most{written}: {_OF_THIS_STEP}"
    elif remedy.scale is not None and remedy.scale > fault.loss_scale:
        yield f"a larger loss scale: {_power(remedy.scale)} instead of {_power(fault.loss_scale)}{written}"
    else:
        yield f"no loss scale holds the smallest and the largest of these; {_power(fault.loss_scale)} is the best"


def _advise_step(remedy: Remedy, fault: FaultRecord, run: RunRecord | None) -> Iterator[str]:
    if remedy.eps is not None:
        yield f"eps={remedy.eps:g} of {fault.op} is zero in {spell_out(fault.out)}, so it divides by zero:"
        if run is None or not run.is_native:
            yield f'opt_level="{remedy.level}", which updates float32 masters'
        else:
            yield "float32 weights: no .half() on the model, but its forward and the loss in torch.autocast, with a"
            yield f'  torch.amp.GradScaler; or amp.initialize(model, optimizer, opt_level="{remedy.level}")'
        yield "  (a larger eps is no remedy: it makes the steps smaller, and small updates are lost in 16 bits)"
        return
    held = ""
    if fault.in_float32 != math.inf:
        held = f" (the float32 master is {fault.in_float32:.3g})"
    yield f"a smaller learning rate, or clipped gradients{held}: no list and no loss scale helps"


def _advise_list(remedy: Remedy, fault: FaultRecord, run: RunRecord | None) -> Iterator[str]:
    """Yield the lines of a list that keep in float32 what has to be, and what the script has to do itself."""
    entries = format_entries(remedy)
    if remedy.alternative:
        alternative = f"blacklist: [{', '.join(remedy.alternative)}]"
        if len(entries) == 1:
            entries = [f"{alternative}   or   {entries[0]}"]
        else:
            entries = [alternative, "or, in its place,", *entries]
    native = None
    if run is not None and run.is_native:
        native = run
        if not native.low:  # no list acts without a region of autocast
            entries = []
    lines = _join_places(fault.lines) or fault.site or "that line"
    edit = f"float32 at {_join_places(remedy.sites) or lines}: .float() on every tensor read there, no cast to 16 bits"
    if not entries:
        yield edit
    elif native is not None:
        yield "in a list of your own, fix.yaml:"
        yield from (f"  {entry}" for entry in entries)
        yield from _advise_use(remedy, fault, edit)
        yield from _advise_region(remedy, fault, native, edit)
    else:
        yield f"in a list of your own, fix.yaml, below `extends: {remedy.extends}`:"
        yield from (f"  {entry}" for entry in entries)
        passed = 'and pass lists="fix.yaml" to amp.initialize'
        if not fault.site.startswith(_CELL):
            passed += ", or --lists fix.yaml to amp-patch"
        yield passed
        if remedy.sites:
            yield f"together with an edit of the script: {edit}"
    if remedy.scale is not None and remedy.is_scale_enough:
        yield f"or a smaller loss scale, {_power(remedy.scale)} at most: {_OF_THIS_STEP}"
    elif remedy.scale is not None and not fault.skipped:  # else it is dynamic, and comes down
        yield f"with a fixed loss scale, lower it to {_power(remedy.scale)}, too: larger values have larger gradients"


def _advise_use(remedy: Remedy, fault: FaultRecord, edit: str) -> Iterator[str]:
    """Yield how a list is laid over a script with torch.autocast, and the edit without which it is not enough."""
    use, what = "amp-patch run --lists fix.yaml", "the script as it is"
    if fault.site.startswith(_CELL):
        use, what = 'amp_patch.native.install(lists="fix.yaml")', "the cells as they are"
    if remedy.sites:
        yield f"and {use}, together with an edit of the script:"
        yield f"  {edit};"
    else:
        yield f"and {use}, which leaves {what};"


def _advise_region(remedy: Remedy, fault: FaultRecord, run: RunRecord, edit: str) -> Iterator[str]:
    """Yield what to write in the script in the place of a list."""
    where = "in a cell" if fault.site.startswith(_CELL) else "in the script"
    region = f'with torch.autocast("{run.device}", enabled=False)'
    if remedy.regions:
        yield f"or instead, {where}: {region} around the forward of"
        yield f"  {_name_regions(remedy.regions)}, on .float() inputs"
        if remedy.ops:  # outside of these modules
            yield f"  and around the calls of {', '.join(remedy.ops)}, on .float() inputs, too"
    else:
        yield f"or instead, {where}, at {_join_places(fault.lines) or fault.site or 'that line'}:"
        yield f"  {region}, and .float() on every tensor read there"
    if remedy.sites:
        yield f"  and the same edit, {edit}"


def _join_places(places: Sequence[str]) -> str:
    """Return places in the script in one phrase, by file and line."""
    return " and ".join(sorted(places, key=natural_order))


def _name_regions(regions: Sequence[str]) -> str:
    """Return the modules that rules choose, as a reader of the script knows them."""
    names = [chooser.partition(": ")[2].strip('"') for chooser in regions]
    if names == ["**"]:
        return "the model"
    if len(names) > RULES_ON_A_LINE:
        return "each of these modules"
    if len(names) == 1:
        return f"module {names[0]}"
    return f"modules {' and '.join(names)}"
