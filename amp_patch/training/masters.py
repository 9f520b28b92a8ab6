"""`Masters`: the float32 masters of 16-bit parameters. It keeps each master and its parameter in agreement.

A master is the float32 copy of a parameter on which the optimizer steps.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..dtypes import LOW_DTYPES
from ..multi_tensor import Group, clone, copy_, eq, group, isnan, where
from ..reporting import warn
from ..torch_private import get_version
from .split_masters import SplitMasters, open_masters

_REGISTRY = ("pairs", "_parameters", "_masters", "_index", "_edits", "_copy_groups", "_buffers", "_split")
"""The attributes that hold masters and buffers. `Masters._replace_registry` replaces them together."""

Pair = tuple[Tensor, Tensor]
"""A 16-bit parameter and its float32 master, of the same shape."""


class _WatchedTensors:
    """A list of tensors, with the version counter and the address that each had when it was last recorded.

    A tensor counts as changed if its version counter or its address differs from the recorded one: something has
    written to it, or has given it other memory.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._addresses: list[int] = []
        # aliases keep the memory alive: after `p.data = f(p.data)` twice, torch may reuse the first address
        self._aliases: list[Tensor] = []

    def append_at(self, index: int, tensor: Tensor) -> None:
        """Append a tensor, which gets `index`. Drop entries from `index` on: an interrupted call may have left them."""
        self._versions[index:] = [get_version(tensor)]
        self._addresses[index:] = [tensor.data_ptr()]
        self._aliases[index:] = [tensor.detach()]
        self.tensors[index:] = [tensor]

    def record(self, index: int) -> None:
        """Record the present version and address of one tensor."""
        tensor = self.tensors[index]
        self._versions[index] = get_version(tensor)
        self._addresses[index] = tensor.data_ptr()
        self._aliases[index] = tensor.detach()

    def record_all(self) -> None:
        """Record the present versions and addresses of all tensors."""
        self._versions = list(map(get_version, self.tensors))
        addresses = list(map(Tensor.data_ptr, self.tensors))
        if addresses != self._addresses:
            self._addresses = addresses
            self._aliases = [tensor.detach() for tensor in self.tensors]

    def mark_changed(self, index: int) -> None:
        """Make a tensor count as changed until it is recorded again."""
        self._versions[index] = -1  # no version counter is negative

    def has_changed(self, index: int) -> bool:
        """Return whether a tensor has changed since it was last recorded."""
        tensor = self.tensors[index]
        return self._versions[index] != get_version(tensor) or self._addresses[index] != tensor.data_ptr()

    def find_changed(self) -> list[int]:
        """Return the indices of the tensors that have changed since they were last recorded."""
        versions, addresses = list(map(get_version, self.tensors)), list(map(Tensor.data_ptr, self.tensors))
        if versions == self._versions and addresses == self._addresses:
            return []
        return [index for index in range(len(self.tensors)) if self.has_changed(index)]


class _Edit(NamedTuple):
    """The float32 values of one master before and after the edits that a script has made to its parameter.

    Attributes:
        before: the master's values without the edits.
        after: its values with the edits.
    """

    before: Tensor
    after: Tensor


