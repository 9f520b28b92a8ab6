"""`Storages`: for each storage, the record of the op that wrote it last.

`written` explains when a value *fits*, and what a *fault* is.
"""

import math
from collections.abc import Iterable, Sequence

from torch import Tensor

from .ops import Op, find_factor, is_reduction
from .tensors import floating_in, is_whole, storage_of
from .written import Written

_SEEDS = ("ones_like", "full_like")
"""Ops that make the gradient with which a backward pass begins."""


class Storages:
    """Maps the address of a storage to the record of the op that wrote it last."""

    def __init__(self) -> None:
        self._written: dict[int, Written] = {}

    def find(self, tensor: Tensor) -> Written | None:
        """Return the record of a tensor's storage, or None if there is none (see `find_at`)."""
        known = self._written.get(storage_of(tensor))
        if known is None or not known.is_old:
            return known
        return self.find_at(storage_of(tensor), tensor.untyped_storage().nbytes())

    def find_at(self, storage: int, size: int) -> Written | None:
        """Return the record of the storage at an address, or None.

        A record from the previous step counts only if its storage had `size` bytes. Otherwise the address belongs to
        another storage now.
        """
        known = self._written.get(storage)
        if known is not None and known.is_old and known.size != size:
            return None
        return known

    def find_parents(self, op: Op) -> list[Written]:
        """Return the records of those inputs of an op that have one."""
        return [known for tensor in op.inputs() if (known := self.find(tensor)) is not None]

    def find_faults(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the faults that explain why values in these tensors do not fit: positions among the step's faults."""
        known = map(self.find, tensors)
        return set().union(*(written.faults for written in known if written is not None))

    def put(self, storage: int, written: Written) -> None:
        """Set the record of a storage."""
        self._written[storage] = written

    def keep(self, output: Tensor, written: Written) -> None:
        """Set the record of an output's storage.

        If the output is only a part of it and fits, a record of values that do not fit stays.
        """
        earlier = self.find(output)
        if earlier is not None and not is_whole(output) and not math.isfinite(earlier.largest):
            # the value that does not fit may be in another part of the storage
            if math.isfinite(written.largest):
                return
            written.faults |= earlier.faults
            written.is_known |= earlier.is_known
        self.put(storage_of(output), written)

    def pass_on(self, op: Op, node: str, outputs: Sequence[Tensor]) -> None:
        """Note an op whose values are not read: an op on lists of tensors or outside of aten (`Overload.is_in_bulk`).

        If faults explain some inputs, they are taken to explain all inputs and outputs. If not, the records of these
        tensors are dropped.
        """
        inputs = list(floating_in(op.inputs()))
        sources = [known for tensor in inputs if (known := self.find(tensor)) is not None and known.is_known]
        # the inputs as well, because foreach ops and fused optimizers write to them
        for tensor in (*inputs, *outputs):
            self.forget(tensor)
            if sources:
                written = Written(op.overload.name, node, math.inf, sources)
                written.explain_by(sources)
                written.size = tensor.untyped_storage().nbytes()
                self.put(storage_of(tensor), written)

    def forget(self, tensor: Tensor) -> None:
        """Drop the record for the storage of a tensor."""
        self._written.pop(storage_of(tensor), None)

    def end_step(self) -> None:
        """Forget the storages of the step.

        A storage whose values a fault explains stays for one more step, because a script may look at gradients and
        losses after the step has ended.
        """
        self._written = {
            storage: written for storage, written in self._written.items() if written.is_known and not written.is_old
        }
        for written in self._written.values():
            written.is_old, written.parents, written.faults = True, (), frozenset()

    def is_scaled(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the backward pass carries the loss scale. True for a tensor without a record."""
        known = self.find(tensor)
        return known is None or is_of_scaled(known)

    def find_summed(self, tensor: Tensor) -> float:
        """Return how many times larger a loss is than the mean of its terms; 1.0 if that is not known."""
        known = self.find(tensor)
        return 1.0 if known is None else known.summed

    def compute_summed(self, op: Op, output: Tensor) -> float:
        """Return how many times larger an output of an op is than the mean of its terms."""
        largest = 1.0
        for tensor in op.inputs():
            known = self.find(tensor)
            # An op that gives as many elements as it gets counts as elementwise, and passes the factor on.
            if known is not None and known.summed > 1 and (tensor.numel() == output.numel() or is_reduction(op)):
                largest = max(largest, known.summed)
        if largest > 1 or is_reduction(op):
            return largest * find_factor(op, output)
        return largest


def is_of_scaled(written: Written) -> bool:
    """Return whether a value that an op of the backward pass has written carries the loss scale."""
    return written.is_scaled or written.op in _SEEDS
