"""The lines of advice in a report: how to apply the remedy of a fault."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..tables import WIDTH, natural_order
from .fault_record import FaultRecord
from .records import RunRecord
from .remedies import RULES_ON_A_LINE, Remedy, RemedyKind, format_entries, format_scale
from .short_dtypes import spell_out

_CELL = "Cell In["  # how IPython begins the place of a line
_WHOLE_MODELS = {'match: "**"': "the model", 'match: "re:^$"': "each model"}
"""Words for the elements of `Remedy.regions` that choose whole models."""

_OF_THIS_STEP = "it fits this step, later steps may need a smaller one"


@dataclass(frozen=True, slots=True)
class _Case:
    """A remedy, the fault that it is for, and the run if that is known."""

    remedy: Remedy
    fault: FaultRecord
    run: RunRecord | None

    @property
    def native_run(self) -> RunRecord | None:
        """The run if the script uses torch.autocast or no amp at all; None if it uses `amp.initialize`."""
        return self.run if self.run is not None and self.run.is_native else None

    @property
    def is_in_notebook(self) -> bool:
        """Whether the line of the fault is in a notebook."""
        return (self.fault.origin.site or "").startswith(_CELL)

    @property
    def lines(self) -> str:
        """The lines of the script that run the ops which must be in float32, in one phrase."""
        return _join_places(self.fault.fix.lines) or self.fault.origin.site or "that line"

    @property
    def edit(self) -> str:
        """The edit of the script that makes ops float32: the ops that no list reaches, or else all of them."""
        places = _join_places(self.remedy.sites) or self.lines
        return f"float32 at {places}: .float() on every tensor read there, no cast to 16 bits"


def advise(remedy: Remedy, fault: FaultRecord, run: RunRecord | None) -> Iterator[str]:
    """Yield the lines of advice for a fault."""
    yield from _ADVISERS[remedy.kind](_Case(remedy, fault, run))


def _advise_script(case: _Case) -> Iterator[str]:
    yield from case.remedy.advice


def _advise_weights(case: _Case) -> Iterator[str]:
    yield "look at the weights, and how they were made"
    if case.remedy.regions:
        yield "if float32 holds them, the module can run in float32:"
        yield from _advise_list(case)


def _advise_sum(case: _Case) -> Iterator[str]:
    yield f"the mean in the place of a sum: the loss is about {case.fault.fix.summed:.3g} times the mean of its terms"
    first, *more = _advise_scale(case)
    yield f"or {first}"
    yield from more


def _advise_scale(case: _Case) -> Iterator[str]:
    remedy, present = case.remedy, case.fault.evidence.loss_scale
    in_script = ""
    if case.native_run is not None and remedy.scale is not None:
        in_script = f", as by GradScaler(init_scale={format_scale(remedy.scale)})"
    if not remedy.is_larger:
        assert remedy.scale is not None
        yield f"a smaller loss scale, {format_scale(remedy.scale)} at most{in_script}: {_OF_THIS_STEP}"
    elif remedy.scale is not None and remedy.scale > present:
        yield f"a larger loss scale: {format_scale(remedy.scale)} instead of {format_scale(present)}{in_script}"
    else:
        yield "no loss scale makes both the smallest and the largest of these gradients fit"


def _advise_step(case: _Case) -> Iterator[str]:
    remedy, origin, evidence = case.remedy, case.fault.origin, case.fault.evidence
    if remedy.eps is None:
        held = f" (the float32 master is {evidence.in_float32:.3g})" if evidence.in_float32 is not None else ""
        yield f"a smaller learning rate, or clipped gradients{held}: no list and no loss scale helps"
        return
    yield f"eps={remedy.eps:g} of {origin.op} is zero in {spell_out(origin.out or '')}, so it divides by zero:"
    if case.native_run is None:
        yield f'opt_level="{remedy.level}", which updates float32 masters'
    else:
        yield (
            "float32 weights: no .half() on the model, but its forward and the loss in torch.autocast, with a"
            f' torch.amp.GradScaler; or amp.initialize(model, optimizer, opt_level="{remedy.level}")'
        )
    yield "  (a larger eps is no remedy: it makes the steps smaller, and small updates are lost in 16 bits)"


def _advise_list(case: _Case) -> Iterator[str]:
    """Yield an op list that keeps the ops in float32, how to use it, and an edit for the ops that no list reaches.

    If no list has an effect, yield the edit alone. A loss scale comes last, if one is part of the remedy.
    """
    native_run = case.native_run
    entries = _format_choice(case.remedy)
    if native_run is not None and not native_run.low:
        entries = []  # without a region of autocast, lists do nothing
    if not entries:
        yield case.edit
    elif native_run is not None:
        yield "in a list of your own, fix.yaml:"
        yield from (f"  {entry}" for entry in entries)
        yield from _advise_use(case)
        yield from _advise_region(case, native_run)
    else:
        yield f"in a list of your own, fix.yaml, below `extends: {case.remedy.extends}`:"
        yield from (f"  {entry}" for entry in entries)
        passed = 'and pass lists="fix.yaml" to amp.initialize'
        if not case.is_in_notebook:
            passed += ", or --lists fix.yaml to amp-patch"
        yield passed
        if case.remedy.sites:
            yield f"together with an edit of the script: {case.edit}"
    yield from _advise_scale_of_list(case)


_ENTRY_WIDTH = WIDTH - 11  # a report prints entries behind a label and a margin of 11 characters together


def _format_choice(remedy: Remedy) -> list[str]:
    """Return the lines of the list's entries. If a blacklist suffices in their place, it comes first."""
    entries = format_entries(remedy)
    if not remedy.alternative:
        return entries
    alternative = f"blacklist: [{', '.join(remedy.alternative)}]"
    in_one_line = f"{alternative}   or   {entries[0]}"
    if len(entries) == 1 and len(in_one_line) <= _ENTRY_WIDTH:
        return [in_one_line]
    return [alternative, "or, in its place,", *entries]


