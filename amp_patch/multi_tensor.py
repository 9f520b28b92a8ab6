"""Ops on many tensors: one call, and few kernels, for all tensors of one device and dtype.

Op lists do not affect these ops.
"""

import operator
from collections.abc import Iterable

import torch
from torch import Tensor

from .torch_private import foreach_copy_

Group = tuple[list[Tensor], ...]
"""Rows of equal length, such as a row of targets and a row of sources. All tensors of a row have the same dtype. All
tensors of the first row are on the same device.
"""

clone = torch.ops.aten.clone.default
"""torch's own `clone`. It returns a copy in the dtype of the tensor, even if an op list has a rule for `clone`."""

eq = torch.ops.aten.eq.Tensor
isnan = torch.ops.aten.isnan.default
where = torch.ops.aten.where.self
"""torch's own `eq`, `isnan` and `where`, which no op list patches."""

_get_device, _get_dtype = operator.attrgetter("device"), operator.attrgetter("dtype")


def group(*rows: Iterable[Tensor]) -> list[Group]:
    """Split rows of equal length, such as a row of targets and a row of sources, into groups that one call can take.

    Tensors at the same position in the rows stay together, in their order. A group has one dtype for each row, and one
    device for the first row; only `copy_` may be used if the other rows are on another device.
    """
    lists = [list(row) for row in rows]
    keys = zip(map(_get_device, lists[0]), *[map(_get_dtype, row) for row in lists], strict=True)
    groups: dict[tuple[object, ...], list[tuple[Tensor, ...]]] = {}
    for key, tensors in zip(keys, zip(*lists, strict=True), strict=True):
        groups.setdefault(key, []).append(tensors)
    return [tuple(map(list, zip(*columns, strict=True))) for columns in groups.values()]


def copy_(groups: Iterable[Group]) -> None:
    """Copy the second row of each group, the sources, into the first, the targets. Each group takes one call."""
    # leave inference mode, because the targets are normal tensors, which autograd uses later
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            copy_(groups)
        return
    with torch.no_grad():
        for targets, sources in groups:
            foreach_copy_(targets, sources)
