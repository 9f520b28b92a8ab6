"""What the demos' training loops share."""

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import amp_patch as amp

from ..config import make_policy
from ..dtypes import dtype_name
from ..errors import AmpError
from ..hardware import get_fast_levels, has_low_products
from ..tables import count_of
from .catalogue import Options

OnStep = Callable[[], object]
REHEARSED = 4
"""Steps of a rehearsal: one to warm up, and three that are timed."""
MOST_SECONDS = 80.0
"""Of a demo whose steps may be fewer: two minutes with the start of Python, pictures, and a machine at other work."""
FEW_STEPS = 20
"""Rather than fewer steps than this, fewer seeds."""


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


class Part(NamedTuple):
    """A training of a demo: `train(steps, on_step)`, and how often it runs: `per_seed` times from each seed, as many
    steps as asked for, and `short` times for a few.
    """

    train: Callable[[int, OnStep], object]
    per_seed: int = 1
    short: int = 0


class Timed(NamedTuple):
    """What a rehearsal took, and each step more takes, in seconds."""

    elapsed: float
    step: float


def prepare(options: Options, parts: Sequence[Part], levels: Sequence[str] = ()) -> Options:
    """Say how 16 bits are computed here and how long the demo will take; return the options, with fewer steps, and then
    seeds, where they may be and would take too long. `levels` are those of a demo that chooses them.

    Rehearses each part for one step and for `REHEARSED`, and closes amp's session.
    """
    told = tell_products(options.device.type, options.levels or levels)
    if told:
        print(told, flush=True)
    for part in parts if len(parts) > 1 else ():  # what a process does once is no part of what each run takes
        part.train(1, lambda: None)
        amp.reset()
    timed = [time_steps(part.train) for part in parts]

    def estimate(steps: int, seeds: int) -> float:
        extra = steps - REHEARSED
        return sum(
            seeds * part.per_seed * (one.elapsed + extra * one.step) + part.short * one.elapsed
            for part, one in zip(parts, timed, strict=True)
        )

    asked = estimate(options.steps, options.seeds)
    steps, seeds = (
        fit(estimate, options.steps, options.seeds) if options.may_shorten else (options.steps, options.seeds)
    )
    takes = f"about {estimate(steps, seeds):.0f} s here, as three steps of each run took"
    if (steps, seeds) == (options.steps, options.seeds):
        print(f"{_count(steps, seeds)}: {takes}\n", flush=True)
    else:
        print(
            f"{_count(steps, seeds)}: {takes}; the {_count(options.steps, options.seeds)} of --steps {options.steps}"
            f" --seeds {options.seeds} would take {asked:.0f} s\n",
            flush=True,
        )
    return replace(options, steps=steps, seeds=seeds)


def fit(estimate: Callable[[int, int], float], steps: int, seeds: int) -> tuple[int, int]:
    """Return the most steps, and then seeds, up to those given, whose estimate is at most `MOST_SECONDS`: fewer seeds
    where it would be fewer than `FEW_STEPS` steps. The least are two steps from one seed.
    """
    for fewer in range(seeds, 0, -1):
        least = min(FEW_STEPS, steps) if fewer > 1 else 2
        for some in range(steps, least - 1, -1):
            if estimate(some, fewer) <= MOST_SECONDS:
                return some, fewer
    return min(2, steps), 1


def time_steps(train: Callable[[int, OnStep], object]) -> Timed:
    """Rehearse a training by the clock: all of it, and the median step, without the first."""
    ends: list[float] = []
    started = time.perf_counter()
    train(REHEARSED, lambda: ends.append(time.perf_counter()))
    elapsed = time.perf_counter() - started
    amp.reset()
    steps = [after - before for before, after in itertools.pairwise(ends)]
    return Timed(elapsed, statistics.median(steps) * len(ends) / REHEARSED)


def tell_products(device_type: str, levels: Sequence[str]) -> str:
    """Return a line on how products of 16-bit values are computed at these levels; nothing for levels without any."""
    lows = dict.fromkeys(low for level in levels if (low := make_policy(level, {}).low_dtype) is not None)
    names = {
        has: [dtype_name(low) for low in lows if has_low_products(device_type, low) is has] for has in (True, False)
    }
    device, told = device_type.upper(), []
    if names[True]:
        told.append(f"{' and '.join(names[True])} by instructions that this {device} has for it")
    if names[False]:
        told.append(
            f"{' and '.join(names[False])} as tensor cores do: values are rounded, products are computed in float32"
            f" (this {device} has no fast ones; for speed here, use {get_fast_levels(device_type)})"
        )
    return f"16 bits here: {'; '.join(told)}" if told else ""


def _count(steps: int, seeds: int) -> str:
    return f"{count_of(steps, 'step')}{f' from each of {seeds} seeds' if seeds > 1 else ''}"
