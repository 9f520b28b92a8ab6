"""`OpRule`: the rules for ops, with all properties of each rule. Most rules are keys of the op list files.

To add a rule, add a row here, and its cast to `casting/wrappers.py`. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

AS_IT_IS = "as it is"
"""The effect on an argument that a rule does not change."""

_SIXTEEN_BIT = ("float16", "bfloat16")
_CASTABLE = (*_SIXTEEN_BIT, "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """The properties of a rule, from which `OpRule` makes a member. `OpRule` describes most of them.

    `effects` says what the rule does to a tensor argument, by the dtype of the argument. It leaves out dtypes that the
    rule does not change. `{low}` stands for the low dtype, and `{like}` for the argument whose dtype is taken.
    """

    name: str
    summary: str
    meaning: str = ""
    example: str = ""
    runs_in: str = ""
    effects: Mapping[str, str] = field(default_factory=dict)
    opt_outs: tuple[str, ...] = ()
    covers_twins: bool = False
    covers_writes: bool = False
    takes_sequence: bool = False
    takes_argument: bool = False
    may_run_low: bool = False


class OpRule(StrEnum):
    """A rule for the arguments of an op. In comparisons, messages and JSON, a member is its name, such as "whitelist".

    Attributes:
        summary: the rule in a few words; `{low}` stands for the low dtype.
        meaning: the comment above the rule's key in a new list file. Empty for a rule that is no key of list files.
        example: an entry of a list file.
        runs_in: "low" or "float32" if the rule casts arguments to that dtype. Empty if the dtypes of the arguments
            decide, or if nothing is cast.
        opt_outs: the names of arguments that switch the rule off: a call that passes one of them, with a value other
            than None, casts nothing.
        covers_twins: an entry for an op also decides about its in-place twin, `exp_` for `exp`: by this rule or, if
            `covers_writes` is False, by `match_self`.
        covers_writes: the rule also holds for ops that write to their first argument. If False, such ops follow
            `match_self` instead, because a cast of the first argument would make them write to a copy.
        takes_sequence: the op takes its tensors in a sequence, as its first argument.
        takes_argument: an entry names an argument of the op (`like`), and the other arguments are cast to its dtype.
        may_run_low: the rule can make an op compute in 16 bits. If such an op overflows, `trace` may propose the
            blacklist for it. False for `sequence_promote`, because ops such as `cat` only copy.
    """

    summary: str
    meaning: str
    example: str
    runs_in: str
    opt_outs: tuple[str, ...]
    covers_twins: bool
    covers_writes: bool
    takes_sequence: bool
    takes_argument: bool
    may_run_low: bool
    _effects: Mapping[str, str]

    WHITELIST = _Row(
        name="whitelist",
        summary="runs in {low}",
        meaning="Ops that run in the low dtype.",
        example="{op: gelu, why: speed}",
        runs_in="low",
        effects=dict.fromkeys(_CASTABLE, "cast to {low}"),
        opt_outs=("out",),
        covers_twins=True,
        may_run_low=True,
    )
    BLACKLIST = _Row(
        name="blacklist",
        summary="runs in float32",
        meaning="Ops that run in float32.",
        example="{op: softmax, why: range}",
        runs_in="float32",
        effects=dict.fromkeys(_SIXTEEN_BIT, "cast to float32"),
        opt_outs=("out", "dtype"),
        covers_twins=True,
    )
    PROMOTE = _Row(
        name="promote",
        summary="runs in the widest dtype among its arguments",
        meaning="Ops that run in the widest dtype among their arguments.",
        example="rms_norm",
        effects={
            "float16": "cast to float32 beside float32 or bfloat16",
            "bfloat16": "cast to float32 beside float32 or float16",
        },
        opt_outs=("out",),
        covers_twins=True,
        may_run_low=True,
    )
    SEQUENCE_PROMOTE = _Row(
        name="sequence_promote",
        summary="runs in the widest dtype among the tensors of its first argument",
        meaning="The same for ops whose first argument is a sequence of tensors.",
        example="cat",
        effects=PROMOTE.effects,
        opt_outs=("out",),
        takes_sequence=True,
    )
    MATCH = _Row(
        name="match",
        summary="runs in the dtype of one of its arguments, which the entry names by `like`",
        meaning="Ops whose tensors are cast to the dtype of one argument.",
        example="{op: flash_attn.flash_attn_func, like: v}",
        effects=dict.fromkeys(_CASTABLE, "cast to the dtype of {like}"),
        opt_outs=("out",),
        covers_twins=True,
        takes_argument=True,
        may_run_low=True,
    )
    BANNED = _Row(
        name="banned",
        summary="refuses 16-bit arguments",
        meaning="Ops that raise an error on 16-bit tensors.",
        example="binary_cross_entropy",
        effects=dict.fromkeys(_SIXTEEN_BIT, "an error"),
        covers_writes=True,
    )
    NEUTRAL = _Row(
        name="neutral",
        summary="taken off its list, so it runs in the dtype it is given",
        meaning="Ops that come off the list an earlier file put them on.",
        example="sum",
        covers_twins=True,
        covers_writes=True,
    )
    MATCH_SELF = _Row(
        name="match_self",
        summary="writes to its first argument, in the dtype of that argument",
        effects=dict.fromkeys(_CASTABLE, "cast to the dtype of {like}"),
        covers_writes=True,
    )
    UNLISTED = _Row(name="unlisted", summary="on no list, so it runs in the dtype it is given")

    def __new__(cls, row: _Row) -> "OpRule":
        member = str.__new__(cls, row.name)
        member._value_ = row.name
        member.summary = row.summary
        member.meaning = row.meaning
        member.example = row.example
        member.runs_in = row.runs_in
        member.opt_outs = row.opt_outs
        member.covers_twins = row.covers_twins
        member.covers_writes = row.covers_writes
        member.takes_sequence = row.takes_sequence
        member.takes_argument = row.takes_argument
        member.may_run_low = row.may_run_low
        member._effects = row.effects
        return member

    # messages that show a rule by `!r` show its name in quotes, not the name of the class
    __repr__ = str.__repr__

    @property
    def is_casting(self) -> bool:
        """Whether the rule casts or refuses arguments of at least one dtype."""
        return bool(self._effects)

    def describe(self, like: str = "") -> str:
        """Return the name of the rule. If the rule has `takes_argument`, `like` follows the name: "match v"."""
        if like and self.takes_argument:
            return f"{self} {like}"
        return str(self)

    def describe_effects(self, low: str, like: str = "") -> dict[str, str]:
        """Return the effect of the rule on a float16, a bfloat16 and a float32 argument, by the name of the dtype.

        Args:
            low: the name of the low dtype.
            like: the argument that the entry names, for a rule with `takes_argument`.
        """
        followed = "the first argument"
        if self.takes_argument:
            followed = like or "the argument that the entry names"
        described = {}
        for dtype in _CASTABLE:
            effect = self._effects.get(dtype, AS_IT_IS).format(low=low, like=followed)
            if effect == f"cast to {dtype}":  # a cast to its own dtype
                effect = AS_IT_IS
            described[dtype] = effect
        return described


RULES: dict[str, OpRule] = {str(rule): rule for rule in OpRule}
"""Every rule, by its name."""

RULE_KEYS = tuple(rule for rule in OpRule if rule.meaning)
"""The rules that are keys of a list file, in the order of `OpRule`."""
