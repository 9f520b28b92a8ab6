"""Questions that code written for torch 0.3 had to ask, as Apex answered them."""

from typing import Any

import torch
from torch import Tensor


def is_tensor_like(x: object) -> bool:
    """Tell whether `x` is a tensor."""
    return isinstance(x, Tensor)


def is_floating_point(x: Tensor) -> bool:
    """Tell whether a tensor is floating."""
    return torch.is_floating_point(x)


def tensor_is_float_tensor() -> bool:
    """Tell whether torch.Tensor is the class of float32 tensors on the CPU: it was before 0.4."""
    return False


def tensor_is_variable() -> bool:
    """Tell whether tensors carry gradients themselves: since 0.4."""
    return True


def variable_is_tensor() -> bool:
    """The same question the other way round."""
    return True


def scalar_python_val(x: Any) -> Any:
    """Return the number in a tensor of one element. Waits for the device."""
    return x.item()


def filter_attrs(module: Any, attrs: list[str]) -> list[str]:
    """Return those names that `module` has."""
    return [name for name in attrs if hasattr(module, name)]
