"""`WeightCache`: 16-bit copies of float32 parameters, so that whitelisted ops do not cast a weight at each use.

A copy is `p.to(low)`, or `p.to(low).float()` for products in float32, made with gradients enabled. The autograd node
of a cast saves no tensor, so the same copy carries gradients to the parameter in any number of forward and backward
passes.

A forward pass must never use old weights. So a copy belongs to an *entry*, and is used only while the entry is *valid*:

* Events after which weights may be different invalidate entries: optimizer steps, both ends of an outermost forward
  without gradients, the exit of `scale_loss` (unless delayed), and `refresh`. Version counters alone do not show every
  edit, because fused optimizers do not raise them.
* Each use compares the parameter's `Signature` with the one from when the copy was last written. The entry keeps the
  memory of the parameter alive, so that no other tensor can get the same address.

Code that records ops (traces, and dispatch modes that do more than watch) must record a cast at each use, and gets no
copy. Inside a function transform, such as `torch.func.grad`, a valid copy is used, but none is made.

What happens to a copy whose entry is not valid any more depends on the device:

* On a GPU, launching the kernel of a cast often takes longer than running it. So the next use of an invalid copy
  *refreshes* all invalid copies in place, with one `torch._foreach_copy_` for each device. A copy that a live autograd
  graph holds must keep its values, and is replaced by a new one.
* On a CPU, invalid copies are dropped, because a new copy is in the CPU's own caches: with refreshed copies, a step of
  a small transformer took 5 % longer. Valid copies are also dropped when an outermost `scale_loss` block begins, unless
  it is delayed. From then on only the graph holds them, so the backward pass can free each after its last use.

Copies for products in float32, and the copies of a `RegionCache`, are dropped on every device, and never refreshed.
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
"""The state in which a parameter was copied: version, address, requires_grad, shape and strides."""

ValidEntry = tuple[Tensor, Signature, object]
"""The copy, the signature of the parameter, and an object that keeps the memory of the parameter alive."""

SMALL_ON_CPU = 2**15
"""On a CPU, a copy of fewer elements costs as much to store and look up as to make (torch 2.13.0, AVX512_BF16)."""

PLAIN_USES = 2
"""The number of uses of a small parameter after an invalidation that take a plain cast each. Later uses, as in an
unrolled RNN, get a copy."""


@dataclass(slots=True)
class _Entry:
    """A copy that is refreshed in place.

    Attributes:
        copy: the tensor that ops get. Its grad_fn, if it has one, leads to the parameter.
        alias: a detached alias of the copy; a refresh writes to it.
        source: a detached alias of the parameter. It keeps the parameter's memory alive.
        identity: the device of the parameter, and its signature without the version. In-place updates of values do not
            change it. After another change, as by `Tensor.set_`, the graph of the copy may not fit the parameter.
        storage_address: the address of the copy's C++ storage.
        idle_uses: the reference counts of the copy and its storage while no graph holds them.
    """

    parameter: Tensor
    copy: Tensor
    alias: Tensor
    source: Tensor
    identity: tuple[object, ...]
    storage_address: int
    idle_uses: tuple[int, int] = (0, 0)

    def count_uses(self) -> tuple[int, int]:
        """Return the reference counts of the copy and its storage. A graph that holds the copy, or a view of it, raises
        one of them.
        """
        return get_tensor_uses(self.copy), get_storage_uses(self.storage_address)

    def may_be_refreshed(self) -> bool:
        """Return whether the parameter may have a copy now, the copy's graph still fits it (see `identity`), and no
        graph of a forward pass holds the copy.
        """
        return (
            self.parameter.dtype is torch.float32
            and _is_cacheable(self.parameter)
            and self.identity == _identify(self.parameter)
            and self.count_uses() == self.idle_uses
        )


def _signature(parameter: Tensor) -> Signature:
    return get_version(parameter), parameter.data_ptr(), parameter.requires_grad, parameter.shape, parameter.stride()


def _identify(parameter: Tensor) -> tuple[object, ...]:
    return parameter.device, *_signature(parameter)[1:]


def are_refreshed_on(device_type: str) -> bool:
    """Return whether invalid 16-bit copies on devices of a type are refreshed in place. Otherwise they are dropped."""
    return device_type != "cpu"


class WeightCache:
    """The copies of one session's parameters.

    Args:
        low: the dtype of the copies.
        device_type: the type of the devices (see `are_refreshed_on`).
        is_rounded: whether copies are float32 tensors, rounded to the low dtype. Such copies are not refreshed, because
            that would take two casts.
        smallest: parameters with fewer elements get a copy only from their third use on: see `PLAIN_USES`. (Autograd
            adds up the gradients of several plain casts in float32, and the gradients of several uses of a copy in the
            low dtype, as under torch.autocast.)

    Attributes:
        valid: the valid entries, by the id of the parameter.
        owned: the parameters that may have a copy, by their id.
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
        self._entries: dict[int, _Entry] = {}  # entries that are refreshed
        self._uses: dict[int, int] = {}  # the uses of small tensors since the last invalidation, by id
        self._is_bypassed = False
        self._lock = threading.RLock()

    def own(self, parameters: Iterable[Tensor]) -> None:
        """Let these parameters have copies from now on. Parameters of other dtypes than float32 get none."""
        for parameter in parameters:
            self.owned[id(parameter)] = parameter

    def keep_only(self, parameters: Iterable[Tensor]) -> None:
        """Forget every parameter that is not among these, and drop its copy."""
        kept = {id(parameter) for parameter in parameters}
        for key in list(self.owned):
            if key not in kept:
                self.owned.pop(key, None)
                self._drop(key)

    def disown_all(self) -> None:
        """Forget every parameter, and drop the copies."""
        self.owned.clear()
        self._entries.clear()
        self.invalidate_all()

    def make_cast(self, plain_cast: TensorCast) -> TensorCast:
        """Return the function that casts a tensor to the low dtype. It returns the copy of a parameter where that is
        allowed, and makes one if necessary. Otherwise it returns the result of `plain_cast`.
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
                if count < PLAIN_USES:
                    uses[key] = count + 1
                    return plain_cast(tensor)
            if key not in owned:
                return plain_cast(tensor)
            if (modes := count_dispatch_modes()) and modes > count_watching_modes():
                return plain_cast(tensor)
            entry = valid.get(key)
            if entry is not None and entry[1] == _signature(tensor):
                return entry[0]
            # Store nothing while gradients are disabled: scripts swap averaged weights in and out for an evaluation,
            # and nothing would invalidate the entry when they are swapped out.
            if self._is_bypassed or not is_grad_enabled() or is_inference_mode_enabled() or not _is_cacheable(tensor):
                return plain_cast(tensor)
            if is_refreshed:
                return self._refresh_or_store(tensor, plain_cast)
            copy = plain_cast(tensor)
            if copy is not tensor:  # a tensor of another device type is not cast
                valid[key] = (copy, _signature(tensor), tensor.untyped_storage())
            return copy

        return to_low

    def _refresh_or_store(self, tensor: Tensor, plain_cast: TensorCast) -> Tensor:
        """Return the copy of `tensor`. If it is missing or invalid, refresh all invalid copies first, then make it if
        it is still missing.
        """
        key = id(tensor)
        with self._lock:  # two threads that refresh at once would overwrite copies in each other's graphs
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
                entry = _Entry(tensor, copy, alias, source, _identify(tensor), get_storage_address(alias))
                entry.idle_uses = entry.count_uses()
                self._entries[key] = entry
                self.valid[key] = (copy, _signature(tensor), source)
            return copy

    def _drop(self, key: int) -> None:
        self.valid.pop(key, None)
        self._entries.pop(key, None)

    def _refresh(self) -> None:
        """Write the parameters of all invalid entries to their copies, so that these entries are valid again: one
        foreach call for each device. Drop entries whose copy must not be written.
        """
        refreshed: list[_Entry] = []
        for key in list(self._entries):  # a garbage collection in this loop may remove entries
            entry = self._entries.get(key)
            if entry is None or key in self.valid:
                continue
            if entry.may_be_refreshed():
                refreshed.append(entry)
            else:
                self._drop(key)
        copy_(group([entry.alias for entry in refreshed], [entry.parameter for entry in refreshed]))
        for entry in refreshed:
            self.valid[id(entry.parameter)] = (entry.copy, _signature(entry.parameter), entry.source)

    @contextlib.contextmanager
    def bypassed(self) -> Iterator[None]:
        """Context manager: no thread uses or makes copies while the block runs, so that a tracer records every cast."""
        before, self._is_bypassed = self._is_bypassed, True
        self.invalidate_all()
        try:
            yield
        finally:
            self._is_bypassed = before

    def mark_updated(self, parameters: Iterable[Tensor]) -> None:
        """Invalidate the entries of parameters that an optimizer has updated."""
        if self.valid or self._uses:  # false if the end of a scale_loss block has just invalidated all
            for parameter in parameters:
                self.valid.pop(id(parameter), None)
                self._uses.pop(id(parameter), None)

    def leave_to_graphs(self) -> None:
        """Drop all copies, unless copies are refreshed in place. A dropped copy is held by graphs alone, so a backward
        pass can free it after its last use.
        """
        if not self._is_refreshed:
            self.invalidate_all()

    def invalidate_all(self) -> None:
        """Invalidate every entry. For edits such as `p.data.mul_`, which change no version counter."""
        self.valid.clear()
        self._uses.clear()


class RegionCache(WeightCache):
    """The copies of a session under `torch.autocast`. Each float32 leaf that requires gradients may have a copy, while
    torch's own cache of weights is enabled.

    torch's cache is cleared whenever a thread leaves its outermost region, and keeps nothing under
    `cache_enabled=False`. This cache keeps its copies no longer than torch keeps its own, because a script may edit
    weights in ways that change no version counter (`p.data.add_`). A patch of `torch.clear_autocast_cache` drops the
    copies, and each use asks torch whether torch's cache is enabled. The fast paths of ops read `valid` without
    asking, so `valid` stays empty here, and copies are in `_copies`.
    """

    def __init__(self, low: torch.dtype, device_type: str, *, is_rounded: bool = False) -> None:
        super().__init__(low, device_type, is_rounded=is_rounded)
        self._copies: dict[int, ValidEntry] = {}

    def make_cast(self, plain_cast: TensorCast) -> TensorCast:
        """Return the function that casts a tensor to the low dtype. It returns the stored copy of a tensor with the
        same signature. Otherwise it returns the result of `plain_cast`, and stores it where that is allowed.
        """
        copies, float32 = self._copies, torch.float32

        def to_low(tensor: Tensor) -> Tensor:
            if is_dynamo_compiling() or tensor.dtype is not float32 or not tensor.requires_grad or not tensor.is_leaf:
                return plain_cast(tensor)
            if not is_autocast_cache_enabled():
                return plain_cast(tensor)
            if (modes := count_dispatch_modes()) and modes > count_watching_modes():
                return plain_cast(tensor)
            key = id(tensor)
            entry = copies.get(key)
            if entry is not None and entry[1] == _signature(tensor):
                return entry[0]
            if self._is_bypassed or not is_grad_enabled() or is_inference_mode_enabled() or not _is_cacheable(tensor):
                return plain_cast(tensor)
            copy = plain_cast(tensor)
            if copy is not tensor:  # a tensor of another device type is not cast
                copies[key] = (copy, _signature(tensor), tensor.untyped_storage())
            return copy

        return to_low

    def mark_updated(self, parameters: Iterable[Tensor]) -> None:
        """Drop the copies of parameters that an optimizer has updated."""
        if self._copies:
            for parameter in parameters:
                self._copies.pop(id(parameter), None)

    def invalidate_all(self) -> None:
        """Drop every copy."""
        self._copies.clear()


def _is_cacheable(tensor: Tensor) -> bool:
    """Return whether a float32 tensor may have a copy, and no tracer, compiler or function transform is active."""
    if tensor.__class__ not in PLAIN_CLASSES or not tensor.is_leaf or tensor.layout is not strided:
        return False
    return peek_interpreter_stack() is None and not get_tracing_state() and not is_compiling()
