"""The rules that an op can follow."""

from enum import Enum

from .op_names import is_augmented, is_inplace


class Rule(str, Enum):
    """What happens to the arguments of an op. A member is its name: it compares, prints and is written to JSON so."""

    WHITELIST = "whitelist"
    BLACKLIST = "blacklist"
    PROMOTE = "promote"
    SEQUENCE_PROMOTE = "sequence_promote"
    BANNED = "banned"
    NEUTRAL = "neutral"
    MATCH_SELF = "match_self"
    INPLACE_ERROR = "inplace_error"
    UNLISTED = "unlisted"

    __str__ = str.__str__
    __repr__ = str.__repr__


RULES = tuple(rule for rule in Rule if rule not in (Rule.MATCH_SELF, Rule.INPLACE_ERROR, Rule.UNLISTED))
"""Those that are keys of a list file. Spellings that write in place, or are on no list, have the others."""

MEANINGS = {
    Rule.WHITELIST: "Ops that run in the low dtype.",
    Rule.BLACKLIST: "Ops that run in float32.",
    Rule.PROMOTE: "Ops that run in the widest dtype among their arguments.",
    Rule.SEQUENCE_PROMOTE: "The same for ops whose first argument is a sequence of tensors.",
    Rule.BANNED: "Ops that raise an error on 16-bit tensors.",
    Rule.NEUTRAL: "Ops that come off the list an earlier file put them on.",
}
"""What a list file says of each of them."""

TWINNED = (Rule.WHITELIST, Rule.BLACKLIST, Rule.PROMOTE, Rule.NEUTRAL)
"""Those that the in-place twins of an op follow too."""


def kind_of(name: str, rule: Rule, inplace_blacklist: str) -> Rule:
    """Return how a spelling behaves whose entry is under `rule`.

    An op that writes to its first argument must not be handed a cast copy of it. Apex does hand a copy to augmented
    operators (`x **= 2` rebinds x and leaves views of it alone); so does a list that refuses in-place twins.
    """
    if rule in (Rule.BANNED, Rule.NEUTRAL):
        return rule
    if is_augmented(name):
        return rule if inplace_blacklist == "error" else Rule.MATCH_SELF
    if is_inplace(name):
        return Rule.INPLACE_ERROR if rule is Rule.BLACKLIST and inplace_blacklist == "error" else Rule.MATCH_SELF
    return rule
