"""`Remedy`: the change that a report advises for a fault. `causes` chooses it, `advice` puts it into words."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..tables import natural_order
from .fault_record import FaultRecord, Word
from .records import RunRecord

RULES_ON_A_LINE = 2
"""The most rules for modules that share a line. If there are more, each has its own line."""


class RemedyKind(Word):
    """The part of a training that a remedy changes."""

    LIST = "list"  # the dtype in which ops or modules run
    WEIGHTS = "weights"  # 16-bit weights that are inf or NaN; if float32 holds them, the dtype of their module
    SUM = "sum"  # the reduction of the loss from a sum to a mean, or the loss scale
    SCALE = "scale"  # the loss scale
    STEP = "step"  # the settings of the optimizer, or the opt_level
    SCRIPT = "script"  # the script or its data, as `Remedy.advice` says


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change to try.

    Attributes:
        kind: the part that it changes.
        extends: the op list that the advised list extends; "" if no list is advised.
        regions: parts of list entries that choose modules to run in float32, such as `match: "blocks.*.norm"`.
        ops: names of ops to run in float32, in addition to the modules.
        alternative: names of ops that are enough in float32, instead of `regions` and `ops`.
        sites: lines of the script that need `.float()`, in addition to the modules and ops.
        scale: the loss scale to use; None if it need not change, or if no scale is known to help.
        is_scale_enough: whether `scale` may take the place of the list.
        is_larger: whether the loss scale is too small. If no larger one helps, `scale` is None, or not larger than the
            present one.
        eps: the eps of the optimizer, if 16 bits round it to zero.
        level: an opt_level to try instead; "" for none.
        advice: lines of advice about the script.
        may_need_list: whether `tune` may find a list if this remedy has none.
    """

    kind: RemedyKind
    extends: str = ""
    regions: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    alternative: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    scale: float | None = None
    is_scale_enough: bool = False
    is_larger: bool = False
    eps: float | None = None
    level: str = ""
    advice: tuple[str, ...] = ()
    may_need_list: bool = False

    @property
    def has_list(self) -> bool:
        """Whether there is a list to try."""
        return bool(self.regions or self.ops)


def make_list_remedy(kind: RemedyKind, fault: FaultRecord, run: RunRecord | None) -> Remedy:
    """Return the remedy that runs the modules and ops of `fault.fix` in float32.

    The list of the remedy extends the last list of the run, or else a shipped list. If a smaller loss scale, of 1
    or more, helps, the remedy has it, too.
    """
    fix, loss_scale = fault.fix, fault.evidence.loss_scale
    low = fault.origin.out if run is None else run.low
    extends = "bfloat16" if low == "bf16" else "float16"
    if run is not None and run.lists:
        extends = run.lists[-1]
    remedy = Remedy(kind, extends, fix.regions, fix.ops, fix.alternative, fix.sites, may_need_list=True)
    if fix.scale is None or fix.scale < 1:
        return remedy
    # a loss scale of 1 is recorded for a value that does not carry the scale, while other gradients do
    if fix.scale < loss_scale or loss_scale == 1:
        return replace(remedy, scale=fix.scale, is_scale_enough=fix.is_scale_enough)
    return remedy


def advise_script(*advice: str, may_need_list: bool = False) -> Remedy:
    """Return the remedy that is an edit of the script or its data. Each argument is a line of advice."""
    return Remedy(RemedyKind.SCRIPT, advice=advice, may_need_list=may_need_list)


def merge(remedy: Remedy, further: Remedy) -> Remedy:
    """Return `remedy` with the modules, ops and lines of `further` added. The result extends the list of `remedy`."""
    return replace(
        remedy,
        regions=_once([*remedy.regions, *further.regions]),
        ops=_once([*remedy.ops, *further.ops]),
        sites=_once([*remedy.sites, *further.sites]),
    )


def _once(names: Iterable[str]) -> tuple[str, ...]:
    """Return each name once, in order."""
    return tuple(dict.fromkeys(names))


def format_entries(remedy: Remedy) -> list[str]:
    """Return the lines of a list, without its `extends`."""
    lines = []
    rules = [f"{{{chooser}, run: float32}}" for chooser in remedy.regions]
    if len(rules) > RULES_ON_A_LINE:
        lines.append("modules:")
        lines += [f"  - {rule}" for rule in sorted(rules, key=natural_order)]
    elif rules:
        lines.append(f"modules: [{', '.join(rules)}]")
    if remedy.ops:
        lines.append(f"blacklist: [{', '.join(remedy.ops)}]")
    return lines


def format_scale(scale: float) -> str:
    """Return a loss scale as text: `2**16`, or `8`."""
    if not 0 < scale < math.inf:
        return f"{scale:g}"
    exponent = math.log2(scale)
    if exponent.is_integer() and abs(exponent) > 3:  # 8 and 0.125 are easier to read as numbers
        return f"2**{exponent:.0f}"
    return f"{scale:g}"
