"""`RegionWatch`: checks the GradScaler and the losses of a script against the dtypes of its regions of autocast."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..torch_dispatch import walk_graph
from .misuse import Kind, Misuse
from .roots import find_line

_LOSS_NODES = frozenset(
    f"{name}Backward0"
    for name in ("MseLoss", "SmoothL1Loss", "HuberLoss", "NllLoss", "NllLoss2D", "KlDiv", "SoftMarginLoss")
) | {"BinaryCrossEntropyWithLogitsBackward0"}
"""Autograd nodes of the losses that autocast computes in float32."""

_LOW = (torch.float16, torch.bfloat16)

_MOST_NODES = 4096
_MOST_WALKS = 8
"""How many nodes of a graph are visited, and how many graphs: a walk through a large graph takes milliseconds, and a
script computes the same losses in each step.
"""


class RegionWatch:
    """Follows the regions, losses and steps of a script. `tell` is called with each misuse."""

    def __init__(self, tell: Callable[[Misuse], None]) -> None:
        self._tell = tell
        self._trained_dtypes = set[torch.dtype]()  # of the regions so far in which gradients were enabled
        self._is_after_region = False  # whether there was a region since the last step
        self._walks_left = _MOST_WALKS
        self._unscaled_at = ""  # the line of the last unscaled loss since the last step with float16 in its graph
        self._unscaled_steps = 0  # steps of optimizers after such a pass

    def note_region(self, dtype: torch.dtype) -> None:
        """Record the dtype of an enabled region that begins, if gradients are enabled."""
        if torch.is_grad_enabled():
            self._trained_dtypes.add(dtype)
            self._is_after_region = True

    def note_backward(self, loss: Any) -> None:
        """Look at the graph of a loss that is about to go backward, if there was a region since the last step."""
        loss = loss[0] if isinstance(loss, (list, tuple)) and len(loss) == 1 else loss
        if not self._is_after_region or not self._walks_left or not isinstance(loss, Tensor):
            return
        self._walks_left -= 1
        nodes = list(walk_graph(loss, _MOST_NODES))
        low = next((dtype for name, dtype in nodes if name in _LOSS_NODES and dtype in _LOW), None)
        if low in self._trained_dtypes:
            self._tell(Misuse(Kind.LOSS_OUTSIDE, find_line(), f"in {str(low).removeprefix('torch.')}"))
        # A loss that is a product may have been multiplied by a scale: by the script, or by a GradScaler.
        is_product = bool(nodes) and nodes[0][0].startswith("Mul")
        if not is_product and any(dtype is torch.float16 for _, dtype in nodes):
            self._unscaled_at = find_line()

    def check_own_step(self, *, has_scalers: bool) -> None:
        """Check a step that no GradScaler takes. `has_scalers`: whether the script has scaled a loss so far."""
        if self._unscaled_at and not has_scalers:
            self._unscaled_steps += 1
        # At the first such step, a script with several optimizers may not have come to its GradScaler yet.
        if self._unscaled_steps > 1 and self._unscaled_at and not has_scalers:
            self._tell(Misuse(Kind.NO_SCALER, self._unscaled_at))
        self._is_after_region = False
        self._unscaled_at = ""

    def check_scaled_step(self) -> None:
        """Check a step that an enabled GradScaler takes."""
        self._is_after_region = False
        self._unscaled_at = ""
        if self._trained_dtypes == {torch.bfloat16}:
            self._tell(Misuse(Kind.SCALED_BFLOAT16, find_line()))
