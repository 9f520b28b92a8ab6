"""`SplitMasters`: masters that are in memory as float32 only while they are used.

A master is the float32 copy of a parameter on which the optimizer steps. While it is not used, a split master
is *closed*: it has no float32 values. Its upper 16 bits are its bfloat16 parameter, and an int16 tensor has the low
half (see `halves`). So an edit of the parameter is an edit of the master.

A closed master is an object of `ClosedMaster`. Before Python code uses its values, the master gets them and is *open*:
an ordinary `torch.nn.Parameter`. When the master is copied to its parameter, for example after a step, it is closed
again, unless something else holds its values. It stays the same object, so groups, optimizer states and scripts may
hold it.

Without a loss scale, a closed master may keep the 16-bit gradient of its parameter as it is. The gradient becomes
float32 when Python code reads it, when another gradient is added to it, or when the master is opened.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..multi_tensor import copy_, eq, group, where
from ..torch_private import get_storage_address, get_storage_uses, get_version, without_overrides
from .halves import join, split_


def _get_setters(name: str) -> tuple[Any, Any]:
    """Return the functions that set and delete an attribute of tensors: the `func` of `__torch_function__`."""
    descriptor: Any = getattr(Tensor, name)
    return descriptor.__set__, descriptor.__delete__


_WITHOUT_VALUES = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("grad", "requires_grad", "shape", "dtype", "device", "layout")),
        *(getattr(Tensor, name).__get__ for name in ("is_leaf", "grad_fn", "ndim", "is_sparse", "is_cpu", "is_cuda")),
        *(getattr(Tensor, name).__get__ for name in ("is_mps", "is_xpu", "is_meta", "is_quantized", "is_nested")),
        *(method for name in ("grad", "requires_grad") for method in _get_setters(name)),
        Tensor.requires_grad_,
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.is_floating_point,
        Tensor.is_complex,
        torch.numel,
        torch.is_floating_point,
        torch.is_complex,
    }
)
"""Functions that need no values of a master, so a closed master stays closed when one is called."""

_GRADIENT: Any = Tensor.grad
_REPLACE_GRADIENT = frozenset((_GRADIENT.__set__, _GRADIENT.__delete__))


class ClosedMaster(nn.Parameter):
    """A split master without float32 values. Code in C++ that bypasses `__torch_function__` reads NaN in each element.

    A function that Python calls opens it first if it needs the values, and then runs with the open master. The shape,
    dtype, device and `grad` of a closed master can be used without that.

    Attributes:
        low_half: the low half, from which its values are made together with the parameter.
    """

    low_half: "LowHalf"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _GRADIENT.__get__:
            open_gradients(args[:1])
        elif func in _REPLACE_GRADIENT:
            args[0].low_half.gradient = None
        if func in _WITHOUT_VALUES:
            with without_overrides():
                return func(*args, **kwargs)
        if func is Tensor.stride:
            return args[0].low_half.low.stride(*args[1:], **kwargs)
        open_masters(_find_closed((args, kwargs)))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        open_masters([self])
        return self.__deepcopy__(memo)  # the method of Parameter, which the object now is

    def __reduce_ex__(self, protocol: Any) -> Any:
        open_masters([self])
        return self.__reduce_ex__(protocol)


class LowHalf:
    """The low half of one split master, and the state of its master and parameter when they were last recorded.

    If a script edits the parameter, the edited elements of the master are those in which the parameter differs from
    `written`. The edited elements get the values of the parameter, and all others keep their low halves.

    `written` takes 2 bytes for each element, so it is freed before a backward pass. Without `written`, the parameter is
    the upper half of all elements, edited or not.

    Attributes:
        parameter: the bfloat16 parameter, which is the upper half.
        low: int16, of the shape of the parameter, without gaps in memory.
        gradient: the gradient of the closed master if it is not in float32 yet, else None. It has the layout of `low`.
        written: a copy of the parameter from when the master was last written, or None.
        has_edits: whether `sync` has seen an edit of the parameter since `written` was copied.
        closed_data: the data of the closed master: NaN, without memory for each element.
        is_private: whether a step has opened the master for the optimizer alone, so that nobody else holds its values.
        is_marked: whether the open master counts as edited, whatever its version counter says. For example, an
            optimizer has changed it (fused optimizers raise no version counter), or it is being written.
    """

    def __init__(self, parameter: Tensor, low: Tensor) -> None:
        self.parameter = parameter
        self.low = low
        self.gradient: Tensor | None = None
        nan = torch.full((), torch.nan, dtype=torch.float32, device=low.device)
        self.closed_data = nan.expand(low.size())
        self.written: Tensor | None = None
        self.has_edits = False
        self.is_private = False
        self.is_marked = False
        self._alias: Tensor | None = None  # of the values of the open master
        self._version = 0
        self._parameter_alias: Tensor | None = None
        self._parameter_version = 0

    def record(self, master: Tensor) -> None:
        """Record the present state of an open master."""
        self.is_marked = self.is_private = False
        self._alias, self._version = master.detach(), get_version(master)

    def record_parameter(self) -> None:
        """Record the present state of the parameter."""
        self._parameter_alias, self._parameter_version = self.parameter.detach(), get_version(self.parameter)

    def forget(self) -> None:
        """Let go of the memory of the master, which counts as edited until it is closed or recorded."""
        self.is_marked = True
        self._alias = None

    def keep_written(self, written: Tensor) -> None:
        """Keep `written`, a copy of the parameter as it is now."""
        self.record_parameter()
        self.has_edits = False
        self.written = written

    def free_written(self) -> None:
        """Let go of `written`. From now on, the parameter is the upper half, whoever has edited it."""
        self.written = self._parameter_alias = None

    def is_master_edited(self, master: Tensor) -> bool:
        """Return whether the open master counts as edited: marked, unrecorded, or with a new address or version."""
        if self.is_marked or self._alias is None:
            return True
        return master.data_ptr() != self._alias.data_ptr() or get_version(master) != self._version

    def is_parameter_edited(self) -> bool:
        """Return whether the parameter has a new address or version since it was recorded. False if it was not."""
        if self._parameter_alias is None:
            return False
        has_moved = self.parameter.data_ptr() != self._parameter_alias.data_ptr()
        return has_moved or get_version(self.parameter) != self._parameter_version

    def is_joinable(self) -> bool:
        """Return whether the parameter still is an upper half: no script has cast it."""
        return self.parameter.dtype is torch.bfloat16

    def put_edits(self, values: Tensor) -> None:
        """Write the edited elements of the parameter to the values of its master, in place."""
        assert self.written is not None
        present = self.parameter.detach().to(values.device)
        values.copy_(where(eq(present, self.written.to(values.device)), values, present.float()))


def can_split(parameter: Tensor) -> bool:
    """Return whether a parameter can be the upper half of its master: plain, bfloat16, without gaps in memory."""
    is_plain = type(parameter) in (Tensor, nn.Parameter) and parameter.layout is torch.strided
    if not is_plain or parameter.dtype is not torch.bfloat16:
        return False
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()


def get_gradient(tensor: Tensor) -> Tensor | None:
    """Return the gradient of a master or a parameter.

    A closed master may keep a 16-bit gradient: return it as it is, and do not convert it to float32.
    """
    if type(tensor) is not ClosedMaster:
        return tensor.grad
    kept = tensor.low_half.gradient
    with without_overrides():
        return tensor.grad if kept is None else kept


def has_gradient(tensor: Tensor) -> bool:
    """Return whether a master or a parameter has a gradient. Does not convert a 16-bit gradient to float32."""
    return get_gradient(tensor) is not None


def open_gradients(masters: Iterable[Tensor]) -> None:
    """Convert the 16-bit gradients that closed masters keep (`LowHalf.gradient`) to float32."""
    closed = [master for master in masters if type(master) is ClosedMaster and master.low_half.gradient is not None]
    if not closed:  # as always in a session without split masters
        return
    opened: list[tuple[Tensor, LowHalf]] = []
    copies: list[Tensor] = []
    sources: list[Tensor] = []
    with without_overrides(), torch.inference_mode(False), torch.no_grad():
        for master in closed:
            half, gradient = master.low_half, master.low_half.gradient
            assert gradient is not None
            if gradient.is_cpu:
                master.grad = gradient.float()
                half.gradient = None  # freed before the next one is converted
                continue
            opened.append((master, half))
            sources.append(gradient)
            copies.append(torch.empty_like(gradient, dtype=torch.float32))
        copy_(group(copies, sources))
        for (opened_master, half), gradient in zip(opened, copies, strict=True):
            opened_master.grad = gradient
            half.gradient = None


def open_masters(masters: Iterable[Tensor], *, is_private: bool = False, room: Tensor | None = None) -> None:
    """Give closed masters their float32 values and gradients. Masters that are open stay as they are.

    Args:
        is_private: whether no code of the script uses the values before they are written to the parameters.
        room: memory for the values of private masters on a CPU. See `join`.
    """
    by_device: dict[torch.device, list[ClosedMaster]] = {}
    masters = list(masters)
    open_gradients(masters)  # first: 16-bit gradients are in `low_half`, which open masters lack
    for master in masters:
        if type(master) is ClosedMaster:
            by_device.setdefault(master.low_half.low.device, []).append(master)
    with without_overrides():
        for closed in by_device.values():
            halves = [master.low_half for master in closed]
            values = _make_values(halves, room)
            opened: list[Tensor] = [*closed]
            for master, half, value in zip(opened, halves, values, strict=True):
                master.data = value
                if is_private:
                    half.is_private = half.is_marked = True
                else:
                    half.record(master)
                    if half.written is None:
                        half.record_parameter()  # the values contain the edits of the parameter so far
                master.__class__ = nn.Parameter  # from here on, the float32 values count
                del vars(master)["low_half"]


def _make_values(halves: Sequence[LowHalf], room: Tensor | None = None) -> list[Tensor]:
    """Return the float32 values of masters on one device."""
    uppers = [half.parameter if half.written is None else half.written for half in halves]
    values = join(uppers, [half.low for half in halves], room if halves[0].low.is_cpu else None)
    with torch.inference_mode(False), torch.no_grad():
        for half, value in zip(halves, values, strict=True):
            if half.has_edits:
                half.put_edits(value)
            elif half.written is None and not half.is_joinable():
                value.copy_(half.parameter)
    return values


def _close(rows: Iterable[tuple[Tensor, LowHalf]]) -> None:
    masters: list[Tensor] = []
    with without_overrides():
        for master, half in rows:
            vars(master)["low_half"] = half
            master.__class__ = ClosedMaster  # from here on, the halves count
            master.data = half.closed_data
            masters.append(master)
        increment_version(masters)  # a graph that has saved a master must not go on with NaN


def _find_closed(value: Any) -> Iterator[Tensor]:
    """Yield the closed masters in nested containers."""
    if type(value) is ClosedMaster:
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _find_closed(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _find_closed(item)


class SplitMasters:
    """The split masters of a session.

    Attributes:
        masters: each master with its low half, by the parameter's id.
    """

    def __init__(self) -> None:
        self.masters: dict[int, tuple[Tensor, LowHalf]] = {}
        self._room: Tensor | None = None  # memory on the CPU for the open masters of a step

    def add(self, parameter: Tensor, data: Tensor | None) -> Tensor:
        """Make a closed master of a parameter, and return it.

        `data`: the float32 values of the master. They are also written to the parameter, rounded. If it is None, the
        master has the values of the parameter.
        """
        low = torch.zeros_like(parameter, dtype=torch.int16, requires_grad=False)
        if data is not None:
            split_([data.detach()], [parameter], [low])
        half = LowHalf(parameter, low)
        master = nn.Parameter(torch.empty((), dtype=torch.float32, device=low.device), parameter.requires_grad)
        _close([(master, half)])
        self.masters[id(parameter)] = master, half
        _expect_edits([half])
        return master

    def get(self, parameter: Tensor) -> Tensor | None:
        """Return the split master of a parameter, open or closed, or None."""
        found = self.masters.get(id(parameter))
        return None if found is None else found[0]

    def find_stored(self) -> list[Tensor]:
        """Return the tensors in memory for the masters: low halves, copies of parameters, and gradients."""
        stored: list[Tensor | None] = []
        for master, half in self.masters.values():
            stored += [half.low, half.written, get_gradient(master)]
        return [tensor for tensor in stored if tensor is not None]

    def choose(self, ids: Collection[int]) -> "SplitMasters":
        """Return the split masters of the parameters whose id is in `ids`."""
        chosen = SplitMasters()
        chosen.masters = {key: found for key, found in self.masters.items() if key in ids}
        return chosen

    def mark_updated(self, parameter: Tensor) -> None:
        """Record that an optimizer has changed the master of a parameter, if it is open."""
        found = self.masters.get(id(parameter))
        if found is not None:
            found[1].is_marked = True

    def open_for_step(self, masters: Sequence[Tensor]) -> None:
        """Open masters whose values nobody but an optimizer uses before they are written.

        On a CPU, they reuse the memory of the masters that the step has opened before, if it is large enough: fresh
        memory costs as much time as the kernels.
        """
        open_gradients(masters)  # first, so that their 16-bit gradients are gone before the memory is taken
        size = 0
        with without_overrides():
            for master in masters:
                if type(master) is ClosedMaster and master.is_cpu:
                    size += master.numel()
        if self._room is not None and (size > self._room.numel() or _is_shared(self._room)):
            self._room = None  # freed before the next is allocated
        if self._room is None:
            self._room = torch.empty(size, dtype=torch.float32, device="cpu")
        open_masters(masters, is_private=True, room=self._room)

    def end_step(self, parameters: Iterable[Tensor]) -> None:
        """Free the memory of the step, and copy the parameters of closed masters to `LowHalf.written`."""
        self._room = None
        _expect_edits([half for master, half in self._find(parameters) if type(master) is ClosedMaster])

    def write(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Write open masters to their parameters and low halves, and close them.

        A master stays open while a script or a graph holds its values, such as `master.data` or an entry of a state
        dict. It also stays open if the script has cast the parameter, which then is no upper half.

        Copies the parameters to `LowHalf.written`. For masters that `open_for_step` has opened, `end_step` does that.

        Args:
            parameters: write only their masters; None for all.
        """
        rows = self._find(parameters)
        opened = [row for row in rows if type(row[0]) is not ClosedMaster]
        if opened:
            self._write(opened)
        _expect_edits([half for _, half in rows if not half.is_private])

    def _write(self, opened: Sequence[tuple[Tensor, LowHalf]]) -> None:
        for _, half in opened:
            half.is_marked = True  # an interrupt may leave the halves half written
            half.has_edits, half.written = False, None
        with torch.inference_mode(False), torch.no_grad():
            for device in {half.low.device for _, half in opened}:
                rows = [row for row in opened if row[1].low.device == device and row[1].is_joinable()]
                if rows:
                    halves = [half for _, half in rows]
                    masters = [master for master, _ in rows]
                    split_(masters, [half.parameter for half in halves], [half.low for half in halves])
            for master, half in opened:
                if not half.is_joinable():
                    half.parameter.copy_(master)
            _close_unused(opened)

    def sync(self, *, both_ways: bool, frees_memory: bool) -> bool:
        """Record edits of parameters with closed masters, and copy edited parameters to open masters.

        Return whether open masters were edited.

        Args:
            both_ways: whether to write edited masters to their parameters. If a script has edited both, the master
                wins.
            frees_memory: whether to let go of `LowHalf.written` where the parameter was not edited, because a backward
                pass, which needs the memory, may follow.
        """
        edited: list[Tensor] = []
        outdated: list[tuple[Tensor, LowHalf]] = []
        for master, half in self.masters.values():
            if type(master) is ClosedMaster:
                if half.written is None:
                    continue
                if half.is_parameter_edited():
                    half.has_edits = True  # first, or an interrupt would lose the edit
                    half.record_parameter()
                elif frees_memory and not half.has_edits:
                    half.free_written()
            elif half.is_master_edited(master):
                edited.append(half.parameter)
            elif half.is_parameter_edited():
                _take_over(master, half)  # the script may hold the values
                outdated.append((master, half))
        if outdated:
            _close_unused(outdated)
        if both_ways and edited:
            self.write(edited)
        return bool(edited)

    def write_edited(self, parameters: Iterable[Tensor]) -> None:
        """Write the masters of `parameters` that are open and were edited."""
        edited: list[Tensor] = []
        for master, half in self._find(parameters):
            if type(master) is not ClosedMaster and half.is_master_edited(master):
                edited.append(half.parameter)
        self.write(edited)

    def _find(self, parameters: Iterable[Tensor] | None) -> Sequence[tuple[Tensor, LowHalf]]:
        if parameters is None:
            return list(self.masters.values())
        return [self.masters[id(parameter)] for parameter in parameters if id(parameter) in self.masters]


