"""What amp_patch costs where it saves nothing: import, initialize, reset, and each patched call.

    python benchmarks/overhead.py --rounds 11 --json overhead.json

Everything runs on the CPU: these are costs of the host. Patched and bare calls are the same Python code on tiny
tensors; between the two the session is opened or closed, never a function swapped by hand. The bare call gets the
tensors that the patched one ends up with, so that both run the same kernel.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import Samples, environment, format_table, interleave, seconds_per_call, write_json
from torch import Tensor, nn

import amp_patch as amp

LAYERS = 80  # a weight and a bias each: 160 tensors
IMPORT_CODE = """
import time
started = time.perf_counter()
import torch
torch_done = time.perf_counter()
{extra}
done = time.perf_counter()
print(torch_done - started, done - torch_done)
"""


@dataclass(frozen=True, slots=True)
class Call:
    """One operation: the rule it is to show, where its name lives, the bare inputs, those that the patch deals with,
    and the code that both run.
    """

    label: str
    owner: object
    name: str
    code: Callable[..., Tensor]
    bare: tuple[Tensor, ...]
    patched: tuple[Tensor, ...]


def measure_import(rounds: int) -> tuple[list[list[str]], dict[str, object]]:
    """Milliseconds of `import torch`, and of `import amp_patch` after it, in fresh processes that take turns with plain
    ones.
    """
    after: list[float] = []

    def fresh_process(extra: str) -> float:
        root = Path(__file__).resolve().parent.parent
        done = subprocess.run(
            [sys.executable, "-c", IMPORT_CODE.format(extra=extra)],
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        )
        torch_seconds, extra_seconds = map(float, done.stdout.split())
        if extra:
            after.append(1e3 * extra_seconds)
        return 1e3 * (torch_seconds + extra_seconds)

    total = interleave({"torch": lambda: fresh_process(""), "both": lambda: fresh_process("import amp_patch")}, rounds)
    alone = statistics.median(after)
    rows = [
        ["import torch", f"{total['torch'].median:.1f} ms", f"+-{total['torch'].spread:.0%}", ""],
        [
            "import amp_patch, torch already there",
            f"{alone:.1f} ms",
            "",
            f"{alone / total['torch'].median:.1%} of torch",
        ],
    ]
    return rows, {
        "torch_ms": total["torch"].values,
        "torch_and_amp_patch_ms": total["both"].values,
        "amp_patch_ms": after,
    }


def measure_initialize(levels: list[str], rounds: int) -> tuple[list[list[str]], dict[str, object]]:
    """Milliseconds of `initialize` for 160 tensors with an optimizer built before it, and of `reset`; the first of the
    process apart.
    """
    reset_ms: dict[str, list[float]] = {level: [] for level in levels}

    def open_and_close(level: str) -> float:
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(LAYERS)))
        optimizer = torch.optim.AdamW(model.parameters())
        started = time.perf_counter()
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        opened = time.perf_counter()
        amp.reset()
        reset_ms[level].append(1e3 * (time.perf_counter() - opened))
        return 1e3 * (opened - started)

    first = open_and_close(levels[0])
    reset_ms[levels[0]].clear()
    rows = [[f"initialize {levels[0]}, first of the process", f"{first:.1f} ms", "", ""]]
    opened = interleave({level: lambda level=level: open_and_close(level) for level in levels}, rounds)
    for level in levels:
        closed = Samples(tuple(reset_ms[level]))
        rows.append(
            [
                f"initialize {level}, {2 * LAYERS} tensors",
                f"{opened[level].median:.1f} ms",
                f"+-{opened[level].spread:.0%}",
                "",
            ]
        )
        rows.append([f"reset after {level}", f"{closed.median:.1f} ms", f"+-{closed.spread:.0%}", ""])
    report = {level: {"initialize_ms": opened[level].values, "reset_ms": reset_ms[level]} for level in levels}
    return rows, {"first_initialize_ms": first, **report}


def make_calls(model: nn.Linear, low: torch.dtype) -> list[Call]:
    """The calls to time, on 8x8 tensors.

    The float32 weights belong to `model`, so the patch finds their low copies in its cache.
    """
    rows, weight, bias = torch.randn(8, 8), model.weight, model.bias
    low_rows, low_weight, low_bias = (
        rows.to(low),
        weight.detach().to(low).requires_grad_(),
        bias.detach().to(low).requires_grad_(),
    )
    heads = low_rows[None]
    return [
        Call(
            "whitelist: F.linear, cached weight",
            F,
            "linear",
            lambda *a: F.linear(*a),
            (low_rows, low_weight),
            (low_rows, weight),
        ),
        Call(
            "whitelist: F.linear, with bias",
            F,
            "linear",
            lambda *a: F.linear(*a),
            (low_rows, low_weight, low_bias),
            (low_rows, weight, bias),
        ),
        Call(
            "whitelist: F.linear, float32 input: one cast",
            F,
            "linear",
            lambda *a: F.linear(*a),
            (low_rows, low_weight, low_bias),
            (rows, weight, bias),
        ),
        Call(
            "whitelist: x @ w, low",
            Tensor,
            "__matmul__",
            lambda x, w: x @ w,
            (low_rows, low_weight),
            (low_rows, low_weight),
        ),
        Call(
            "whitelist: x @ w, cached weight",
            Tensor,
            "__matmul__",
            lambda x, w: x @ w,
            (low_rows, low_weight),
            (low_rows, weight),
        ),
        Call(
            "whitelist: x @ w, float32 x: one cast",
            Tensor,
            "__matmul__",
            lambda x, w: x @ w,
            (low_rows, low_weight),
            (rows, weight),
        ),
        Call(
            "whitelist: attention, low",
            F,
            "scaled_dot_product_attention",
            lambda x: F.scaled_dot_product_attention(x, x, x),
            (heads,),
            (heads,),
        ),
        Call(
            "whitelist: torch.einsum, low",
            torch,
            "einsum",
            lambda x: torch.einsum("ij,jk->ik", x, x),
            (low_rows,),
            (low_rows,),
        ),
        Call("blacklist: F.softmax, float32", F, "softmax", lambda x: F.softmax(x, dim=-1), (rows,), (rows,)),
        Call(
            "blacklist: F.layer_norm, float32",
            F,
            "layer_norm",
            lambda x, b: F.layer_norm(x, (8,), b, b),
            (rows, bias),
            (rows, bias),
        ),
        Call(
            "blacklist: torch.logsumexp, float32", torch, "logsumexp", lambda x: torch.logsumexp(x, 0), (rows,), (rows,)
        ),
        Call("blacklist: torch.exp, low: one cast", torch, "exp", lambda x: torch.exp(x), (rows,), (low_rows,)),
        Call("promote: torch.atan2, alike", torch, "atan2", lambda x: torch.atan2(x, x), (rows,), (rows,)),
        Call(
            "promote: torch.atan2, mixed: one cast",
            torch,
            "atan2",
            lambda x, y: torch.atan2(x, y),
            (rows, rows),
            (rows, low_rows),
        ),
        Call("sequence promote: torch.cat, alike", torch, "cat", lambda x: torch.cat([x, x]), (rows,), (rows,)),
        Call(
            "match self: x.addcmul_(x, x), alike",
            Tensor,
            "addcmul_",
            lambda x: x.addcmul_(x, x, value=0.0),
            (rows.clone(),),
            (rows.clone(),),
        ),
        Call("no rule: torch.relu", torch, "relu", lambda x: torch.relu(x), (rows,), (rows,)),
    ]


def make_apex_calls(model: nn.Linear, low: torch.dtype) -> list[Call]:
    """The same for the rules that only the list `apex` has."""
    rows = torch.rand(8, 8)
    return [
        Call(
            "banned: F.binary_cross_entropy",
            F,
            "binary_cross_entropy",
            lambda x: F.binary_cross_entropy(x, x),
            (rows,),
            (rows,),
        ),
        Call("in-place error: x.pow_(1)", Tensor, "pow_", lambda x: x.pow_(1), (rows.clone(),), (rows.clone(),)),
    ]


def measure_calls(
    level: str,
    rounds: int,
    calls: int,
    make: Callable[[nn.Linear, torch.dtype], list[Call]] = make_calls,
    lists: str | None = None,
) -> tuple[list[list[str]], dict[str, object]]:
    """Microseconds of each call bare and under `level`; every round opens and closes a session of its own."""
    bare: dict[str, list[float]] = {}
    patched: dict[str, list[float]] = {}
    marks: dict[str, bool] = {}
    for _ in range(rounds):
        model = nn.Linear(8, 8)
        low = torch.bfloat16
        timed = make(model, low)
        for call in timed:
            bare.setdefault(call.label, []).append(
                1e6 * seconds_per_call(lambda call=call: call.code(*call.bare), calls)
            )
        amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, lists=lists, verbosity=0)
        if amp.stats().low_dtype != low:
            raise SystemExit(f"{level} is in {amp.stats().low_dtype} here, but the calls are timed in {low}")
        for call in timed:
            marks[call.label] = amp.is_patched(call.owner, call.name)
            call.code(*call.patched)
            patched.setdefault(call.label, []).append(
                1e6 * seconds_per_call(lambda call=call: call.code(*call.patched), calls)
            )
        amp.reset()
    rows, report = [], {}
    for label, values in bare.items():
        before, after = Samples(tuple(values)), Samples(tuple(patched[label]))
        note = f"{after.difference(before):+.2f} us, x{after.ratio(before):.2f}" + (
            "" if marks[label] else ", not patched"
        )
        rows.append([f"{level} {label}", f"{after.median:.2f} us", f"bare {before.median:.2f} us", note])
        report[label] = {"is_patched": marks[label], "bare_us": before.values, "patched_us": after.values}
    return rows, report


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Costs of amp_patch on the host: import, initialize, reset, and each patched call."
    )
    parser.add_argument("--rounds", type=int, default=9, help="interleaved repeats (default: %(default)s)")
    parser.add_argument(
        "--calls", type=int, default=5000, help="calls timed together in one repeat (default: %(default)s)"
    )
    parser.add_argument(
        "--levels", default="O4", help="levels to initialize, with a comma between (default: %(default)s)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="torch threads; tiny tensors need no more than one (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="write every sample into this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    levels = arguments.levels.split(",")

    import_rows, imports = measure_import(arguments.rounds)
    initialize_rows, initializes = measure_initialize(levels, arguments.rounds)
    call_rows, calls = [], {}
    for level in levels:
        rows, calls[level] = measure_calls(level, arguments.rounds, arguments.calls)
        call_rows += rows
    rows, calls["apex"] = measure_calls("O4", arguments.rounds, arguments.calls, make_apex_calls, "apex")
    call_rows += [[f"apex list, {row[0]}", *row[1:]] for row in rows]
    machine = environment(torch.device("cpu"))
    print(", ".join(f"{key} {value}" for key, value in machine.items()), end="\n\n")
    print(format_table(("what", "median", "against", "amp_patch adds"), [*import_rows, *initialize_rows, *call_rows]))
    write_json(arguments.json, {"environment": machine, "imports": imports, "initialize": initializes, "calls": calls})


if __name__ == "__main__":
    main()
