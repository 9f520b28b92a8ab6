"""`Decisions`: judging backward passes, each process by itself or all ranks that step together as one.

Ranks that hold different gradients (shards, pipeline stages) find different overflows. They must skip the same steps
and divide by the same scales; so they take the largest of their flags before each step, as DeepSpeed and Megatron-LM
do. DistributedDataParallel needs none of this: what it reduces is the same everywhere, an overflow of one rank too.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_distributed import broadcast_tensors
from .backward_pass import BackwardPass, combine_found_inf
from .loss_scaler import LossScaler


class Decisions:
    """Judges passes for the scalers of a session.

    Args:
        scalers: read anew at each call.
        device_type: where the flags are.
    """

    def __init__(self, scalers: Sequence[LossScaler], device_type: str) -> None:
        self.scalers = scalers
        self._device_type = device_type
        self._groups: Sequence[Any] = ()

    def share(self, groups: Sequence[Any]) -> None:
        """Decide with all ranks of these process groups from now on: one reduction over each, in this order."""
        self._groups = groups
        for scaler in self.scalers:
            scaler.is_shared = bool(groups)

    def give_scales(self, group: Any, source: int) -> None:
        """Give all ranks of a process group the loss scales of one, by its number in the group. Waits for nothing."""
        dynamic = [scaler for scaler in self.scalers if scaler.is_dynamic]
        states = [scaler.send_state(torch.device(self._device_type)) for scaler in dynamic]
        if states:
            broadcast_tensors(group, states, sum(state.nbytes for state in states), source)
        for scaler, state in zip(dynamic, states, strict=True):
            scaler.receive_state(state)

    @property
    def groups(self) -> Sequence[Any]:
        """The process groups that decide together; none where each process decides for itself."""
        return self._groups

    def judge(self, passes: Sequence[BackwardPass]) -> Sequence[BackwardPass]:
        """Update the scale of each pass's scaler, and return the passes with flags on which a step may be skipped.

        Where ranks decide together, each of them must call this as often as the others, with or without passes: one
        that has none gets passes that carry the flags of the others. Waits for nothing; a reduction of three float32
        numbers for each dynamic scaler, none under static ones.
        """
        dynamic = [scaler for scaler in self.scalers if scaler.is_dynamic] if self._groups else []
        for one in passes:
            if one.scaler not in dynamic:
                one.scaler.update()
        if not dynamic:
            return passes
        rows = self._reduce([self._flags_of(scaler, passes) for scaler in dynamic])
        judged = list(passes)
        for scaler, (own, due, is_due) in zip(dynamic, rows, strict=True):
            mine = [one for one in passes if one.scaler is scaler]
            if not mine:
                mine = [BackwardPass(scaler, own.device)]
                judged += mine
            for one in mine:
                one.overrule(own)
            scaler.follow(due, is_due)
        return judged

    def judge_outside_of_steps(self, passes: Sequence[BackwardPass]) -> None:
        """Update the scales of passes that no step will judge.

        Where ranks decide together the next step does: it is what all of them have in common.
        """
        if not self._groups:
            self.judge(passes)

    def _flags_of(self, scaler: LossScaler, passes: Sequence[BackwardPass]) -> list[Tensor]:
        """Return whether `passes` overflowed, whether any due pass did, and whether there is one: 0-dim float32."""
        mine = [one for one in passes if one.scaler is scaler]
        for one in mine:
            if not one.is_open:
                one.complete()
        due = scaler.due()
        zero = torch.zeros((), dtype=torch.float32, device=self._device_type)
        flags = [combine_found_inf(some) if some else zero for some in (mine, due)]
        return [*(flag.to(zero.device) for flag in flags), torch.full_like(zero, float(bool(due)))]

    def _reduce(self, rows: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
        flags = torch.stack([torch.stack(list(row)) for row in rows])
        for group in self._groups:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        return [row.unbind() for row in flags]
