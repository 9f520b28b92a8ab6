"""Long runs: thousands of steps, of sessions and of interrupts in one process, after which nothing may have grown.

    python tests/soak/soak.py [steps | sessions | interrupts] [--count N]

`steps` trains a small model at O1 with batches of NaN, and at O2, O4 and O5 with a checkpoint that is saved and loaded
every 100 steps. `sessions` opens and closes sessions for models drawn at random. `interrupts` has a timer press Ctrl-C
in training, then resets and trains again. Each prints what there is of it at tenths of the way, and exits with 1 if
torch is not as it was, or if objects, hooks or memory grew from the third tenth to the last.
"""

import argparse
import collections
import functools
import gc
import io
import os
import random
import signal
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from torch_state import find_changes

import amp_patch as amp
from amp_patch.torch_private import GLOBAL_POST_HOOKS

COUNTS = {"steps": 7_500, "sessions": 2_000, "interrupts": 2_000}
ALLOWED_MB = 16.0
"""Of resident memory between two tenths: the allocator's own, which comes and goes."""

Row = dict[str, float]


class Growth:
    """Counts what lives in this process, and says what grew."""

    def __init__(self, count: int) -> None:
        self._every = max(1, count // 10)
        self._rows: list[Row] = []
        self._types: list[collections.Counter[str]] = []

    def is_due(self, done: int) -> bool:
        """Tell whether this is a tenth of the way."""
        return done % self._every == 0

    def look(self, done: int) -> None:
        """Count at each tenth of the way."""
        if not self.is_due(done):
            return
        gc.collect()
        found = gc.get_objects()
        types = collections.Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in found)
        row = {
            "done": done,
            "objects": len(found),
            "tensors": sum(isinstance(one, torch.Tensor) for one in found),
            "hooks": len(GLOBAL_POST_HOOKS) + _count_hooks(found),
            "MB": _read_resident_mb(),
        }
        self._rows.append(row)
        self._types.append(types)
        print("  ".join(f"{name} {value:,.0f}" for name, value in row.items()), flush=True)

    def find(self) -> list[str]:
        """Return what grew from the third tenth to the last; what comes first fills caches."""
        early, late = self._rows[2], self._rows[-1]
        grown: list[str] = []
        for name in ("tensors", "hooks"):
            if late[name] > early[name]:
                grown.append(f"{name}: {early[name]:,.0f} -> {late[name]:,.0f}")
        if late["MB"] > early["MB"] + ALLOWED_MB:
            grown.append(f"MB: {early['MB']:,.0f} -> {late['MB']:,.0f}")
        for name, number in self._types[-1].items():
            before = self._types[2][name]
            if name.startswith("amp_patch") and number > before or number > before + 100:
                grown.append(f"{name}: {before} -> {number}")
        return grown


def _count_hooks(found: list[object]) -> int:
    modules = [one for one in found if isinstance(one, nn.Module)]
    return sum(len(value) for one in modules for key, value in vars(one).items() if "hook" in key and value)


def _read_resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def make_model(width: int = 8, depth: int = 2) -> nn.Sequential:
    """Return a small net with a batch norm."""
    layers: list[nn.Module] = [nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    """Train a step."""
    loss = F.cross_entropy(model(inputs), torch.arange(len(inputs)) % 3)
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()


def run_steps(level: str, count: int, growth: Growth) -> None:
    """Train at a level; raises RuntimeError where a weight is not finite."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for number in range(1, count + 1):
        inputs = torch.randn(6, 4)
        if level == "O1" and number % 97 == 0:
            inputs[0, 0] = torch.nan
            model.eval()  # running statistics would keep the NaN
        step(model, optimizer, inputs)
        model.train()
        if number % 100 == 0:
            _save_and_load(model, optimizer)
        growth.look(number)
    if not all(torch.isfinite(one).all() for one in model.state_dict().values()):
        raise RuntimeError(f"{level}: a weight is not finite")
    amp.reset()


def _save_and_load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"])


def run_sessions(count: int, growth: Growth) -> None:
    """Open and close sessions of models drawn at random; most second ones are left to the garbage collector."""
    draw = random.Random(0)
    for number in range(1, count + 1):
        level = draw.choice(["O0", "O1", "O2", "O3", "O4", "O5"])
        model = make_model(draw.choice([4, 8, 16]), draw.randrange(3))
        make = draw.choice([torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
        optimizer = make(model.parameters(), lr=1e-3)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for _ in range(draw.randrange(3)):
            step(model, optimizer, torch.randn(6, 4))
        del model, optimizer
        if number % 2 or growth.is_due(number):
            amp.reset()
        growth.look(number)


def run_interrupts(count: int, growth: Growth) -> None:
    """Have a timer press Ctrl-C in the middle of sessions; raises RuntimeError where torch is not as it was."""
    _train_and_reset("O1")  # what is imported late is not to be interrupted half-way
    draw = random.Random(0)
    left_disabled = 0
    for number in range(1, count + 1):
        level = draw.choice(["O1", "O2", "O4", "O5"])
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            # again where Python ignores it: in __del__
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.001, 0.1), 0.5)
            while True:
                _train_and_reset(level)
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
        left_disabled += not torch.is_grad_enabled()
        torch.set_grad_enabled(True)  # torch leaves it off if Ctrl-C comes as the step of an optimizer restores it
        amp.reset()
        if changes := find_changes():
            raise RuntimeError(f"interrupt {number}: {changes}")
        _train_and_reset(level)
        if changes := find_changes():
            raise RuntimeError(f"the session after interrupt {number}: {changes}")
        growth.look(number)
    print(f"gradients left disabled by torch: {left_disabled} times")


def _train_and_reset(level: str) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for _ in range(3):
        step(model, optimizer, torch.ones(6, 4))
    amp.reset()


RUNS = {f"steps at {level}": functools.partial(run_steps, level) for level in ("O1", "O2", "O4", "O5")}
RUNS |= {"sessions": run_sessions, "interrupts": run_interrupts}


def main() -> int:
    """Run the parts that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*COUNTS, []], help="which to run (default: all)")
    parser.add_argument(
        "--count", type=int, help="how many, in the place of 7,500 steps a level and 2,000 of the others"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    code = 0
    for name, run in RUNS.items():
        part = name.partition(" ")[0]
        if arguments.parts and part not in arguments.parts:
            continue
        count = arguments.count or COUNTS[part]
        print(f"{name}: {count:,}", flush=True)
        growth = Growth(count)
        run(count, growth)
        for line in (*growth.find(), *find_changes()):
            print(f"  grew: {line}")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
