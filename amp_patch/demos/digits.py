"""Handwritten digits at every opt_level: a small convolutional network with BatchNorm, one row for each level."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

import amp_patch as amp

from ..dtypes import dtype_name
from ..insight.comparing import Campaign, Comparison, Row, plan_runs
from ..insight.runs import FunctionRunner
from ..tables import RowPrinter
from .catalogue import Options
from .digits_training import Digits, TrainResult, load_digits_tensors, train
from .training import OnStep, Part, make_bar, prepare

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


WIDTHS = (5, 9, 9, 10, 10, 8, 7, 10, 13, 10, 14)


def run(options: Options) -> None:
    """Train at each level asked for from each seed; print a row for each when it is there, and draw how they differ.

    Ctrl-C leaves the rows there are, and what is written of them.
    """
    digits = load_digits_tensors(options.device)
    reference = _reference(options)
    options = prepare(
        options,
        [
            Part(partial(_train_from, level, digits, options.seed), 2 if level == reference else 1, short=1)
            for level in options.levels
        ],
    )
    table = RowPrinter(COLUMNS, WIDTHS, left=2)
    measured = measure(options, table.print_row, digits)
    if table.rows:
        _conclude(measured.comparison, options)
    if measured.is_interrupted:
        raise KeyboardInterrupt


class Measured(NamedTuple):
    """What each level reached from each seed, and how they compare; whether Ctrl-C came before all had."""

    comparison: Comparison
    results: dict[str, list[TrainResult]]
    is_interrupted: bool


def measure(
    options: Options, on_row: Callable[[Sequence[str]], object] = lambda row: None, digits: Digits | None = None
) -> Measured:
    """Train and compare; `on_row` is called with the cells of each level. What a training raises is raised."""
    data = load_digits_tensors(options.device) if digits is None else digits
    found: dict[tuple[str, int], TrainResult] = {}
    errors: list[Exception] = []
    seeds, reference = range(options.seed, options.seed + options.seeds), _reference(options)
    with make_bar((len(options.levels) + 1) * options.seeds * options.steps + 2 * len(options.levels)) as bar:

        def train_once() -> None:
            seed = torch.initial_seed()
            try:
                result = train(reference, data, steps=options.steps, seed=seed, on_step=bar.update)
            except Exception as error:
                errors.append(error)
                raise
            found.setdefault((result.level, seed), result)  # the run for the noise floor comes after the plain one

        def on_done(level: str) -> None:
            if errors:
                raise errors[0]
            row = next(row for row in campaign.comparison().rows() if row.name == level)
            bar.clear()
            on_row(_cells(row, [found[level, seed] for seed in seeds]))
            bar.refresh()

        plan = plan_runs(options.levels, reference, options.steps, seeds)._replace(leave=False, by_run=True)
        campaign = Campaign(FunctionRunner(train_once), plan, bar.set_description, on_done)
        amp.reset()
        is_interrupted = False
        try:
            campaign.run()
        except KeyboardInterrupt:
            if not found:
                raise
            is_interrupted = True
    results = {level: [found[level, seed] for seed in seeds if (level, seed) in found] for level in options.levels}
    return Measured(campaign.comparison(), results, is_interrupted)


def _reference(options: Options) -> str:
    return "O0" if "O0" in options.levels else options.levels[0]


def _train_from(level: str, digits: Digits, seed: int, steps: int, on_step: OnStep) -> TrainResult:
    return train(level, digits, steps=steps, seed=seed, on_step=on_step)


def _conclude(comparison: Comparison, options: Options) -> None:
    """Print what there is to know of the rows; draw and write what is asked for."""
    seeds = options.seeds
    print(
        f"\nmeans of {seeds} seed{'s' if seeds > 1 else ''}; difference of the loss from {comparison.about.reference}"
    )
    if comparison.noise is not None:
        print(f"noise: {comparison.noise:.1e}, the difference that inputs off by one unit in the last place make")
    if options.plot:
        comparison.save_png(options.plot)
        print(f"\ndifferences, time and memory: {options.plot}")
    if options.html:
        comparison.save_html(options.html)
        print(f"\nreport: {options.html}")


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
