"""What the demo `digits` trains: a small convolutional network with BatchNorm, on handwritten digits, at one opt_level.

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()

These three lines, the last two in `training.take_step`, are all that a user writes. scikit-learn brings the data: 1,797
images of 8x8.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import amp_patch as amp

from .catalogue import require_packages
from .picture import mean_of_last
from .training import draw_batches, synchronize, take_step

BATCH_SIZE = 96
LEARNING_RATE = 0.1


class Digits(NamedTuple):
    """Images `[n, 1, 8, 8]` float32 with zero mean and unit variance; labels `[n]` int64 in 0..9."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass(frozen=True, slots=True)
class TrainResult:
    """One level: accuracy in percent on the test images, the median time of a step, a training loss for each step."""

    level: str
    low_dtype: torch.dtype | None
    accuracy: float
    final_loss: float
    ms_per_step: float
    steps_skipped: int
    loss_scale: float
    names_patched: int
    parameters_low: int
    parameters_float32: int
    losses: tuple[float, ...]


def build_model() -> nn.Sequential:
    """Return the network, float32 on the CPU: `[n, 1, 8, 8]` images to `[n, 10]` logits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def load_digits_tensors(device: torch.device | str = "cpu") -> Digits:
    """Return the digits on `device`: every third image is for testing (599 of 1,797), whatever the seed."""
    require_packages(["sklearn"])
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8)
    images = (images - images.mean()) / images.std()
    targets = torch.from_numpy(labels).long()
    is_test = torch.arange(len(targets)) % 3 == 0
    return Digits(
        *(part.to(device) for part in (images[~is_test], targets[~is_test], images[is_test], targets[is_test]))
    )


def train(
    level: str,
    digits: Digits,
    *,
    steps: int,
    seed: int = 0,
    on_step: Callable[[], object] = lambda: None,
) -> TrainResult:
    """Train a new model on the device of `digits` for `steps` batches and leave amp's session open, as a script would.

    `on_step` is called after every step, outside the time that is measured. The device is synchronised once a step, for
    the clock.
    """
    device = digits.train_images.device
    torch.manual_seed(seed)
    model: nn.Module = build_model().to(device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=LEARNING_RATE, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps + 1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    losses, seconds = [], []
    model.train()
    for rows in draw_batches(len(digits.train_labels), BATCH_SIZE, steps, seed, device):
        started = time.perf_counter()
        loss = functional.cross_entropy(model(digits.train_images[rows]), digits.train_labels[rows])
        take_step(loss, optimizer)
        scheduler.step()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
        losses.append(loss.detach())
        on_step()

    return _report(level, _accuracy(model, digits), torch.stack(losses).float().tolist(), seconds)


def _accuracy(model: nn.Module, digits: Digits) -> float:
    """Percent of the test images that the model labels right, in eval mode and without gradients."""
    model.eval()
    with torch.no_grad():
        predicted = model(digits.test_images).argmax(dim=1)
    return 100.0 * float((predicted == digits.test_labels).float().mean())


def _report(level: str, accuracy: float, losses: list[float], seconds: list[float]) -> TrainResult:
    """Join the measurements, without the first tenth of the times as warm-up, with what the session says of itself."""
    stats = amp.stats()
    return TrainResult(
        level=stats.opt_level or level,
        low_dtype=stats.low_dtype,
        accuracy=accuracy,
        final_loss=mean_of_last(losses),
        ms_per_step=1e3 * statistics.median(seconds[len(seconds) // 10 :]),
        steps_skipped=stats.steps_skipped,
        loss_scale=stats.loss_scales[0],
        names_patched=stats.names_patched,
        parameters_low=stats.parameters_low,
        parameters_float32=stats.parameters_float32,
        losses=tuple(losses),
    )
