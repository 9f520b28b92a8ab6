"""`Folding`: calls that are alike, folded into one record with their number: memory goes by lines of code."""

import threading
from dataclasses import dataclass, field, replace

import torch

from .naming import Site
from .records import OpRecord, UndoneCastRecord
from .rules import short


@dataclass(slots=True, eq=False)
class Call:
    """One call while it runs, and as long as ops of its backward pass may come.

    Attributes:
        listed: the name by which the lists have the op, "" for one that is on none.
        target: the dtype that the rule asks for, or None.
        sources: addresses of the tensors that are to be cast for it; `copied`: of those that were.
        cast_dtypes: from and to which dtypes it cast.
        is_reached: whether lists and rules for modules act where it runs.
        names_dtype: whether it is a cast of the script's to a dtype that its line names, and not to another tensor's.
    """

    op: str
    module: str
    site: Site
    phase: str
    rule: str = ""
    entry: str = ""
    region: str = ""
    listed: str = ""
    given: tuple[str, ...] = ()
    out: tuple[str, ...] = ()
    ran: set[str] = field(default_factory=set)
    casts: int = 0
    target: torch.dtype | None = None
    sources: set[int] = field(default_factory=set)
    copied: set[int] = field(default_factory=set)
    cast_dtypes: set[tuple[str, str]] = field(default_factory=set)
    is_reached: bool = True
    names_dtype: bool = False


class Folding:
    """The records so far, in the order in which the first of each kind came. Calls come from any thread.

    Args:
        keeps_ops: False: nothing is recorded.
    """

    def __init__(self, *, keeps_ops: bool = True) -> None:
        self.keeps_ops = keeps_ops
        self.step = 0
        self._ops: dict[OpRecord, list[int]] = {}  # calls, casts, avoided
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
        record = OpRecord(
            *(self.step, call.phase, call.module, call.op, call.rule, call.entry, call.region, call.given),
            *(tuple(sorted(call.ran)), call.out, call.site.place),
        )
        with self._lock:
            counts = self._ops.setdefault(record, [0, 0, 0])
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
            return [
                replace(record, calls=calls, casts=casts, avoided=avoided)
                for record, (calls, casts, avoided) in self._ops.items()
            ]

    def undone(self) -> list[UndoneCastRecord]:
        """Return the records of casts that undo each other."""
        with self._lock:
            return [replace(record, calls=calls) for record, calls in self._undone.items()]
