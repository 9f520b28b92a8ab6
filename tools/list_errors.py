"""What float32 buys the blacklisted ops: the error of each op's 16-bit kernel, against that of a cast to float32 and a
rounding of the result.

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
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import environment, format_table, write_json
from torch import Tensor

from amp_patch.config.op_lists import load_oplists

SIZES = (16, 256, 4096, 65536)
SCALES = (1e-6, 0.01, 1.0, 30.0, 1000.0)
ROWS = 4
SMALL = (
    2.0**-10
)  # an element smaller than this part of the largest one counts as that large: its error is lost beside the others
MOST = 2.0  # roundings, for an op to be safe
RIGHT = 1.5  # roundings, for float32 to have an element right: 1, and the rest for its own error

Make = Callable[[int, float, torch.Generator], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Measured:
    """One op: the call, and its float64 inputs for a size and a scale."""

    call: Callable[..., Tensor]
    make: Make


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


# ---- inputs ----------------------------------------------------------------------------------------------------------


def reals(size: int, scale: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randn(ROWS, size, dtype=torch.float64, generator=generator) * scale,)


def positives(size: int, scale: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    return ((torch.rand(ROWS, size, dtype=torch.float64, generator=generator) + 0.01) * scale,)


def within_one(size: int, scale: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Between -0.98 and 0.98, or closer to 0 for a small scale."""
    return ((torch.rand(ROWS, size, dtype=torch.float64, generator=generator) * 2 - 1) * min(scale, 0.98),)


