"""`QuietWatch`: passes the ops of a run on to `UpdateWatch` and `CopyWatch`, which look for quiet losses.

A *quiet loss* is a loss of precision: 16 bits make values wrong, and all values stay finite.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ...dtypes import LOW_DTYPES
from ...session import Session, current
from ...torch_dispatch import leave_mode
from ..naming import name_tensors
from ..ops import Op, Overload, find_overload
from ..quiet_record import QuietRecord
from ..sites import Site
from ..tensors import storage_of, tensors_in
from ..watching import WatchingMode
from .copies import CopyWatch
from .updates import UpdateWatch


class QuietWatch(WatchingMode):
    """Sees the ops of a run: in optimizer steps as a dispatch mode; outside of steps, an `Observer` calls `prepare` and
    `note`. Changes no value. Waits for the device.

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, overload = kwargs or {}, find_overload(func)
        site = self.prepare(overload, args, kwargs)
        result = func(*args, **kwargs)
        self.note(Op(overload, func, args, args, kwargs, result, None), site)
        return result

    def prepare(self, overload: Overload, args: Sequence[Any], kwargs: dict[str, Any]) -> Site | None:
        """Prepare for an op that is about to run. Return its line if `note` has to compute it in float32, else None."""
        if overload.is_silent or not any(tensor.dtype in LOW_DTYPES for tensor in tensors_in((args, kwargs))):
            return None
        return self.updates.prepare(overload, args, kwargs)

    def note(self, op: Op, site: Site | None) -> None:
        """Look at an op that has run. `site` is the result of `prepare`."""
        self.updates.note_young(op)
        if site is not None:
            with current.without_casts():
                self.updates.follow(op, site)
        self.copies.note(op)

    def begin_step(self, optimizer: Optimizer, *, has_stepped: bool = False) -> None:
        """Note that an optimizer's step begins, and watch its ops. `has_stepped`: see `UpdateWatch.begin_step`."""
        self.updates.begin_step(optimizer, has_stepped=has_stepped)
        self.__enter__()

    def end_step(self, optimizer: Optimizer | None, step: int) -> None:
        """Note that a step ends, and judge its changes. `step` is the number of the next step."""
        leave_mode(self)
        self.updates.end_step(optimizer)
        self._names.clear()
        self.set_step(step)

    def set_step(self, step: int) -> None:
        """Set the number of the step that runs next."""
        self.updates.step = self.copies.step = step

    def records(self) -> list[QuietRecord]:
        """Return the records of the quiet losses so far."""
        return [*self.updates.records(), *self.copies.records()]

    def _find_name(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor of the models; "" for another tensor. None for a 16-bit parameter with a float32
        master, whose changes are not followed.
        """
        if not self._names:
            session = self._get_session()
            for name, known in name_tensors(session.models()):
                is_copy = known.requires_grad and session.find_master(known) is not None
                self._names.setdefault(storage_of(known), None if is_copy else name)
        return self._names.get(storage_of(tensor), "")
