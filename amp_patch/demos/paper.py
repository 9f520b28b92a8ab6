"""The experiments of "Mixed Precision Training" (Micikevicius et al. 2018, arXiv:1710.03740) on handwritten digits.

Master weights (its section 3.1): a classifier is trained by plain SGD at a learning rate so small that most updates are
below half the distance of neighbouring float16 values, as happens late in training. Loss scaling (3.2): an autoencoder
with sigmoids, whose loss is a mean over all pixels of all images, so that the gradients of its activations are small.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..tables import RowPrinter
from .catalogue import Options
from .digits_training import Digits, load_digits_tensors
from .paper_training import Result, Task, autoencoder, classifier, train
from .picture import COLOURS, Curve, draw_losses, make_figure, mean_of_last
from .training import OnStep, Part, make_bar, one_thread, prepare

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ZERO_BELOW = 2.0**-25
"""float16 rounds a magnitude up to this one, half its smallest, to zero."""
SUBNORMAL_BELOW = 2.0**-14
"""Magnitudes below this one have fewer than float16's 11 bits."""
COLUMNS = ("run", "final loss", "test", "updates lost", "gradients zero", "loss scale")
MASTERS: Mapping[str, Mapping[str, Any]] = {
    "float32": {"opt_level": "O0"},
    "float16, masters": {"opt_level": "O2", "loss_scale": "dynamic"},
    "float16, no masters": {"opt_level": "O2", "loss_scale": "dynamic", "master_weights": False},
}
SCALING: Mapping[str, Mapping[str, Any]] = {
    "float32": {"opt_level": "O0"},
    "float16, loss scaled": {"opt_level": "O2", "loss_scale": "dynamic"},
    "float16, not scaled": {"opt_level": "O2", "loss_scale": 1.0},
}
LEVELS = ("O0", "O2")
RUN_COLOURS = (COLOURS["O0"], COLOURS["O4"], COLOURS["O2"])


class Lost(NamedTuple):
    """What float16 makes of gradients: the parts that become zero, keep fewer than 11 bits, and become inf."""

    zero: float
    subnormal: float
    inf: float


def find_lost(gradients: Tensor, scale: float) -> Lost:
    """Return what float16 makes of float32 gradients multiplied by `scale`; those that are zero count in none."""
    sizes = gradients[gradients != 0].abs() * scale
    parts = (sizes <= ZERO_BELOW, (sizes > ZERO_BELOW) & (sizes < SUBNORMAL_BELOW), sizes.half().isinf())
    return Lost(*(float(part.float().mean()) for part in parts))


def count_by_exponent(gradients: Tensor, scale: float, exponents: range) -> Tensor:
    """Return the part of the elements `[len(exponents)]` that has a magnitude from 2**e up to, not with, 2**(e + 1).

    Magnitudes beyond either end count at that end, zeros nowhere.
    """
    exponent = torch.frexp(gradients[gradients != 0] * scale).exponent - 1
    places = exponent.clamp(exponents[0], exponents[-1]) - exponents[0]
    return torch.bincount(places, minlength=len(exponents)) / gradients.numel()


