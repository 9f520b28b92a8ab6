"""What 16 bits do to training: loss and accuracy of every mode against float32, and the two failures that mixed
precision exists to prevent.

    python benchmarks/accuracy.py --seeds 3 --json accuracy.json --plot accuracy.png

Modes see the same initial weights and the same batches, so a difference is taken within each seed. The two failures
follow Micikevicius et al., "Mixed Precision Training", ICLR 2018: gradients too small for float16 (section 3.2), and
updates too small for a 16-bit weight (3.1).
"""

import argparse
import dataclasses
import functools
import importlib.util
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from modes import MODES, SLOW_ON_CPU, Trainer, prepared
from plots import add_option, save_lines
from timing import environment, format_table, write_json
from torch import Tensor, nn
from workloads import Transformer

from amp_patch.demos.digits_training import build_model, load_digits_tensors

LAST = 20  # steps whose training losses are averaged into the final one
LOSS_WEIGHT = 1e-6  # puts most gradients of the small network below what float16 can hold
SMALL_LR = 2e-4  # times gradients of the order of 0.01, less than half of the last place of most 16-bit weights
COLUMNS = ("task", "mode", "loss", "+-", "to float32", "+-", "accuracy", "+-", "to float32", "+-")


@dataclass(frozen=True, slots=True)
class Task:
    """A model to train and to judge.

    Attributes:
        batches: (inputs, targets) of each step, from a seed and the number of steps.
        tests: (inputs, targets) to judge by.
    """

    build: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batches: Callable[[int, int], list[tuple[Tensor, Tensor]]]
    tests: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Result:
    """One run: the training loss of each step, and the accuracy in percent on the tests."""

    losses: tuple[float, ...]
    accuracy: float

    @property
    def final_loss(self) -> float:
        return statistics.fmean(self.losses[-LAST:])


# ---- the tasks -------------------------------------------------------------------------------------------------------


