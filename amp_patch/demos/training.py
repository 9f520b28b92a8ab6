"""What the demos' training loops share."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import amp_patch as amp


def take_step(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Step on the gradients of `loss` alone: the lines that a training script has, with amp's two."""
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def draw_batches(rows: int, size: int, steps: int, seed: int, device: torch.device) -> list[Tensor]:
    """Row indices `[size]` of each step's batch, drawn without replacement; the same on every device for one seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(rows, generator=generator)[:size].to(device) for _ in range(steps)]


def synchronize(device: torch.device) -> None:
    """Wait for the work of an accelerator; the CPU has none waiting."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def make_bar(steps: int) -> Any:
    """Return tqdm's progress bar over so many steps; it shows itself on a terminal only."""
    from tqdm import tqdm

    return tqdm(total=steps, unit="step", leave=False, disable=None)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute on one core: a network this small gains nothing by more, and a busy machine makes it wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
