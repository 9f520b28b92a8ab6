"""`amp-patch lists`: show op lists, check list files, compare lists, and explain what they say of one op."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..config import OpLists, explain, load_oplists, op_lists, shipped, torch_autocast
from ..errors import OpListError

SUMMARY = "Show, check, compare and explain op lists."
LOW_NAMES = ("float16", "bfloat16")
DEVICES = ("cuda", "cpu")
_SPEC = "a shipped list or the path of a list file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the four tasks and their arguments."""
    tasks = parser.add_subparsers(metavar="TASK", required=True)

    show = _add_task(
        tasks, "show", "print what lists come to: every entry, why it is there and where it stands", _run_show
    )
    show.add_argument("lists", nargs="+", metavar="NAME|FILE", help=f"{_SPEC}; of several, later ones win")
    show.add_argument("--spellings", action="store_true", help="name every attribute of torch that follows an entry")
    show.add_argument("--json", action="store_true", help="print JSON, which has all spellings")

    check = _add_task(
        tasks,
        "check",
        "print every fault of list files as file:line:column: text; exit code 1 if there is one",
        _run_check,
    )
    check.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a list file; faults of files that it extends are printed too",
    )

    diff = _add_task(
        tasks,
        "diff",
        "print the ops on which two lists differ; exit code 0 if they are equal, 1 if not, 2 on trouble",
        _run_diff,
    )
    for name in ("left", "right"):
        diff.add_argument(
            name,
            metavar="LISTS",
            help=f"{_SPEC}; several joined by commas, of which later ones win; or torch, for torch.autocast",
        )
    diff.add_argument(
        "--device", choices=DEVICES, default="cuda", help="the device type of torch.autocast (default: cuda)"
    )
    diff.add_argument("--json", action="store_true", help="print JSON")

    tell = _add_task(
        tasks, "explain", "tell which rule an op follows, why, and what becomes of its arguments", _run_explain
    )
    tell.add_argument("op", metavar="OP", help="an op as in a list file, such as softmax or torch.fft.rfft")
    tell.add_argument(
        "--lists",
        nargs="+",
        metavar="NAME|FILE",
        help=f"{_SPEC}; of several, later ones win (default: the list of the dtype)",
    )
    tell.add_argument(
        "--dtype", choices=LOW_NAMES, help="the low dtype (default: the one that a list is named after, else float16)"
    )
    tell.add_argument("--json", action="store_true", help="print JSON")


