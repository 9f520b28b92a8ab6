"""Copies of many tensors in few kernels: `torch._foreach_copy_` on groups of one kind."""

from collections.abc import Iterable

import torch
from torch import Tensor

from .torch_private import foreach_copy_

Group = tuple[list[Tensor], list[Tensor]]
"""Targets and sources."""


def group_pairs(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> list[Group]:
    """Return the pairs as groups of one device and one dtype on either side."""
    groups: dict[tuple[torch.device, torch.dtype, torch.dtype], Group] = {}
    for target, source in zip(targets, sources, strict=True):
        group = groups.setdefault((target.device, target.dtype, source.dtype), ([], []))
        group[0].append(target)
        group[1].append(source)
    return list(groups.values())


def copy_(groups: Iterable[Group]) -> None:
    """Copy sources into targets, in one kernel for each group."""
    with torch.inference_mode(False), torch.no_grad():
        for targets, sources in groups:
            foreach_copy_(targets, sources)
