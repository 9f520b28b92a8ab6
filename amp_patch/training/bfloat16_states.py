"""`Bfloat16States`: keeps the state of an optimizer as bfloat16 between steps, and as float32 inside of them."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..multi_tensor import copy_, group
from ..torch_private import without_overrides
from .stochastic_rounding import StochasticRounding

_AVERAGES = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "acc_delta", "momentum_buffer"),
        *("sum", "variance"),
    }
)
"""Running averages and sums. A step may change them by less than half the spacing of bfloat16 (2**-9 of the value): with
beta2 = 0.999, an average of squares shrinks by 2**-10 of it. Rounded to nearest, such an average would stand still, so
they are rounded stochastically.
"""

_OTHERS = frozenset({"max_exp_avg_sq", "prev", "step_size"})
"""States that a step replaces, or multiplies by a factor that bfloat16 can tell from 1. They are rounded to nearest."""

_NAMES = _AVERAGES | _OTHERS

# Not in either: counters and products of decays, which are single numbers; rows and columns of Adafactor, which are
# small; and the averaged weights of ASGD, of which the script wants all bits.



class Bfloat16States:
    """The bfloat16 states of one optimizer.

    A state is kept as bfloat16 if its name is in one of the tables above, and it is a dense float32 tensor of the shape
    of its parameter. Tensors without dimensions, and tensors of other classes, such as DTensor, stay float32.

    Args:
        rounding: shared by all optimizers of the session.
    """

    def __init__(self, rounding: StochasticRounding) -> None:
        self.rounding = rounding
        # bfloat16 tensors whose values are in float32 at present, by the parameter's id and the name of the state
        self._kept: dict[tuple[int, str], Tensor] = {}

    def open(self, optimizer: Optimizer, parameters: Iterable[Any]) -> None:
        """Replace the bfloat16 states of parameters by their float32 values."""
        opened: list[tuple[dict[str, Any], str]] = []
        copies: list[Tensor] = []
        sources: list[Tensor] = []
        for parameter in parameters:
            state = optimizer.state.get(parameter, {})
            for name in _NAMES.intersection(state):
                value = state[name]
                if type(value) is Tensor and value.dtype is torch.bfloat16:
                    self._kept[id(parameter), name] = value
                    opened.append((state, name))
                    sources.append(value)
        with torch.inference_mode(False):
            copies = [torch.empty_like(source, dtype=torch.float32) for source in sources]
        copy_(group(copies, sources))
        for (state, name), value in zip(opened, copies, strict=True):
            state[name] = value

    def open_all(self, optimizer: Optimizer) -> None:
        """Replace all bfloat16 states by their float32 values, which stay."""
        self.open(optimizer, list(optimizer.state))
        self._kept.clear()

    def close(self, optimizer: Optimizer, parameters: Iterable[Any]) -> None:
        """Round the float32 states of parameters to bfloat16."""
        rows: list[_Row] = []
        with without_overrides(), torch.inference_mode(False):
            for parameter in parameters:
                state = optimizer.state.get(parameter, {})
                for name in sorted(_NAMES.intersection(state)):  # the order decides which random numbers each gets
                    value = state[name]
                    if not _can_round(value, parameter):
                        continue
                    kept = self._kept.pop((id(parameter), name), None)
                    if kept is None or kept.shape != value.shape or kept.stride() != value.stride():
                        kept = torch.empty_like(value, dtype=torch.bfloat16)
                    rows.append(_Row(state, name, value, kept))
        together: dict[tuple[torch.device, bool], list[_Row]] = {}
        for row in rows:
            together.setdefault((row.value.device, row.name in _AVERAGES), []).append(row)
        for (_, is_random), chosen in together.items():
            values = [row.value for row in chosen]
            self.rounding.round_(values, [row.kept for row in chosen], is_random=is_random)
        for row in rows:
            row.state[row.name] = row.kept


class _Row(NamedTuple):
    """A state that is rounded.

    Attributes:
        state: all states of its parameter, by name.
        value: float32.
        kept: the bfloat16 tensor that gets the value, of the same shape and strides.
    """

    state: dict[str, Any]
    name: str
    value: Tensor
    kept: Tensor


def _can_round(value: Any, parameter: Tensor) -> bool:
    """Return whether a state is a plain, dense float32 tensor with the shape of its parameter."""
    if type(value) is not Tensor or value.dtype is not torch.float32 or value.layout is not torch.strided:
        return False
    if value.requires_grad or value.ndim == 0 or value.shape != parameter.shape:
        return False
    return torch.empty_like(value, device="meta").stride() == value.stride()