def _add_task(
    tasks: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    summary: str,
    task: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = tasks.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.set_defaults(task=task)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Do one task and return its exit code.

    Raises OpListError where lists cannot be read; `diff` says so itself and returns 2.
    """
    task: Callable[[argparse.Namespace], int] = arguments.task
    return task(arguments)


# ---- show ------------------------------------------------------------------------------------------------------------


def _run_show(arguments: argparse.Namespace) -> int:
    lists = load_oplists(arguments.lists)
    _print(_as_json(_show_as_data(lists)) if arguments.json else _show(lists, arguments.spellings))
    return 0


def _show(lists: OpLists, has_spellings: bool) -> Iterator[str]:
    yield (
        f"{', '.join(lists.names)}: {len(lists.spellings)} spellings on torch {torch.__version__}, digest"
        f" {lists.digest[:12]}"
    )
    by_entry = _by_entry(lists)
    for rule in op_lists.RULES:
        entries = [entry for entry in by_entry if entry.rule == rule]
        if entries:
            yield f"\n{rule}: {explain.SUMMARIES[rule].format(low='the low dtype')}"
        for entry, row in zip(
            entries, _columns((entry.op, entry.why, _place(entry)) for entry in entries), strict=True
        ):
            lost = ", ".join(_lost(entry, by_entry[entry]))
            yield f"  {row}  except {lost}" if lost else f"  {row}"
            if has_spellings:
                yield f"    {', '.join(_named(spelling) for spelling in by_entry[entry])}"
    if modules := lists.modules:
        yield (
            "\nmodules: run in this dtype whatever the rules above say;"
            " of several that cover a module the last one counts"
        )
        yield from (
            f"  {row}" for row in _columns((rule.chooser, rule.run, rule.why, _place(rule)) for rule in modules)
        )
    without_effect = (
        (lists.missing, "missing: torch has no such op"),
        (lists.deferred, "deferred: takes effect when the package is imported"),
        (lists.other_torch, "kept out: since or until excludes this torch"),
    )
    for others, title in without_effect:
        if others:
            yield f"\n{title}"
            yield from (
                f"  {row}"
                for row in _columns(
                    (entry.op, entry.rule, entry.why, _place(entry), _bounds(entry)) for entry in others
                )
            )


def _show_as_data(lists: OpLists) -> dict[str, object]:
    return {
        "lists": lists.names,
        "torch": str(torch.__version__),
        "digest": lists.digest,
        "inplace_blacklist": lists.inplace_blacklist,
        "entries": [
            {**asdict(entry), "spellings": [_as_data(spelling) for spelling in group]}
            for entry, group in _by_entry(lists).items()
        ],
        "modules": [_module_as_data(rule) for rule in lists.modules],
        "missing": [asdict(entry) for entry in lists.missing],
        "deferred": [asdict(entry) for entry in lists.deferred],
        "other_torch": [asdict(entry) for entry in lists.other_torch],
    }


def _module_as_data(rule: Any) -> dict[str, object]:
    return {name: getattr(rule, name) for name in ("chooser", "run", "why", "path", "line", "column")}


def _as_data(spelling: op_lists.Spelling) -> dict[str, object]:
    name = f"{spelling.owner_name}.{spelling.name}"
    return {"name": name, "kind": spelling.kind, "overridden": [asdict(entry) for entry in spelling.overridden]}


def _by_entry(lists: OpLists) -> dict[op_lists.OpEntry, list[op_lists.Spelling]]:
    """Return the spellings that follow each entry, neutral entries too."""
    by_entry: dict[op_lists.OpEntry, list[op_lists.Spelling]] = {}
    for spelling in (*lists.spellings, *lists.neutral):
        by_entry.setdefault(spelling.entry, []).append(spelling)
    return by_entry


def _lost(entry: op_lists.OpEntry, spellings: list[op_lists.Spelling]) -> list[str]:
    """Return the spellings of an entry's op that later files put elsewhere."""
    held = {(spelling.owner_name, spelling.name) for spelling in spellings}
    return [".".join(key) for key in op_lists.find_spellings(entry.op, may_be_missing=True) if key not in held]


def _named(spelling: op_lists.Spelling) -> str:
    name = f"{spelling.owner_name}.{spelling.name}"
    return name if spelling.kind == spelling.entry.rule else f"{name} ({spelling.kind})"


# ---- check -----------------------------------------------------------------------------------------------------------


def _run_check(arguments: argparse.Namespace) -> int:
    reports = [op_lists.check_oplists(path) for path in arguments.files]
    faults = dict.fromkeys(fault for report in reports for fault in report.found)  # of a file that two extend, once
    # a fault may leave entries without effect that would have one, so only a file without faults is warned of
    warnings = dict.fromkeys(warning for report in reports if not report.found for warning in report.warnings)
    _print([*faults, *warnings])
    return 1 if faults else 0


# ---- diff ------------------------------------------------------------------------------------------------------------


def _run_diff(arguments: argparse.Namespace) -> int:
    try:
        left, right = (_load_side(spec, arguments.device) for spec in (arguments.left, arguments.right))
    except OpListError as error:  # not 1, which would say that they differ
        print(f"{arguments.parser.prog}: failed: {error}", file=sys.stderr)
        return 2
    differences = explain.compare(left, right)
    if arguments.json:
        _print(
            _as_json(
                {
                    "left": left.names,
                    "right": right.names,
                    "differences": [asdict(difference) for difference in differences],
                }
            )
        )
    else:
        _print(
            _columns(
                (difference.op, f"{_in_diff(difference.left)} -> {_in_diff(difference.right)}")
                for difference in differences
            )
        )
    return 1 if differences else 0


def _in_diff(kind: str) -> str:
    return "(unlisted)" if kind == "unlisted" else kind


def _load_side(spec: str, device_type: str) -> OpLists:
    if spec == "torch":
        return op_lists.make_oplists(torch_autocast.get_rules(device_type), f"torch.autocast({device_type!r})")
    return load_oplists(spec.split(","))


# ---- explain ---------------------------------------------------------------------------------------------------------


def _run_explain(arguments: argparse.Namespace) -> int:
    names = arguments.lists or [arguments.dtype or LOW_NAMES[0]]
    low = arguments.dtype or next((name for name in names if name in LOW_NAMES), LOW_NAMES[0])
    lists = load_oplists(names)
    explanation = explain.explain(arguments.op, lists)
    if arguments.json:
        effects = {ruling.kind: explain.describe_effects(ruling.kind, low) for ruling in explanation.rulings}
        modules = [_module_as_data(rule) for rule in lists.modules]
        _print(_as_json({"lists": names, "low": low, **asdict(explanation), "effects": effects, "modules": modules}))
        return 0
    _print(_explain(explanation, names, low))
    if lists.modules and {"whitelist", "blacklist"} & {ruling.kind for ruling in explanation.rulings}:
        _print(
            f"Within {rule.chooser} it runs in {low if rule.run == 'low' else rule.run} ({_place(rule)})."
            for rule in lists.modules
        )
    return 0


def _explain(explanation: explain.Explanation, names: list[str], low: str) -> Iterator[str]:
    yield f"{explanation.op}, by {', '.join(names)} with {low} as the low dtype"
    for ruling in explanation.rulings:
        yield "\n" + ", ".join(ruling.spellings)
        yield from (f"  {row}" for row in _columns(_explain_ruling(ruling, low)))
    for entry in explanation.missing:
        yield f"\n{entry.rule} by {_place(entry)}, without effect: torch {torch.__version__} has no such op"
    for entry in explanation.other_torch:
        yield (
            f"\n{entry.rule} by {_place(entry)}, without effect:"
            f" {_bounds(entry)} keeps it out on torch {torch.__version__}"
        )
    kinds = {ruling.kind for ruling in explanation.rulings}
    if kinds - {"unlisted", "neutral"}:
        yield "\nfloat64, complex, integer and quantised arguments are left alone."
    if kinds & {"whitelist", "blacklist", "promote", "sequence_promote"}:
        yield f"A call with out={' or dtype=' if 'blacklist' in kinds else ''} runs as it was written."


def _explain_ruling(ruling: explain.Ruling, low: str) -> Iterator[tuple[str, str]]:
    entry = ruling.entry
    summary = explain.SUMMARIES[ruling.kind].format(low=low)
    yield "rule", summary if entry is None else f"{entry.rule}: {summary}"
    if entry is not None:
        yield "entry", f"{entry.op} at {_place(entry)}{_reason(entry)}"
    for earlier in reversed(ruling.overridden):
        yield "overrides", f"{earlier.op} on {earlier.rule} at {_place(earlier)}{_reason(earlier)}"
    if ruling.package is not None:
        takes_effect = (
            "not imported yet; the entry takes effect when it is"
            if entry
            else "not imported, so the name cannot be looked up"
        )
        yield "package", f"{ruling.package} is {takes_effect}"
    effects = explain.describe_effects(ruling.kind, low)
    for effect in dict.fromkeys(effects.values()):
        yield ", ".join(dtype for dtype in effects if effects[dtype] == effect), effect


# ---- printing --------------------------------------------------------------------------------------------------------


def _place(entry: Any) -> str:
    """Return `file:line`; a shipped list needs no folder."""
    path = Path(entry.path)
    return f"{path.name if path.parent == shipped.lists_dir() else entry.path}:{entry.line}"


def _reason(entry: op_lists.OpEntry) -> str:
    return f", why: {entry.why}" if entry.why else ""


def _bounds(entry: op_lists.OpEntry) -> str:
    return ", ".join(
        f"{bound} {version}" for bound, version in (("since", entry.since), ("until", entry.until)) if version
    )


def _columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the rows as lines whose cells stand below each other."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _as_json(data: dict[str, object]) -> list[str]:
    return [json.dumps(data, indent=2, ensure_ascii=False)]


def _print(lines: Iterable[str]) -> None:
    """Print lines; what the terminal cannot show, as escapes."""
    encoding = sys.stdout.encoding or "utf-8"
    for line in lines:
        print(line.encode(encoding, "backslashreplace").decode(encoding))
