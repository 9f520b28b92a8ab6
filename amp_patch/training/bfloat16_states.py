"""`Bfloat16States`: keeps states of an optimizer as bfloat16 between steps, and as float32 during steps."""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import OptimizerError
from ..multi_tensor import copy_, group
from ..torch_private import without_overrides
from .groups import Groups
from .step_log import is_capturing
from .stochastic_rounding import StochasticRounding

_AVERAGES = (
    *("exp_avg", "exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "acc_delta", "momentum_buffer"),
    *("sum", "variance"),
)
"""Running averages and sums. They are rounded stochastically, because a step may change them by less than half the
spacing of bfloat16. Half the spacing is at least 2**-9 of a value; with beta2 = 0.999, an average of squares shrinks by
at most 0.001 of its value. Rounded to nearest, it would never shrink.
"""

_OTHERS = ("max_exp_avg_sq", "prev", "step_size")
"""States that a step replaces, or multiplies by a factor (`step_size` of Rprop). They are rounded to nearest."""

_NAMES = {name: number for number, name in enumerate((*_AVERAGES, *_OTHERS))}
"""The names in both tables, numbered."""

# In neither table: counters and products of decays, which are single numbers; rows and columns of Adafactor, which are
# small; and the averaged weights of ASGD, of which the script wants all bits.

_ALIGNMENT = 16
"""The number of float32 elements in 64 bytes, the cache line of most CPUs."""


class Bfloat16States:
    """The bfloat16 states of one optimizer.

    A state is kept as bfloat16 if its name is in one of the tables above, and it is a float32 tensor of the shape of
    its parameter, in memory without gaps. Tensors without dimensions, and tensors of other classes, such as DTensor,
    stay float32.

    A state is *open* while it is float32, during a step. A step may run in parts (`step_parts`), and each part opens
    only the states of its own parameters.

    Args:
        optimizer: the optimizer, held by a weak reference.
        groups: its parameter groups.
        rounding: the stochastic rounding, shared by all optimizers of the session.
    """

    def __init__(self, optimizer: Optimizer, groups: Groups, rounding: StochasticRounding) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._rounding = rounding
        self._groups = groups
        self._positions: dict[int, int] = {}  # where each parameter's elements begin, by its id
        self._size = 0  # the number of elements of all parameters
        # bfloat16 tensors whose values are in float32 at present, by the parameter's id and the name of the state
        self._kept: dict[tuple[int, str], Tensor] = {}
        # memory for open states on a CPU; the parts of a step share it, because fresh memory costs much time
        self._memory: Tensor | None = None
        self._is_memory_used = False

    def begin_step(self) -> None:
        """Prepare the random numbers of the next step. Raises OptimizerError while a CUDA graph is being captured."""
        if is_capturing():
            raise OptimizerError(
                'a CUDA graph cannot capture step() with optimizer_state_type="bfloat16": each replay would round with'
                " the same random numbers. Call step() outside of the graph, or leave optimizer_state_type out."
            )
        self._rounding.begin_step()
        self._number()

    def _number(self) -> None:
        """Number the elements of all parameters, from the smallest parameter to the largest.

        These numbers select the random numbers of the rounding, which are drawn in blocks (see
        `stochastic_rounding`). Parts of a step take parameters in about this order, so a part uses few blocks.
        """
        self._positions.clear()
        self._size = 0
        with without_overrides():
            for parameter in sorted(self._groups.parameters(), key=Tensor.numel):
                self._positions[id(parameter)] = self._size
                self._size += parameter.numel()

    def _get_states(self) -> dict[Any, dict[str, Any]]:
        """Return the states of the optimizer by parameter. Empty once the optimizer is gone."""
        optimizer = self._optimizer()
        return {} if optimizer is None else optimizer.state

    def open(self, parameters: Iterable[Any], *, is_private: bool = False) -> None:
        """Replace the bfloat16 states of parameters by their float32 values.

        `is_private`: whether no code of the script reads these values until `close`.
        """
        states = self._get_states()
        opened: list[tuple[dict[str, Any], str]] = []
        copies: list[Tensor] = []
        sources: list[Tensor] = []
        for parameter in parameters:
            state = states.get(parameter, {})
            for name in _NAMES.keys() & state.keys():
                value = state[name]
                if type(value) is Tensor and value.dtype is torch.bfloat16:
                    self._kept[id(parameter), name] = value
                    opened.append((state, name))
                    sources.append(value)
        with torch.inference_mode(False):
            if is_private and all(source.is_cpu for source in sources):
                copies = self._take_memory(sources)
            else:
                copies = [torch.empty_like(source, dtype=torch.float32) for source in sources]
        copy_(group(copies, sources))
        for (state, name), value in zip(opened, copies, strict=True):
            state[name] = value

    def _take_memory(self, sources: list[Tensor]) -> list[Tensor]:
        """Return float32 tensors in the layouts of `sources`, in memory that all parts of a step use in turn."""
        starts = [0]
        for source in sources:
            starts.append(starts[-1] + source.numel() + -source.numel() % _ALIGNMENT)
        # open states that a failed step has left may still lie in the memory
        if self._memory is None or self._memory.numel() < starts[-1] or self._is_memory_used:
            self._memory = None  # frees the old memory first, unless such states still lie in it
            self._memory = torch.empty(starts[-1], dtype=torch.float32, device="cpu")
        self._is_memory_used = True
        taken: list[Tensor] = []
        for source, start in zip(sources, starts, strict=False):
            taken.append(self._memory.as_strided(source.size(), source.stride(), start))
        return taken

    def end_step(self) -> None:
        """Free the memory that the parts of a step have shared."""
        self._memory = None
        self._rounding.end_step()

    def open_all(self) -> None:
        """Replace all bfloat16 states by their float32 values, and free the bfloat16 tensors."""
        self.open(self._get_states())
        self._kept.clear()

    def close_all(self) -> None:
        """Round the float32 states of all parameters to bfloat16."""
        self._number()
        self.close(self._groups.parameters())
        self.end_step()

    def close(self, parameters: Iterable[Any]) -> None:
        """Round the float32 states of parameters to bfloat16."""
        rows = self._find_float32(parameters)
        together: dict[tuple[torch.device, bool], list[_Row]] = {}
        for row in rows:
            together.setdefault((row.value.device, row.name in _AVERAGES), []).append(row)
        for (_, is_average), chosen in together.items():
            values = [row.value for row in chosen]
            rounded = [row.kept for row in chosen]
            if is_average:
                self._rounding.round_(values, rounded, [row.position for row in chosen])
            else:
                self._rounding.round_to_nearest_(values, rounded)
        for row in rows:
            row.state[row.name] = row.kept
        self._is_memory_used = False

    def _find_float32(self, parameters: Iterable[Any]) -> list["_Row"]:
        """Return the float32 states that `close` rounds, each with the tensor that gets the result."""
        states = self._get_states()
        rows: list[_Row] = []
        with without_overrides(), torch.inference_mode(False):
            for parameter in parameters:
                if id(parameter) not in self._positions:
                    self._number()  # a hook has added the parameter in the step
                state = states.get(parameter, {})
                for name in _NAMES.keys() & state.keys():
                    value = state[name]
                    if not _can_round(value, parameter):
                        continue
                    kept = self._kept.pop((id(parameter), name), None)
                    if kept is None or kept.shape != value.shape or kept.stride() != value.stride():
                        kept = torch.empty_like(value, dtype=torch.bfloat16)
                    if kept.stride() != value.stride():
                        continue  # the memory of the value has gaps
                    position = _NAMES[name] * self._size + self._positions[id(parameter)]
                    rows.append(_Row(state, name, value, kept, position))
        return rows


class _Row(NamedTuple):
    """A float32 state.

    Attributes:
        state: all states of its parameter, by name.
        kept: the bfloat16 tensor that gets the value, of the same shape and strides.
        position: the position of its first element among the elements of all states that the optimizer may have.
    """

    state: dict[str, Any]
    name: str
    value: Tensor
    kept: Tensor
    position: int


def _can_round(value: Any, parameter: Tensor) -> bool:
    """Return whether a state is a plain float32 tensor with the shape of its parameter, and not a single number."""
    if type(value) is not Tensor or value.dtype is not torch.float32 or value.layout is not torch.strided:
        return False
    return value.ndim > 0 and value.shape == parameter.shape and not value.requires_grad
