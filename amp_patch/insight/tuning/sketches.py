"""Sketches of gradients: at most `SIZE` numbers, which fit in a file, and from which the distance of two gradients can
be estimated.
"""

import base64
import math
import struct

import torch
from torch import Tensor

SIZE = 4096


def sketch(gradient: Tensor) -> tuple[float, float, str]:
    """Return the norm of a gradient, its largest magnitude, and its sketch: the last fields of a SketchRecord.

    The sketch is little-endian float32 in base64. For up to `SIZE` values, it holds the gradient itself; for a larger
    gradient, `SIZE` sums of its values with random signs. Gradients of equal size get equal signs. These random signs
    do not change the random numbers of the run. Of a DTensor, only the shard of this rank counts.
    """
    if hasattr(gradient, "to_local"):
        gradient = gradient.to_local()
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    flat = gradient.detach().float().reshape(-1)
    norm = float(torch.linalg.vector_norm(flat))
    largest = 0.0
    if flat.numel():
        largest = float(flat.abs().amax())
    if flat.numel() > SIZE:
        generator = torch.Generator("cpu").manual_seed(0)
        signs = torch.randint(2, flat.shape, generator=generator, dtype=torch.int8, device="cpu")
        signed = flat * signs.mul_(2).sub_(1).to(flat.device)
        flat = torch.nn.functional.pad(signed, (0, -len(signed) % SIZE)).view(-1, SIZE).sum(0)
    values = flat.tolist()
    data = struct.pack(f"<{len(values)}f", *values)
    return norm, largest, base64.b64encode(data).decode()


def distance(first: str, second: str) -> float:
    """Return the norm of the difference of two gradients, from their sketches.

    The norm is exact for up to `SIZE` values, and an estimate within a few percent for more. It is inf if the sketches
    have different lengths, and inf or NaN if a gradient is not finite.
    """
    values, subtracted = _decode(first), _decode(second)
    if len(values) != len(subtracted):
        return math.inf
    return math.dist(values, subtracted)


def _decode(text: str) -> tuple[float, ...]:
    data = base64.b64decode(text)
    return struct.unpack(f"<{len(data) // 4}f", data)