def probabilities(size: int, scale: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    return tuple(
        torch.sigmoid(torch.randn(ROWS, size, dtype=torch.float64, generator=generator) * min(scale, 3))
        for _ in range(2)
    )


def with_targets(size: int, scale: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Logits, and probabilities as targets."""
    return reals(size, scale, generator)[0], torch.sigmoid(reals(size, 1.0, generator)[0])


def with_variances(size: int, scale: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Means, targets, and variances of the size of the squared distances."""
    first, second, third = several(3)(size, scale, generator)
    return first, second, third**2 + 0.01


def around_one(size: int, scale: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    """For products: factors whose product stays near 1, and for a large scale one that grows."""
    spread = min(scale, 1) / math.sqrt(size)
    return (
        torch.exp(torch.randn(ROWS, size, dtype=torch.float64, generator=generator) * spread + (scale > 1) * 20 / size),
    )


def several(count: int, make: Make = reals) -> Make:
    return lambda size, scale, generator: tuple(make(size, scale, generator)[0] for _ in range(count))


def logits(size: int, scale: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    """`size` samples of 16 classes."""
    return (torch.randn(size, 16, dtype=torch.float64, generator=generator) * scale,)


def squares(size: int, scale: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    side = max(2, int(math.sqrt(size)))
    return (torch.randn(side, side, dtype=torch.float64, generator=generator) * scale,)


def affine(size: int, scale: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Rows with a mean of their own, a weight near 1 and a bias near 0: what a normalization layer sees."""
    (value,) = reals(size, scale, generator)
    weight = 1 + torch.randn(size, dtype=torch.float64, generator=generator) * 0.1
    return value + scale, weight, torch.randn(size, dtype=torch.float64, generator=generator) * 0.1


def images(size: int, scale: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    side = max(4, int(math.sqrt(size)))
    return (torch.randn(1, 4, side, side, dtype=torch.float64, generator=generator) * scale,)


# ---- ops -------------------------------------------------------------------------------------------------------------


def _classes(value: Tensor) -> Tensor:
    return torch.arange(value.shape[0], device=value.device) % value.shape[1]


def _reduced(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Both the mean and the sum: which a loss takes is up to the call."""
    return lambda *inputs: torch.stack([loss(*inputs, reduction="mean"), loss(*inputs, reduction="sum")])


def _signs(value: Tensor) -> Tensor:
    return (torch.arange(value.numel(), device=value.device) % 2 * 2 - 1).reshape(value.shape).to(value.dtype)


def _elementwise() -> Iterator[tuple[str, Measured]]:
    for name in ("exp", "expm1", "sinh", "cosh", "tan", "square"):
        yield name, Measured(getattr(torch, name), reals)
    for name in ("log", "log1p", "log2", "log10", "reciprocal", "rsqrt"):
        yield name, Measured(getattr(torch, name), positives)
    for name in ("acos", "asin", "atanh", "erfinv"):
        yield name, Measured(getattr(torch, name), within_one)
    yield "softplus", Measured(F.softplus, reals)
    yield "pow", Measured(lambda x: torch.pow(x, 1.7), positives)
    yield "polygamma", Measured(lambda x: torch.polygamma(1, x), positives)


def _reductions() -> Iterator[tuple[str, Measured]]:
    for name in ("softmax", "log_softmax", "logsumexp", "logcumsumexp", "cumsum"):
        yield name, Measured(lambda x, name=name: getattr(torch, name)(x, 1), reals)
    yield "softmin", Measured(lambda x: F.softmin(x, 1), reals)
    for name in ("sum", "nansum"):
        yield name, Measured(lambda x, name=name: getattr(torch, name)(x, 1), positives)
    yield "prod", Measured(lambda x: torch.prod(x, 1), around_one)
    yield "cumprod", Measured(lambda x: torch.cumprod(x, 1), around_one)
    yield "trace", Measured(torch.trace, lambda *of: (squares(*of)[0].abs(),))
    for name in ("std", "var"):
        yield name, Measured(lambda x, name=name: getattr(torch, name)(x, 1), reals)
        yield f"{name}_mean", Measured(lambda x, name=name: getattr(torch, f"{name}_mean")(x, 1)[0], reals)


def _norms() -> Iterator[tuple[str, Measured]]:
    yield "norm", Measured(lambda x: torch.norm(x, dim=1), reals)
    yield "vector_norm", Measured(lambda x: torch.linalg.vector_norm(x, dim=1), reals)
    yield "matrix_norm", Measured(torch.linalg.matrix_norm, squares)
    yield "frobenius_norm", Measured(lambda x: torch.frobenius_norm(x, [1]), reals)
    yield "renorm", Measured(lambda x: torch.renorm(x, 2, 0, 1.0), reals)
    yield "normalize", Measured(F.normalize, reals)
    for name in ("cosine_similarity", "pairwise_distance"):
        yield name, Measured(getattr(F, name), several(2))
    yield "dist", Measured(torch.dist, several(2))
    yield "cdist", Measured(torch.cdist, several(2))
    yield "pdist", Measured(F.pdist, reals)
    yield "layer_norm", Measured(lambda x, w, b: F.layer_norm(x, x.shape[1:], w, b), affine)
    yield "rms_norm", Measured(lambda x, w, b: F.rms_norm(x, x.shape[1:], w, 1e-5), affine)
    yield "group_norm", Measured(lambda x: F.group_norm(x, 2), images)
    yield "local_response_norm", Measured(lambda x: F.local_response_norm(x, 3), images)
    yield (
        "matrix_exp",
        Measured(
            torch.matrix_exp, lambda size, scale, generator: squares(min(size, 256), min(scale, 1) / 8, generator)
        ),
    )
    yield "vander", Measured(lambda x: torch.vander(x[0, :4]), reals)


def _losses() -> Iterator[tuple[str, Measured]]:
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        yield name, Measured(_reduced(getattr(F, name)), several(2))
    yield "cross_entropy", Measured(_reduced(lambda x, **how: F.cross_entropy(x, _classes(x), **how)), logits)
    yield "nll_loss", Measured(_reduced(lambda x, **how: F.nll_loss(x, _classes(x), **how)), logits)
    yield "kl_div", Measured(_reduced(lambda x, y, **how: F.kl_div(-x.abs(), y, **how)), probabilities)
    yield "binary_cross_entropy", Measured(_reduced(F.binary_cross_entropy), probabilities)
    yield "binary_cross_entropy_with_logits", Measured(_reduced(F.binary_cross_entropy_with_logits), with_targets)
    yield "gaussian_nll_loss", Measured(_reduced(F.gaussian_nll_loss), with_variances)
    yield "poisson_nll_loss", Measured(_reduced(F.poisson_nll_loss), several(2))
    yield "soft_margin_loss", Measured(_reduced(lambda x, **how: F.soft_margin_loss(x, _signs(x), **how)), reals)
    yield (
        "hinge_embedding_loss",
        Measured(_reduced(lambda x, **how: F.hinge_embedding_loss(x, _signs(x), **how)), reals),
    )
    yield (
        "multilabel_soft_margin_loss",
        Measured(_reduced(lambda x, **how: F.multilabel_soft_margin_loss(x, (_signs(x) + 1) / 2, **how)), reals),
    )
    yield (
        "margin_ranking_loss",
        Measured(_reduced(lambda x, y, **how: F.margin_ranking_loss(x, y, _signs(x), 0.1, **how)), several(2)),
    )
    yield (
        "cosine_embedding_loss",
        Measured(_reduced(lambda x, y, **how: F.cosine_embedding_loss(x, y, _signs(x[:, 0]), **how)), several(2)),
    )
    yield "triplet_margin_loss", Measured(_reduced(F.triplet_margin_loss), several(3))


def _resampling() -> Iterator[tuple[str, Measured]]:
    yield "interpolate", Measured(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), images)


# Why an op is not run.
LEFT_OUT = dict.fromkeys(
    ["grid_sample", "grid_sampler"],
    "the 16-bit CPU kernel of torch 2.13 reads memory outside images above some 180x180",
)
MEASURED = dict([*_elementwise(), *_reductions(), *_norms(), *_losses(), *_resampling()])


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(
    op: str, dtype: torch.dtype, sizes: Sequence[int] = SIZES, scales: Sequence[float] = SCALES, device: str = "cpu"
) -> Errors:
    """Return the worst errors of one op in one dtype; an op without a 16-bit kernel has the kernel's complaint as
    `problem`.
    """
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
    """Return the errors by norm of both gradients, that of float32 rounded as the cast of a 16-bit input rounds it; nan
    where it has no value.
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


def unmeasured() -> list[str]:
    """Return the ops that float16.yaml blacklists for another reason than a missing kernel, and that are neither
    measured nor left out.
    """
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
    machine = {**environment(torch.device(arguments.device)), "date": datetime.date.today().isoformat()}
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
    write_json(arguments.json, {"environment": machine, "sizes": sizes, "scales": SCALES, "errors": errors})


if __name__ == "__main__":
    main()
