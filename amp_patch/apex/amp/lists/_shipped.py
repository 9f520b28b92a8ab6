"""Reads the list `apex` by owner and rule."""

import functools

from ..._core import read_list

_read_list = functools.cache(read_list)


def shipped_names(owner: str, rule: str) -> list[str]:
    """Return the names that the list `apex` has for an owner, such as `torch.Tensor`, and a rule; no in-place twins."""
    return [
        op.rpartition(".")[2]
        for op, rule_of_op in _read_list("apex")
        if rule_of_op == rule and op.rpartition(".")[0] == owner
    ]
