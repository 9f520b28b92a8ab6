"""What the demos' training loops share."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import amp_patch as amp

from ..errors import AmpError


class DemoError(AmpError):
    """A demo measured something else than what it is there to show."""


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


def record_gradients(optimizer: torch.optim.Optimizer, into: list[Tensor]) -> Any:
    """Append to `into`, at each step, a copy of all gradients that the optimizer steps on, flat; return the handle."""

    def record(*_: object) -> None:
        # masters have their gradients during the step only
        gradients = [weight.grad for weight in amp.master_params(optimizer)]
        into.append(torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]))

    return optimizer.register_step_pre_hook(record)


def measure_peak(step: Callable[[], object], device: torch.device) -> int:
    """Run `step` and return by how many bytes the memory in use on `device` rose at most above what it was before.

    On CUDA the allocator tells; on a CPU it is what torch's profiler sees between ops, less what they need inside.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it says on stderr when it starts and when it stops
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=False) as profile:
        step()
    in_use = itertools.accumulate(event.self_cpu_memory_usage for event in profile.function_events or ())
    return max(in_use, default=0)


def report_checks(checks: Mapping[str, bool]) -> None:
    """Print a line for each check; raise DemoError, which names them, if one came out false."""
    print("\n".join(f"{'yes' if holds else 'NO '}  {check}" for check, holds in checks.items()))
    broken = [check for check, holds in checks.items() if not holds]
    if broken:
        raise DemoError(f"not so: {'; '.join(broken)}")
