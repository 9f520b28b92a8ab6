"""What master weights and loss scaling are for: two experiments of "Mixed Precision Training" on handwritten digits.

Micikevicius et al. 2018, arXiv:1710.03740. Master weights (section 3.1): plain SGD at a learning rate so small that
float16 rounds most updates away, as happens late in training. Loss scaling (3.2): an autoencoder with sigmoids, whose
loss is a mean over all pixels of all images, so that its gradients are small.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import common
import torch
from torch import Tensor, nn
from torch.nn import functional

import amp_patch as amp

WATCH_EVERY = 20  # updates and gradients are looked at in one step of so many


class Task(NamedTuple):
    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    batch_size: int
    compute_loss: Callable[[Tensor, Tensor, Tensor], Tensor]


class Result(NamedTuple):
    """One training. `updates_lost`: the part of the weights with a gradient that a step left as they were.

    `gradients`: those of the layers' outputs, float32, the loss scale divided out.
    """

    losses: list[float]
    updates_lost: float
    gradients: Tensor
    loss_scale: float


def make_classifier() -> Task:
    """Updates are small: by SGD with a small learning rate."""
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-3)
    return Task(model, optimizer, 64, lambda outputs, images, labels: functional.cross_entropy(outputs, labels))


def make_autoencoder() -> Task:
    """Gradients are small: of a mean over many values, through sigmoids."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((64, 96), (96, 96), (96, 16), (16, 96), (96, 96)):
        layers += [nn.Linear(inputs, outputs), nn.Sigmoid()]
    model = nn.Sequential(*layers, nn.Linear(96, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return Task(model, optimizer, 512, lambda outputs, images, labels: functional.mse_loss(outputs, images))


def train(make_task: Callable[[], Task], properties: dict[str, Any], digits: common.Digits, steps: int) -> Result:
    """Train anew with these arguments of `amp.initialize`, and watch some of the steps."""
    torch.manual_seed(0)
    images = digits.images.flatten(1)
    task = make_task()
    model, optimizer = amp.initialize(task.model.to(images.device), task.optimizer, verbosity=0, **properties)
    losses, lost, gradients = [], [], []

    def watch_gradients(module: nn.Module, inputs: object, output: Tensor) -> None:
        if is_watched:
            scale = amp.stats().loss_scales[0]
            output.register_hook(lambda gradient: gradients.append(gradient.float().flatten() / scale))

    def watch_weights(*_: object) -> None:
        if is_watched:  # masters have their gradients during the step only
            weights = [weight for weight in amp.master_params(optimizer) if weight.grad is not None]
            before.extend((weight, weight.detach().clone(), weight.grad != 0) for weight in weights)

    for layer in task.model:
        layer.register_forward_hook(watch_gradients)
    optimizer.register_step_pre_hook(watch_weights)
    for step, rows in enumerate(common.draw_batches(len(images), task.batch_size, steps, 0, images.device)):
        is_watched = step % WATCH_EVERY == 0
        before: list[tuple[Tensor, Tensor, Tensor]] = []
        optimizer.zero_grad()
        loss = task.compute_loss(model(images[rows]).float(), images[rows], digits.labels[rows])
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
        lost += [(weight.detach() == value)[has_gradient] for weight, value, has_gradient in before]
    scale = amp.stats().loss_scales[0]
    amp.reset()
    return Result(losses, torch.cat(lost).float().mean().item(), torch.cat(gradients), scale)


FLOAT16 = {"opt_level": "O2", "loss_scale": "dynamic"}
MASTERS = {
    "float32": {"opt_level": "O0"},
    "float16, masters": FLOAT16,
    "float16, no masters": {**FLOAT16, "master_weights": False},
}
SCALING = {
    "float32": {"opt_level": "O0"},
    "float16, loss scaled": FLOAT16,
    "float16, not scaled": {**FLOAT16, "loss_scale": 1.0},
}
EXPERIMENTS = (
    ("Master weights: a classifier with small updates", make_classifier, MASTERS),
    ("Loss scaling: an autoencoder with small gradients", make_autoencoder, SCALING),
)


def main(argv: Sequence[str] | None = None) -> int:
    options = common.parse_options(__doc__, steps=500, argv=argv)
    torch.set_num_threads(1)  # more threads gain nothing on networks of this size
    digits = common.load_digits(options.device)
    every = [(make_task, properties) for _, make_task, runs in EXPERIMENTS for properties in runs.values()]
    common.shorten(options, lambda steps: [train(make_task, each, digits, steps) for make_task, each in every])

    found = []
    for title, make_task, runs in EXPERIMENTS:
        print(f"{title}\n")
        table = common.Table("run".ljust(20), "final loss", "updates lost", "gradients zero", "loss scale")
        results = {}
        for name, properties in runs.items():
            result = results[name] = train(make_task, properties, digits, options.steps)
            loss = f"{common.mean_of_last(result.losses):.4f}"
            zero = (result.gradients == 0).float().mean().item()
            table.print_row(name, loss, f"{result.updates_lost:.1%}", f"{zero:.1%}", f"{result.loss_scale:g}")
        found.append(results)
        print()
    if options.plot:
        figure, panels = common.make_figure(3)
        for axes, (title, _, _), results in zip(panels, EXPERIMENTS, found, strict=False):
            common.draw_lines(axes, title, {name: result.losses for name, result in results.items()})
        plain, scaled, _ = found[1].values()
        sizes = plain.gradients[plain.gradients != 0].abs().log2()
        styles = ({"color": common.COLOURS[1]}, {"color": common.COLOURS[2], "linestyle": "--"})
        for scale, style in zip((1.0, scaled.loss_scale), styles, strict=True):
            shifted = (sizes + math.log2(scale)).tolist()
            panels[2].hist(shifted, range(-48, 17), density=True, histtype="step", label=f"times {scale:g}", **style)
        panels[2].axvspan(-48, -25, color="#D55E00", alpha=0.16, label="zero in float16")
        panels[2].axvspan(-25, -14, color="#E69F00", alpha=0.16, label="subnormal in float16")
        panels[2].set_title("The autoencoder's gradients: log2 of their size")
        panels[2].margins(y=0.5)  # room for the legend above
        panels[2].legend(loc="upper center", ncols=2, fontsize=10)
        figure.savefig(options.plot)
        print(f"Losses and gradients: {options.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
