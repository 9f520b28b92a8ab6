"""Contracts and verdicts as text.

A contract is a file that promises how a training computes: ops, dtypes, settings and numbers. A verdict says which of
these promises a check found broken.
"""

from collections.abc import Iterator

from ...tables import count_of, wrap_item
from .contract import Contract, Numbers
from .verdict import Break, Verdict

SHOWN = 8
"""The largest number of broken promises that are shown after the first."""

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
    """Return the result of a check as text: the first broken promise, up to eight more, and the notes.

    `contract` is the path of the contract.
    """
    lines = []
    if verdict.holds:
        lines.append(f"{contract} holds")
    else:
        first, *further = verdict.breaks
        lines.append(f"{contract} is broken: {_TITLES[first.kind]}")
        lines.extend(wrap_item(_with_site(first)))
        if further:
            lines.append(f"also broken, causes before effects ({len(further)} more):")
            for broken in further[:SHOWN]:
                lines.extend(wrap_item(f"{broken.kind}: {_with_site(broken)}"))
            if len(further) > SHOWN:
                lines.append(f"  and {len(further) - SHOWN} more; --json FILE has all")
        if first.kind != "region":  # without mixed precision, --update has nothing to measure
            lines.append("if this is meant, --update writes the contract anew")
    lines.extend(f"note: {note}" for note in verdict.notes)
    return "\n".join(lines)


def _with_site(broken: Break) -> str:
    """Return a broken promise with its line in front: "model.py:12: linear in head: ..."."""
    return f"{broken.site}: {broken.text}" if broken.site else broken.text


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
        differing = count_of(len(contract.ops) - ops, "op")
        lines.append(f"not promised: {differing}, whose calls differed between equal runs")
    for name, numbers in contract.numbers.items():
        lines.extend(_describe_numbers(name, numbers))
    return "\n".join(lines)


def _describe_numbers(name: str, numbers: Numbers) -> Iterator[str]:
    """Yield lines about the promised numbers on one kind of hardware."""
    if numbers.hardware.problem:
        yield f"numbers on {name}: none, since {numbers.hardware.problem}"
        return
    bands = [module.output_band for module in numbers.modules if module.output_band is not None]
    widest = f", first outputs within {max(bands):.1g}" if bands else ""
    yield f"numbers on {name}: {count_of(len(bands), 'module')}{widest}"
    for curve in numbers.curves:
        has_no_scale = curve.name == "loss scale" and set(curve.values) == {1.0}
        if curve.name == "skipped" or has_no_scale:  # skips say nothing by themselves
            continue
        promised_steps = [step for step, band in enumerate(curve.bands) if band is not None]
        if not promised_steps:
            yield f"  {curve.name}: not promised, since equal runs differ too much"
            continue
        last = promised_steps[-1]
        yield (
            f"  {curve.name}: {len(promised_steps)} of {count_of(len(curve.values), curve.noun)},"
            f" {curve.values[last]:.5g} ± {curve.bands[last]:.1g} in {curve.noun} {last}"
        )
