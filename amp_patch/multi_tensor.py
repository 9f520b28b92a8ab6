"""Ops on many tensors in few kernels, grouped by device and dtype. No list casts these ops."""

import operator
from collections.abc import Iterable

import torch
from torch import Tensor

from .torch_private import foreach_copy_

Group = tuple[list[Tensor], ...]
"""Rows of equal length. The tensors of a row have one dtype; the tensors of the first row are on one device."""

clone = torch.ops.aten.clone.default
"""Returns a copy in the dtype of the tensor, whatever rule `clone` has in a list."""

eq = torch.ops.aten.eq.Tensor
where = torch.ops.aten.where.self
"""torch's own `eq` and `where`, whatever rules they have in a list."""

_get_device, _get_dtype = operator.attrgetter("device"), operator.attrgetter("dtype")


def group(*rows: Iterable[Tensor]) -> list[Group]:
    """Split rows of equal length, such as targets and sources, into groups that one kernel takes.

    Tensors that belong together are on one device, or the kernel copies between two. Order is kept.
    """
    lists = [list(row) for row in rows]
    kinds = zip(map(_get_device, lists[0]), *[map(_get_dtype, row) for row in lists], strict=True)
    groups: dict[tuple[object, ...], list[tuple[Tensor, ...]]] = {}
    for kind, tensors in zip(kinds, zip(*lists, strict=True), strict=True):
        groups.setdefault(kind, []).append(tensors)
    return [tuple(map(list, zip(*columns, strict=True))) for columns in groups.values()]


def copy_(groups: Iterable[Group]) -> None:
    """Copy the second row of each group, the sources, into the first, in one kernel for each group."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            copy_(groups)
        return
    with torch.no_grad():
        for targets, sources in groups:
            foreach_copy_(targets, sources)
