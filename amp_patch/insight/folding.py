"""`Folding`: calls that are alike, folded into one record with their number: memory goes by lines of code."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .naming import Site
from .records import OpRecord, UndoneCastRecord
from .rules import short


class Call:
    """One call while it runs, and as long as ops of its backward pass may come.

    Attributes:
        listed: the name by which the lists have the op, "" for one that is on none.
        target: the dtype that the rule asks for, or None.
        sources: addresses of the tensors that are to be cast for it; `copied`: of those that were.
        cast_dtypes: from and to which dtypes it cast.
    """

    __slots__ = (
        *("cast_dtypes", "casts", "copied", "entry", "given", "listed", "module", "op", "out", "phase", "ran"),
        *("region", "rule", "site", "sources", "target"),
    )

    def __init__(self, op: str, module: str, site: Site, phase: str) -> None:
        self.op = op
        self.module = module
        self.site = site
        self.phase = phase
        self.rule = self.entry = self.region = self.listed = ""
        self.given: tuple[str, ...] = ()
        self.out: tuple[str, ...] = ()
        self.ran: set[str] = set()
        self.casts = 0
        self.target: torch.dtype | None = None
        self.sources: set[int] = set()
        self.copied: set[int] = set()
        self.cast_dtypes: set[tuple[str, str]] = set()


class Folding:
    """The records so far, in the order in which the first of each kind came. Calls come from any thread.

    Args:
        keeps_ops: False: nothing is recorded.
    """

    def __init__(self, *, keeps_ops: bool = True) -> None:
        self.keeps_ops = keeps_ops
        self.step = 0
        self._ops: dict[tuple[Any, ...], list[int]] = {}  # what makes records differ: calls, casts, avoided
        self._undone: dict[UndoneCastRecord, int] = {}
        self._lock = threading.Lock()

    def add(self, call: Call) -> None:
        """Take in a call that has ended."""
        if not self.keeps_ops:
            return
        avoided = 0
        if call.target is not None:
            target = short(call.target)
            if target in call.ran or target in call.out:  # else it ran as it was written: with out=, say
                avoided = len(call.sources - call.copied)
        key = (
            *(self.step, call.phase, call.module, call.op, call.rule, call.entry, call.region, call.given),
            *(frozenset(call.ran), call.out, call.site.place),
        )
        with self._lock:
            counts = self._ops.setdefault(key, [0, 0, 0])
            counts[0] += 1
            counts[1] += call.casts
            counts[2] += avoided

    def add_undone(self, producer: Call, consumer: Call, outside: str, between: str) -> None:
        """Take in a cast that undoes one of the call before."""
        if not self.keeps_ops:
            return
        record = UndoneCastRecord(self.step, consumer.module, producer.op, consumer.op, outside, between)
        with self._lock:
            self._undone[record] = self._undone.get(record, 0) + 1

    def ops(self) -> list[OpRecord]:
        """Return the records of ops."""
        with self._lock:
            found = [(key, tuple(counts)) for key, counts in self._ops.items()]
        return [_make_record(key, counts) for key, counts in found]

    def undone(self) -> list[UndoneCastRecord]:
        """Return the records of casts that undo each other."""
        with self._lock:
            return [replace(record, calls=calls) for record, calls in self._undone.items()]


def _make_record(key: tuple[Any, ...], counts: Sequence[int]) -> OpRecord:
    *before, ran, out, site = key
    calls, casts, avoided = counts
    return OpRecord(*before, tuple(sorted(ran)), out, site, calls, casts, avoided)  # type: ignore[call-arg]
