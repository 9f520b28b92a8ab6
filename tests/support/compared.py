"""A comparison put together by hand: what it says is known, and nothing is trained for it."""

import math

from amp_patch.insight.comparing import Comparison
from amp_patch.insight.recordings import Recording
from amp_patch.insight.records import (
    ComparedRecord,
    ComparisonRecord,
    CurveRecord,
    GradientRecord,
    LayerRecord,
    OpRecord,
    RunRecord,
)

HOSTILE = "</script><b onclick=\"alert('x')\">&amp;"


def make_comparison(*, layers=("embedding", "head"), steps=30, extra=()):
    """O0, O1 and O4 from two seeds: O1 skips steps 0 and 1 and is off by 1e-3, O4 by 1e-2, the noise is 1e-6. Of the
    gradients a quarter is 2**-40, half 1.5 * 2**-20 and a quarter 1.
    """
    runs = [
        ComparedRecord("O0", "O0", peak=4_000_000, loss_scale=1.0),
        ComparedRecord("O1", "O1", "f16", ("float16",), "0123456789abcdef", peak=5_000_000, loss_scale=1024.0),
        ComparedRecord("O4", "O4", "bf16", ("my<list>.yaml",), "fedcba9876543210", peak=10_000_000, loss_scale=1.0),
        ComparedRecord("O5", failed=f"the script ended with exit code 1 {HOSTILE}"),
    ]
    command = f"amp-patch compare train.py --html r.html --seeds 2 --steps 30 {HOSTILE}"
    records = [ComparisonRecord("O0", steps, (0, 1), "a CPU", command), *runs]
    plain = [2.0 / (1 + step) for step in range(steps)]
    for seed in (0, 1):
        for name, off, ms, skipped in (("O0", 0.0, 10.0, ()), ("O1", 1e-3, 5.0, (0, 1)), ("O4", 1e-2, 20.0, ())):
            losses = tuple(loss + off * (1 + seed) for loss in plain)
            records.append(CurveRecord(name, seed, losses, (1024.0,) * steps, skipped, ms))
        records.append(CurveRecord("O0", seed, tuple(loss + 1e-6 for loss in plain), (1.0,) * steps, (), 9.0, True))
    counts = [0] * 4 * 41
    counts[0], counts[4 * 20 + 1], counts[4 * 40] = 25, 50, 25
    records.append(GradientRecord("O0", -40, tuple(counts), 7, 0))
    for number, layer in enumerate(layers):
        records.append(LayerRecord("O1", layer, 0.0, 1e-3 * (number + 1), 2e-3))
        records.append(LayerRecord("O4", layer, None, math.inf if number == 0 else 1e-2, None))
    return Comparison(Recording(RunRecord("2.13.0", "cpu", "O0", "", (), "", 0), [*records, *extra]))


def make_op(module, op="F.linear", rule="whitelist"):
    return OpRecord(
        0, "forward", module, op, rule, "float16.yaml:3", "", ("f32",), ("f16",), ("f16",), "train.py:9", 3, 2
    )
