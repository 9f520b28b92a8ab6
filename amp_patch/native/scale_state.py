"""`ScaleState`: notices learning rate schedules that count skipped steps, and checkpoints without a scaler's state."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..patching import Patch
from .misuse import Kind, Misuse
from .roots import find_line, is_in_library

_OPTIMIZER_KEYS = frozenset({"state", "param_groups"})
_SCALER_KEYS = frozenset({"scale", "growth_factor", "backoff_factor"})
_DEEPEST = 3
_MOST_PARTS = 64
"""The depth to which a checkpoint is searched, and the number of items that are searched in each container: the
`state_dict` of a model has many weights."""


class ScaleState:
    """Observes the schedules and the checkpoints of a script. Calls `tell` with each misuse that it notices."""

    def __init__(self, tell: Callable[[Misuse], None]) -> None:
        self._tell = tell
        # For each optimizer, the number of its `scaler.step` calls, taken or skipped.
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._skipped: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers whose last step was skipped
        # For each schedule, the number of its `step` calls after the first, which its constructor usually makes.
        self._schedules: weakref.WeakKeyDictionary[LRScheduler, int] = weakref.WeakKeyDictionary()
        # the line that has saved a checkpoint since the last step, with the optimizer's state, but not the scaler's
        self._saved_at = ""
        # Whether `GradScaler.state_dict` was called: the script may save the state in a separate file.
        self._is_state_read = False

    def patches(self) -> Iterator[Patch]:
        """Yield the patches of LRScheduler.step, torch.save and GradScaler.state_dict."""
        yield Patch(LRScheduler, "step", self._check_schedule)
        yield Patch(torch, "save", self._note_saving)
        yield Patch(torch.amp.GradScaler, "state_dict", self._note_state)

    def note_scaled_step(self, optimizer: Any, *, is_skipped: bool) -> None:
        """Record a step by an enabled GradScaler.

        If a checkpoint was saved without the scaler since the step before, and `GradScaler.state_dict` was never
        called, report this now: the training goes on, so it was not the checkpoint of a finished model.
        """
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if is_skipped:
            self._skipped.add(optimizer)
        else:
            self._skipped.discard(optimizer)
        if self._saved_at and not self._is_state_read:
            self._tell(Misuse(Kind.UNSAVED_SCALER, self._saved_at))
        self._saved_at = ""

    def note_reading(self) -> None:
        """Forget which steps were skipped: the script has read the scale, which may tell it about a skipped step."""
        self._skipped.clear()

    def _check_schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
            count = self._schedules[scheduler] = self._schedules.get(scheduler, -1) + 1
            steps = self._steps.get(scheduler.optimizer, 0)
            # a schedule that has stepped less often than its optimizer may count epochs
            if 2 <= steps <= count and scheduler.optimizer in self._skipped and not is_in_library():
                self._tell(Misuse(Kind.SCHEDULED_SKIP, find_line()))
            return original(scheduler, *args, **kwargs)

        return step

    def _note_saving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
            if self._steps and _holds(obj, _OPTIMIZER_KEYS):
                self._saved_at = "" if _holds(obj, _SCALER_KEYS) else find_line()
            return original(obj, *args, **kwargs)

        return save

    def _note_state(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def state_dict(scaler: Any) -> Any:
            self._is_state_read = True
            return original(scaler)

        return state_dict


def _holds(value: Any, keys: frozenset[str], depth: int = 0) -> bool:
    """Return whether a checkpoint is a mapping with these keys, or holds one not deeper than `_DEEPEST`."""
    if isinstance(value, Mapping):
        if keys <= value.keys():
            return True
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    else:
        return False
    return depth < _DEEPEST and any(_holds(part, keys, depth + 1) for part in parts[:_MOST_PARTS])
