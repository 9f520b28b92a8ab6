"""The blacklisted ops whose errors `list_errors` measures: how each is called, and on what inputs."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 4

Make = Callable[[int, float, torch.Generator], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Measured:
    """One op: the call, and its float64 inputs for a size and a scale."""

    call: Callable[..., Tensor]
    make: Make


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
    ["grid_sample", "grid_sampler", "torch.grid_sampler_2d", "torch.grid_sampler_3d"],
    "the 16-bit CPU kernel of torch 2.13 reads memory outside images above some 180x180",
) | dict.fromkeys(
    ["affine_grid", "affine_grid_generator", "cov", "corrcoef"],
    "made of a product, whose error depends on the size of its operands",
)
MEASURED = dict([*_elementwise(), *_reductions(), *_norms(), *_losses(), *_resampling()])
