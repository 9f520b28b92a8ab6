"""What amp_patch costs where it saves nothing: initialize, reset, each patched call, and steps that insight looks at.

    python benchmarks/overhead.py --rounds 11

Everything runs on the CPU: these are costs of the host. Patched and bare calls are the same Python code on tiny
tensors; between the two the session is opened or closed, never a function swapped by hand. The bare call gets the
tensors that the patched one ends up with, so that both run the same kernel.
"""

import argparse
import contextlib
import functools
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timing import Samples, environment, format_table, interleave
from torch import Tensor, nn
from training import WORKLOADS, Size, prepared

import amp_patch as amp
from amp_patch import insight
from amp_patch.insight.tracer import tracing

LAYERS = 80  # a weight and a bias each: 160 tensors


@dataclass(frozen=True, slots=True)
class Call:
    """One operation: the rule it is to show, where its name lives, the code, the inputs of the patched call, and those
    of the bare one where they are others.
    """

    label: str
    owner: object
    name: str
    code: Callable[..., Tensor]
    patched: tuple[Tensor, ...]
    bare: tuple[Tensor, ...] = ()


def measure_initialize(level: str, rounds: int) -> list[list[str]]:
    """Milliseconds of `initialize` for 160 tensors with an optimizer built before it, and of `reset`; the first of the
    process apart.
    """
    opened, closed = [], []
    for _ in range(rounds + 1):
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(LAYERS)))
        optimizer = torch.optim.AdamW(model.parameters())
        started = time.perf_counter()
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        between = time.perf_counter()
        amp.reset()
        opened.append(1e3 * (between - started))
        closed.append(1e3 * (time.perf_counter() - between))
    first, *later = opened
    initialize, reset = Samples(tuple(later)), Samples(tuple(closed[1:]))
    return [
        [f"initialize {level}, first of the process", f"{first:.1f} ms", "", ""],
        [f"initialize {level}, {2 * LAYERS} tensors", f"{initialize.median:.1f} ms", f"+-{initialize.spread:.0%}", ""],
        [f"reset after {level}", f"{reset.median:.1f} ms", f"+-{reset.spread:.0%}", ""],
    ]


