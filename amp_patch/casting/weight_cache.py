"""The 16-bit copies of float32 parameters that whitelisted ops read, made once for all forward passes up to the next
optimizer step.

A copy is `p.to(low)` with gradients enabled. The cast's autograd node saves nothing, so it carries gradients back to
the parameter in any number of forward and backward passes.

What must never happen is a forward with old weights. Version counters alone do not tell (fused optimizers do not bump
them), nor do addresses (memory is used again). So a copy is used only while its entry is *valid*: the entry holds the
memory that the copy was made from, each use compares the signature and the dtype, and any optimizer step, both ends of
an outermost forward without gradients, the exit of `scale_loss` and `refresh` invalidate entries. What records ops
(traces, function transforms, dispatch modes) must see the cast each time, and is never given an entry.

Where launching a kernel costs more than running it, copies that no graph holds any more are *refreshed* in place, all
of them in one `torch._foreach_copy_`; one that a live graph holds is replaced by a new one. On a CPU copies are dropped
instead: one made where it is used is in the caches, and refreshed copies made a step of a small transformer 5 % longer.
The cache lets go of them when an outermost `scale_loss` block begins: the backward pass frees them one by one.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, is_autocast_cache_enabled, is_grad_enabled, is_inference_mode_enabled, strided

from ..dtypes import PLAIN_CLASSES, TensorCast
from ..events import count_watching_modes
from ..multi_tensor import copy_, group
from ..torch_private import (
    count_dispatch_modes,
    get_storage_address,
    get_storage_uses,
    get_tensor_uses,
    get_tracing_state,
    get_version,
    peek_interpreter_stack,
)
from .compiling import is_compiling, is_dynamo_compiling

Signature = tuple[int, int, bool, torch.Size, tuple[int, ...]]
"""What a parameter must still have for its copy to be used: version, address, requires_grad, shape and strides."""

ValidEntry = tuple[Tensor, Signature, object]
"""The copy, the signature of the parameter, and its memory: while that is held, no other has its address."""

SMALL_ON_CPU = 2**15
"""On a CPU, a copy of fewer elements costs as much to enter and to look up as to make (torch 2.13.0, AVX512_BF16)."""

FEW = 2
"""So many uses of a small parameter, between two invalidations, take a cast each; an unrolled RNN uses it often."""


@dataclass(slots=True)
class _Entry:
    """A copy that is refreshed in place.

    Attributes:
        parameter, copy: what ops are given is the copy; its grad_fn leads to the parameter.
        alias: the memory of the copy without the grad_fn: what a refresh writes.
        source: an alias of the parameter's memory, to which no other can come while it lives.
        place: device and signature of the parameter, without the version: what no step changes. After `set_`, gradients
            of old copies would lead nowhere.
        memory: the address of the copy's storage.
        idle_uses: how many hold the copy and its storage while no graph needs them.
    """

    parameter: Tensor
    copy: Tensor
    alias: Tensor
    source: Tensor
    place: tuple[object, ...]
    memory: int
    idle_uses: tuple[int, int] = (0, 0)

    def count_uses(self) -> tuple[int, int]:
        """Count the holders of the copy and of its storage: a graph saves the tensor itself or a view of it."""
        return get_tensor_uses(self.copy), get_storage_uses(self.memory)

    def may_be_written(self) -> bool:
        """Tell whether no graph needs the values that the copy has now, and the parameter is what it was."""
        return (
            self.parameter.dtype is torch.float32
            and _is_cacheable(self.parameter)
            and self.place == _place(self.parameter)
            and self.count_uses() == self.idle_uses
        )


def _signature(parameter: Tensor) -> Signature:
    return get_version(parameter), parameter.data_ptr(), parameter.requires_grad, parameter.shape, parameter.stride()


def _place(parameter: Tensor) -> tuple[object, ...]:
    return parameter.device, *_signature(parameter)[1:]


def are_refreshed_on(device_type: str) -> bool:
    """Tell whether copies on such devices are refreshed in place, or dropped and made anew."""
    return device_type != "cpu"


class WeightCache:
    """The copies of one session, of the parameters given to `own`.

    Args:
        low: their dtype.
        device_type: where they are, which says whether they are refreshed in place, or dropped.
        is_rounded: copies are float32, with values of the low dtype. They are never refreshed: that takes two casts.
        smallest: parameters of fewer elements have a copy from their third use. The gradients of the first two are
            added in float32; those of a copy, as under torch.autocast, in the low dtype.

    Attributes:
        valid, owned: the valid entries and the parameters, by the parameter's id.
    """

    def __init__(
        self,
        low: torch.dtype,
        device_type: str,
        *,
        is_rounded: bool = False,
        smallest: int = 0,
    ) -> None:
        self.low = low
        self._smallest = smallest
        self.valid: dict[int, ValidEntry] = {}
        self.owned: dict[int, Tensor] = {}
        self._is_refreshed = are_refreshed_on(device_type) and not is_rounded
        self._entries: dict[int, _Entry] = {}  # those that are refreshed
        self._uses: dict[int, int] = {}  # of small parameters since the last invalidation
        self._is_bypassed = False
        self._lock = threading.RLock()

    def own(self, parameters: Iterable[Tensor]) -> None:
        """Cache copies of these parameters. Only of float32 ones; the others take a plain cast at each use."""
        for parameter in parameters:
            self.owned[id(parameter)] = parameter

    def keep_only(self, parameters: Iterable[Tensor]) -> None:
        """Forget all parameters but these, and free their copies."""
        kept = {id(parameter) for parameter in parameters}
        for key in list(self.owned):
            if key not in kept:
                self.owned.pop(key, None)
                self._drop(key)

    def disown_all(self) -> None:
        """Forget every parameter, and free the copies."""
        self.owned.clear()
        self._entries.clear()
        self.invalidate_all()

    def make_cast(self, plain_cast: TensorCast) -> TensorCast:
        """Return the function that casts one tensor to the low dtype: by a valid entry if there is one, else by
        `plain_cast`. A tensor that may have an entry has one from then on.
        """
        valid, owned, float32 = self.valid, self.owned, torch.float32
        smallest, uses, is_refreshed = self._smallest, self._uses, self._is_refreshed

        def to_low(tensor: Tensor) -> Tensor:
            if is_dynamo_compiling():
                return plain_cast(tensor)
            key = id(tensor)
            if tensor.dtype is not float32 or tensor.__class__ not in PLAIN_CLASSES:
                return plain_cast(tensor)
            if tensor.numel() < smallest:
                count = uses.get(key, 0)
                if count < FEW:
                    uses[key] = count + 1
                    return plain_cast(tensor)
            if key not in owned:
                return plain_cast(tensor)
            if (modes := count_dispatch_modes()) and modes > count_watching_modes():
                return plain_cast(tensor)
            entry = valid.get(key)
            if entry is not None and entry[1] == _signature(tensor):
                return entry[0]
            # without gradients nothing would invalidate an entry before weights that were swapped in are swapped out
            if self._is_bypassed or not is_grad_enabled() or is_inference_mode_enabled() or not _is_cacheable(tensor):
                return plain_cast(tensor)
            if is_refreshed:
                return self._refresh_or_enter(tensor, plain_cast)
            copy = plain_cast(tensor)
            if copy is not tensor:  # which is what comes of a tensor of another device type: not ours to cast
                valid[key] = (copy, _signature(tensor), tensor.untyped_storage())
            return copy

        return to_low

    def _refresh_or_enter(self, tensor: Tensor, plain_cast: TensorCast) -> Tensor:
        key = id(tensor)
        with self._lock:  # two threads that refresh at once would write under each other's graphs
            valid = self.valid.get(key)
            if valid is None or valid[1] != _signature(tensor):
                self.valid.pop(key, None)
                self._refresh()
                valid = self.valid.get(key)
            if valid is not None:
                return valid[0]
            copy = plain_cast(tensor)
            if copy is not tensor:
                alias, source = copy.detach(), tensor.detach()
                entry = _Entry(tensor, copy, alias, source, _place(tensor), get_storage_address(alias))
                entry.idle_uses = entry.count_uses()
                self._entries[key] = entry
                self.valid[key] = (copy, _signature(tensor), source)
            return copy

    def _drop(self, key: int) -> None:
        self.valid.pop(key, None)
        self._entries.pop(key, None)

    def _refresh(self) -> None:
        """Make every entry valid, in one kernel for each device; drop those whose copy may not be written."""
        refreshed: list[_Entry] = []
        for key in list(self._entries):  # not items: garbage that is collected meanwhile may own some of them
            entry = self._entries.get(key)
            if entry is None or key in self.valid:
                continue
            if entry.may_be_written():
                refreshed.append(entry)
            else:
                self._drop(key)
        copy_(group([entry.alias for entry in refreshed], [entry.parameter for entry in refreshed]))
        for entry in refreshed:
            self.valid[id(entry.parameter)] = (entry.copy, _signature(entry.parameter), entry.source)

    @contextlib.contextmanager
    def bypassed(self) -> Iterator[None]:
        """Cast every weight plainly inside the block, in all threads: what traces the ops must see the cast, not its
        stored result.
        """
        before, self._is_bypassed = self._is_bypassed, True
        self.invalidate_all()
        try:
            yield
        finally:
            self._is_bypassed = before

    def mark_updated(self, parameters: Iterable[Tensor]) -> None:
        """Invalidate the entries of parameters that an optimizer stepped over."""
        if self.valid or self._uses:  # there is none after a scale_loss block
            for parameter in parameters:
                self.valid.pop(id(parameter), None)
                self._uses.pop(id(parameter), None)

    def leave_to_graphs(self) -> None:
        """Hold no copy that is not refreshed any more, so that a backward pass frees each with the last use of it."""
        if not self._is_refreshed:
            self.invalidate_all()

    def invalidate_all(self) -> None:
        """Invalidate every entry: weights may have been edited where nothing shows it (`p.data.mul_`)."""
        self.valid.clear()
        self._uses.clear()


class RegionCache(WeightCache):
    """The copies of a session over `torch.autocast`: of each leaf that requires gradients, as long as torch keeps its
    own copies of such leaves.

    Scripts that nobody edits change weights where no version counter shows it (`p.data.add_`). torch is right about
    them by these laws alone: it keeps nothing where `cache_enabled=False` (a script that is one region that never ends
    is in such a region), and forgets everything when a thread leaves its outermost region. So each use asks torch
    first. `valid` stays empty: an op that looks copies up there by itself would not ask.
    """

    def __init__(self, low: torch.dtype, device_type: str, *, is_rounded: bool = False) -> None:
        super().__init__(low, device_type, is_rounded=is_rounded)
        self._kept: dict[int, ValidEntry] = {}

    def make_cast(self, plain_cast: TensorCast) -> TensorCast:
        """Return the function that casts one tensor to the low dtype: by a copy that is kept, else by `plain_cast`."""
        kept, float32 = self._kept, torch.float32

        def to_low(tensor: Tensor) -> Tensor:
            if is_dynamo_compiling() or tensor.dtype is not float32 or not tensor.requires_grad or not tensor.is_leaf:
                return plain_cast(tensor)
            if not is_autocast_cache_enabled():
                return plain_cast(tensor)
            if (modes := count_dispatch_modes()) and modes > count_watching_modes():
                return plain_cast(tensor)
            key = id(tensor)
            entry = kept.get(key)
            if entry is not None and entry[1] == _signature(tensor):
                return entry[0]
            if self._is_bypassed or not is_grad_enabled() or is_inference_mode_enabled() or not _is_cacheable(tensor):
                return plain_cast(tensor)
            copy = plain_cast(tensor)
            if copy is not tensor:  # a tensor of another device type is not cast
                kept[key] = (copy, _signature(tensor), tensor.untyped_storage())
            return copy

        return to_low

    def mark_updated(self, parameters: Iterable[Tensor]) -> None:
        """Drop the copies of parameters that an optimizer stepped over."""
        for parameter in parameters:
            self._kept.pop(id(parameter), None)

    def invalidate_all(self) -> None:
        """Drop every copy."""
        self._kept.clear()


def _is_cacheable(tensor: Tensor) -> bool:
    """Tell whether a float32 tensor may have a copy, and the cast is no part of a trace or a function transform."""
    if tensor.__class__ not in PLAIN_CLASSES or not tensor.is_leaf or tensor.layout is not strided:
        return False
    return peek_interpreter_stack() is None and not get_tracing_state() and not is_compiling()
