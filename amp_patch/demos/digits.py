"""Handwritten digits at every opt_level: a small convolutional network with BatchNorm, one row for each level."""

import statistics
from collections.abc import Sequence

import torch

import amp_patch as amp

from ..dtypes import dtype_name
from ..hardware import explain_products, has_low_products
from ..insight.comparing import Campaign, Comparison, Row, plan_runs
from ..insight.runs import FunctionRunner
from ..tables import format_table
from .catalogue import Options
from .digits_training import TrainResult, load_digits_tensors, train
from .training import make_bar

COLUMNS = (
    "level",
    "low dtype",
    "accuracy",
    "final loss",
    "difference",
    "ms/step",
    "skipped",
    "loss scale",
    "names patched",
    "params low",
    "params float32",
)


def run(options: Options) -> None:
    """Train at each level asked for from each seed; print the table, and draw how the levels differ."""
    comparison, results = measure(options)
    rows = comparison.rows()
    print(format_table(COLUMNS, (_cells(row, results[row.name]) for row in rows), left=2))
    reference, seeds = comparison.about.reference, options.seeds
    print(f"\nmeans of {seeds} seed{'s' if seeds > 1 else ''}; difference of the loss from {reference}")
    if comparison.noise is not None:
        print(f"noise: {comparison.noise:.1e}, the difference that inputs off by one unit in the last place make")
    for low in dict.fromkeys(each[0].low_dtype for each in results.values()):
        if low is not None and not has_low_products(options.device.type, low):
            print(f"\n{explain_products(options.device.type, low)}")
    if options.plot:
        comparison.save_png(options.plot)
        print(f"\ndifferences, time and memory: {options.plot}")
    if options.html:
        comparison.save_html(options.html)
        print(f"\nreport: {options.html}")


def measure(options: Options) -> tuple[Comparison, dict[str, list[TrainResult]]]:
    """Train and compare; return what each level reached from each seed, too. What a training raises is raised."""
    digits = load_digits_tensors(options.device)
    found: dict[tuple[str, int], TrainResult] = {}
    errors: list[Exception] = []
    levels, seeds = options.levels, range(options.seed, options.seed + options.seeds)
    reference = "O0" if "O0" in levels else levels[0]
    with make_bar((len(levels) + 1) * options.seeds * options.steps + 2 * len(levels)) as bar:

        def train_once() -> None:
            seed = torch.initial_seed()
            try:
                result = train(reference, digits, steps=options.steps, seed=seed, on_step=bar.update)
            except Exception as error:
                errors.append(error)
                raise
            found.setdefault((result.level, seed), result)  # the run for the noise floor comes after the plain one

        plan = plan_runs(levels, reference, options.steps, seeds)._replace(leave=False)
        campaign = Campaign(FunctionRunner(train_once), plan, bar.set_description)
        amp.reset()
        campaign.run()
    if errors:
        raise errors[0]
    return campaign.comparison(), {level: [found[level, seed] for seed in seeds] for level in levels}


def _cells(row: Row, results: Sequence[TrainResult]) -> tuple[str, ...]:
    """The cells of one level, in the order of `COLUMNS`."""
    first = results[0]
    return (
        row.name,
        dtype_name(first.low_dtype),
        f"{statistics.fmean(result.accuracy for result in results):.2f} %",
        f"{statistics.fmean(result.final_loss for result in results):.4f}",
        "-" if row.difference is None else f"{row.difference:+.1e}",
        "-" if row.ms is None else f"{row.ms:.2f}",
        str(row.skipped),
        f"{first.loss_scale:g}",
        str(first.names_patched),
        f"{first.parameters_low:,}",
        f"{first.parameters_float32:,}",
    )
