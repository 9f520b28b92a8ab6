"""`ScaleUpdates`: updates loss scales and agrees on skipped steps, in each process alone or in all ranks that step
together.

Ranks that hold different gradients (shards, pipeline stages) find different overflows, but must skip the same steps.
So they reduce the maximum of their flags before each step, as DeepSpeed and Megatron-LM do. DistributedDataParallel
reduces the gradients, so it needs none of this.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_distributed import broadcast_tensors
from .loss_scaler import LossScaler
from .step_log import is_capturing, stop_if_hopeless, warn_of_small_scale

LOOK_EVERY = 32
"""After so many updates outside of steps the host looks at the scales."""


class ScaleUpdates:
    """Updates the scalers of a session, a list that is read at each call.

    Attributes:
        groups: the process groups whose ranks decide together. Empty: each process decides alone.
    """

    def __init__(self, scalers: Sequence[LossScaler], device_type: str) -> None:
        self.scalers = scalers
        self._device_type = device_type
        self.groups: Sequence[Any] = ()
        self._unseen = 0  # updates outside of steps, since the host has seen a scale

    def share(self, groups: Sequence[Any]) -> None:
        """Decide with all ranks of these process groups from now on: one reduction over each, in this order."""
        self.groups = groups
        for scaler in self.scalers:
            scaler.is_shared = bool(groups)

    def give_scales(self, group: Any, source: int) -> None:
        """Broadcast the loss scales of rank `source` of a process group to its other ranks. Waits for nothing."""
        dynamic = [scaler for scaler in self.scalers if scaler.is_dynamic]
        states = [scaler.send_state(torch.device(self._device_type)) for scaler in dynamic]
        if states:
            broadcast_tensors(group, states, sum(state.nbytes for state in states), source)
        for scaler, state in zip(dynamic, states, strict=True):
            scaler.receive_state(state)

    def update(self, found_inf: dict[LossScaler, Tensor]) -> dict[LossScaler, Tensor]:
        """Update the scales for a step, and return the flags (0-dim float32) that decide whether it is skipped.

        A process that decides alone updates the scalers of the step. Where ranks decide together, all of them call this
        equally often, with or without flags. The result then has a flag for each dynamic scaler: an overflow of any
        rank skips the step on all. This takes one reduction of three float32 numbers for each dynamic scaler. Waits for
        nothing.
        """
        if not self.groups:
            for scaler in found_inf:
                scaler.update()
            return found_inf
        agreed: dict[LossScaler, Tensor] = {}
        dynamic: list[LossScaler] = [scaler for scaler in self.scalers if scaler.is_dynamic]
        for scaler, flag in found_inf.items():
            if scaler not in dynamic:
                scaler.update()
                agreed[scaler] = flag
        if dynamic:
            flags = torch.stack([self._flags_of(scaler, found_inf.get(scaler)) for scaler in dynamic])
            # one after the other: a flag reaches all ranks of overlapping groups, such as pipeline stages with shards
            for group in self.groups:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
            for scaler, row in zip(dynamic, flags, strict=True):
                agreed[scaler], since_update, is_due = row.unbind()
                scaler.update_with_ranks(since_update, is_due)
        return agreed

    def update_without_step(self, scalers: Iterable[LossScaler]) -> None:
        """Update scales after passes that no step follows. Where ranks decide together, the next step does that."""
        if not self.groups:
            for scaler in scalers:
                scaler.update()
                self._unseen += scaler.is_dynamic

    def look_at_scales(self) -> None:
        """Warn of scales that fall outside of steps, where loops skip bad batches by themselves. Waits for the device
        once in `LOOK_EVERY` updates. Raises GradientOverflowError as a step does.
        """
        if self._unseen < LOOK_EVERY or is_capturing():
            return
        self._unseen = 0
        for scaler in self.scalers:
            before = scaler.known_scale
            scaler.known_scale = scaler.loss_scale()
            if scaler.is_dynamic and scaler.known_scale < before:
                warn_of_small_scale(scaler)
                stop_if_hopeless([scaler])

    def _flags_of(self, scaler: LossScaler, found_inf: Tensor | None) -> Tensor:
        """Return the flag of the step, the flag of all backward passes since the last update, and whether there are
        such passes: shape (3,), float32.
        """
        zero = torch.zeros((), dtype=torch.float32, device=self._device_type)
        of_step = zero if found_inf is None else found_inf.to(zero.device)
        since_update = zero if scaler.found_inf is None else scaler.found_inf.to(zero.device)
        is_due = torch.full_like(zero, float(scaler.found_inf is not None))
        return torch.stack([of_step, since_update, is_due])
