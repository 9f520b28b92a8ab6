"""What is to be done about a fault: `place` says of ops by what a list can reach them, `find_remedy` what to try.

Nothing here is worded: `fault_text` does that, by the kind of script.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ..config import levels
from ..tables import natural_order, star_numbers
from .records import FaultRecord, RunRecord
from .short_dtypes import TINY

if TYPE_CHECKING:
    from torch import nn

    from .written import Item

Kind = Literal[
    "list",
    "scale",
    "sum",
    "weights",
    "data",
    "mathematics",
    "divergence",
    "step",
    "gradients",
    "beyond",
    "held",
    "region",
]
CASTS = ("_to_copy", "copy_")
_EVERY_MODULE = 'match: "**"'
RULES_ON_A_LINE = 2
IN_FORWARD = "a gradient that the forward pass takes"
"""The region of a fault in one under torch.autocast, which casts that backward pass too, whatever a list says."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to try.

    Attributes:
        kind: "list" (what has to run in float32), "scale" (a loss scale), "sum" (the mean
            in the place of a sum, or a loss scale), "weights" (those that came in: a region, if
            float32 holds them), "data", "mathematics", "divergence", "gradients" or "beyond" (no list helps), "step"
            (the optimizer, its eps, or a level with masters), "held" (a list has the module in float32 already),
            "region" (a gradient that the forward pass takes inside of torch.autocast).
        extends: what a list is laid over.
        regions: choosers of modules to run in float32, such as `match: "blocks.*.norm"`.
        ops: names of ops to run in float32, beside these modules.
        alternative: names of ops that suffice in the place of `regions` and `ops`.
        sites: lines of the script that are to be given `.float()`, beside both.
        scale: the loss scale to use, of a list: where it is fixed, beside the list, or in its place if
            `is_scale_enough`; `is_larger`: than the present one.
        eps: of the optimizer, where 16 bits make it zero.
        level: to use instead.
    """

    kind: Kind
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

    @property
    def has_list(self) -> bool:
        """Whether there is a list to try."""
        return bool(self.regions or self.ops)


def find_remedy(fault: FaultRecord, run: RunRecord | None) -> Remedy:
    """Return what to try about a fault. Without the run, a list is laid over the shipped one."""
    if fault.cause == "step":
        if fault.out == "f16" and fault.eps is not None and 0 < fault.eps <= TINY["f16"]:
            return Remedy("step", eps=fault.eps, level=levels.find_master_level("float16").name)
        return Remedy("step")
    if fault.cause == "divergence":
        return Remedy("divergence")
    if fault.cause == "came in":
        if fault.in_float32 < math.inf:
            return _list_of("list", fault, run)
        if fault.parameter and ("f16" in fault.given or "bf16" in fault.given):
            return _list_of("weights", fault, run)
        return Remedy("data")
    if fault.cause == "mathematics":
        return Remedy("mathematics")
    if fault.phase == "backward" and fault.value == "zero":
        return Remedy("scale", scale=fault.scale, is_larger=True)
    if fault.region == IN_FORWARD:
        return Remedy("region")
    if fault.summed:
        return Remedy("sum", scale=fault.scale)
    if fault.rule.startswith("run: float32"):
        return Remedy("held")
    has_list = bool(fault.regions or fault.ops)
    if fault.phase == "backward" and fault.is_scale_enough and not has_list:
        return Remedy("scale", scale=fault.scale)
    if fault.phase == "backward" and fault.rule.startswith("border"):
        return Remedy("gradients")
    if fault.beyond:
        return Remedy("beyond")
    return _list_of("list", fault, run)


def _list_of(kind: Kind, fault: FaultRecord, run: RunRecord | None) -> Remedy:
    low, extends = fault.out, ""
    if run is not None:
        low = run.low
        if run.lists:
            extends = run.lists[-1]
    if not extends:
        extends = "bfloat16" if low == "bf16" else "float16"
    remedy = Remedy(kind, extends, fault.regions, fault.ops, fault.alternative, fault.sites)
    is_smaller = fault.scale is not None and (fault.scale < fault.loss_scale or fault.loss_scale == 1)
    if is_smaller and fault.scale is not None and fault.scale >= 1:
        return replace(remedy, scale=fault.scale, is_scale_enough=fault.is_scale_enough)
    return remedy


def add(remedy: Remedy, other: Remedy) -> Remedy:
    """Return a remedy with what another adds to its list; it is laid over what the first is."""
    return replace(
        remedy,
        regions=_once([*remedy.regions, *other.regions]),
        ops=_once([*remedy.ops, *other.ops]),
        sites=_once([*remedy.sites, *other.sites]),
    )


def format_entries(remedy: Remedy) -> list[str]:
    """Return the lines of a list, less what it extends."""
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


# ---- by what a list reaches an op ------------------------------------------------------------------------------------


def place(items: Iterable["Item"], models: "Sequence[nn.Module]", *, has_lists: bool) -> dict[str, Any]:
    """Return by what ops are reached that have to run in float32, as fields of `Remedy`.

    A module is named where the op is inside of one. A rule for the model itself would cover all of it, so an op that
    the model calls itself, or the loss code, is named by a list. `has_lists`: whether lists of ops act at this level.
    """
    names: list[str] = []
    regions: list[str] = []
    ops: list[str] = []
    sites: list[str] = []
    casts: list[str] = []
    covered: set[str] = set()  # lines of modules that other ops put into float32: a cast to x.dtype is one to float32
    known = _name_all(models)
    given = list(items)
    for item in given:
        name, model, op = "", None, ""
        if (item.is_in_module or item.module) and item.module in known:
            name, model = known[item.module]
        if has_lists:
            op = _find_listed_name(item)
        is_cast_of_script = item.aten in CASTS and not item.listed and not item.rule
        if not item.is_reached or (is_cast_of_script and item.names_dtype):
            sites.append(item.site)
        elif is_cast_of_script and not name:
            casts.append(item.site)
        elif name:
            names.append(name)
            covered.add(item.site)
        elif op:
            ops.append(op)
        elif model is not None:
            regions.append(_choose_root(model, models))
        else:
            sites.append(item.site)
    kinds = {name: type(module) for model in models for name, module in model.named_modules() if name}
    if _EVERY_MODULE in regions:
        regions = [_EVERY_MODULE]
    else:
        regions = [*(f"match: {json.dumps(name)}" for name in fold(names, kinds)), *regions]
    sites += [site for site in casts if site not in covered]
    alternative: list[str] = []
    if has_lists and regions and all(item.rule in ("whitelist", "promote") for item in given):
        alternative = [item.listed for item in given]
    reached = {"regions": regions, "ops": ops, "alternative": alternative, "sites": sites}
    return {name: _once(each) for name, each in reached.items()}


def _once(names: Iterable[str]) -> tuple[str, ...]:
    """Return each name once, in their order."""
    return tuple(dict.fromkeys(names))


def _name_all(models: "Sequence[nn.Module]") -> "dict[str, tuple[str, nn.Module]]":
    """Return for each module, by the name that reports have, its name in its own model, as rules have it, and the
    model.
    """
    from .naming import name_modules

    own = {id(module): (name, model) for model in models for name, module in model.named_modules()}
    return {name: own[known] for known, (_, name) in name_modules(list(models))}


def _choose_root(model: "nn.Module", models: "Sequence[nn.Module]") -> str:
    kind = type(model)
    if len(models) == 1:
        return _EVERY_MODULE
    if "<" in kind.__qualname__ or kind.__module__.startswith("torch."):  # no class that a rule can name
        return 'match: "re:^$"'
    return f"type: {kind.__module__}.{kind.__qualname__}"


def _find_listed_name(item: "Item") -> str:
    """Return by which name a list reaches an op, "" where it cannot: what is written in place stays in 16 bits."""
    from ..config import op_names

    if item.rule in ("whitelist", "promote"):
        return item.listed
    if item.listed or item.rule or item.aten.endswith("_"):
        return ""
    name = item.aten.lstrip("_")  # torch._softmax is in front of the kernel, and what scripts call is softmax
    return name if op_names.find_or_none(name) else ""


_NUMBER = re.compile(r"\d+")


def fold(names: Iterable[str], kinds: Mapping[str, type]) -> list[str]:
    """Return patterns for modules: names of one class that differ in numbers alone are one pattern, which may match
    more than these, but nothing of another class; those inside of others are left out. `kinds`: the classes of all
    modules.
    """
    alike: dict[tuple[str, type | None], list[str]] = {}
    for name in dict.fromkeys(names):
        alike.setdefault((_NUMBER.sub("*", name), kinds.get(name)), []).append(name)
    patterns: list[str] = []
    for (_, kind), same in alike.items():
        patterns += _fold_alike(same, kind, kinds)
    return [one for one in patterns if not any(one.startswith(f"{other}.") for other in patterns)]


def _fold_alike(names: list[str], kind: type | None, kinds: Mapping[str, type]) -> list[str]:
    """Return one pattern; or one for each last part, as in an `nn.Sequential` of several classes; or the names."""
    by_last_part: dict[str, list[str]] = {}
    for name in names:
        by_last_part.setdefault(name.rpartition(".")[2], []).append(name)
    for groups in ([names], list(by_last_part.values())):
        patterns = [star_numbers(group) for group in groups]
        parts = re.compile("|".join(re.escape(pattern).replace(r"\*", "[^.]*") for pattern in patterns))
        if {other for name, other in kinds.items() if parts.fullmatch(name)} <= {kind}:
            return patterns
    return names
