"""`Masters`: the float32 masters of 16-bit parameters, and how each pair is kept in agreement."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..dtypes import LOW_DTYPES
from ..multi_tensor import Group, clone, copy_, eq, group, where
from ..reporting import warn
from ..torch_private import get_version

_REGISTRY = ("pairs", "_parameters", "_masters", "_index", "_edits", "_groups", "_buffers")
"""The attributes that say which masters there are."""

Pair = tuple[Tensor, Tensor]
"""A 16-bit parameter and its float32 master, of the same shape."""


class _Watched:
    """A list of tensors, with the version counter and the address that each had when it was last seen.

    A tensor has moved if it was written to, or has other memory, since it was last seen.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._addresses: list[int] = []
        # these keep the memory alive: after `p.data = f(p.data)` twice, torch may reuse the first address
        self._aliases: list[Tensor] = []

    def end_with(self, index: int, tensor: Tensor) -> None:
        """Append a tensor at `index`. Entries from there on, which an interrupt may have left, are dropped."""
        self._versions[index:] = [get_version(tensor)]
        self._addresses[index:] = [tensor.data_ptr()]
        self._aliases[index:] = [tensor.detach()]
        self.tensors[index:] = [tensor]

    def see(self, index: int) -> None:
        """Record the present state of one tensor."""
        tensor = self.tensors[index]
        self._versions[index] = get_version(tensor)
        self._addresses[index] = tensor.data_ptr()
        self._aliases[index] = tensor.detach()

    def see_all(self) -> None:
        """Record the present state of all tensors."""
        self._versions = list(map(get_version, self.tensors))
        addresses = list(map(Tensor.data_ptr, self.tensors))
        if addresses != self._addresses:
            self._addresses = addresses
            self._aliases = [tensor.detach() for tensor in self.tensors]

    def mark_moved(self, index: int) -> None:
        """Make a tensor count as moved until it is seen again."""
        self._versions[index] = -1

    def has_moved(self, index: int) -> bool:
        """Return whether a tensor has moved since it was last seen."""
        tensor = self.tensors[index]
        return self._versions[index] != get_version(tensor) or self._addresses[index] != tensor.data_ptr()

    def find_moved(self) -> list[int]:
        """Return the indices of the tensors that have moved since they were last seen."""
        versions, addresses = list(map(get_version, self.tensors)), list(map(Tensor.data_ptr, self.tensors))
        if versions == self._versions and addresses == self._addresses:
            return []
        return [index for index in range(len(self.tensors)) if self.has_moved(index)]


class _Edit(NamedTuple):
    """The edits of one parameter since its master was last copied to it.

    Attributes:
        before: the master from before these edits.
        after: the master with them.
    """

    before: Tensor
    after: Tensor


