"""Contracts and verdicts as text."""

from ...tables import count_of
from .contract import Contract
from .verdict import Break, Verdict

SHOWN = 8
"""The number of broken promises that are shown after the first."""

_TITLES = {
    "region": "the script uses no mixed precision any more",
    "precision": "an op runs in another precision",
    "rule": "another rule decides about an op",
    "cast": "the script casts elsewhere",
    "constant": "an op has other numbers or words among its arguments",
    "optimizer": "the optimizer has other settings",
    "ops": "the script calls other ops",
    "start": "a module starts with other weights",
    "output": "a module computes something else",
    "gradient": "a module gets other gradients",
    "update": "a module is updated otherwise",
    "lost": "updates are lost",
    "steps": "the training takes fewer steps",
    "skipped": "other steps are skipped",
    "scale": "the loss scale is another",
    "loss": "the loss left its band",
    "norm": "a norm left its band",
}


def format_verdict(verdict: Verdict, contract: str) -> str:
    """Return the result of a check: the first broken promise, up to eight others, and the notes."""
    lines = []
    if verdict.holds:
        lines.append(f"{contract} holds")
    else:
        first, *others = verdict.breaks
        lines.append(f"{contract} is broken: {_TITLES[first.kind]}")
        lines.append(f"  {_place(first)}")
        if others:
            lines.append(f"also broken, causes before effects ({len(others)} more):")
            lines.extend(f"  {each.kind}: {_place(each)}" for each in others[:SHOWN])
            if len(others) > SHOWN:
                lines.append(f"  and {len(others) - SHOWN} more; --json FILE has all")
        lines.append("if this is meant, --update writes the contract anew")
    lines.extend(f"note: {note}" for note in verdict.notes)
    return "\n".join(lines)


def _place(each: Break) -> str:
    return f"{each.site}: {each.text}" if each.site else each.text


def describe_contract(contract: Contract) -> str:
    """Return the promises of a contract in a few lines."""
    about = contract.about
    ops = sum(op.is_promised for op in contract.ops)
    lines = [
        f"{about.script}: {count_of(about.steps, 'step')} from seed {about.seed}, torch {about.torch}, {about.device},"
        f" level {about.level or 'none'}",
        f"promised: dtypes, rules and constants of {count_of(ops, 'op')}, settings of"
        f" {count_of(len(contract.optimizers), 'parameter group')}",
    ]
    if ops < len(contract.ops):
        lines.append(f"not promised: {count_of(len(contract.ops) - ops, 'op')}, since equal runs had other calls")
    for name, part in contract.numbers.items():
        if part.hardware.problem:
            lines.append(f"numbers on {name}: none, since {part.hardware.problem}")
            continue
        outputs = [module.output_band for module in part.modules if module.output is not None]
        known = [band for band in outputs if band is not None]
        lines.append(
            f"numbers on {name}: {count_of(len(known), 'module')}"
            + (f", first outputs within {max(known):.1g}" if known else "")
        )
        for curve in part.curves:
            if curve.name == "skipped" or set(curve.values) == {1.0}:
                continue  # nothing to read in skips, and in the loss scale of a training without one
            kept = sum(band is not None for band in curve.bands)
            if kept:
                last = next(place for place in reversed(range(len(curve.bands))) if curve.bands[place] is not None)
                lines.append(
                    f"  {curve.name}: {kept} of {count_of(len(curve.values), 'step')},"
                    f" {curve.values[last]:.5g} ± {curve.bands[last]:.1g} in step {last + 1}"
                )
            else:
                lines.append(f"  {curve.name}: not promised, since equal runs differ too much")
    return "\n".join(lines)
