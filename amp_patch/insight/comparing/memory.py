"""`PeakMeter`: measures the largest number of bytes in use between `start` and `stop`."""

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...dtypes import PLAIN_CLASSES
from ...events import add_watching_modes
from ...session import Session
from ...torch_dispatch import TorchDispatchMode, leave_mode
from ..tensors import tensors_in


class PeakMeter:
    """Measures the peak of the memory of a session.

    On an accelerator, the allocator of torch reports the peak of the process; if it does not, as on MPS, the peak is
    None.

    On a CPU, a dispatch mode adds up the storages that are alive: weights, float32 masters, buffers, gradients and
    optimizer states, and all results of ops. It does not count memory that ops use internally, or storages of sparse
    tensors and of tensor subclasses.

    Stop the meter in the thread that started it. On a CPU, code of torch.compile runs uncompiled until then.

    Attributes:
        peak: bytes; None before `stop`, and if unknown.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._counting: _Counting | None = None
        self.peak: int | None = None

    def start(self) -> None:
        """Start measuring."""
        if self._session.device_type != "cpu":
            self._call_allocator("reset_peak_memory_stats")
        else:
            self._counting = _Counting()
            self._counting.add_all(_state_of(self._session))
            add_watching_modes(1)
            self._counting.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop measuring, and set `peak`. A second call does nothing."""
        if self._session.device_type != "cpu":
            self.peak = self.peak or self._call_allocator("max_memory_allocated")
        elif self._counting is not None and leave_mode(self._counting):
            add_watching_modes(-1)
            self.peak, self._counting = self._counting.peak, None

    def _call_allocator(self, name: str) -> Any:
        """Call a function of the device's module, such as torch.cuda. Return None if the module does not have it."""
        function = getattr(torch.get_device_module(self._session.device_type), name, lambda: None)
        return function()


class _Counting(TorchDispatchMode):
    """Adds up the bytes of storages that are alive, each storage once.

    A storage is known by the id of its Python object, because torch keeps this object as long as the storage.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, weakref.ref[Any]] = {}  # the living storages, by id
        self._sizes: dict[weakref.ref[Any], tuple[int, int]] = {}  # the id of each storage, and its bytes
        self._freed: list[weakref.ref[Any]] = []  # the storages that were freed since the last op
        self._in_use = self.peak = 0  # bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add_all(tensors_in((result,)))
        return result

    def add_all(self, tensors: Iterable[Tensor]) -> None:
        """Subtract the storages that were freed since the last call. Add the storages of plain CPU tensors that are not
        counted yet.
        """
        while self._freed:
            key, size = self._sizes.pop(self._freed.pop())
            del self._known[key]
            self._in_use -= size
        for tensor in tensors:
            if type(tensor) not in PLAIN_CLASSES or tensor.layout is not torch.strided or not tensor.is_cpu:
                continue
            storage = tensor.untyped_storage()
            if id(storage) not in self._known:
                self._add(storage, id(storage), storage.nbytes())
        self.peak = max(self.peak, self._in_use)

    def _add(self, storage: Any, key: int, size: int) -> None:
        # the callback is no Python function, because a Ctrl-C during its call would be lost
        reference = weakref.ref(storage, self._freed.append)
        self._known[key], self._sizes[reference] = reference, (key, size)
        self._in_use += size


def _state_of(session: Session) -> Iterator[Tensor]:
    """Yield weights and buffers with their gradients, then the tensors stored for masters, and optimizer states."""
    models = (itertools.chain(model.parameters(), model.buffers()) for model in session.models())
    optimizers = session.optimizers()
    stepped = (group["params"] for optimizer in optimizers for group in optimizer.param_groups)
    for weight in itertools.chain(*models, *stepped):
        yield weight
        # a closed split master (see `split_masters`) is no plain tensor: reading its `grad` would make a float32 one
        if type(weight) in PLAIN_CLASSES and weight.is_leaf and weight.grad is not None:
            yield weight.grad
    yield from session.bindings.masters.find_stored()
    for optimizer in optimizers:
        yield from tensors_in(optimizer.state.values())
