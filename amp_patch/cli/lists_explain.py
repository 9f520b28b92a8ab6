"""`amp-patch lists explain`: prints the rule of an op, the reason for it, and its effect on the arguments."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from .. import config
from ..tables import align, wrap_sentences
from .lists_printing import LIST, as_data, bounds, location, module_as_data, print_json, print_lines

SUMMARY = "print the rule of an op, the line that sets it, and what happens to its arguments"
LOW_NAMES = ("float16", "bfloat16")

EXAMPLES = (
    "amp-patch lists explain softmax",
    "amp-patch lists explain torch.fft.rfft --lists float16 fast",
)
"""Command lines that the help shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the task."""
    parser.usage = "%(prog)s OP [--lists NAME|FILE ...] [--dtype {float16,bfloat16}] [--json]"
    parser.set_defaults(refuse=parser.error)
    parser.add_argument(
        "op", nargs="?", metavar="OP", help="an op as in a list file, such as softmax or torch.fft.rfft"
    )
    parser.add_argument(
        "--lists",
        nargs="+",
        metavar="NAME|FILE",
        help=f"{LIST}; of several, later ones win (default: the list of the dtype)",
    )
    parser.add_argument(
        "--dtype",
        choices=LOW_NAMES,
        help="the low dtype (default: the one of the lists)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the rules of an op. Return 0."""
    op, lists_given = arguments.op, arguments.lists or []
    if op is None and len(lists_given) > 1:
        # in `--lists mine.yaml softmax`, argparse takes the op as one of the lists
        *lists_given, op = lists_given
    if op is None:
        arguments.refuse("the following arguments are required: OP")
    names = lists_given or [arguments.dtype or LOW_NAMES[0]]
    lists = config.load_oplists(names, may_be_overlay=True)
    low = arguments.dtype or _find_low(names, lists)
    explanation = config.explain.explain_op(op, lists)
    if arguments.json:
        effects = {ruling.kind: ruling.describe_effects(low) for ruling in explanation.rulings}
        modules = list(map(module_as_data, lists.modules))
        print_json({"lists": names, "low": low, **as_data(explanation), "effects": effects, "modules": modules})
        return 0
    print_lines(map(wrap_sentences, _format(explanation, names, low)))
    if any(ruling.kind.runs_in for ruling in explanation.rulings):
        for rule in lists.modules:
            dtype = rule.run.replace("low", low)
            print(wrap_sentences(f"Within {rule.chooser} it runs in {dtype} ({location(rule)})."))
    return 0


def _find_low(names: list[str], lists: "config.OpLists") -> str:
    """Return the first of `names` that is "float16" or "bfloat16".

    If there is none, return "bfloat16" if the lists extend the shipped list `bfloat16`, else "float16".
    """
    for name in names:
        if name in LOW_NAMES:
            return name
    shipped = config.list_names.locate("bfloat16", Path())
    for spelling in lists.spellings:
        if any(Path(entry.path) == shipped for entry in (spelling.entry, *spelling.overridden)):
            return "bfloat16"
    return "float16"


def _format(explanation: "config.explain.Explanation", names: list[str], low: str) -> Iterator[str]:
    """Yield the lines of the report, except lines about module rules."""
    import torch

    yield f"{explanation.op}, by {', '.join(names)} with {low} as the low dtype"
    for ruling in explanation.rulings:
        yield "\n" + ", ".join(ruling.spellings)
        yield from (f"  {row}" for row in align(_format_ruling(ruling, low)))
    for entry in explanation.missing:
        rule = entry.rule.describe(entry.like)
        yield f"\n{rule} by {location(entry)}, without effect: torch {torch.__version__} has no such op"
    for entry in explanation.other_torch:
        rule = entry.rule.describe(entry.like)
        # the version after @, as in `autocast-cuda@2.11`, is the version of torch that a list is read for
        is_for_running = entry.is_for(config.op_lists.get_running_torch())
        kept_out = "in the version after @" if is_for_running else f"on torch {torch.__version__}"
        yield f"\n{rule} by {location(entry)}, without effect: {bounds(entry)} keeps it out {kept_out}"
    rules = [ruling.kind for ruling in explanation.rulings]
    if any(rule.is_casting for rule in rules):
        yield "\nfloat64, complex, integer and quantized arguments are never cast."
    # if the spellings follow several rules, the longest tuple of arguments contains the shorter ones
    opt_outs = max((rule.opt_outs for rule in rules), key=len, default=())
    if opt_outs:
        arguments = " or ".join(f"{argument}=" for argument in opt_outs)
        yield f"A call with {arguments} runs as it was written."
    if rules and all(rule.runs_in == "float32" for rule in rules):
        return  # what follows is about 16-bit operands
    name = explanation.op.rpartition(".")[2]
    if config.op_lists.is_product(name):
        yield (
            f"\nThis is a product: if the device has no {low} instructions, values are rounded to {low}, then"
            " multiplied and added in float32, unless the level's property `compute` says otherwise."
        )
    elif config.op_lists.is_without_cpu_kernel(name):
        yield (
            "\nWhere products are computed in float32 (see the level's property `compute`), this op is, too, and its"
            f" result is rounded: CPUs may have no {low} kernel of it."
        )


def _format_ruling(ruling: "config.explain.Ruling", low: str) -> Iterator[tuple[str, str]]:
    """Yield the rows of a table about a ruling: a title, such as "rule" or a dtype, and the text."""
    entry = ruling.entry
    summary = ruling.kind.summary.format(low=low)
    about_package = "not imported, so the name cannot be looked up"
    if entry is None:
        yield "rule", summary
    else:
        about_package = "not imported yet; the entry takes effect when it is"
        yield "rule", f"{entry.rule.describe(entry.like)}: {summary}"
        yield "entry", f"{entry.op} at {location(entry)}{_reason(entry.why)}"
    for earlier in reversed(ruling.overridden):
        yield (
            "overrides",
            f"{earlier.op} on {earlier.rule.describe(earlier.like)} at {location(earlier)}{_reason(earlier.why)}",
        )
    if ruling.package is not None:
        yield "package", f"{ruling.package} is {about_package}"
    effects = ruling.describe_effects(low)
    # one row for all dtypes with the same effect
    for effect in dict.fromkeys(effects.values()):
        yield ", ".join(dtype for dtype in effects if effects[dtype] == effect), effect


def _reason(why: str) -> str:
    if not why:
        return ""
    return f", why: {why}"
