"""Reads the list `apex` by owner and rule."""

import contextlib
import functools

from ....config import load_oplists, op_lists
from ....session import current


@functools.cache
def _entries() -> tuple[op_lists.OpEntry, ...]:
    session = current.state.session
    with (
        contextlib.nullcontext() if session is None else session.patcher.suspended()
    ):  # names are looked up as torch has them
        return tuple(dict.fromkeys(spelling.entry for spelling in load_oplists("apex").spellings))


def shipped_names(owner: str, rule: str) -> list[str]:
    """Return the names that the shipped list `apex` has for an owner such as `torch.Tensor` on one of its lists,
    without in-place twins.
    """
    return [
        entry.op.rpartition(".")[2]
        for entry in _entries()
        if entry.rule == rule and entry.op.rpartition(".")[0] == owner
    ]
