"""Gradients made small enough to be kept in a file, so that the difference of two can still be told."""

import array
import base64
import math
import sys

import torch
from torch import Tensor

SIZE = 4096


def sketch(gradient: Tensor) -> tuple[float, float, str]:
    """Return the norm of a gradient, its largest magnitude, and its sketch: see SketchRecord.

    Draws no random numbers of the run's.
    """
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    dense = local.to_dense() if local.layout is not torch.strided else local
    flat = dense.detach().float().reshape(-1)
    norm, largest = float(torch.linalg.vector_norm(flat)), float(flat.abs().amax()) if flat.numel() else 0.0
    if flat.numel() > SIZE:
        generator = torch.Generator("cpu").manual_seed(0)
        signs = torch.randint(2, flat.shape, generator=generator, dtype=torch.int8, device="cpu")
        signed = flat * signs.mul_(2).sub_(1).to(flat.device)
        flat = torch.nn.functional.pad(signed, (0, -len(signed) % SIZE)).view(-1, SIZE).sum(0)
    values = array.array("f", flat.tolist())
    if sys.byteorder == "big":
        values.byteswap()
    return norm, largest, base64.b64encode(values.tobytes()).decode()


def distance(first: str, second: str) -> float:
    """Return the norm of the difference of two gradients by their sketches: exact up to 4,096 values, then within some
    percent. inf for gradients of other shapes; NaN where they hold what is not finite.
    """
    one, other = _decode(first), _decode(second)
    return math.dist(one, other) if len(one) == len(other) else math.inf


def _decode(text: str) -> "array.array[float]":
    values = array.array("f", base64.b64decode(text))
    if sys.byteorder == "big":
        values.byteswap()
    return values
