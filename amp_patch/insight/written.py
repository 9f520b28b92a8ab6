"""`Written`: what is known of the op that wrote a storage last, and of what it read in turn."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..dtypes import LOW_DTYPES
from .folding import Call
from .ops import Op
from .records import FaultRecord

_STRICT = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "dot", "mv", "linear"})  # no mixed dtypes
_LOW_RULES = ("whitelist", "cast_model_type", "run: low")


class Item(NamedTuple):
    """An op that has to run in float32: the module, whether it is inside of one, the call and what torch ran of it, by
    which name the lists have it, where in the script, and by which rule it ran. `is_reached` and `names_dtype`: as of
    `Call`.
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


@dataclass(slots=True, eq=False)
class Written:
    """What an op wrote, and what it read.

    Attributes:
        op, node: what torch ran, and the node of the backward pass that it is part of.
        largest: the largest magnitude that it gave.
        parents: what is known of its inputs.
        is_known: whether what does not fit in it comes of faults that were entered already: `faults`.
        is_old: of the step before; `size`: of the storage, in bytes.
        item: the op, if it is one of the forward pass; `is_low`: whether it gave 16 bits.
        is_scaled: it is a gradient, which goes with the loss scale; in a backward pass there are other values, too.
        is_held_low: it gives 16 bits also where an input is in float32.
        summed: how many times larger it is than the mean of what was summed for it.
        let_in: the fault that it would be if -inf, which came in with the data, were no mask.
    """

    op: str
    node: str
    largest: float
    parents: "Sequence[Written]"
    faults: frozenset[int] = frozenset()
    is_old: bool = False
    size: int = 0
    is_known: bool = False
    item: Item | None = None
    is_low: bool = False
    is_held_low: bool = True
    is_scaled: bool = False
    summed: float = 1.0
    let_in: FaultRecord | None = None

    def come_of(self, known: "Sequence[Written]") -> None:
        """Take in that what does not fit comes of what is known."""
        self.is_known = True
        self.faults = frozenset().union(*(one.faults for one in known))

    def describe(self, op: Op, call: Call, is_in_module: bool, is_low: bool) -> None:
        """Take in which call of the forward pass this is."""
        self.is_low = is_low
        name = op.overload.name
        place, rule = call.site.place, call.rule
        how = call.is_reached, call.names_dtype
        self.item = Item(call.module, is_in_module, call.op, call.listed, name, place, rule, *how)
        is_given_low = any(tensor.dtype in LOW_DTYPES for tensor in op.inputs())
        self.is_held_low = (
            call.rule in _LOW_RULES
            or call.region == "low"
            or (op.overload.is_copy and is_low)
            or (name in _STRICT and call.rule != "blacklist" and is_given_low)
        )


def find_named(made: Sequence[Written], wanted: Collection[Written]) -> list[Item]:
    """Return the ops that have to be named for the wanted ones to give float32, of all ops of a step in their order: an
    op that may take the dtype of its inputs needs no rule where one of these is in float32.
    """
    wide: set[Written] = set()
    named: list[Item] = []
    for one in made:
        is_promoted = not one.is_held_low and not wide.isdisjoint(one.parents)
        if is_promoted or one in wanted:
            wide.add(one)
        if one in wanted and not is_promoted and one.item is not None:
            named.append(one.item)
    return list(dict.fromkeys(named))
