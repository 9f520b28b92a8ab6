"""Trainings that lose something quietly in 16 bits: no inf and no NaN, and they learn less. Beside them healthy ones.

`python tests/support/quiet_faults.py [NAME ...]` checks that each case is what it says, and prints the errors against
float32.
"""

import sys
import warnings
from typing import NamedTuple

import quiet_counts
import quiet_gradients
import quiet_healthy
import quiet_healthy_data
import quiet_updates
import quiet_values
import torch
from quiet_cases import CASES, Case
from torch import Tensor

import amp_patch as amp

__all__ = ["CASES", "FAULTY", "HEALTHY", "check", "describe", "errors_of"]

# Importing the modules has entered their cases.
FAULTY = {name: entered for name, entered in CASES.items() if entered.cause is not None}
HEALTHY = {name: entered for name, entered in CASES.items() if entered.cause is None}
assert all((quiet_counts, quiet_gradients, quiet_healthy, quiet_healthy_data, quiet_updates, quiet_values))


class Errors(NamedTuple):
    """The relative errors of a script against float32, as it is and mended, and whether a value was not finite."""

    as_given: float
    mended: float
    is_finite: bool


def measure(entered: Case, **how) -> Tensor:
    """Train a case for all its steps and return what matters, in float64."""
    try:
        run = entered.start(**how)
        loss = None
        for _ in range(entered.proof):
            loss = run.step()
        measured = loss if run.measure is None else run.measure()
        return measured.detach().double().flatten()
    finally:
        amp.reset()


def errors_of(entered: Case) -> Errors:
    truth = measure(entered, is_float32=True)
    as_given = measure(entered)
    mended = as_given if entered.cause is None else measure(entered, is_mended=True)
    size = truth.norm().clamp(min=torch.finfo(torch.float64).tiny)
    is_finite = all(bool(measured.isfinite().all()) for measured in (truth, as_given, mended))
    return Errors(float((as_given - truth).norm() / size), float((mended - truth).norm() / size), is_finite)


def describe(entered: Case) -> str:
    """Return the row of a case in the documentation."""
    return f"| {entered.about} | {entered.cause} |"


def check(entered: Case) -> str:
    """Return what is wrong with a case; empty if it is what it says."""
    errors = errors_of(entered)
    wrong = []
    if not errors.is_finite:
        wrong.append("a value is not finite")
    if entered.cause is not None and not errors.as_given >= entered.lost:
        wrong.append(f"little is lost: error {errors.as_given:.3g}")
    if not errors.mended <= entered.rounding:
        wrong.append(f"not float32 when it is mended or healthy: error {errors.mended:.3g}")
    if entered.cause is not None and not entered.names and not entered.lines:
        wrong.append("neither a name nor a line")
    try:
        run = entered.start()
        recording = amp.insight.trace(run.step, steps=entered.steps, on_fault="record")
    finally:
        amp.reset()
    faults = [fault for fault in recording.of(amp.insight.FaultRecord) if not fault.is_search]
    if faults:
        wrong.append(f"not quiet: {faults[0].value} at {faults[0].site}")
    found = [(lost.cause, lost.tensor or lost.site) for lost in recording.quiet]
    is_right = any(lost.cause == entered.cause and entered.is_named(lost.tensor, lost.site) for lost in recording.quiet)
    if entered.cause is None and found:
        wrong.append(f"a false alarm: {found}")
    if entered.cause is not None and not is_right:
        wrong.append(f"not found, but {found}")
    return "; ".join(wrong)


def main(names):
    """Check cases, print a row for each, and return how many are wrong."""
    warnings.simplefilter("ignore")
    count = 0
    for name in names or CASES:
        entered = CASES[name]
        try:
            errors, wrong = errors_of(entered), check(entered)
        except Exception as error:
            errors, wrong = Errors(0, 0, False), repr(error)
        count += bool(wrong)
        row = f"{entered.cause or 'healthy':15} {name:34} {errors.as_given:9.3g} {errors.mended:9.3g}  {wrong}"
        print(row, flush=True)
    print(f"{len(FAULTY)} faulty, {len(HEALTHY)} healthy, {count} wrong")
    return count


if __name__ == "__main__":
    # The modules of cases import quiet_cases; run as a script, this module is beside them.
    sys.exit(bool(main(sys.argv[1:])))
