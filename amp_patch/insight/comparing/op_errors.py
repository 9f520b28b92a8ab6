"""Finds the error that each op adds in 16 bits.

`OpErrors` measures the errors of ops in one run, the reference. `LowOps` finds out which ops run in 16 bits in another
run; their errors are those that `OpErrors` has measured.
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
"""Functions that do so on a GPU, but draw the same numbers for both dtypes on a CPU."""


class LowOps:
    """Notes which ops of a step have a result in 16 bits, while gradients are enabled. The records have no errors."""

    def __init__(self) -> None:
        self._watch: OpWatch | None = None
        self._session: Session | None = None
        self._has_seen_ops = False
        self._low_ops: dict[tuple[str, str, str], OpErrorRecord] = {}  # by module, op and line of the script

    def watch(self, session: Session) -> None:
        """Begin to watch the ops of a session. Call it again when the session gets more models: it begins anew, unless
        an op was seen already.
        """
        if self._watch is not None:
            if self._session is session and self._has_seen_ops:
                return  # with more models, modules may get other names, and noted ops have the old ones
            self._watch.stop()
        self._session = session
        self._watch = OpWatch(session, self._call, name_plainly, everywhere=True)
        self._watch.start()

    def stop(self) -> None:
        """Stop watching. It may be called twice."""
        if self._watch is not None:
            self._watch.stop()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager: ignore the ops of the block, which are not the script's."""
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
        """Yield a record for each op that has run in 16 bits, in each module and at each line of the script."""
        yield from self._low_ops.values()

    def _here(self) -> str:
        """Return the name of the module that runs."""
        assert self._watch is not None
        return self._watch.module_name()

    def _call(
        self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], op: str, rule: OpRule | None
    ) -> Any:
        """Call a function, and note the op if its result has 16 bits."""
        result = function(*args, **kwargs)
        if not torch.is_grad_enabled():
            return result
        for tensor in tensors_in([result]):
            self._has_seen_ops = True
            if tensor.dtype in LOW_DTYPES:
                self._note(name_plainly(function), tensor)
        return result

    def _note(self, op: str, result: torch.Tensor) -> None:
        """Note an op with a result in 16 bits."""
        # with the line: the same op may run in 16 bits at one line of a module, and in float32 at another
        key = self._here(), op, find_site().place
        if key not in self._low_ops:
            is_random = op in RANDOM or (op in _RANDOM_ON_GPU and result.device.type != "cpu")
            self._low_ops[key] = OpErrorRecord("", short(result.dtype), *key, is_random=is_random)


class OpErrors(LowOps):
    """Measures the error of each op of a step in float16 and in bfloat16, if its result is float32.

    The script gets the float32 result. For each 16-bit dtype, a `Shadow` also runs the call on inputs that are rounded
    to this dtype. Nothing is measured if gradients are disabled, or if a second call would differ (see
    `Shadow.run_low`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._shadows = [Shadow(low, lambda: 1.0) for low in sorted(LOW_DTYPES, key=str)]

    def stop(self) -> None:
        """Stop watching. It may be called twice."""
        super().stop()
        for shadow in self._shadows:
            shadow.end_step()

    def records(self) -> Iterator[OpErrorRecord]:
        """Yield a record for each op and 16-bit dtype, in each module and at each line of the script.

        The error is the larger one of the forward and the backward pass. An overflow in the forward pass is an error of
        inf.
        """
        for shadow in self._shadows:
            low = short(shadow.low)
            for measured in shadow.records():
                forward_error = math.inf if measured.overflow else measured.error
                is_backward = measured.backward_error > forward_error
                error = max(forward_error, measured.backward_error)
                yield OpErrorRecord("", low, measured.module, measured.op, measured.site, error, is_backward)

    def _call(
        self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], op: str, rule: OpRule | None
    ) -> Any:
        """Call a function, and compare its result with the results in 16 bits."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        # not `op`, which may be the name of a list's entry: a run without lists would have another name for the call
        module, op, site = self._here(), name_plainly(function), find_site().place
        # before the call, which may change its arguments in place
        low_results = [shadow.run_low(op, function, args, kwargs) for shadow in self._shadows]
        result = function(*args, **kwargs)
        self._has_seen_ops = self._has_seen_ops or any(True for _ in tensors_in([result]))
        for shadow, low_result in zip(self._shadows, low_results, strict=True):
            shadow.compare(module, op, low_result, result, is_listed=False, site=site)
        return result