def _expect_edits(halves: Iterable[LowHalf]) -> None:
    """Copy the parameters to `LowHalf.written`, where there is no copy yet, so that `sync` finds later edits."""
    unkept = [half for half in halves if half.written is None]
    copies = [torch.empty_like(half.parameter, requires_grad=False) for half in unkept]
    copy_(group(copies, [half.parameter for half in unkept]))
    for half, copied in zip(unkept, copies, strict=True):
        half.is_private = False
        half.keep_written(copied)


def _take_over(master: Tensor, half: LowHalf) -> None:
    """Copy the edits of a parameter to its open master."""
    half.has_edits = half.written is not None
    (values,) = _make_values([half])
    with torch.inference_mode(False), torch.no_grad():
        master.copy_(values)
    half.record_parameter()
    half.record(master)


def _close_unused(opened: Sequence[tuple[Tensor, LowHalf]]) -> None:
    """Close masters, except those whose values something else holds, and those whose parameter the script has cast.

    Record the state of the masters that stay open.
    """
    closable = [row for row in opened if row[1].is_private and row[1].is_joinable()]
    by_storage: dict[int, list[tuple[Tensor, LowHalf]]] = {}
    for master, half in opened:
        if not (half.is_private and half.is_joinable()):
            half.forget()
            by_storage.setdefault(get_storage_address(master), []).append((master, half))
    for address, rows in by_storage.items():
        is_used = get_storage_uses(address) > len(rows) + _get_own_uses()
        for master, half in rows:
            if is_used or not half.is_joinable():
                half.record(master)
            else:
                closable.append((master, half))
    _close(closable)


def _is_shared(tensor: Tensor) -> bool:
    """Return whether other tensors use the memory of a tensor."""
    return get_storage_uses(get_storage_address(tensor)) > 1 + _get_own_uses()


def _get_own_uses() -> int:
    """Return how many uses of a storage torch itself counts besides those of tensors."""
    lone = torch.empty(())
    return get_storage_uses(get_storage_address(lone)) - 1
