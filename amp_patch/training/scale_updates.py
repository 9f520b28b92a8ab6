"""`ScaleUpdates`: updates loss scales and agrees on skipped steps, in each process alone or in all ranks that step
together.

Ranks that hold different gradients (shards, pipeline stages) find different overflows, but must skip the same steps.
So they reduce the maximum of their flags before each step. Ranks of DistributedDataParallel hold the same gradients,
and need none of this.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_distributed import broadcast_tensors
from .loss_scaler import LossScaler
from .step_log import is_capturing, stop_if_hopeless, warn_of_small_scale

READ_EVERY = 32
"""After so many updates of dynamic scales outside of steps, the host reads the scales."""


class ScaleUpdates:
    """Updates the scalers of a session.

    Attributes:
        process_groups: the groups whose ranks decide together. Empty: each process decides alone.
    """

    def __init__(self, scalers: Sequence[LossScaler], device_type: str) -> None:
        self.scalers = scalers
        self._device_type = device_type
        self.process_groups: Sequence[Any] = ()
        self._updates_since_read = 0  # updates outside of steps, since the host has read the scales

    def share(self, groups: Sequence[Any]) -> None:
        """From now on, decide with all ranks of these process groups, by one reduction over each, in this order."""
        self.process_groups = groups
        for scaler in self.scalers:
            scaler.is_shared = bool(groups)

    def broadcast_scales(self, group: Any, source: int) -> None:
        """Broadcast the state of the dynamic scalers of rank `source` of a process group to its other ranks. Does not
        wait for the device.
        """
        dynamic = [scaler for scaler in self.scalers if scaler.is_dynamic]
        states = [scaler.pack_state(torch.device(self._device_type)) for scaler in dynamic]
        if states:
            broadcast_tensors(group, states, sum(state.nbytes for state in states), source)
        for scaler, state in zip(dynamic, states, strict=True):
            scaler.load_packed_state(state)

    def update(self, found_inf: dict[LossScaler, Tensor]) -> dict[LossScaler, Tensor]:
        """Update the scales for a step, and return the flags (0-dim float32) that decide whether it is skipped.

        A process that decides alone updates the scalers in `found_inf`. Where ranks decide together, all of them must
        call this equally often, with or without flags. The result then has a flag for each dynamic scaler: an overflow
        on any rank skips the step on all. This takes one reduction over each group, of three float32 numbers for each
        dynamic scaler. Does not wait for the device.
        """
        if not self.process_groups:
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
            flags = torch.stack([self._stack_flags(scaler, found_inf.get(scaler)) for scaler in dynamic])
            # one after the other, so that a flag crosses from one group to the next: from shards to pipeline stages
            for group in self.process_groups:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
            for scaler, row in zip(dynamic, flags, strict=True):
                agreed[scaler], passes_flag, is_due = row.unbind()
                scaler.update_with_ranks(passes_flag, is_due)
        return agreed

    def update_without_step(self, scalers: Iterable[LossScaler]) -> None:
        """Update scales without a step. Where ranks decide together, the next step does this."""
        if not self.process_groups:
            for scaler in scalers:
                scaler.update()
                self._updates_since_read += scaler.is_dynamic

    def warn_of_falling_scales(self) -> None:
        """Warn about scales that have fallen far.

        For scripts that read the overflow themselves, and then zero the gradients instead of calling `step`.

        Reads the scales, which waits for the device, once in `READ_EVERY` updates. Raises GradientOverflowError if a
        scale is so small that it cannot be the cause of the overflows.
        """
        if self._updates_since_read < READ_EVERY or is_capturing():
            return
        self._updates_since_read = 0
        for scaler in self.scalers:
            before = scaler.known_scale
            scaler.known_scale = scaler.loss_scale()
            if scaler.is_dynamic and scaler.known_scale < before:
                warn_of_small_scale(scaler)
                stop_if_hopeless([scaler])

    def _stack_flags(self, scaler: LossScaler, found_inf: Tensor | None) -> Tensor:
        """Return three flags, of shape (3,), float32.

        They tell whether the step overflows, whether a backward pass since the last update did, and whether there was
        such a pass.
        """
        zero = torch.zeros((), dtype=torch.float32, device=self._device_type)
        step_flag = zero if found_inf is None else found_inf.to(zero.device)
        passes_flag = zero if scaler.found_inf is None else scaler.found_inf.to(zero.device)
        is_due = torch.full_like(zero, float(scaler.found_inf is not None))
        return torch.stack([step_flag, passes_flag, is_due])