def run(options: Options) -> None:
    """Run both experiments, print a table of each and what float16 makes of the gradients, draw all three."""
    digits = load_digits_tensors(options.device)
    tasks = (
        ("master weights: a classifier at a small learning rate", classifier(), MASTERS),
        ("loss scaling: an autoencoder with small gradients", autoencoder(), SCALING),
    )
    with one_thread():
        every = [(task, properties) for _, task, runs in tasks for properties in runs.values()]
        options = prepare(options, [Part(_rehearse(*one, digits, options.seed)) for one in every], LEVELS)
        with make_bar(len(every) * options.steps) as bar:
            masters, scaling = (_compare(*one, digits, options, bar) for one in tasks)
    plain, scaled, _ = scaling.values()
    print("float32's gradients of the autoencoder, if they were float16:")
    for scale in (1.0, scaled.loss_scale):
        lost = find_lost(plain.gradients, scale)
        print(
            f"times {scale:g}: {lost.zero:.1%} become zero, {lost.subnormal:.1%} lose bits as subnormals,"
            f" {lost.inf:.1%} become inf"
        )
    if options.plot:
        figure, panels = make_figure(3)
        for axes, results in zip(panels, (masters, scaling), strict=False):
            curves = zip(results.items(), RUN_COLOURS, strict=True)
            draw_losses(axes, [Curve(name, result.losses, colour) for (name, result), colour in curves])
        panels[0].set_title("Master weights: a classifier, small updates", loc="left")
        panels[1].set_title("Loss scaling: an autoencoder, small gradients", loc="left")
        _draw_histogram(panels[2], plain.gradients, scaled.loss_scale)
        figure.savefig(options.plot)
        print(f"\nlosses and gradients: {options.plot}")


def _compare(
    title: str, task: Task, runs: Mapping[str, Mapping[str, Any]], digits: Digits, options: Options, bar: Any
) -> dict[str, Result]:
    """Run one experiment, and print its table, each row when it is there."""
    print(f"{title}\n")
    table = RowPrinter(COLUMNS, (max(map(len, runs)), 10, 14))
    results = {}
    for name, properties in runs.items():
        bar.set_description(name)
        results[name] = train(task, properties, digits, options.steps, options.seed, bar.update)
        bar.clear()
        table.print_row(_cells(name, results[name]))
    print()
    return results


def _rehearse(task: Task, properties: Mapping[str, Any], digits: Digits, seed: int) -> Callable[[int, OnStep], Result]:
    return lambda steps, on_step: train(task, properties, digits, steps, seed, on_step)


def _cells(name: str, result: Result) -> tuple[str, ...]:
    """The cells of one run, in the order of `COLUMNS`."""
    return (
        name,
        f"{mean_of_last(result.losses):.4f}",
        result.test,
        f"{result.updates_lost:.1%}",
        f"{result.gradients_zero:.1%}",
        f"{result.loss_scale:g}",
    )


def _draw_histogram(axes: "Axes", gradients: Tensor, scale: float) -> None:
    """The gradients' magnitudes by power of two, as they are and scaled, over what float16 makes of such magnitudes."""
    exponents = range(-48, 17)
    edges = [*exponents, exponents[-1] + 1]
    axes.axvspan(edges[0], -25, color="#D55E00", alpha=0.16, linewidth=0)
    axes.axvspan(-25, -14, color="#E69F00", alpha=0.16, linewidth=0)
    for factor, colour, name in ((1.0, COLOURS["O2"], "as they are"), (scale, COLOURS["O4"], f"times {scale:g}")):
        parts = 100.0 * count_by_exponent(gradients, factor, exponents)
        axes.stairs(parts.tolist(), edges, color=colour, linewidth=1.8)
        peak = int(parts.argmax())
        axes.annotate(
            name, (edges[peak] + 0.5, float(parts[peak])), (0, 5), textcoords="offset points", color=colour, ha="center"
        )
    axes.set_ylim(0, axes.get_ylim()[1] * 1.16)
    lost = find_lost(gradients, 1.0)
    for middle, text in (
        (-36.5, f"zero in float16\n{lost.zero:.1%} unscaled"),
        (-19.5, f"subnormal\n{lost.subnormal:.1%}"),
    ):
        axes.text(middle, 0.985, text, transform=axes.get_xaxis_transform(), ha="center", va="top", fontsize=9)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xticks(range(-48, 17, 8), [f"$2^{{{exponent}}}$" for exponent in range(-48, 17, 8)])
    axes.set_xlabel("magnitude of a gradient, by power of two")
    axes.set_ylabel("gradients (%)")
    axes.set_title("The autoencoder's gradients in float32", loc="left")
