"""What the demo `paper` trains, and how it watches updates and gradients: two small networks on handwritten digits."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import amp_patch as amp

from .digits_training import Digits
from .training import draw_batches, take_step

WATCH_EVERY = 20
"""Updates and gradients are looked at in one step of so many."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained, on batches of so many images, and its measure on the test images, ready to print."""

    build: Callable[[], nn.Sequential]
    make_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    batch_size: int
    compute_loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    measure: Callable[[Tensor, Tensor, Tensor], str]


@dataclass(frozen=True, slots=True)
class Result:
    """One run, of which some steps were watched.

    `updates_lost` is the part of the weights with a gradient that a step left as they were; `gradients` are all
    elements of the gradients of the layers' outputs, float32, the loss scale divided out, and `gradients_zero` is the
    part of them that is zero.
    """

    losses: tuple[float, ...]
    test: str
    updates_lost: float
    gradients: Tensor
    gradients_zero: float
    loss_scale: float


def classifier() -> Task:
    """Return the task on which updates are small."""
    return Task(
        lambda: nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 10)),
        lambda parameters: torch.optim.SGD(parameters, lr=2e-3),
        64,
        lambda outputs, _, labels: functional.cross_entropy(outputs, labels),
        lambda outputs, _, labels: f"{100.0 * float((outputs.argmax(dim=1) == labels).float().mean()):.1f} % right",
    )


def autoencoder() -> Task:
    """Return the task on which gradients are small."""
    sizes = (64, 96, 96, 16, 96, 96, 64)

    def build() -> nn.Sequential:
        pairs = zip(sizes[:-1], sizes[1:], strict=True)
        layers = [layer for pair in pairs for layer in (nn.Linear(*pair), nn.Sigmoid())]
        return nn.Sequential(*layers[:-1])

    return Task(
        build,
        lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
        512,
        lambda outputs, images, _: functional.mse_loss(outputs, images),
        lambda outputs, images, _: f"error {float(functional.mse_loss(outputs, images)):.4f}",
    )


def train(
    task: Task,
    properties: Mapping[str, Any],
    digits: Digits,
    steps: int,
    seed: int,
    on_step: Callable[[], object] = lambda: None,
) -> Result:
    """Train anew on the device of `digits`, with these arguments of `amp.initialize`, and watch some of the steps."""
    torch.manual_seed(seed)
    images, test_images = digits.train_images.flatten(1), digits.test_images.flatten(1)
    network = task.build().to(images.device)
    model: nn.Module = network
    optimizer = task.make_optimizer(network.parameters())
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **properties)
    watched = Watched()
    losses = []
    for step, rows in enumerate(draw_batches(len(images), task.batch_size, steps, seed, images.device)):
        with watched.watch(network, optimizer) if step % WATCH_EVERY == 0 else contextlib.nullcontext():
            loss = task.compute_loss(model(images[rows]).float(), images[rows], digits.train_labels[rows])
            take_step(loss, optimizer)
        losses.append(loss.detach())
        on_step()
    with torch.no_grad():
        test = task.measure(model(test_images).float(), test_images, digits.test_labels)
    gradients = torch.cat(watched.gradients)
    return Result(
        losses=tuple(torch.stack(losses).tolist()),
        test=test,
        updates_lost=float(torch.cat(watched.is_lost).float().mean()),
        gradients=gradients,
        gradients_zero=float((gradients == 0).float().mean()),
        loss_scale=amp.stats().loss_scales[0],
    )


@dataclass(slots=True)
class Watched:
    """What was seen in the steps that were watched, an entry for each tensor.

    `gradients` are those of the layers' outputs, flat, float32, the loss scale divided out; `is_lost` tells of each
    weight with a gradient whether the step left it as it was.
    """

    gradients: list[Tensor] = field(default_factory=list)
    is_lost: list[Tensor] = field(default_factory=list)

    @contextlib.contextmanager
    def watch(self, network: nn.Sequential, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Watch the one step that the block takes."""
        scale = amp.stats().loss_scales[0]
        found: list[Tensor] = []

        def catch(module: nn.Module, inputs: object, output: Tensor) -> None:
            output.register_hook(found.append)

        hooks = [layer.register_forward_hook(catch) for layer in network]
        before: list[tuple[Tensor, Tensor, Tensor]] = []

        def note(*_: object) -> None:
            # masters have their gradients during the step only
            for weight in amp.master_params(optimizer):
                if weight.grad is not None:
                    before.append((weight, weight.detach().clone(), weight.grad.bool()))

        handles = [*hooks, optimizer.register_step_pre_hook(note)]
        yield
        for handle in handles:
            handle.remove()
        self.gradients += [gradient.float().flatten() / scale for gradient in found]
        self.is_lost += [(weight.detach() == old)[has_gradient] for weight, old, has_gradient in before]
