"""What float32 buys the blacklisted ops: the error of each 16-bit kernel against that of float32, rounded.

    python tools/list_errors.py --json list_errors.json
    python tools/list_errors.py --dtypes bfloat16 --ops softmax,layer_norm --sizes 64,4096

An error is counted in roundings: 1 is the largest error that rounding an exact result to the 16-bit dtype makes. The
exact result is that of float64 on the same 16-bit inputs. `low` is the kernel of the op on 16-bit tensors; `float32` is
what a blacklisted op does, its result rounded to the same dtype so that the two compare. The worst case is shown. For
the result that is the worst element over all sizes and scales, among those that float32 itself gets right. For the
gradient of the first input it is the norm of the error over the norm of the gradient, for inputs of size 1 and less:
larger ones saturate, and where gradients cancel to next to nothing, relative errors mean nothing either.

An op is *safe in low* where its 16-bit kernel is never more than 2 roundings off, gives nothing out of range that
float32 has in range, and has a gradient within 2 roundings, or twice what float32 comes to. lists/fast.yaml holds ops
that are safe in both dtypes.
"""

import argparse
import datetime
import json
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from list_error_cases import LEFT_OUT, MEASURED
from torch import Tensor

from amp_patch.config.op_lists import load_oplists
from amp_patch.tables import format_table

SIZES = (16, 256, 4096, 65536)
SCALES = (1e-6, 0.01, 1.0, 30.0, 1000.0)
SMALL = 2.0**-10  # an element smaller than this part of the largest counts as that large: beside it its error is lost
MOST = 2.0  # roundings, for an op to be safe
RIGHT = 1.5  # roundings, for float32 to have an element right: 1, and the rest for its own error


@dataclass(frozen=True, slots=True)
class Errors:
    """The worst of one op in one dtype. Errors in roundings; nan where there is no gradient."""

    op: str
    dtype: str
    low: float
    float32: float
    low_gradient: float
    float32_gradient: float
    out_of_range: int  # results, over all cases, that float32 holds and the low dtype does not
    problem: str = ""

    @property
    def is_safe(self) -> bool:
        """Whether the op is as good in low, by the criterion above."""
        gradient_fits = math.isnan(self.low_gradient) or self.low_gradient <= MOST * max(1.0, self.float32_gradient)
        return self.low <= MOST and gradient_fits and not self.out_of_range and not self.problem


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(
    op: str, dtype: torch.dtype, sizes: Sequence[int] = SIZES, scales: Sequence[float] = SCALES, device: str = "cpu"
) -> Errors:
    """Return the worst errors of one op in one dtype; `problem` is the complaint of an op without a 16-bit kernel."""
    worst = [0.0, 0.0, math.nan, math.nan]
    out_of_range = 0
    for size in sizes:
        for scale in scales:
            generator = torch.Generator().manual_seed(size)
            inputs = [value.to(dtype).to(device) for value in MEASURED[op].make(size, scale, generator)]
            try:
                errors, count = _compare(MEASURED[op].call, inputs, dtype)
            except (RuntimeError, NotImplementedError) as problem:
                return Errors(op, _name(dtype), *[math.nan] * 4, 0, str(problem).splitlines()[0])
            out_of_range += count
            if scale > 1:
                errors[2:] = [math.nan, math.nan]
            worst = [_larger(*pair) for pair in zip(worst, errors, strict=True)]
    return Errors(op, _name(dtype), *worst, out_of_range)


def _larger(worst: float, value: float) -> float:
    return value if math.isnan(worst) else worst if math.isnan(value) else max(worst, value)


def _compare(call: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype) -> tuple[list[float], int]:
    """Return the four errors of one case, and how many results leave the range."""
    exact, exact_gradient = _run(call, inputs, torch.float64)
    low, low_gradient = _run(call, inputs, dtype)
    wide, wide_gradient = _run(call, inputs, torch.float32)
    leaves = wide.isfinite() & ~(low.isfinite() & wide.to(dtype).isfinite())
    of_float32 = _roundings(wide.to(dtype), exact, dtype)[~leaves & exact.isfinite()]
    of_low = _roundings(low, exact, dtype)[~leaves & exact.isfinite()][of_float32 <= RIGHT]
    errors = [float(of_low.max()) if of_low.numel() else 0.0, float(of_float32.max()) if of_float32.numel() else 0.0]
    return errors + _gradient_errors(low_gradient, wide_gradient, exact_gradient, dtype), int(leaves.sum())


