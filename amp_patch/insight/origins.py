"""`Origins`: for each storage, the call that gave it its dtype. Reports on exceptions read it."""

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
"""Under these rules, an op takes the dtype of an input."""


@dataclass(frozen=True, slots=True)
class Made:
    """The call that made a storage.

    Attributes:
        call: the call; None for a storage that was there before.
        dtype: its dtype.
        parent: the storage from which the call took the dtype, if it did.
        storage: the address of the storage.
    """

    call: OpCall | None
    dtype: torch.dtype
    parent: "Made | None"
    storage: int

    def find_root(self) -> "Made":
        """Return the storage whose call decided the dtype that this one has taken over."""
        made = self
        while made.parent is not None:
            made = made.parent
        return made


def _rank_as_source(tensor: Tensor) -> tuple[bool, bool]:
    """Return the key that sorts inputs by what they say about a dtype: weights first, and biases after them."""
    return not isinstance(tensor, nn.Parameter), tensor.dim() < 2


class Origins:
    """Maps the address of a storage to the call that made it. A storage keeps its dtype, whoever writes to it later."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[StorageWeakRef, Made]] = {}
        self.last: Made | None = None  # made by the latest call

    def find(self, tensor: Tensor) -> Made | None:
        """Return what made the storage of a tensor; None if it was there before, or hides its address."""
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
        """Return whether an op that computes nothing makes a storage."""
        return overload.name.startswith(_MAKES_EMPTY)

    def note(self, call: OpCall, inputs: Sequence[Tensor], outputs: Iterable[Tensor]) -> None:
        """Note the outputs of a call."""
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
        """Return the input whose dtype the call has taken over; None if a rule or a cast decided."""
        if call.target is dtype or call.rule not in _FOLLOWED_RULES:
            return None
        like = [tensor for tensor in inputs if tensor.dtype is dtype]
        like.sort(key=_rank_as_source)
        known = [(tensor, self.find(tensor)) for tensor in like]
        # The call itself has cast some of its inputs. What it was given says more.
        for tensor, made in known:
            if made is None:
                return Made(None, dtype, None, storage_of(tensor))
            if made.call is not call:
                return made
        return known[0][1] if known else None

    def end_step(self) -> None:
        """Forget the storages that are gone. Of the others, keep the call that decided, and not the way from there."""
        self._made = {
            storage: (reference, made.find_root() if made.parent is not None else made)
            for storage, (reference, made) in self._made.items()
            if not reference.expired()
        }
        self.last = None
