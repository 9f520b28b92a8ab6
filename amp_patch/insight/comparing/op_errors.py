"""Finds the error that each op adds in 16 bits. `OpErrors` measures it, in the run in float32; `LowOps` notes which ops
of another run have it.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...config import OpRule
from ...dtypes import LOW_DTYPES
from ...session import Session
from ..op_watch import Function, OpWatch, name_plainly
from ..records import OpErrorRecord
from ..rules import short
from ..shadow import Shadow
from ..sites import find_site
from ..tensors import tensors_in

RANDOM = frozenset(
    {"randn_like", "rand_like", "normal", "normal_", "uniform_", "exponential_", "rrelu", "gumbel_softmax"}
)
"""Functions that draw other random numbers in 16 bits than in float32, from the same seed."""

_RANDOM_ON_GPU = frozenset({"dropout", "dropout_", "alpha_dropout", "feature_dropout", "bernoulli", "bernoulli_"})
"""Functions that do so on a GPU, whose kernels draw several numbers at once, but not on a CPU."""


class LowOps:
    """Notes which ops of a step have a result in 16 bits."""

    def __init__(self) -> None:
        self._watch: OpWatch | None = None
        self._session: Session | None = None
        self._has_seen = False
        self._seen: dict[tuple[str, str], OpErrorRecord] = {}

    def watch(self, session: Session) -> None:
        """Begin. Called again when a session gets more models."""
        if self._watch is not None:
            if self._session is session and self._has_seen:
                return  # once ops are noted, the names of their modules should not change
            self._watch.stop()
        self._session = session
        self._watch = OpWatch(session, self._call, name_plainly, everywhere=True)
        self._watch.start()

    def stop(self) -> None:
        """End. Harmless twice."""
        if self._watch is not None:
            self._watch.stop()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager: ignore the ops of the block, because they are not the script's."""
        watch = self._watch
        if watch is None or watch.is_busy:
            yield
            return
        watch.is_busy = True
        try:
            yield
        finally:
            watch.is_busy = False

    def records(self) -> Iterator[OpErrorRecord]:
        """Yield a record for each op in each module."""
        yield from self._seen.values()

    def _here(self) -> str:
        """Return the name of the module that runs."""
        assert self._watch is not None
        return self._watch.module_name()

    def _call(
        self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], op: str, rule: OpRule | None
    ) -> Any:
        result = function(*args, **kwargs)
        if not torch.is_grad_enabled():
            return result
        op = _shorten(op)
        for tensor in tensors_in([result]):
            self._has_seen = True
            if tensor.dtype in LOW_DTYPES and (self._here(), op) not in self._seen:
                is_random = op in RANDOM or (op in _RANDOM_ON_GPU and tensor.device.type != "cpu")
                key = self._here(), op
                self._seen[key] = OpErrorRecord("", short(tensor.dtype), *key, find_site().place, is_random=is_random)
        return result


class OpErrors(LowOps):
    """Measures the error of each op of a step in both 16-bit dtypes, in a run in float32."""

    def __init__(self) -> None:
        super().__init__()
        self._shadows = [Shadow(low, lambda: 1.0) for low in sorted(LOW_DTYPES, key=str)]
        self._sites: dict[tuple[str, str], str] = {}

    def stop(self) -> None:
        """End. Harmless twice."""
        super().stop()
        for shadow in self._shadows:
            shadow.end_step()

    def records(self) -> Iterator[OpErrorRecord]:
        """Yield a record for each op in each module, and each dtype."""
        for shadow in self._shadows:
            low = short(shadow.low)
            for seen in shadow.records():
                error, site = math.inf if seen.overflow else seen.error, self._sites.get((seen.module, seen.op), "")
                is_backward = seen.backward_error > error
                error = max(error, seen.backward_error)
                yield OpErrorRecord("", low, seen.module, seen.op, site, error, is_backward)

    def _call(
        self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], op: str, rule: OpRule | None
    ) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        place, op = self._here(), _shorten(op)
        if (place, op) not in self._sites:
            self._sites[place, op] = find_site().place
        low_results = [shadow.run_low(op, function, args, kwargs) for shadow in self._shadows]
        result = function(*args, **kwargs)
        self._has_seen = self._has_seen or any(True for _ in tensors_in([result]))
        for shadow, low in zip(self._shadows, low_results, strict=True):
            shadow.compare(place, op, low, result, is_listed=False)
        return result


def _shorten(op: str) -> str:
    return op.rpartition(".")[2]