class Masters:
    """The masters of a session.

    An optimizer step changes masters; scripts also change masters (SAM, Lookahead) and parameters (weight clipping)
    themselves. The version counters and addresses at the last copy show which side was edited. If both were, the master
    wins.

    A master takes over the elements of an edited parameter that differ from its own rounded values. Until the next copy
    to the parameter, an `_Edit` is kept: an element that the script sets back gets its old float32 value, and later
    edits that raise no version counter, such as through `parameter.data`, are found.

    Attributes:
        pairs: each 16-bit parameter with its master, by the master's id.
        has_warned_of_copy: whether the warning about a copied model was given.
        is_compiled: whether a model runs in compiled code, which does not call `sync` before its forward pass.
    """

    def __init__(self) -> None:
        self.pairs: dict[int, Pair] = {}
        self._parameters = _Watched()
        self._masters = _Watched()
        self._index: dict[int, int] = {}  # by the parameter's id
        self._edits: dict[int, _Edit] = {}  # by index: of parameters, since masters were last copied to them
        self._groups: list[Group] | None = None  # all pairs by device and dtype, once made
        self._gradients: list[
            tuple[Tensor, Tensor]
        ] = []  # parameters with their float32 gradients from before the cast
        self._buffers: dict[int, Pair] = {}  # each buffer that was cast, with its float32 values, by the buffer's id
        self.has_warned_of_copy = False
        self.is_compiled = False

    def add(self, parameter: Tensor, master: Tensor) -> None:
        """Register `master` (float32, same shape) as the master of `parameter`, which has none yet."""
        index = len(self._parameters.tensors)
        self._masters.end_with(index, master)
        self._groups = None
        self._parameters.end_with(index, parameter)
        self.pairs[id(master)] = parameter, master
        self._index[id(parameter)] = index

    def clear(self) -> None:
        """Forget all masters."""
        self._exchange(Masters())

    def keep_only(self, ids: Collection[int]) -> None:
        """Sync, then keep only the masters and the values of the tensors with these ids."""
        self.sync()
        kept = Masters()
        for parameter, master in self.pairs.values():
            if id(parameter) in ids:
                kept.add(parameter, master)
                edit = self._edits.get(self._index[id(parameter)])
                if edit is not None:
                    kept._edits[kept._index[id(parameter)]] = edit
        for key, (buffer, values) in self._buffers.items():
            if key in ids:
                kept.keep_buffer(buffer, values)
        self._exchange(kept)

    def _exchange(self, other: "Masters") -> None:
        """Take the registry of another object, in one call, so that an interrupt leaves the old one or the new one."""
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
        """Copy values to the master of a parameter, or keep the values of a buffer, before torch rounds them."""
        master = self.get(tensor)
        if master is not None:
            with torch.no_grad():
                master.copy_(values)
        elif id(tensor) in self._buffers:
            self.keep_buffer(tensor, values.detach().to(tensor.device, torch.float32, copy=True))

    def float32_of(self, tensor: Tensor) -> Tensor:
        """Return the float32 values of a 16-bit tensor: its master, or the values kept for a buffer, except for
        elements that have changed since.
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
        """Give the kept gradients to the masters. A parameter without one gets its own back, cast to its dtype."""
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
        return None if index is None else self._masters.tensors[index]

    def mark_updated(self, masters: Iterable[Tensor]) -> None:
        """Record that an optimizer changed these masters: fused optimizers do not raise the version counter."""
        for master in masters:
            pair = self.pairs.get(id(master))
            if pair is not None:
                self._masters.mark_moved(self._index[id(pair[0])])

    def copy_to_parameters(self, pairs: Collection[Pair] | None = None) -> None:
        """Copy masters to their parameters, all or only those in `pairs`, in one kernel for each (device, dtype)."""
        if pairs is None or len(pairs) == len(self.pairs):
            self._copy_all()
            self._edits.clear()
        else:
            self._copy_some([self._index[id(parameter)] for parameter, _ in pairs])

    def refresh(self) -> None:
        """Sync, then copy all masters to their parameters: no version counter shows edits through `master.data`."""
        self.sync()
        self._copy_all()

    def copy_from_parameters(self, *, warns: bool = False, again: bool = True) -> None:
        """Copy edited parameters to their masters. Masters that were edited stay as they are.

        `again`: see `sync`.
        `warns`: warn once if there are such masters, and a compiled model may have run since with old parameters.
        """
        has_edited_masters = self._copy_edits(both_ways=False, again=again)
        if warns and has_edited_masters and self.is_compiled:
            self.is_compiled = False
            warn(
                "masters were edited since the last step, and a compiled model does not notice that: call"
                " amp.refresh() after each edit, before the model runs"
            )

    def copy_loaded_to_parameters(self, parameters: Iterable[Tensor | None]) -> None:
        """For the given parameters, copy the masters that `load` has changed to them."""
        indices = [self._index[id(parameter)] for parameter in parameters if id(parameter) in self._index]
        loaded = [index for index in indices if self._masters.has_moved(index)]
        if loaded:
            self._copy_some(loaded)

    def sync(self, *, again: bool = True) -> None:
        """Copy each edited parameter to its master, and each edited master to its parameter.

        `again`: compare also the parameters that are known to be edited. Scripts often put weights back in ways that no
        version counter shows.
        """
        self._copy_edits(both_ways=True, again=again)

    def _copy_all(self) -> None:
        if self._groups is None:
            self._groups = group(self._parameters.tensors, self._masters.tensors)
        copy_(self._groups)
        self._parameters.see_all()
        self._masters.see_all()

    def _copy_some(self, indices: Collection[int]) -> None:
        parameters = [self._parameters.tensors[index] for index in indices]
        copy_(group(parameters, [self._masters.tensors[index] for index in indices]))
        for index in indices:
            self._edits.pop(index, None)
            self._see(index)

    def _see(self, index: int) -> None:
        self._parameters.see(index)
        self._masters.see(index)

    def _copy_edits(self, *, both_ways: bool, again: bool) -> bool:
        """Copy edited parameters to their masters, and edited masters to their parameters if `both_ways`. If both sides
        of a pair were edited, the master wins. Return whether masters were edited. `again`: see `sync`.
        """
        edited, moved = set(self._parameters.find_moved()), set(self._masters.find_moved())
        if again:
            edited.update(self._edits)
        for index in sorted(edited - moved):
            self._apply_edit(index)
            self._see(index)
        if both_ways and moved:
            self._copy_some(moved)
        return bool(moved)

    def _apply_edit(self, index: int) -> None:
        """Copy the edited elements of a parameter to its master."""
        parameter, master = self._parameters.tensors[index], self._masters.tensors[index]
        with torch.inference_mode(False), torch.no_grad():
            if index not in self._edits:
                values = clone(master)
                self._edits[index] = _Edit(values, values)
            edit = self._edits[index]
            values = torch.empty_like(master, requires_grad=False)
            copy_([([values], [parameter])])
            values = where(_is_rounded(parameter, edit.before), edit.before, values)
            values = where(_is_rounded(parameter, edit.after), edit.after, values)
            # a value that the script has written to the master meanwhile, through `master.data`, wins
            is_kept = eq(master, edit.after)
            values = where(is_kept, values, master)
            before = where(is_kept, edit.before, master)
            copy_([([master], [values])])
            self._edits[index] = _Edit(before, values)  # after the copy, or an interrupt would lose the edit


def _is_rounded(parameter: Tensor, master: Tensor) -> Tensor:
    """Return in which elements a 16-bit parameter equals the rounded master: a bool tensor of their shape."""
    rounded = torch.empty_like(parameter, requires_grad=False)
    copy_([([rounded], [master])])
    is_rounded: Tensor = eq(parameter, rounded)
    return is_rounded