class Layer(nn.Linear):
    """A layer of 8x8 weights, with a large weight beside them."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.large = nn.Parameter(torch.randn(4096, 8))


def make_calls(model: Layer, low: torch.dtype) -> list[Call]:
    """The calls to time, on 8x8 tensors.

    The float32 weights belong to `model`. Those of 8x8 elements are cast at each use on a CPU; low copies of larger
    ones are cached.
    """
    rows, weight, bias, large = torch.randn(8, 8), model.weight, model.bias, model.large
    low_rows = rows.to(low)
    low_weight = weight.detach().to(low).requires_grad_()
    low_bias = bias.detach().to(low).requires_grad_()
    low_large = large.detach().to(low).requires_grad_()
    low_layer, layer = (low_rows, low_weight, low_bias), (low_rows, weight, bias)
    heads = low_rows[None]

    def attention(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    def linear(*given: Tensor) -> Tensor:
        return F.linear(*given)

    def matmul(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    def atan2(x: Tensor, y: Tensor) -> Tensor:
        return torch.atan2(x, y)

    def norm(x: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x, (8,), b, b)

    clones = (rows.clone(),)
    return [
        Call("whitelist: F.linear, low", F, "linear", linear, low_layer),
        Call("whitelist: F.linear, cached weight", F, "linear", linear, (low_rows, large), (low_rows, low_large)),
        Call("whitelist: F.linear, small weight: one cast", F, "linear", linear, layer[:2], low_layer[:2]),
        Call("whitelist: F.linear, with bias: two casts", F, "linear", linear, layer, low_layer),
        Call("whitelist: x @ w, low", Tensor, "__matmul__", matmul, low_layer[:2]),
        Call("whitelist: x @ w, float32 x: one cast", Tensor, "__matmul__", matmul, (rows, low_weight), low_layer[:2]),
        Call("whitelist: attention, low", F, "scaled_dot_product_attention", attention, (heads,)),
        Call("blacklist: F.softmax, float32", F, "softmax", lambda x: F.softmax(x, dim=-1), (rows,)),
        Call("blacklist: F.layer_norm, float32", F, "layer_norm", norm, (rows, bias)),
        Call("blacklist: torch.exp, low: one cast", torch, "exp", lambda x: torch.exp(x), (low_rows,), (rows,)),
        Call("promote: torch.atan2, alike", torch, "atan2", atan2, (rows, rows)),
        Call("promote: torch.atan2, mixed: one cast", torch, "atan2", atan2, (rows, low_rows), (rows, rows)),
        Call("sequence promote: torch.cat, alike", torch, "cat", lambda x: torch.cat([x, x]), (rows,)),
        Call("match self: x.addcmul_(x, x), alike", Tensor, "addcmul_", lambda x: x.addcmul_(x, x, value=0.0), clones),
        Call("no rule: torch.relu", torch, "relu", lambda x: torch.relu(x), (rows,)),
    ]


def measure_calls(level: str, rounds: int, calls: int) -> list[list[str]]:
    """Microseconds of each call bare and under `level`; every round opens and closes a session of its own."""
    bare: dict[str, list[float]] = {}
    patched: dict[str, list[float]] = {}
    is_patched: dict[str, bool] = {}
    low = torch.bfloat16 if level in ("O4", "O5") else torch.float16

    def microseconds(call: Call, inputs: tuple[Tensor, ...]) -> float:
        return 1e6 * timeit.timeit(lambda: call.code(*inputs), number=calls) / calls

    for _ in range(rounds):
        model = Layer()
        timed = make_calls(model, low)
        for call in timed:
            bare.setdefault(call.label, []).append(microseconds(call, call.bare or call.patched))
        amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
        for call in timed:
            is_patched[call.label] = amp.is_patched(call.owner, call.name)
            call.code(*call.patched)
            patched.setdefault(call.label, []).append(microseconds(call, call.patched))
        amp.reset()
    rows = []
    for label, values in bare.items():
        before, after = Samples(tuple(values)), Samples(tuple(patched[label]))
        note = f"{after.difference(before):+.2f} us, x{after.ratio(before):.2f}"
        if not is_patched[label]:
            note += ", not patched"
        rows.append([f"{level} {label}", f"{after.median:.2f} us", f"bare {before.median:.2f} us", note])
    return rows


@contextlib.contextmanager
def counted_calls(found: list[int]) -> Iterator[None]:
    """Append how many Python functions were called in the block."""
    count = -1  # the end of the block is a call, too

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)
        found.append(count)


def enter(loss: Tensor, optimizer: torch.optim.Optimizer) -> tuple[contextlib.AbstractContextManager[Tensor], Tensor]:
    """Enter a `scale_loss` block; return it, and the scaled loss."""
    block = amp.scale_loss(loss, optimizer)
    return block, block.__enter__()


def run_steps(layers: int, steps: int, level: str | None) -> dict[str, tuple[list[float], list[int]]]:
    """Microseconds and Python calls of entering and leaving a block, and of a step, one by one; None: plain torch.

    The first steps, which make what is made once, are left out. Every second step is timed, the others are counted.
    The optimizer is fused: what others call of torch is patched at O1 and O4, and is not what a step itself costs.
    """
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if level is not None:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    found: dict[str, tuple[list[float], list[int]]] = {part: ([], []) for part in ("enter", "leave", "step")}

    def measure(part: str, index: int, code: Callable[[], Any]) -> Any:
        times, calls = found[part]
        if index % 2:
            with counted_calls(calls):
                return code()
        started = time.perf_counter()
        result = code()
        times.append(1e6 * (time.perf_counter() - started))
        return result

    for index in range(steps):
        loss = model(torch.ones(4, 32)).float().sum()
        if level is None:
            loss.backward()
        else:
            block, scaled_loss = measure("enter", index, functools.partial(enter, loss, optimizer))
            scaled_loss.backward()
            measure("leave", index, functools.partial(block.__exit__, None, None, None))
        measure("step", index, optimizer.step)
        optimizer.zero_grad()
    amp.reset()
    return {part: (times[4:], calls[4:]) for part, (times, calls) in found.items()}


def measure_blocks(rounds: int, steps: int = 24) -> list[list[str]]:
    """What a `scale_loss` block and a step cost on the host: microseconds in a loop of training, and Python calls."""
    rows = []
    for layers in (2, 60):
        plain = run_steps(layers, steps * rounds, None)["step"]
        for level in ("O1", "O2", "O4", "O5"):
            for part, (times, calls) in run_steps(layers, steps * rounds, level).items():
                taken, called = statistics.median(times), statistics.median(calls)
                note = ""
                if part == "step":
                    of_torch = statistics.median(plain[0])
                    note = f"torch {of_torch:.0f} us"
                    taken, called = taken - of_torch, called - statistics.median(plain[1])
                title = f"{part}, {2 * layers} tensors, {level}"
                rows.append(
                    [title, f"{statistics.median(times):.0f} us", note, f"{taken:+.0f} us, {called:+.0f} calls"]
                )
    return rows


def measure_insight(name: str, mode: str, rounds: int, steps: int = 3) -> list[list[str]]:
    """CPU milliseconds of a step under O4, or under torch.autocast, plain and while insight looks on, taking turns."""

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4)

    ways: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
        "plain": contextlib.nullcontext,
        "explain": insight.recording,
        "trace": tracing,
        "trace --underflow": lambda: tracing(underflow=0.999999),
    }
    torch.manual_seed(0)
    workload = WORKLOADS[name](Size(), torch.device("cpu"))
    losses = workload.micro_batches(1)
    with prepared(mode, workload.build, make_optimizer, torch.device("cpu")) as trainer:

        def take_steps(way: str) -> float:
            with ways[way]():
                trainer.step(losses)  # without a session of the trainer's, one is opened in it
                started = time.process_time()
                for _ in range(steps):
                    trainer.step(losses)
                return 1e3 * (time.process_time() - started) / steps

        for way in ways:
            take_steps(way)  # warms up
        samples = interleave({way: functools.partial(take_steps, way) for way in ways}, rounds)
    plain = samples.pop("plain")
    return [
        [
            f"{way}, a step of {name}, {mode}",
            f"{taken.median:.1f} ms",
            f"plain {plain.median:.1f} ms",
            f"x{taken.ratio(plain):.2f}",
        ]
        for way, taken in samples.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Costs of amp_patch on the host: initialize, reset, each patched call, and insight."
    )
    parser.add_argument("--rounds", type=int, default=9, help="interleaved repeats (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=5000, help="calls timed together (default: %(default)s)")
    parser.add_argument("--level", default="O4", help="to initialize (default: %(default)s)")
    parser.add_argument(
        "--workload",
        default="gpt-64",
        help="steps that insight looks at; slow where a CPU has no 16-bit products (default: %(default)s)",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tiny tensors need no more
    rounds, level = arguments.rounds, arguments.level
    rows = [
        *measure_initialize(level, rounds),
        *measure_calls(level, rounds, arguments.calls),
    ]
    rows += measure_blocks(rounds)
    for name in filter(None, arguments.workload.split(",")):
        for mode in ("O4", "autocast-bfloat16"):
            rows += measure_insight(name, mode, rounds)
    print(environment(torch.device("cpu")), end="\n\n")
    print(format_table(("what", "median", "against", "amp_patch adds"), rows))


if __name__ == "__main__":
    main()
