"""`amp-patch lists show`: prints the merged lists.

The *spellings* of an entry are the functions that its name means, such as `torch.exp` and `Tensor.exp` for `exp`.
"""

import argparse
from collections.abc import Iterator

from .. import config
from ..tables import WIDTH
from .lists_printing import LIST, as_data, bounds, fit_rows, location, module_as_data, print_json, print_lines
from .values import add_wide

_MARGIN = "  "
SUMMARY = "print every entry of the merged lists, with its reason, file and line"

EXAMPLES = (
    "amp-patch lists show float16",
    "amp-patch lists show bfloat16 fast",
)
"""Command lines that the help shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the task."""
    parser.add_argument("lists", nargs="+", metavar="NAME|FILE", help=f"{LIST}; of several, later ones win")
    about_spellings = "also print, below each entry, the names that it decides"
    parser.add_argument("--spellings", action="store_true", help=about_spellings)
    parser.add_argument("--json", action="store_true", help="print JSON, which has all spellings")
    add_wide(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the lists. Return 0."""
    lists = config.load_oplists(arguments.lists, may_be_overlay=True)
    if arguments.json:
        print_json(_lists_as_data(lists))
    else:
        width = None if arguments.wide else WIDTH - len(_MARGIN)
        print_lines(_show(lists, width, with_spellings=arguments.spellings))
    return 0


def _show(lists: "config.OpLists", width: int | None, *, with_spellings: bool) -> Iterator[str]:
    """Yield the lines of the report: the rules for ops, the module rules, and the entries without effect."""
    import torch

    yield (
        f"{', '.join(lists.names)}: {len(lists.spellings)} spellings on torch {torch.__version__}, digest"
        f" {lists.digest[:12]}"
    )
    yield from _show_rules(lists, width, with_spellings=with_spellings)
    if lists.modules:
        yield ("\nmodules: run in the dtype shown, whatever the rules above say; the last rule that matches wins")
        cells = [(rule.chooser, rule.run, rule.why, location(rule)) for rule in lists.modules]
        yield from (f"{_MARGIN}{row}" for row in fit_rows(cells, width))
    without_effect = (
        (lists.missing, "missing: there is no such op"),
        (_deferred(lists), "deferred: takes effect when the package is imported"),
        (lists.other_torch, "kept out: since or until excludes the torch version that the list is read for"),
    )
    for entries, title in without_effect:
        if entries:
            yield f"\n{title}"
            rows = [
                (entry.op, entry.rule.describe(entry.like), entry.why, location(entry), bounds(entry))
                for entry in entries
            ]
            yield from (f"{_MARGIN}{row}" for row in fit_rows(rows, width))


def _show_rules(lists: "config.OpLists", width: int | None, *, with_spellings: bool) -> Iterator[str]:
    """Yield each rule with its entries.

    A row ends with `except` and the spellings that its entry names, but that an entry of a later file decides.
    """
    by_entry = _by_entry(lists)
    for rule in config.op_rules.RULE_KEYS:
        entries = [entry for entry in by_entry if entry.rule is rule]
        if entries:
            yield f"\n{rule}: {rule.summary.format(low='the low dtype')}"
        rows = fit_rows([(_with_argument(entry), entry.why, location(entry)) for entry in entries], width)
        for entry, row in zip(entries, rows, strict=True):
            lost = _find_lost(entry, by_entry[entry])
            if lost:
                row += f"  except {', '.join(lost)}"
            yield f"  {row}"
            if with_spellings:
                yield f"    {', '.join(_name(spelling) for spelling in by_entry[entry])}"


def _with_argument(entry: "config.op_lists.OpEntry") -> str:
    """Return the op of an entry, with the argument that the entry names."""
    return f"{entry.op} like {entry.like}" if entry.like else entry.op


def _lists_as_data(lists: "config.OpLists") -> dict[str, object]:
    import torch

    entries = []
    for entry, group in _by_entry(lists).items():
        entries.append({**as_data(entry), "spellings": list(map(_spelling_as_data, group))})
    return {
        "lists": lists.names,
        "torch": str(torch.__version__),
        "digest": lists.digest,
        "entries": entries,
        "modules": list(map(module_as_data, lists.modules)),
        "missing": list(map(as_data, lists.missing)),
        "deferred": list(map(as_data, _deferred(lists))),
        "other_torch": list(map(as_data, lists.other_torch)),
    }


def _spelling_as_data(spelling: "config.op_lists.Spelling") -> dict[str, object]:
    name = f"{spelling.owner_name}.{spelling.name}"
    return {"name": name, "kind": spelling.rule, "overridden": [as_data(entry) for entry in spelling.overridden]}


def _deferred(lists: "config.OpLists") -> "tuple[config.op_lists.OpEntry, ...]":
    return tuple(spelling.entry for spelling in lists.deferred)


def _by_entry(lists: "config.OpLists") -> "dict[config.op_lists.OpEntry, list[config.op_lists.Spelling]]":
    """Return the spellings that each entry decides, also for entries of the rule `neutral`."""
    by_entry: dict[config.op_lists.OpEntry, list[config.op_lists.Spelling]] = {}
    for spelling in (*lists.spellings, *lists.neutral):
        by_entry.setdefault(spelling.entry, []).append(spelling)
    return by_entry


def _find_lost(entry: "config.op_lists.OpEntry", decided: "list[config.op_lists.Spelling]") -> list[str]:
    """Return the spellings that an entry names, but that another entry, of a later file, decides.

    Args:
        decided: the spellings that the entry decides.
    """
    keys = {(spelling.owner_name, spelling.name) for spelling in decided}
    named = config.op_lists.find_spellings(entry.op, may_be_missing=True)
    return [".".join(key) for key in named if key not in keys]


def _name(spelling: "config.op_lists.Spelling") -> str:
    """Return the dotted name of a spelling, with its rule if that differs from the rule of its entry."""
    name = f"{spelling.owner_name}.{spelling.name}"
    if spelling.rule != spelling.entry.rule:
        name += f" ({spelling.rule})"
    return name