class Masters:
    """The masters of a session.

    An optimizer step changes masters. Scripts edit masters (SAM, Lookahead) and parameters (weight clipping), too. When
    one of the two is copied to the other, their version counters and addresses are recorded. If a version counter or an
    address differs later, its tensor counts as edited. If both were edited, the master wins.

    If a parameter was edited, its master takes over the elements that differ from the rounded master. An `_Edit` of
    this is kept until the master is next copied to the parameter. It has two uses: an element that the script sets back
    gets its old float32 value, and later edits through `parameter.data`, which raise no version counter, are found.

    Split masters, which are in memory as float32 only while in use, record their edits in `SplitMasters` instead.

    Attributes:
        pairs: each 16-bit parameter with its master, by the master's id.
        has_warned_of_copy: whether the warning about a copied model was given.
        is_compiled: whether a model was compiled since the last warning about compiled models. The forward of
            a compiled model does not call `sync`.
        is_paused: whether forward passes leave out `sync`, while a step is repeated with copies of weights.
    """

    def __init__(self) -> None:
        self.pairs: dict[int, Pair] = {}
        self._parameters = _WatchedTensors()
        self._masters = _WatchedTensors()
        self._index: dict[int, int] = {}  # the position of a pair in both lists, by the parameter's id
        self._edits: dict[int, _Edit] = {}  # by index
        self._copy_groups: list[Group] | None = None  # all pairs by device and dtype; None: to be made at the next copy
        # parameters with their float32 gradients from before the cast
        self._gradients: list[tuple[Tensor, Tensor]] = []
        # each buffer that was cast, with its float32 values, by the buffer's id
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._split = SplitMasters()
        self.has_warned_of_copy = False
        self.is_compiled = False
        self.is_paused = False

    def add(self, parameter: Tensor, master: Tensor) -> None:
        """Register `master` (float32, same shape) as the master of `parameter`, which has none yet."""
        index = len(self._parameters.tensors)
        self._masters.append_at(index, master)
        self._copy_groups = None
        self._parameters.append_at(index, parameter)
        self.pairs[id(master)] = parameter, master
        self._index[id(parameter)] = index

    def add_split(self, parameter: Tensor, data: Tensor | None) -> Tensor:
        """Make and return a split master of `parameter`. See `SplitMasters.add`."""
        master = self._split.add(parameter, data)
        self.pairs[id(master)] = parameter, master
        return master

    def find_stored(self) -> list[Tensor]:
        """Return the tensors that split masters keep in memory, without the parameters and the open masters."""
        return self._split.find_stored()

    def clear(self) -> None:
        """Forget all masters, and the values of all buffers."""
        self._replace_registry(Masters())

    def keep_only(self, ids: Collection[int]) -> None:
        """Sync, then forget the masters of all parameters, and the values of all buffers, whose id is not in `ids`."""
        self.sync()
        kept = Masters()
        kept._split = self._split.choose(ids)
        for parameter, master in self.pairs.values():
            if kept._split.get(parameter) is not None:
                kept.pairs[id(master)] = parameter, master
            elif id(parameter) in ids:
                kept.add(parameter, master)
                edit = self._edits.get(self._index[id(parameter)])
                if edit is not None:
                    kept._edits[kept._index[id(parameter)]] = edit
        for key, (buffer, values) in self._buffers.items():
            if key in ids:
                kept.keep_buffer(buffer, values)
        self._replace_registry(kept)

    def _replace_registry(self, source: "Masters") -> None:
        """Take over the masters of `source`, in one call, so that an interrupt leaves the old registry or the new."""
        vars(self).update({name: vars(source)[name] for name in _REGISTRY})

    def keep_buffer(self, buffer: Tensor, values: Tensor) -> None:
        """Keep the float32 values of a buffer that is about to be rounded."""
        self._buffers[id(buffer)] = buffer, values

    def find_changed_buffers(self) -> list[Tensor]:
        """Return the 16-bit buffers that differ from the values that were kept for them. Waits for the device."""
        changed: list[Tensor] = []
        for buffer, _ in self._buffers.values():
            values = self._find_values(buffer)
            if buffer.dtype in LOW_DTYPES and values is not None and not bool(_equals_rounded(buffer, values).all()):
                changed.append(buffer)
        return changed

    def _find_values(self, buffer: Tensor) -> Tensor | None:
        """Return the float32 values of a buffer, or None if there are none of its shape and device."""
        _, values = self._buffers.get(id(buffer), (buffer, None))
        if values is None or values.shape != buffer.shape or values.device != buffer.device:
            return None
        return values

    def load(self, tensor: Tensor, values: Tensor) -> None:
        """Copy values to the master of a parameter, or keep them for a buffer that was cast, before torch rounds them.

        Do nothing for any other tensor.
        """
        master = self.get(tensor)
        if master is not None:
            self.open([master])
            with torch.no_grad():
                master.copy_(values)
        elif id(tensor) in self._buffers:
            self.keep_buffer(tensor, values.detach().to(tensor.device, torch.float32, copy=True))

    def float32_of(self, tensor: Tensor) -> Tensor:
        """Return the float32 values of a 16-bit tensor: of its master, or kept for a buffer, else its own values.

        Elements of a buffer that have changed since its values were kept have their present values.
        """
        master = self.get(tensor)
        if master is not None:
            self.open([master])
            return master.detach()
        present = tensor.detach().float()
        values = self._find_values(tensor)
        if values is None:
            return present
        with torch.no_grad():
            merged: Tensor = where(_equals_rounded(tensor, values), values, present)
        return merged

    def keep_gradient(self, parameter: Tensor) -> None:
        """Keep the float32 gradient of a parameter that is about to be cast, for its master."""
        if parameter.grad is not None:
            self._gradients.append((parameter, parameter.grad))
            parameter.grad = None

    def return_gradients(self) -> None:
        """Give the kept gradients to the masters. A parameter without a master gets its gradient back in its dtype."""
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
        return self._split.get(parameter) if index is None else self._masters.tensors[index]

    def open(self, masters: Iterable[Tensor], *, is_private: bool = False) -> None:
        """Give split masters their float32 values, until `copy_to_parameters`.

        `is_private`: whether no code of the script uses the values before then.
        """
        if is_private:
            self._split.open_for_step(list(masters))
        else:
            open_masters(masters)

    def mark_updated(self, masters: Iterable[Tensor]) -> None:
        """Record that an optimizer changed these masters. Fused optimizers do not raise the version counter."""
        for master in masters:
            pair = self.pairs.get(id(master))
            if pair is None:
                continue
            index = self._index.get(id(pair[0]))
            if index is None:
                self._split.mark_updated(pair[0])
            else:
                self._masters.mark_changed(index)

    def copy_to_parameters(self, pairs: Collection[Pair] | None = None) -> None:
        """Copy masters to their parameters, all or only those in `pairs`."""
        if pairs is None or len(pairs) == len(self.pairs):
            self._copy_all()
            self._edits.clear()
            return
        parameters = [parameter for parameter, _ in pairs]
        if self._split.masters:
            self._split.write(parameters)
        self._copy_some([self._index[id(parameter)] for parameter in parameters if id(parameter) in self._index])

    def refresh(self) -> None:
        """Sync, then copy all masters to their parameters.

        So edits through `master.data`, which raise no version counter, count as well.
        """
        self.sync()
        self._copy_all()

    def end_step(self, pairs: Collection[Pair]) -> None:
        """Prepare the split masters in `pairs` for edits of the script, after a step or a skipped one."""
        self._split.end_step([parameter for parameter, _ in pairs])

    def free_memory(self) -> None:
        """Let go of memory that split masters need only between a step and the next backward pass."""
        self._split.sync(both_ways=False, frees_memory=True)

    def copy_from_parameters(self, *, warns: bool = False, rechecks: bool = True) -> None:
        """Copy edited parameters to their masters. Masters that were edited stay as they are.

        Args:
            warns: warn if masters were edited, and a compiled model may have run with the old parameters since.
            rechecks: see `sync`.
        """
        has_edited_masters = self._copy_edits(both_ways=False, rechecks=rechecks)
        if warns and has_edited_masters and self.is_compiled:
            self.is_compiled = False
            warn(
                "masters were edited since the last step, and a compiled model does not notice that: call"
                " amp.refresh() after each edit, before the model runs"
            )

    def copy_loaded_to_parameters(self, parameters: Iterable[Tensor | None]) -> None:
        """Copy masters that have changed, for example by `load`, to those of their parameters in `parameters`."""
        loaded_parameters = [parameter for parameter in parameters if parameter is not None]
        self._split.write_edited(loaded_parameters)
        indices = [self._index[id(parameter)] for parameter in loaded_parameters if id(parameter) in self._index]
        loaded = [index for index in indices if self._masters.has_changed(index)]
        if loaded:
            self._copy_some(loaded)

    def sync(self, *, rechecks: bool = True, frees_memory: bool = False) -> None:
        """Copy each edited parameter to its master, and each edited master to its parameter.

        Args:
            rechecks: also compare the values of parameters that were edited before. Scripts often put the old weights
                back in ways that no version counter shows.
            frees_memory: see `SplitMasters.sync`.
        """
        self._copy_edits(both_ways=True, rechecks=rechecks, frees_memory=frees_memory)

    def _copy_all(self) -> None:
        if self._split.masters:
            self._split.write()
        if self._copy_groups is None:
            self._copy_groups = group(self._parameters.tensors, self._masters.tensors)
        copy_(self._copy_groups)
        self._parameters.record_all()
        self._masters.record_all()

    def _copy_some(self, indices: Collection[int]) -> None:
        parameters = [self._parameters.tensors[index] for index in indices]
        copy_(group(parameters, [self._masters.tensors[index] for index in indices]))
        for index in indices:
            self._edits.pop(index, None)
            self._record_pair(index)

    def _record_pair(self, index: int) -> None:
        self._parameters.record(index)
        self._masters.record(index)

    def _copy_edits(self, *, both_ways: bool, rechecks: bool, frees_memory: bool = False) -> bool:
        """Copy edited parameters to their masters, and with `both_ways`, edited masters to their parameters.

        If a script has edited both, the master wins. Return whether masters were edited. The arguments: see `sync`.
        """
        are_split_edited = False
        if self._split.masters:
            are_split_edited = self._split.sync(both_ways=both_ways, frees_memory=frees_memory)
        edited_parameters = set(self._parameters.find_changed())
        edited_masters = set(self._masters.find_changed())
        if rechecks:
            edited_parameters.update(self._edits)
        for index in sorted(edited_parameters - edited_masters):
            self._apply_edit(index)
            self._record_pair(index)
        if both_ways and edited_masters:
            self._copy_some(edited_masters)
        return are_split_edited or bool(edited_masters)

    def _apply_edit(self, index: int) -> None:
        """Copy the edited elements of a parameter to its master, and remember the edit."""
        parameter, master = self._parameters.tensors[index], self._masters.tensors[index]
        with torch.inference_mode(False), torch.no_grad():
            if index not in self._edits:
                unedited = clone(master)
                self._edits[index] = _Edit(unedited, unedited)
            edit = self._edits[index]
            values = torch.empty_like(master, requires_grad=False)
            copy_([([values], [parameter])])
            # an element that equals a rounded float32 value was not edited, or was set back: use that value
            values = where(_equals_rounded(parameter, edit.before), edit.before, values)
            values = where(_equals_rounded(parameter, edit.after), edit.after, values)
            # an element that the script has written since the last edit, through `master.data`, wins
            is_unwritten = where(isnan(edit.after), isnan(master), eq(master, edit.after))
            values = where(is_unwritten, values, master)
            before = where(is_unwritten, edit.before, master)
            copy_([([master], [values])])
            self._edits[index] = _Edit(before, values)  # after the copy, or an interrupt would lose the edit


def _equals_rounded(parameter: Tensor, master: Tensor) -> Tensor:
    """Return a bool tensor of the same shape: True where the 16-bit parameter equals the master, rounded to 16 bits."""
    rounded = torch.empty_like(parameter, requires_grad=False)
    copy_([([rounded], [master])])
    is_equal: Tensor = eq(parameter, rounded)
    return is_equal