def _run(call: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the result of a call in `dtype` and the gradient of its first input, None where the op has none."""
    first, *others = [value.to(dtype) for value in inputs]
    result = call(first.requires_grad_(), *others)
    upstream = (torch.arange(result.numel(), device=result.device) % 5 - 1.5).reshape(result.shape).to(dtype)
    try:
        (gradient,) = torch.autograd.grad(result, first, upstream)
    except RuntimeError:
        gradient = None
    return result.detach(), gradient


def _roundings(result: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of each element, in units of the largest that rounding it to `dtype` may make."""
    info = torch.finfo(dtype)
    sizes = exact.abs()
    largest = float(sizes[sizes.isfinite()].max()) if sizes.isfinite().any() else 0.0
    error = (result.double() - exact).abs() / (
        sizes.clamp(min=max(info.tiny, SMALL * min(largest, info.max))) * (info.eps / 2)
    )
    return error.nan_to_num(nan=math.inf, posinf=math.inf)


def _gradient_errors(low: Tensor | None, wide: Tensor | None, exact: Tensor | None, dtype: torch.dtype) -> list[float]:
    """Return the errors by norm of both gradients, nan where there is none.

    That of float32 is rounded as the cast of a 16-bit input rounds it.
    """
    if low is None or wide is None or exact is None or not (exact.isfinite().all() and wide.to(dtype).isfinite().all()):
        return [math.nan, math.nan]
    info = torch.finfo(dtype)
    unit = max(float(exact.norm()), info.tiny * math.sqrt(exact.numel())) * (info.eps / 2)
    errors = [float((gradient.double() - exact).norm()) / unit for gradient in (low, wide.to(dtype))]
    return [error if math.isfinite(error) else math.inf for error in errors]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain(value: object) -> object:
    """JSON has no nan and no inf."""
    return value if not isinstance(value, float) or math.isfinite(value) else None if math.isnan(value) else "inf"


def _name_device(device: torch.device) -> str:
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if get_name is None else get_name(device)


def _describe_machine(device: torch.device) -> dict[str, object]:
    """What a reader needs to place the figures."""
    is_cpu = device.type == "cpu"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.backends.cpu.get_cpu_capability() if is_cpu else _name_device(device),
        "date": datetime.date.today().isoformat(),
    }


def unmeasured() -> list[str]:
    """Return the ops that are neither measured nor left out, of those on float16's blacklist that have kernels."""
    entries = {spelling.entry for spelling in load_oplists("float16").spellings if spelling.entry.rule == "blacklist"}
    return sorted({entry.op for entry in entries if entry.why != "kernel"} - {*MEASURED, *LEFT_OUT})


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The errors of 16-bit kernels of blacklisted ops against those of float32."
    )
    parser.add_argument("--ops", default=",".join(MEASURED), help="ops to measure, with a comma between (default: all)")
    parser.add_argument(
        "--dtypes", default="bfloat16,float16", help="16-bit dtypes, with a comma between (default: %(default)s)"
    )
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="elements to a row (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where to run the kernels (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write every figure into this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [int(size) for size in arguments.sizes.split(",")]
    cases = [(op, getattr(torch, dtype)) for op in arguments.ops.split(",") for dtype in arguments.dtypes.split(",")]
    found = [measure(*case, sizes, SCALES, arguments.device) for case in cases]
    machine = _describe_machine(torch.device(arguments.device))
    print(", ".join(f"{key} {value}" for key, value in machine.items()), end="\n\n")
    rows = [
        [
            *(one.op, one.dtype),
            *(f"{value:.2g}" for value in (one.low, one.float32, one.low_gradient, one.float32_gradient)),
            *(str(one.out_of_range or ""), "safe in low" if one.is_safe else one.problem[:60]),
        ]
        for one in found
    ]
    print(format_table(("op", "dtype", "low", "float32", "gradient low", "float32", "out of range", ""), rows, left=2))
    for op, reason in LEFT_OUT.items():
        print(f"not run: {op}, since {reason}")
    errors = [{name: _plain(value) for name, value in {**asdict(one), "is_safe": one.is_safe}.items()} for one in found]
    if arguments.json is not None:
        report = {"environment": machine, "sizes": sizes, "scales": SCALES, "errors": errors}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