def make_digits(device: torch.device) -> Task:
    """The network and the data of `amp-patch demo`: convolutions with BatchNorm on handwritten digits.

    Needs scikit-learn.
    """
    digits = load_digits_tensors(device)

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)

    def batches(seed: int, steps: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        chosen = [torch.randperm(len(digits.train_labels), generator=generator)[:96].to(device) for _ in range(steps)]
        return [(digits.train_images[rows], digits.train_labels[rows]) for rows in chosen]

    return Task(lambda: build_model().to(device), make_optimizer, batches, (digits.test_images, digits.test_labels))


def make_text(device: torch.device) -> Task:
    """A character-level transformer on the help texts that come with Python; the last twentieth of them is for
    testing.
    """
    sequence = 64
    tokens = torch.tensor([min(ord(character), 127) for character in read_text()], device=device)
    border = len(tokens) * 19 // 20

    def cut(starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = torch.stack([tokens[start : start + sequence + 1] for start in starts])
        return rows[:, :-1], rows[:, 1:].contiguous()

    def batches(seed: int, steps: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(border - sequence - 1, (steps, 16), generator=generator)
        return [cut(row) for row in starts.tolist()]

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3)

    tests = cut(range(border, len(tokens) - sequence - 1, (len(tokens) - border) // 96))
    return Task(lambda: Transformer(64, 2, sequence, vocabulary=128).to(device), make_optimizer, batches, tests)


def read_text() -> str:
    """The topics of Python's `help()`, some 400,000 characters; they differ a little from one Python to the next."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def make_small(
    device: torch.device, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], weight: float
) -> Task:
    """A small network on ten noisy prototypes, its loss times `weight`; float16 on the CPU allows no more."""
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.randn(10, 64, generator=generator)

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        labels = torch.randint(10, (count,), generator=generator)
        return (prototypes[labels] + 2 * torch.randn(count, 64, generator=generator)).to(device), labels.to(device)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10), _Weigh(weight)).to(device)

    def batches(seed: int, steps: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed + 1)
        return [draw(32, generator) for _ in range(steps)]

    return Task(build, make_optimizer, batches, draw(512, generator))


class _Weigh(nn.Module):
    """Returns its input, and multiplies the gradient: what a weight of the loss does, while the loss itself stays
    readable.
    """

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, logits: Tensor) -> Tensor:
        logits = logits.float()
        return logits.detach() + (logits - logits.detach()) * self.weight


# ---- training --------------------------------------------------------------------------------------------------------


def compute_loss(inputs: Tensor, targets: Tensor, run: Callable[..., Tensor]) -> Tensor:
    return F.cross_entropy(run(inputs).float().flatten(0, -2), targets.flatten())


def train(
    task: Task,
    mode: str,
    seed: int,
    steps: int,
    device: torch.device,
    watch: Callable[[Trainer], object] = lambda trainer: None,
    **options: Any,
) -> Result:
    """Train anew. `watch` is called before the first step and after the last."""
    torch.manual_seed(seed)
    losses = []
    with prepared(mode, task.build, task.make_optimizer, device, **options) as trainer:
        watch(trainer)
        for batch in task.batches(seed, steps):
            losses.append(trainer.step([functools.partial(compute_loss, *batch)]).detach())
        watch(trainer)
        return Result(tuple(torch.stack(losses).float().tolist()), get_accuracy(trainer, *task.tests))


def get_accuracy(trainer: Trainer, inputs: Tensor, targets: Tensor) -> float:
    trainer.model.eval()
    with torch.no_grad():
        predicted = trainer.forward(lambda run: run(inputs)).argmax(dim=-1)
    return 100.0 * float((predicted == targets).float().mean())


def get_mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def compare(task: Task, modes: Sequence[str], seeds: int, steps: int, device: torch.device) -> dict[str, list[Result]]:
    """Each mode's results, one for each seed."""
    return {mode: [train(task, mode, seed, steps, device) for seed in range(seeds)] for mode in modes}


def comparison_rows(name: str, results: Mapping[str, Sequence[Result]]) -> list[list[str]]:
    """One row for each mode; differences are taken within each seed."""
    rows = []
    for mode, runs in results.items():
        row = [name, mode]
        for get, digits in ((lambda run: run.final_loss, 4), (lambda run: run.accuracy, 2)):
            differences = [get(run) - get(reference) for run, reference in zip(runs, results["float32"], strict=True)]
            mean, deviation = get_mean_and_deviation([get(run) for run in runs])
            shift, spread = get_mean_and_deviation(differences)
            row += [f"{mean:.{digits}f}", f"{deviation:.{digits}f}", f"{shift:+.{digits}f}", f"{spread:.{digits}f}"]
        rows.append(row)
    return rows


# ---- gradients that vanish -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SmallGradients:
    """One run: in percent, the gradient elements of the first step that are zero although float32's are not; and the
    result.
    """

    zero: float
    result: Result


def run_small_gradients(steps: int, device: torch.device) -> dict[str, SmallGradients]:
    """Train the small network with a loss weight of 1e-6, under float16 with several loss scales.

    Adam divides by the size of the gradients, so float32 does not mind the weight; the optimizer's epsilon is far below
    the gradients.
    """
    task = make_small(device, lambda model: torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-20), LOSS_WEIGHT)
    runs: dict[str, tuple[str, dict[str, object]]] = {"float32": ("float32", {})}
    for scale in (1, 8, 128, 1024, "dynamic"):
        runs[f"float16, loss scale {scale}"] = ("O2", {"cast_model_type": "float16", "loss_scale": scale})
    results: dict[str, SmallGradients] = {}
    is_nonzero = torch.tensor(True)
    for label, (mode, options) in runs.items():
        noted, first = _noting_gradients(task)
        result = train(noted, mode, 0, steps, device, **options)
        if label == "float32":
            is_nonzero = first[0] != 0
        results[label] = SmallGradients(100.0 * float((is_nonzero & (first[0] == 0)).sum() / is_nonzero.sum()), result)
    return results


def _noting_gradients(task: Task) -> tuple[Task, list[Tensor]]:
    """The same task, and a list that training fills with the gradients that the optimizer steps on, all of one step in
    one tensor.
    """
    noted: list[Tensor] = []

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = task.make_optimizer(model)
        optimizer.register_step_pre_hook(lambda *_: noted.append(_flatten(optimizer, lambda parameter: parameter.grad)))
        return optimizer

    return dataclasses.replace(task, make_optimizer=make_optimizer), noted


def _flatten(optimizer: torch.optim.Optimizer, get: Callable[[Tensor], Tensor]) -> Tensor:
    """What `get` takes of each parameter that the optimizer steps on, as one float32 tensor on the CPU."""
    return torch.cat(
        [
            get(parameter).detach().float().flatten().cpu()
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
    )


# ---- updates that vanish ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SmallUpdates:
    """One run: in percent, the weights that are no longer what they were; how far they are from it, relative to
    float32; and the result.
    """

    moved: float
    distance: float
    result: Result


def run_small_updates(steps: int, device: torch.device) -> dict[str, SmallUpdates]:
    """Train the small network by plain SGD at a small learning rate, with and without float32 masters."""
    task = make_small(device, lambda model: torch.optim.SGD(model.parameters(), lr=SMALL_LR), 1.0)
    runs: dict[str, tuple[str, dict[str, object]]] = {
        "float32": ("float32", {}),
        "float16 model": ("pure-float16", {}),
        "float16, O3": ("O3", {"cast_model_type": "float16"}),
        "float16, O2: masters": ("O2", {"cast_model_type": "float16", "loss_scale": "dynamic"}),
        "bfloat16 model": ("pure-bfloat16", {}),
        "bfloat16, O3": ("O3", {"cast_model_type": "bfloat16"}),
        "bfloat16, O5: masters": ("O5", {}),
    }
    results: dict[str, SmallUpdates] = {}
    distances: dict[str, float] = {}
    for label, (mode, options) in runs.items():
        ends: list[Tensor] = []
        result = train(
            task,
            mode,
            0,
            steps,
            device,
            lambda trainer, ends=ends: ends.append(_flatten(trainer.optimizer, lambda p: p)),
            **options,
        )
        before, after = ends
        distances[label] = float((after - before).norm())
        results[label] = SmallUpdates(
            100.0 * float((after != before).float().mean()), distances[label] / distances["float32"], result
        )
    return results


# ---- the command -----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Loss and accuracy of every mode against float32; vanishing gradients and updates."
    )
    tasks = ("digits", "text", "small-gradients", "small-updates")
    parser.add_argument("--tasks", default=",".join(tasks), help="default: %(default)s")
    parser.add_argument(
        "--modes",
        help=f"of {', '.join(MODES)}, for the first two; default: autocast and levels, but no float16 on the CPU",
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each mode (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of a run (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's)")
    parser.add_argument(
        "--quick", action="store_true", help="one seed and a few steps: shows that it runs, and no more"
    )
    parser.add_argument("--json", type=Path, help="write every loss into this file")
    add_option(parser)
    parsed = parser.parse_args(arguments)
    parsed.tasks = parsed.tasks.split(",")
    on_cpu = torch.device(parsed.device).type == "cpu"
    default = [mode for mode in MODES if not mode.startswith("pure") and not (on_cpu and mode in SLOW_ON_CPU)]
    parsed.modes = list(dict.fromkeys(["float32", *(parsed.modes.split(",") if parsed.modes else default)]))
    for option, given, allowed in (("tasks", parsed.tasks, tasks), ("modes", parsed.modes, MODES)):
        if unknown := sorted(set(given) - set(allowed)):
            parser.error(f"--{option}: {', '.join(unknown)} is not one of {', '.join(allowed)}")
    if "digits" in parsed.tasks and importlib.util.find_spec("sklearn") is None:
        parser.error("the digits come with scikit-learn, which is not installed; choose other --tasks")
    if parsed.quick:
        parsed.seeds, parsed.steps = 1, 3
    return parsed


def main(arguments: Sequence[str] | None = None) -> None:
    parsed = parse_arguments(arguments)
    device = torch.device(parsed.device)
    if parsed.threads:
        torch.set_num_threads(parsed.threads)
    report: dict[str, object] = {}
    curves: dict[str, dict[str, Sequence[float]]] = {}
    machine = {**environment(device), "seeds": parsed.seeds, "steps": parsed.steps}
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    compared = {}
    for name in (name for name in parsed.tasks if name in ("digits", "text")):
        task = make_digits(device) if name == "digits" else make_text(device)
        compared[name] = compare(task, parsed.modes, parsed.seeds, parsed.steps, device)
        curves[name] = {mode: _smoothed(runs) for mode, runs in compared[name].items()}
        report[name] = {
            mode: [{"losses": run.losses, "accuracy": run.accuracy} for run in runs]
            for mode, runs in compared[name].items()
        }
    if compared:
        rows = [row for name, results in compared.items() for row in comparison_rows(name, results)]
        print("\n" + format_table(COLUMNS, rows, left=2))
    if "small-gradients" in parsed.tasks:
        small = run_small_gradients(parsed.steps, device)
        print(f"\nGradients of a loss weighted by {LOSS_WEIGHT:g}")
        rows = [
            [label, f"{run.zero:.1f} %", f"{run.result.final_loss:.4f}", f"{run.result.accuracy:.1f} %"]
            for label, run in small.items()
        ]
        print(format_table(("mode", "lost to zero", "loss", "accuracy"), rows))
        curves["small gradients"] = {label: _smoothed([run.result]) for label, run in small.items()}
        report["small-gradients"] = {
            label: {"percent_zero": run.zero, "losses": run.result.losses} for label, run in small.items()
        }
    if "small-updates" in parsed.tasks:
        updates = run_small_updates(parsed.steps, device)
        print(f"\nUpdates of plain SGD with a learning rate of {SMALL_LR:g}")
        rows = [
            [label, f"{run.moved:.1f} %", f"{run.distance:.3f}", f"{run.result.final_loss:.4f}"]
            for label, run in updates.items()
        ]
        print(format_table(("mode", "weights moved", "distance", "loss"), rows))
        curves["small updates"] = {label: _smoothed([run.result]) for label, run in updates.items()}
        report["small-updates"] = {
            label: {"percent_moved": run.moved, "distance": run.distance, "losses": run.result.losses}
            for label, run in updates.items()
        }
    write_json(parsed.json, {"environment": machine, "tasks": report})
    save_lines(parsed.plot, f"Training loss (mean of the last {LAST} steps)", "step", curves)


def _smoothed(runs: Sequence[Result]) -> list[float]:
    """The mean over the runs and over each step and those before it, `LAST` at most."""
    means = [statistics.fmean(values) for values in zip(*(run.losses for run in runs), strict=True)]
    return [statistics.fmean(means[max(0, end - LAST) : end]) for end in range(1, len(means) + 1)]


if __name__ == "__main__":
    main()
