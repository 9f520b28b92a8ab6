"""`find_scope`: finds how to make ops run in float32: by module rules, by names in lists, or by edits of the script."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from ..config import OpRule, op_names
from ..tables import star_numbers
from .fault_record import CASTS, Fix
from .naming import name_modules
from .sites import casts_result
from .written import Culprit

_EVERY_MODULE = 'match: "**"'
_NO_SUBMODULE = 'match: "re:^$"'  # matches the models themselves; for a class that no rule can name
_LISTED_IN_LOW = [rule for rule in OpRule if rule.may_run_low]
_NUMBER = re.compile(r"\d+")


def find_scope(culprits: Iterable[Culprit], models: Sequence[nn.Module], *, has_lists: bool) -> Fix:
    """Return, as a `Fix`, the module rules, list entries and lines to edit by which the ops `culprits` run in float32.

    For an op in a submodule, this is a rule for the submodule. For an op that the model itself or the loss code calls,
    it is the op's name in a list if possible, because a rule for the model would cover all of it. An op that no
    rule and no list reaches gets its line. `has_lists`: whether lists of ops act at the opt_level of the run.
    """
    modules: list[str] = []
    roots: list[str] = []
    ops: list[str] = []
    sites: list[str] = []
    casts: list[str] = []  # lines with a cast outside of submodules
    covered: set[str] = set()  # lines of ops in `modules`: the rule makes x.dtype, and a cast to it, float32 there
    known = name_all(models)
    given = list(culprits)
    for culprit in given:
        # `name` is the submodule that the op ran in; "" for an op that a model itself, or the loss code, calls.
        name, model = "", None
        if culprit.is_in_module or culprit.module:
            name, model = known.get(culprit.module, ("", None))
        listed_name = _find_listed_name(culprit) if has_lists else ""
        is_cast_of_script = culprit.aten in CASTS and not culprit.listed and not culprit.rule
        if not culprit.is_reached or (is_cast_of_script and culprit.names_dtype):
            sites.append(culprit.site)  # neither a list nor a rule acts there, or the line says `.half()`
        elif is_cast_of_script and not name:
            casts.append(culprit.site)
        elif name:
            modules.append(name)
            covered.add(culprit.site)
        elif listed_name:
            ops.append(listed_name)
        elif model is not None:
            roots.append(_choose_root(model, models))
        else:
            sites.append(culprit.site)
        if (name or listed_name) and not is_cast_of_script and casts_result(culprit.file, culprit.number):
            sites.append(culprit.site)  # the op may run in float32, and the line casts its result back to 16 bits
    kinds = {name: type(module) for model in models for name, module in model.named_modules() if name}
    regions = [*(f"match: {json.dumps(name)}" for name in fold_names(modules, kinds)), *roots]
    if _EVERY_MODULE in roots:  # it covers all other modules
        regions = [_EVERY_MODULE]
    sites += [site for site in casts if site not in covered]
    # If the lists put all of these ops into 16 bits, the lists can take them out again.
    alternative: list[str] = []
    if has_lists and regions and all(culprit.rule in _LISTED_IN_LOW for culprit in given):
        alternative = [culprit.listed for culprit in given]
    return Fix(_once(regions), _once(ops), _once(alternative), _once(sites))


def find_submodule_rules(culprit: Culprit, models: Sequence[nn.Module]) -> tuple[str, ...]:
    """Return the rules for the submodule that an op ran in, as in `Fix.regions`, if they make the op run in float32.

    Return () for an op that a model itself, or the loss code, calls: a rule for the model would cover all of it.
    """
    if not name_all(models).get(culprit.module, ("", None))[0]:
        return ()
    scope = find_scope([culprit], models, has_lists=False)
    return () if scope.sites else scope.regions


def _once(names: Iterable[str]) -> tuple[str, ...]:
    """Return each name once, in order."""
    return tuple(dict.fromkeys(names))


def name_all(models: Sequence[nn.Module]) -> dict[str, tuple[str, nn.Module]]:
    """Return for each module its name within its model, and the model. The keys are the names of modules in reports."""
    own = {id(module): (name, model) for model in models for name, module in model.named_modules()}
    return {name: own[key] for key, (_, name) in name_modules(list(models))}


def _choose_root(model: nn.Module, models: Sequence[nn.Module]) -> str:
    """Return the chooser of the rule for a whole model: the part of the rule that says which modules it covers."""
    kind = type(model)
    if len(models) == 1:
        return _EVERY_MODULE
    # A rule cannot name a class that is made in a function. And a class of torch may have instances inside other
    # modules.
    if "<" in kind.__qualname__ or kind.__module__.startswith("torch."):
        return _NO_SUBMODULE
    return f"type: {kind.__module__}.{kind.__qualname__}"


def _find_listed_name(culprit: Culprit) -> str:
    """Return the name by which a list can put an op into float32, or "".

    There is none for an op whose rule does not run it in 16 bits. An op on no list has one if torch knows its name, and
    it does not write in place.
    """
    if culprit.rule in _LISTED_IN_LOW:
        return culprit.listed
    if culprit.listed or culprit.rule or culprit.aten.endswith("_"):
        return ""
    name = culprit.aten.lstrip("_")  # scripts call softmax, and torch dispatches _softmax
    return name if op_names.find_known_spellings(name) else ""


def fold_names(names: Iterable[str], kinds: Mapping[str, type]) -> list[str]:
    """Return patterns that match the named modules. Names that differ only in numbers become one pattern, if all
    modules that it matches are of one class: "blocks.0.norm" and "blocks.3.norm" become "blocks.*.norm".

    A pattern may match more modules than are named. A pattern that continues another one is left out, as "a.*.norm"
    continues "a.*". `kinds` has the classes of all modules.
    """
    alike: dict[tuple[str, type | None], list[str]] = {}
    for name in dict.fromkeys(names):
        alike.setdefault((_NUMBER.sub("*", name), kinds.get(name)), []).append(name)
    patterns: list[str] = []
    for (_, kind), same in alike.items():
        patterns += _fold_alike(same, kind, kinds)
    return [pattern for pattern in patterns if not any(pattern.startswith(f"{outer}.") for outer in patterns)]


def _fold_alike(names: list[str], kind: type | None, kinds: Mapping[str, type]) -> list[str]:
    """Return patterns for `names` that match no module of another class than `kind`.

    Try one pattern for all names, then one for each last part, as in an `nn.Sequential`, and else return the names.
    """
    by_last_part: dict[str, list[str]] = {}
    for name in names:
        by_last_part.setdefault(name.rpartition(".")[2], []).append(name)
    for groups in ([names], list(by_last_part.values())):
        patterns = [star_numbers(group) for group in groups]
        parts = re.compile("|".join(re.escape(pattern).replace(r"\*", "[^.]*") for pattern in patterns))
        if {matched for name, matched in kinds.items() if parts.fullmatch(name)} <= {kind}:
            return patterns
    return names
