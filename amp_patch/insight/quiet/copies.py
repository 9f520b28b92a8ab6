"""`CopyWatch`: finds ops that use an old 16-bit copy of a weight, which has changed since the copy was made.

torch.autocast keeps the copies that it makes until its `with` block ends.
"""

import functools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...dtypes import LOW_DTYPES
from ...session import current
from ...torch_dispatch import TO_COPY, get_current_node
from ..ops import Op
from ..quiet_record import QuietCause, QuietRecord
from ..rules import short
from ..sites import find_site, names_dtype
from ..tensors import storage_of

_SAMPLES = 4096
"""The most elements of a weight, evenly spread, that are compared with its copy at each use."""


@dataclass(slots=True)
class _Copy:
    """A 16-bit copy of a weight.

    Attributes:
        storage: the storage of the copy, held weakly.
        weight: the weight. It is not held weakly, because torch.utils.swap_tensors refuses a tensor with
            weak references.
    """

    storage: Any
    weight: Tensor


@dataclass
class _Stale:
    """The uses of old copies at one line.

    Attributes:
        step, name, op, module, dtype: of the first use: the step, the weight, the op, the module and the 16-bit dtype.
        steps, names: of all uses: the steps, and the names of the weights.
    """

    step: int
    name: str
    op: str
    module: str
    dtype: torch.dtype
    steps: set[int]
    names: set[str]


class CopyWatch:
    """Compares 16-bit copies of weights with the weights, when ops of a forward pass use a copy.

    Args:
        name: returns the qualified name of a tensor of a model; "" or None if there is none to report.
        find_module: returns the name of the module that is running.
    """

    def __init__(self, name: Any, find_module: Any) -> None:
        self._name = name
        self._find_module = find_module
        self._copies: dict[int, _Copy] = {}  # the copies that are alive, by the id of the storage
        self._stale: dict[str, _Stale] = {}  # by the line
        self.step = 0

    def note(self, op: Op) -> None:
        """Note an op that has run."""
        if op.overload.packet is TO_COPY:
            self._note_cast(op)
        elif self._copies and not op.overload.is_silent and get_current_node() is None:
            for tensor in op.inputs():
                if tensor.dtype in LOW_DTYPES and storage_of(tensor):
                    self._check(op, tensor)

    def _note_cast(self, op: Op) -> None:
        """Note a copy, unless the line that makes it names a 16-bit dtype. Such a script may keep an old copy on
        purpose.
        """
        weight, copy = op.args[0], op.result
        is_of_weight = isinstance(weight, Tensor) and weight.requires_grad and weight.is_leaf
        if not is_of_weight or copy.dtype not in LOW_DTYPES or not storage_of(copy) or names_dtype():
            return
        storage = copy.untyped_storage()
        key = id(storage)
        # Python ignores exceptions in the callback of a weak reference, so a Ctrl-C in a Python function would be lost.
        forget = functools.partial(self._copies.pop, key)
        self._copies[key] = _Copy(weakref.ref(storage, forget), weight)

    def _check(self, op: Op, tensor: Tensor) -> None:
        """Note the use of an old copy, if the tensor is one. An op of the script reads the tensor."""
        storage = tensor.untyped_storage()
        known = self._copies.get(id(storage))
        if known is None:
            return
        weight = known.weight
        if weight.numel() * tensor.element_size() != storage.nbytes():
            return
        with current.without_casts():
            if _is_alike(weight, tensor):
                return
        site = find_site()
        if site.by == "amp":
            return
        name = self._name(weight) or ""
        stale = self._stale.setdefault(
            site.place, _Stale(self.step, name, op.overload.name, self._find_module(), tensor.dtype, set(), set())
        )
        stale.steps.add(self.step)
        stale.names.add(name)

    def records(self) -> list[QuietRecord]:
        """Return a record for each line that used old copies."""
        return [
            QuietRecord(
                QuietCause.STALE_COPY,
                step=stale.step,
                steps=len(stale.steps),
                looked=max(self.step, max(stale.steps) + 1),
                tensor=stale.name or None,
                tensors=len(stale.names),
                of=len(stale.names),
                module=stale.module or None,
                op=stale.op,
                site=site or None,
                dtype=short(stale.dtype),
            )
            for site, stale in self._stale.items()
        ]


def _is_alike(weight: Tensor, copy: Tensor) -> bool:
    """Return whether a copy has the values of a weight, by samples. NaN equals NaN.

    True for an empty weight, and for a weight that is not contiguous, which is not compared.
    """
    if not weight.is_contiguous() or weight.numel() == 0:
        return True
    stride = -(-weight.numel() // _SAMPLES)
    own = weight.detach().view(-1)[::stride]
    kept = copy.detach().as_strided((weight.numel(),), (1,), 0)[::stride]
    rounded = own.to(copy.dtype)
    return bool(((rounded == kept) | (rounded.isnan() & kept.isnan())).all())
