"""QLoRA (Dettmers et al. 2023, arXiv:2305.14314): a language model in 4 bits, fine-tuned by adapters at level O4.

A byte-level transformer learns the English of Python's `help()` in float32. Quantised to NF4 with double quantisation,
and frozen, it then learns Python source by LoRA adapters, on which a paged AdamW with 8-bit state steps. What
bitsandbytes does not quantise has to be float32: amp_patch refuses a base in 16 bits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

import amp_patch as amp

from ..tables import format_table
from .catalogue import Options
from .picture import COLOURS, make_figure
from .qlora_training import (
    BATCH_SIZE,
    are_equal,
    base_tensors,
    build_model,
    count_bytes,
    find_gradients,
    measure_loss,
    quantise,
    read_help,
    read_source,
    state_tensors,
    train,
)
from .training import Part, make_bar, one_thread, prepare, report_checks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PRETRAINING = 2
"""So many steps in float32 for each step of fine-tuning."""
TEXTS = ("help texts", "Python source")
STAGES = ("float32", "4 bits", "4 bits, tuned")
PARTS = ("weights", "adapters", "optimizer")


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured: losses on unseen windows by stage and text, bytes by way of training and part, and what
    must be true.
    """

    losses: dict[str, dict[str, float]]
    sizes: dict[str, dict[str, int]]
    checks: dict[str, bool]


def run(options: Options) -> None:
    """Train, quantise, fine-tune; print losses and bytes, and check what must hold. Raises DemoError if it does not."""
    with one_thread():
        options = prepare(
            options, [Part(lambda steps, on_step: experiment(replace(options, steps=steps), on_step))], ["O4"]
        )
        with make_bar((1 + PRETRAINING) * options.steps) as bar:
            result = experiment(options, bar.update)
    columns = ("loss on unseen", *result.losses)
    stages = list(result.losses.values())
    print(format_table(columns, [(text, *(f"{stage[text]:.4f}" for stage in stages)) for text in stages[0]]))
    rows = [
        (way, *(f"{size:,}" for size in (*parts.values(), sum(parts.values())))) for way, parts in result.sizes.items()
    ]
    print(f"\n{format_table(('bytes', *PARTS, 'all'), rows)}")
    if options.plot:
        figure, (lines, bars) = make_figure(2)
        _draw_losses(lines, result.losses)
        _draw_sizes(bars, result.sizes)
        figure.savefig(options.plot)
        print(f"\nlosses and bytes: {options.plot}")
    print()
    report_checks(result.checks)


def experiment(options: Options, on_step: Callable[[], object] = lambda: None) -> Result:
    """Train in float32, quantise, fine-tune at O4, and compare; leaves no session open."""
    learned, tuned = texts = read_help(options.device), read_source(options.device)
    losses: list[dict[str, float]] = []

    def measure(model: nn.Module) -> None:
        losses.append({name: measure_loss(model, text) for name, text in zip(TEXTS, texts, strict=True)})

    model, adamw = build_model(options.device, options.seed)
    amp.initialize(model, adamw, opt_level="O0", verbosity=0)
    train(model, adamw, learned, PRETRAINING * options.steps, options.seed, on_step)
    amp.reset()
    measure(model)
    whole = (count_bytes(model.parameters()), 0, count_bytes(state_tensors(adamw)))

    adapted, paged = quantise(model, options.seed)
    measure(adapted)
    before = [tensor.clone() for tensor in base_tensors(adapted)]
    adapted, paged = amp.initialize(adapted, paged, opt_level="O4", verbosity=0)
    train(adapted, paged, tuned, options.steps, options.seed, on_step)
    by_amp = find_gradients(adapted, tuned.test[:BATCH_SIZE], paged)
    amp.reset()
    by_autocast = find_gradients(adapted, tuned.test[:BATCH_SIZE], None)
    measure(adapted)

    after = list(base_tensors(adapted))
    adapters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    small = (count_bytes(after), count_bytes(adapters), count_bytes(state_tensors(paged)))
    return Result(
        dict(zip(STAGES, losses, strict=True)),
        {"float32": dict(zip(PARTS, whole, strict=True)), "QLoRA": dict(zip(PARTS, small, strict=True))},
        {
            f"all {len(before)} tensors of the base are what they were, bit by bit": are_equal(before, after),
            f"all {len(adapters)} gradients equal those under torch.autocast, bit by bit": (
                len(by_amp) == len(adapters) and are_equal(by_amp, by_autocast)
            ),
            "the optimizer keeps its state in 8 bits": all(
                paged.state[each]["state1"].dtype is torch.uint8 for each in adapters
            ),
        },
    )


def _draw_losses(axes: "Axes", losses: dict[str, dict[str, float]]) -> None:
    """A line for each text over the stages, with its values, and its name at the end."""
    for text, colour in zip(TEXTS, (COLOURS["O0"], COLOURS["O4"]), strict=True):
        values = [stage[text] for stage in losses.values()]
        axes.plot(list(losses), values, "o-", color=colour, linewidth=2)
        labels = [f"{value:.3f}" for value in values[:-1]] + [f"{values[-1]:.3f}  {text}"]
        for place, (value, label) in enumerate(zip(values, labels, strict=True)):
            # the last stands beside its point, clear of a line that falls
            offset, side = ((10, -4), "left") if place == len(values) - 1 else ((0, 8), "center")
            axes.annotate(label, (place, value), offset, textcoords="offset points", color=colour, ha=side)
    axes.margins(x=0.12, y=0.12)
    axes.set_ylabel("loss (nats a character)")
    axes.set_title("Loss on unseen text; tuned on Python source", loc="left")


def _draw_sizes(axes: "Axes", sizes: dict[str, dict[str, int]]) -> None:
    """A bar for each way of training, its parts on top of each other, and their sum."""
    bottoms = [0.0] * len(sizes)
    for part, colour in zip(PARTS, (COLOURS["O1"], COLOURS["O4"], COLOURS["O5"]), strict=True):
        heights = [parts[part] / 2**20 for parts in sizes.values()]
        axes.bar(list(sizes), heights, 0.5, bottom=bottoms, color=colour, label=part)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for column, total in enumerate(bottoms):
        axes.annotate(f"{total:.2f} MiB", (column, total), (0, 3), textcoords="offset points", ha="center")
    axes.set_title("Memory for weights and optimizer (MiB)", loc="left")
    axes.legend(loc="upper right", frameon=False)
    axes.set_xlim(-0.6, len(sizes) - 0.4)
    axes.grid(visible=False, axis="x")
