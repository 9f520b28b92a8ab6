"""`QuietWatch`: the dispatch mode that shows the ops of a run to those that look for quiet losses."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ...dtypes import LOW_DTYPES
from ...session import Session, current
from ..naming import name_tensors
from ..ops import Op, find_overload
from ..quiet_record import QuietRecord
from ..tensors import storage_of, tensors_in
from ..watching import WatchingMode
from .copies import CopyWatch
from .updates import UpdateWatch


class QuietWatch(WatchingMode):
    """Looks at ops that have 16-bit tensors, also those of optimizers. It changes no value, and waits for the device.

    Args:
        get_session: returns the session whose models are trained.
        find_module: returns the name of the module that is running.
    """

    def __init__(self, get_session: Callable[[], Session], find_module: Callable[[], str]) -> None:
        super().__init__()
        self._get_session = get_session
        self._names: dict[int, str | None] = {}  # by the address of the storage, until the step ends
        self.updates = UpdateWatch(self._find_name, find_module)
        self.copies = CopyWatch(self._find_name, find_module)
        self._is_busy = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        if self._is_busy:
            return func(*args, **kwargs)
        overload = find_overload(func)
        site = None
        is_given_low = any(tensor.dtype in LOW_DTYPES for tensor in tensors_in(given))
        if is_given_low:
            with self._busy():
                site = self.updates.prepare(overload, args, kwargs)
        result = func(*args, **kwargs)
        op = Op(overload, func, args, args, kwargs, result, None)
        self.updates.note_young(op)
        if is_given_low or any(tensor.dtype in LOW_DTYPES for tensor in op.outputs()):
            with self._busy():
                self.updates.note(op, site)
                self.copies.note(op)
        return result

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """Return a block whose ops are the watch's own: it does not look at them, and no list acts on them."""
        self._is_busy = True
        try:
            with current.without_casts():
                yield
        finally:
            self._is_busy = False

    def begin_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer's step begins."""
        with self._busy():
            self.updates.begin_step(optimizer)

    def end_step(self, optimizer: Optimizer | None, step: int) -> None:
        """Judge what has changed since the last step. `step` is the number of the next step."""
        with self._busy():
            self.updates.end_step(optimizer)
        self._names.clear()
        self.updates.step = self.copies.step = step

    def records(self) -> list[QuietRecord]:
        """Return the losses so far."""
        return [*self.updates.records(), *self.copies.records()]

    def _find_name(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor of the models, "" for another one, and None if it has a float32 master."""
        if not self._names:
            session = self._get_session()
            for name, known in name_tensors(session.models()):
                is_copy = known.requires_grad and session.find_master(known) is not None
                self._names.setdefault(storage_of(known), None if is_copy else name)
        return self._names.get(storage_of(tensor), "")
