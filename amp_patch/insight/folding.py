"""`Folding`: folds equal calls of a step into one record that counts them."""

import threading
from dataclasses import dataclass, field, replace

import torch

from .records import MOST_CONSTANTS, OpRecord, UndoneCastRecord
from .rules import short
from .sites import Site


@dataclass(slots=True, eq=False)
class OpCall:
    """One call of an op, kept while it runs and while ops of its backward pass may follow.

    Attributes:
        op: the spelling that was called, or `aten.` and the name of the op.
        module: the name of the innermost module that runs.
        site: the line of the script.
        phase, rule, entry, region, given, out, ran, casts: as in `OpRecord`.
        listed: the name of the op in the lists; "" for an op on no list.
        target: the dtype to which the rule casts arguments, or None.
        sources: addresses of the arguments that the rule can cast, and that have another dtype than `target`.
        copied: addresses of the tensors that were cast.
        cast_dtypes: for each cast, the dtypes before and after it, such as ("f32", "f16"). Casts of weights to 16 bits
            are left out.
        widened: the call that cast 16-bit values to float32, if this call computes in float32 because of it. It is this
            call itself, or the call from which the arguments come, directly or through ops on no list. Else None.
        is_reached: whether lists and rules for modules act where it runs.
        names_dtype: whether it is a cast whose line in the script is not known, or names a 16-bit dtype, as in
            `.half()`.
        constants: the constants among the arguments of this call, as in `OpRecord`.
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
    widened: "OpCall | None" = None
    is_reached: bool = True
    names_dtype: bool = False
    constants: tuple[str, ...] = ()

    def has_widened(self) -> bool:
        """Return whether the call has cast a 16-bit argument to float32."""
        return any(target == "f32" and source in ("f16", "bf16") for source, target in self.cast_dtypes)


@dataclass(slots=True)
class _Counts:
    """The counts of equal calls, and the different constants among their arguments. See `OpRecord`."""

    calls: int = 0
    casts: int = 0
    avoided: int = 0
    constants: set[str] = field(default_factory=set)

    def add(self, call: OpCall, avoided: int) -> None:
        self.calls += 1
        self.casts += call.casts
        self.avoided += avoided
        if len(self.constants) <= MOST_CONSTANTS:  # beyond that, none is reported
            self.constants.update(call.constants)

    def list_constants(self) -> tuple[str, ...]:
        """Return the constants, sorted; () if there are too many."""
        if len(self.constants) > MOST_CONSTANTS:
            return ()
        return tuple(sorted(self.constants))


class Folding:
    """Counts calls by record, in the order of first calls. Any thread may add calls.

    Args:
        keeps_ops: whether to count at all.
    """

    def __init__(self, *, keeps_ops: bool = True) -> None:
        self.keeps_ops = keeps_ops
        self.step = 0
        self._ops: dict[OpRecord, _Counts] = {}
        self._undone: dict[UndoneCastRecord, int] = {}
        self._lock = threading.Lock()

    def count(self, call: OpCall) -> None:
        """Count a call that has ended."""
        if not self.keeps_ops:
            return
        avoided = 0
        if call.target is not None:
            target = short(call.target)
            # only if the rule has acted, which it does not in a call with out=
            if target in call.ran or target in call.out:
                avoided = len(call.sources - call.copied)
        record = OpRecord(
            *(self.step, call.phase, call.module, call.op, call.rule, call.entry, call.region, call.given),
            *(tuple(sorted(call.ran)), call.out, call.site.place),
        )
        with self._lock:
            self._ops.setdefault(record, _Counts()).add(call, avoided)

    def count_undone(self, producer: OpCall, consumer: OpCall, outside: str, between: str) -> None:
        """Count a cast of `consumer` that undoes a cast of `producer`. `outside`, `between`: see `UndoneCastRecord`."""
        if not self.keeps_ops:
            return
        record = UndoneCastRecord(self.step, consumer.module, producer.op, consumer.op, outside, between)
        with self._lock:
            self._undone[record] = self._undone.get(record, 0) + 1

    def make_op_records(self) -> list[OpRecord]:
        """Return the records of ops."""
        with self._lock:
            return [
                replace(
                    record,
                    calls=counts.calls,
                    casts=counts.casts,
                    avoided=counts.avoided,
                    constants=counts.list_constants(),
                )
                for record, counts in self._ops.items()
            ]

    def make_undone_records(self) -> list[UndoneCastRecord]:
        """Return the records of casts that undo each other."""
        with self._lock:
            return [replace(record, calls=calls) for record, calls in self._undone.items()]
