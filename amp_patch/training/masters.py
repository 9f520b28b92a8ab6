"""`Masters`: the float32 masters of 16-bit parameters, and how each pair is kept in agreement."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from ..dtypes import LOW_DTYPES
from ..multi_tensor import Group, clone, copy_, eq, group, where
from ..reporting import warn
from ..torch_private import get_version

_REGISTRY = ("pairs", "_parameters", "_masters", "_index", "_seen", "_loaded", "_pushed", "_groups", "_buffers")
"""The attributes that say which masters there are."""

Pair = tuple[Tensor, Tensor]
"""A 16-bit parameter and its float32 master, of the same shape."""


class _State:
    """Version counters and addresses of many tensors, read and compared in few calls."""

    def __init__(self, tensors: list[Tensor], before: "_State | None" = None) -> None:
        self.versions = list(map(get_version, tensors))
        self.addresses = list(map(Tensor.data_ptr, tensors))
        # while these live, no other memory gets their addresses: `p.data = f(p.data)`, twice, would come back to one
        self.aliases: list[Tensor]
        if before is not None and before.addresses == self.addresses:
            self.aliases = before.aliases
        else:
            self.aliases = [tensor.detach() for tensor in tensors]

    def end_with(self, index: int, tensor: Tensor) -> None:
        """Append the state of a tensor at `index`, and drop what an interrupt may have left there."""
        self.versions[index:] = [get_version(tensor)]
        self.addresses[index:] = [tensor.data_ptr()]
        self.aliases[index:] = [tensor.detach()]

    def see(self, index: int, tensor: Tensor) -> None:
        """Update the state of one tensor."""
        self.versions[index] = get_version(tensor)
        self.addresses[index] = tensor.data_ptr()
        self.aliases[index] = tensor.detach()

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _State) and self.versions == other.versions and self.addresses == other.addresses

    def differs_at(self, index: int, other: "_State") -> bool:
        return bool(self.versions[index] != other.versions[index] or self.addresses[index] != other.addresses[index])


class Masters:
    """The masters of a session.

    An optimizer step changes masters; scripts also change masters (SAM, Lookahead) and parameters (weight clipping)
    themselves. The version counters and addresses of the last copy tell which side moved; if both did, the master wins.

    Attributes:
        pairs: each 16-bit parameter with its master, by the master's id.
        has_warned_of_copy: whether the warning about a copied model was given.
        is_compiled: whether a model runs in compiled code, which does not call `sync` before its forward pass.
    """

    def __init__(self) -> None:
        self.pairs: dict[int, Pair] = {}
        self._parameters: list[Tensor] = []
        self._masters: list[Tensor] = []
        self._index: dict[int, int] = {}  # by the parameter's id
        self._seen = (_State([]), _State([]))  # of parameters and of masters, as of the last copy
        self._loaded: set[int] = set()  # indices of masters to be copied once more, as they were loaded
        # by index: the value at the last push of masters whose parameters were edited since
        self._pushed: dict[int, Tensor] = {}
        self._groups: list[Group] | None = None  # of all, for pushing
        self._gradients: list[tuple[Tensor, Tensor]] = []  # of parameters before they were cast
        self._buffers: dict[int, Pair] = {}  # each buffer that was cast, with its float32 values, by the buffer's id
        self.has_warned_of_copy = False
        self.is_compiled = False

    def add(self, parameter: Tensor, master: Tensor) -> None:
        """Register `master` (float32, same shape) as the master of `parameter`, which has none yet."""
        index = len(self._parameters)
        for seen, tensor in zip(self._seen, (parameter, master), strict=True):
            seen.end_with(index, tensor)
        self._masters[index:] = [master]
        self._groups = None
        self._parameters.append(parameter)
        self.pairs[id(master)] = parameter, master
        self._index[id(parameter)] = index

    def clear(self) -> None:
        """Forget all masters."""
        self._exchange(Masters())

    def keep_only(self, ids: Collection[int]) -> None:
        """Forget the masters of all other parameters and the values of all other buffers, by id, after a sync."""
        self.sync()
        kept = Masters()
        for parameter, master in self.pairs.values():
            if id(parameter) in ids:
                kept.add(parameter, master)
        for key, (buffer, values) in self._buffers.items():
            if key in ids:
                kept.keep_buffer(buffer, values)
        self._exchange(kept)

    def _exchange(self, other: "Masters") -> None:
        """Take over the registry of another object in one call: an interrupt leaves either."""
        vars(self).update({name: vars(other)[name] for name in _REGISTRY})

    def keep_buffer(self, buffer: Tensor, values: Tensor) -> None:
        """Keep the float32 values of a buffer that is about to be rounded."""
        self._buffers[id(buffer)] = buffer, values

    def find_changed_buffers(self) -> list[Tensor]:
        """Return the buffers that have changed since they were cast. Waits for the device, once for each."""
        changed: list[Tensor] = []
        for buffer, _ in self._buffers.values():
            values = self._find_values(buffer)
            if buffer.dtype in LOW_DTYPES and values is not None and not bool(_is_rounded(buffer, values).all()):
                changed.append(buffer)
        return changed

    def _find_values(self, buffer: Tensor) -> Tensor | None:
        """Return the float32 values of a buffer, or None if there are none of its shape and device."""
        _, values = self._buffers.get(id(buffer), (buffer, None))
        if values is None or values.shape != buffer.shape or values.device != buffer.device:
            return None
        return values

    def load(self, tensor: Tensor, values: Tensor) -> None:
        """Copy values to the master of a parameter, or keep those of a buffer, before torch rounds them."""
        master = self.get(tensor)
        if master is not None:
            with torch.no_grad():
                master.copy_(values)
        elif id(tensor) in self._buffers:
            self.keep_buffer(tensor, values.detach().to(tensor.device, torch.float32, copy=True))

    def float32_of(self, tensor: Tensor) -> Tensor:
        """Return the float32 values of a 16-bit tensor: its master, or of a buffer those that were kept, where it has
        not changed since.
        """
        master = self.get(tensor)
        if master is not None:
            return master.detach()
        own = tensor.detach().float()
        values = self._find_values(tensor)
        if values is None:
            return own
        with torch.no_grad():
            full: Tensor = where(_is_rounded(tensor, values), values, own)
        return full

    def keep_gradient(self, parameter: Tensor) -> None:
        """Keep the float32 gradient of a parameter that is about to be cast, for its master."""
        if parameter.grad is not None:
            self._gradients.append((parameter, parameter.grad))
            parameter.grad = None

    def return_gradients(self) -> None:
        """Give the kept gradients to the masters, or cast to parameters without a master."""
        gradients, self._gradients = self._gradients, []
        for parameter, gradient in gradients:
            master = self.get(parameter)
            if master is None:
                parameter.grad = gradient.to(parameter.dtype)
            else:
                master.grad = gradient

    def get(self, parameter: Tensor) -> Tensor | None:
        """Return the master of `parameter`, or None."""
        index = self._index.get(id(parameter))
        return None if index is None else self._masters[index]

    def mark_updated(self, masters: Iterable[Tensor]) -> None:
        """Record that an optimizer changed these masters: fused ones do not raise the version counter."""
        if not self._masters:
            return
        for master in masters:
            pair = self.pairs.get(id(master))
            if pair is not None:
                self._seen[1].versions[self._index[id(pair[0])]] = -1

    def push(self, pairs: Collection[Pair] | None = None) -> None:
        """Copy masters (all, or those of `pairs`) to their parameters, in one kernel for each (device, dtype)."""
        if pairs is None or len(pairs) == len(self._parameters):
            if self._groups is None:
                self._groups = group(self._parameters, self._masters)
            copy_(self._groups)
            self._loaded.clear()
            self._pushed.clear()
            self._seen = (_State(self._parameters, self._seen[0]), _State(self._masters, self._seen[1]))
        else:
            self._push_some([self._index[id(parameter)] for parameter, _ in pairs])

    def pull(self) -> None:
        """Take over edits; warn once if masters moved and a compiled model may have run since with old parameters."""
        if self.take_edits() and self.is_compiled:
            self.is_compiled = False
            warn(
                "masters were edited since the last step, and a compiled model does not notice that: call"
                " amp.refresh() after each edit, before the model runs"
            )

    def take_edits(self) -> bool:
        """Copy edited parameters to their masters. Return whether masters were edited, too; these stay as they are."""
        return self._reconcile(pushing=False)

    def agree(self, parameter: Tensor) -> None:
        """Record that a parameter and its master, if it has one, were loaded with the same values.

        The next sync copies the master once more: scripts load masters by `master.data.copy_`, which nothing shows.
        """
        index = self._index.get(id(parameter))
        if index is not None:
            self._pushed.pop(index, None)
            self._see(index)
            self._loaded.add(index)

    def sync(self) -> None:
        """Copy each edited parameter to its master, and each edited master to its parameter."""
        self._reconcile(pushing=True)

    def _push_some(self, indices: list[int]) -> None:
        copy_(group([self._parameters[index] for index in indices], [self._masters[index] for index in indices]))
        for index in indices:
            self._loaded.discard(index)
            self._pushed.pop(index, None)
            self._see(index)

    def _take_over(self, index: int) -> None:
        """Copy those elements of an edited parameter to its master that differ from the rounded master."""
        parameter, master = self._parameters[index], self._masters[index]
        with torch.inference_mode(False), torch.no_grad():
            if index not in self._pushed:
                self._pushed[index] = clone(master)
            pushed = self._pushed[index]
            edited = torch.empty_like(master, requires_grad=False)
            copy_([([edited], [parameter])])
            edited = where(_is_rounded(parameter, master), master, edited)
            copy_([([master], [where(_is_rounded(parameter, pushed), pushed, edited)])])

    def _see(self, index: int) -> None:
        for seen, tensors in zip(self._seen, (self._parameters, self._masters), strict=True):
            seen.see(index, tensors[index])

    def _reconcile(self, *, pushing: bool) -> bool:
        """Copy edits to the other side, those of masters only if `pushing`. Return whether masters moved."""
        parameters, masters = _State(self._parameters, self._seen[0]), _State(self._masters, self._seen[1])
        if (parameters, masters) == self._seen and not self._loaded:
            return False
        moved: list[int] = []
        for index in range(len(self._parameters)):
            is_moved = masters.differs_at(index, self._seen[1])
            if parameters.differs_at(index, self._seen[0]) and not is_moved:
                self._take_over(index)
                self._see(index)
            if is_moved or index in self._loaded:
                moved.append(index)
        if pushing and moved:
            self._push_some(moved)
        return bool(moved)


def _is_rounded(parameter: Tensor, master: Tensor) -> Tensor:
    """Return in which elements a 16-bit parameter equals the rounded master: a bool tensor of their shape."""
    rounded = torch.empty_like(parameter, requires_grad=False)
    copy_([([rounded], [master])])
    is_rounded: Tensor = eq(parameter, rounded)
    return is_rounded
