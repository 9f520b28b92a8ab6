"""`Written`: the record of the op that wrote a storage last.

A value *fits* if it is finite. A *fault* is a value that does not fit, with its cause. If other values are computed
from it and do not fit either, the fault *explains* them.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..dtypes import LOW_DTYPES
from .fault_record import FaultRecord
from .folding import OpCall
from .ops import Op

TRAIL = 6
"""The most ops before a fault that its record names."""

_STRICT = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "dot", "mv", "linear"})
"""Ops that take no operands of different dtypes."""

_LOW_RULES = ("whitelist", "cast_model_type", "run: low")
"""Rules that cast float32 inputs to 16 bits."""


class Culprit(NamedTuple):
    """An op of the forward pass that may have to run in float32.

    Attributes:
        module: the name of the module that it ran in.
        is_in_module: whether it ran in a module at all; the model itself may have the name "".
        op, listed, rule, is_reached, names_dtype: as in `OpCall`.
        aten: the op that torch ran.
        site: the line of the script.
        file, number: the file and the number of this line, as in `Site`.
    """

    module: str
    is_in_module: bool
    op: str
    listed: str
    aten: str
    site: str
    rule: str
    is_reached: bool = True
    names_dtype: bool = False
    file: str = ""
    number: int = 0


@dataclass(slots=True, eq=False)
class Written:
    """The record of a result of an op.

    Attributes:
        op: the op that torch ran.
        node: the autograd node that ran it; "" in a forward pass.
        largest: the largest magnitude of the result; inf or NaN if it holds, or may hold, one.
        parents: the records of the op's inputs.
        faults: the faults that explain the result, as their positions among the faults of the step.
        is_known: whether the result does not fit, and a fault explains it.
        is_old: whether it was written in the previous step. Then `parents` and `faults` are empty.
        size: bytes of the storage.
        culprit: the op as a candidate for float32. None for an op of the backward pass.
        is_low: whether it is a 16-bit result of the forward pass, or of a `backward` that the user wrote.
        is_held_low: whether the result would have 16 bits even if an input were float32.
        is_scaled: whether it is a gradient that carries the loss scale. A backward pass has other values, too.
        summed: how many times larger it is than the mean of the terms that were summed for it; 1 without a sum.
        mask_fault: the fault to report if an input that looks like a mask has made this result inf or NaN, and proves
            to be no mask; None without such an input.
    """

    op: str
    node: str
    largest: float
    parents: "Sequence[Written]"
    faults: frozenset[int] = frozenset()
    is_old: bool = False
    size: int = 0
    is_known: bool = False
    culprit: Culprit | None = None
    is_low: bool = False
    is_held_low: bool = True
    is_scaled: bool = False
    summed: float = 1.0
    mask_fault: FaultRecord | None = None

    def explain_by(self, sources: "Sequence[Written]") -> None:
        """Note that the faults of some inputs explain the result, which does not fit."""
        self.is_known = True
        self.faults = frozenset().union(*(source.faults for source in sources))

    def explain_by_fault(self, number: int) -> None:
        """Note that the fault at this position among the faults of the step explains the result."""
        self.is_known, self.faults = True, frozenset({number})

    def describe(self, op: Op, call: OpCall, is_in_module: bool, is_low: bool) -> None:
        """Note the call of the forward pass that wrote this."""
        self.is_low = is_low
        name = op.overload.name
        self.culprit = Culprit(
            module=call.module,
            is_in_module=is_in_module,
            op=call.op,
            listed=call.listed,
            aten=name,
            site=call.site.place,
            rule=call.rule,
            is_reached=call.is_reached,
            names_dtype=call.names_dtype,
            file=call.site.file,
            number=call.site.number,
        )
        is_given_low = any(tensor.dtype in LOW_DTYPES for tensor in op.inputs())
        self.is_held_low = (
            call.rule in _LOW_RULES
            or call.region == "low"
            or (op.overload.is_copy and is_low)
            or (name in _STRICT and call.rule != "blacklist" and is_given_low)
        )


def find_culprits(made: Sequence[Written], wanted: Collection[Written]) -> list[Culprit]:
    """Return the ops to run in float32 so that the wanted results are float32.

    `made` has the results of a step in order. An op is left out if an op before it makes one of its inputs float32, and
    it then runs in float32 without a change of its own.
    """
    wide: set[Written] = set()
    culprits: list[Culprit] = []
    for written in made:
        is_promoted = not written.is_held_low and not wide.isdisjoint(written.parents)
        if is_promoted or written in wanted:
            wide.add(written)
        if written in wanted and not is_promoted and written.culprit is not None:
            culprits.append(written.culprit)
    return list(dict.fromkeys(culprits))


def find_trail(written: Written) -> Iterator[tuple[str, float]]:
    """Yield the ops that led to a value, latest first, each with its largest magnitude: ("mul", 3e4), ("exp", 200.0).

    Of several inputs of an op, it follows the one of the largest magnitude.
    """
    for _ in range(TRAIL):
        if not written.parents:
            return
        written = max(written.parents, key=_rank_magnitude)
        node = shorten_node(written.node)
        yield f"{written.op} in {node}" if node else written.op, written.largest


def _rank_magnitude(written: Written) -> float:
    """Return the largest magnitude of a result as a key to compare: NaN is as large as inf."""
    return math.inf if math.isnan(written.largest) else written.largest


def shorten_node(node: str) -> str:
    """Return the name of an autograd node without its namespace."""
    return node.rpartition("::")[2]
