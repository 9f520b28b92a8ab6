"""`RegionWatch`: checks whether the GradScaler and the losses of a script suit the dtypes of its autocast regions.

A region is a block `with torch.autocast(...)`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..torch_dispatch import walk_graph
from .misuse import Kind, Misuse
from .roots import find_line

_LOSS_NODES = frozenset(
    f"{name}Backward0" for name in ("MseLoss", "SmoothL1Loss", "HuberLoss", "NllLoss", "NllLoss2D", "SoftMarginLoss")
) | {"BinaryCrossEntropyWithLogitsBackward0"}
"""Autograd nodes of losses that torch.autocast computes in float32. Not all such losses have a node of their own."""

_LOW = (torch.float16, torch.bfloat16)

_MOST_NODES = 4096
_MOST_WALKS = 8
"""At most this many nodes are visited in a graph, in at most this many graphs of a run. A walk through a large graph
takes milliseconds.
"""


class RegionWatch:
    """Follows the regions, losses and steps of a script. `tell` is called with each misuse."""

    def __init__(self, tell: Callable[[Misuse], None]) -> None:
        self._tell = tell
        self._trained_dtypes = set[torch.dtype]()  # of the regions so far in which gradients were enabled
        self._is_after_region = False  # whether such a region began since the last step
        self._walks_left = _MOST_WALKS
        # The line of a backward pass since the last step. Its graph has float16 tensors, and nothing seems to have
        # multiplied its loss by a scale. If there were several, the last one; "" if there was none.
        self._unscaled_at = ""
        self._unscaled_steps = 0  # the number of steps without a GradScaler after such a backward pass

    def note_region(self, dtype: torch.dtype) -> None:
        """Record an enabled region that begins, unless gradients are disabled, as they are in an evaluation."""
        if torch.is_grad_enabled():
            self._trained_dtypes.add(dtype)
            self._is_after_region = True

    def note_backward(self, loss: Any) -> None:
        """Before a backward pass, look for misuses in the graph of its loss, and note whether the loss seems unscaled.

        Looks only at a pass with one loss, and only if a region with gradients has begun since the last step. Looks at
        `_MOST_WALKS` graphs at most.
        """
        loss = loss[0] if isinstance(loss, (list, tuple)) and len(loss) == 1 else loss
        if not self._is_after_region or not self._walks_left or not isinstance(loss, Tensor):
            return
        self._walks_left -= 1
        nodes = list(walk_graph(loss, _MOST_NODES))
        low = next((dtype for name, dtype in nodes if name in _LOSS_NODES and dtype in _LOW), None)
        if low in self._trained_dtypes:
            self._tell(Misuse(Kind.LOSS_OUTSIDE, find_line(), f"in {str(low).removeprefix('torch.')}"))
        # If the last op was a product, it may have multiplied the loss by a scale: the script's own or a GradScaler's.
        is_product = bool(nodes) and nodes[0][0].startswith("Mul")
        if not is_product and any(dtype is torch.float16 for _, dtype in nodes):
            self._unscaled_at = find_line()

    def check_own_step(self, *, has_scalers: bool) -> None:
        """Check a step without a GradScaler. `has_scalers`: whether a GradScaler has scaled a loss so far."""
        if self._unscaled_at and not has_scalers:
            self._unscaled_steps += 1
        # not at the first such step: a script with several optimizers may scale the loss of a later optimizer
        if self._unscaled_steps > 1 and self._unscaled_at and not has_scalers:
            self._tell(Misuse(Kind.NO_SCALER, self._unscaled_at))
        self._is_after_region = False
        self._unscaled_at = ""

    def check_scaled_step(self) -> None:
        """Check a step by an enabled GradScaler."""
        self._is_after_region = False
        self._unscaled_at = ""
        if self._trained_dtypes == {torch.bfloat16}:
            self._tell(Misuse(Kind.SCALED_BFLOAT16, find_line()))
