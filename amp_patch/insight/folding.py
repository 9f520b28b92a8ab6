"""`Folding`: calls that are alike, folded into one record with their number: memory goes by lines of code."""

import threading
from dataclasses import replace

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
    """The records so far, in the order in which the first of each kind came. Calls come from any thread."""

    def __init__(self) -> None:
        self.step = 0
        self._ops: dict[tuple[object, ...], OpRecord] = {}
        self._undone: dict[UndoneCastRecord, int] = {}
        self._lock = threading.Lock()

    def add(self, call: Call) -> None:
        """Take in a call that has ended."""
        target = None if call.target is None else short(call.target)
        is_cast = target in call.ran or target in call.out  # else it ran as it was written: with out=, say
        avoided = len(call.sources - call.copied) if is_cast else 0
        record = OpRecord(
            step=self.step,
            phase=call.phase,
            module=call.module,
            op=call.op,
            rule=call.rule,
            entry=call.entry,
            region=call.region,
            given=call.given,
            ran=tuple(sorted(call.ran)),
            out=call.out,
            site=call.site.place,
        )
        key = tuple(getattr(record, name) for name in _KEY)
        with self._lock:
            known = self._ops.get(key)
            self._ops[key] = replace(
                record,
                calls=1 + (known.calls if known else 0),
                casts=call.casts + (known.casts if known else 0),
                avoided=avoided + (known.avoided if known else 0),
            )

    def add_undone(self, producer: Call, consumer: Call, outside: str, between: str) -> None:
        """Take in a cast that undoes one of the call before."""
        record = UndoneCastRecord(self.step, consumer.module, producer.op, consumer.op, outside, between)
        with self._lock:
            self._undone[record] = self._undone.get(record, 0) + 1

    def ops(self) -> list[OpRecord]:
        """Return the records of ops."""
        with self._lock:
            return list(self._ops.values())

    def undone(self) -> list[UndoneCastRecord]:
        """Return the records of casts that undo each other."""
        with self._lock:
            return [replace(record, calls=calls) for record, calls in self._undone.items()]


_KEY = tuple(name for name in OpRecord.__slots__ if name not in ("calls", "casts", "avoided"))