def _advise_scale_of_list(case: _Case) -> Iterator[str]:
    scale = case.remedy.scale
    if scale is None:
        return
    if case.remedy.is_scale_enough:
        yield f"or a smaller loss scale, {format_scale(scale)} at most: {_OF_THIS_STEP}"
    elif not case.fault.effect.skipped:  # a skipped step has a dynamic scale, which comes down by itself
        yield f"with a fixed loss scale, lower it to {format_scale(scale)}, too: larger values have larger gradients"


def _advise_use(case: _Case) -> Iterator[str]:
    """Yield how to run a script with torch.autocast under a list, and the edit that the list needs, if any."""
    use, unchanged = "amp-patch run --lists fix.yaml", "the script as it is"
    if case.is_in_notebook:
        use, unchanged = 'amp_patch.native.install(lists="fix.yaml")', "the cells as they are"
    if case.remedy.sites:
        yield f"and {use}, together with an edit of the script:"
        yield f"  {case.edit};"
    else:
        yield f"and {use}, which leaves {unchanged};"


def _advise_region(case: _Case, run: RunRecord) -> Iterator[str]:
    """Yield the region of torch.autocast to write into the script instead of an op list."""
    remedy = case.remedy
    where = "in a cell" if case.is_in_notebook else "in the script"
    region = f'with torch.autocast("{run.device}", enabled=False)'
    is_same_line = not remedy.regions and bool(remedy.sites) and set(remedy.sites) <= set(case.fault.fix.lines)
    if remedy.regions:
        yield f"or instead, {where}: {region} around the forward of"
        yield f"  {_name_regions(remedy.regions)}, on .float() inputs"
        if remedy.ops:  # these run outside of the modules
            yield f"  and around the calls of {', '.join(remedy.ops)}, on .float() inputs, too"
    else:
        yield f"or instead, {where}, at {case.lines}:"
        yield f"  {region}, and .float() on every tensor read there"
        if is_same_line:
            yield "  (no cast to 16 bits)"
    if remedy.sites and not is_same_line:
        yield f"  and the same edit, {case.edit}"


def _join_places(places: Sequence[str]) -> str:
    """Return lines of the script in one phrase, by file and line."""
    return " and ".join(sorted(places, key=natural_order))


def _name_regions(regions: Sequence[str]) -> str:
    """Return a phrase for the modules that `regions` choose (see `Remedy.regions`): "module encoder" or "the model"."""
    if len(regions) > RULES_ON_A_LINE:
        return "each of these modules"
    models: list[str] = []
    names: list[str] = []
    for chooser in regions:
        kind, _, name = chooser.partition(": ")
        if chooser in _WHOLE_MODELS:
            models.append(_WHOLE_MODELS[chooser])
        elif kind == "type":  # only a whole model is chosen by its class
            models.append(f"the model of class {name}")
        else:
            names.append(name.strip('"'))
    if names:
        models.append(f"module{'s' * (len(names) > 1)} {' and '.join(names)}")
    return " and ".join(models)


_ADVISERS: dict[RemedyKind, Callable[[_Case], Iterator[str]]] = {
    RemedyKind.LIST: _advise_list,
    RemedyKind.WEIGHTS: _advise_weights,
    RemedyKind.SUM: _advise_sum,
    RemedyKind.SCALE: _advise_scale,
    RemedyKind.STEP: _advise_step,
    RemedyKind.SCRIPT: _advise_script,
}
