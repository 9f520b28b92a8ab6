"""`apex.contrib.clip_grad`: torch's `clip_grad_norm_`."""

from collections.abc import Iterable

import torch
from torch import Tensor


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """See torch.nn.utils.clip_grad_norm_."""
    # looked up at each call, because `amp.initialize` patches it to clip the gradients of float32 masters
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
