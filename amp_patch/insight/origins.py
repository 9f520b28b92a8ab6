"""`Origins`: keeps for each storage the call that gave it its dtype, for reports on exceptions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..torch_dispatch import StorageWeakRef
from .folding import OpCall
from .ops import Overload
from .tensors import storage_of

_MAKES_EMPTY = ("empty", "new_empty")
_FOLLOWED_RULES = ("", "promote", "sequence_promote", "match_self")
"""Rules under which an op may take the dtype of an input; "" for an op without a rule."""


@dataclass(frozen=True, slots=True)
class Made:
    """A storage, and the call that made it.

    Attributes:
        call: the call; None for a storage that no noted call has made, such as the storage of a batch.
        dtype: the dtype of the values in it.
        parent: the record of the storage from which the call took the dtype; None if the call decided it, or if `call`
            is None.
        storage: the address of the storage.
    """

    call: OpCall | None
    dtype: torch.dtype
    parent: "Made | None"
    storage: int

    def find_root(self) -> "Made":
        """Return the last record in the chain of parents, or this one if it has no parent.

        Its call decided the dtype, or no noted call made its storage.
        """
        made = self
        while made.parent is not None:
            made = made.parent
        return made


def _rank_as_source(tensor: Tensor) -> tuple[bool, bool]:
    """Return a sort key for inputs: parameters first; among equals, tensors with less than two dimensions last."""
    return not isinstance(tensor, nn.Parameter), tensor.dim() < 2


class Origins:
    """Maps the address of a storage to the call that made it. Later writes do not count: the dtype stays."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[StorageWeakRef, Made]] = {}
        self.last: Made | None = None  # the latest storage that was noted

    def find(self, tensor: Tensor) -> Made | None:
        """Return the record of the storage of a tensor; None if no noted call made it, or made it in another dtype."""
        storage = storage_of(tensor)
        kept = self._made.get(storage)
        if kept is None:
            return None
        reference, made = kept
        # Another storage may have got the memory of one that was freed.
        if reference.expired() or made.dtype is not tensor.dtype:
            return None
        return made

    @staticmethod
    def is_of_interest(overload: Overload) -> bool:
        """Return whether to note an op although it computes nothing: it makes an empty tensor."""
        return overload.name.startswith(_MAKES_EMPTY)

    def note(self, call: OpCall, inputs: Sequence[Tensor], outputs: Iterable[Tensor]) -> None:
        """Note the floating outputs of a call, except outputs whose storage is known already in their dtype."""
        for tensor in outputs:
            if not tensor.is_floating_point() or self.find(tensor) is not None:
                continue
            storage = storage_of(tensor)
            if not storage:
                continue
            made = Made(call, tensor.dtype, self._find_parent(call, tensor.dtype, inputs), storage)
            self._made[storage] = StorageWeakRef(tensor.untyped_storage()), made
            self.last = made

    def _find_parent(self, call: OpCall, dtype: torch.dtype, inputs: Sequence[Tensor]) -> Made | None:
        """Return the record of the input whose dtype the call has taken over; None if the call decided the dtype."""
        if call.target is dtype or call.rule not in _FOLLOWED_RULES:
            return None
        like = [tensor for tensor in inputs if tensor.dtype is dtype]
        like.sort(key=_rank_as_source)
        known = [(tensor, self.find(tensor)) for tensor in like]
        # inputs that the call itself has cast come last, because they lead back to this call
        for tensor, made in known:
            if made is None:
                return Made(None, dtype, None, storage_of(tensor))
            if made.call is not call:
                return made
        return known[0][1] if known else None

    def end_step(self) -> None:
        """Forget the storages that are gone. Replace the record of each other storage by its root: see `find_root`."""
        self._made = {
            storage: (reference, made.find_root() if made.parent is not None else made)
            for storage, (reference, made) in self._made.items()
            if not reference.expired()
        }
        self.last = None
