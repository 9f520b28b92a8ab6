"""Notes about the lists of a recording: casts that the list `fast` avoids, and rules that versions of torch changed.

Imports torch only if there may be something to say: commands that read recordings start without it.
"""

from collections.abc import Iterator

from .. import config
from ..tables import count_of
from .recordings import Recording

_FAST = "fast"
_AUTOCAST = "autocast-"
_SHORT = {"torch.nn.functional.": "F.", "torch.Tensor.": "Tensor."}


def note_lists(recording: Recording) -> Iterator[str]:
    """Yield the notes about a recording."""
    yield from _note_avoidable(recording)
    yield from _note_changes(recording)


def _note_avoidable(recording: Recording) -> Iterator[str]:
    """Yield a line about ops that widen 16-bit values which later ops cast back, if the list `fast` has them.

    The kernels of these ops compute in float32 inside, so a cast of their arguments makes no result more exact.
    """
    if not any(cast.between == "f32" for cast in recording.undone):
        return
    fast = config.load_oplists(_FAST, may_be_overlay=True)
    rules = {spelling.entry.op: spelling.entry.rule for spelling in (*fast.spellings, *fast.neutral)}
    counts: dict[str, int] = {}
    for cast in recording.undone:
        op = cast.producer.rpartition(".")[2]
        if cast.between == "f32" and op in rules:
            counts[op] = counts.get(op, 0) + cast.calls
    if not counts:
        return
    by_rule: dict[str, list[str]] = {}
    for op in counts:
        by_rule.setdefault(rules[op], []).append(op)
    lines = ", ".join(f"{rule}: [{', '.join(ops)}]" for rule, ops in by_rule.items())
    run = recording.run
    lists = f"--lists {_FAST}"
    if not run.is_native:
        lists = f"lists=[{', '.join(repr(name) for name in (*run.lists, _FAST))}]"
    casts = count_of(sum(counts.values()), "cast")
    verb = "computes" if len(counts) == 1 else "compute"
    yield (
        f"{' and '.join(counts)} {verb} in float32 inside: {lists}, or `{lines}` in a list, keeps the results in"
        f" {run.low} and avoids {casts} back"
    )


def _note_changes(recording: Recording) -> Iterator[str]:
    """Yield a line for each op that ran and whose rule, in a list of torch's autocast in use, torch has changed."""
    ran = {op.op for op in recording.ops}
    lists = {op.entry.partition(".yaml:")[0] for op in recording.ops if op.entry.startswith(_AUTOCAST)}
    for name in sorted(lists.intersection(config.shipped.shipped_names())):
        for change in config.explain.find_changes(name):
            for row in change.differences:
                if not ran.isdisjoint(map(_shorten, row.spellings)):
                    yield (
                        f"torch {change.after} changed what its autocast does to {row.op} on"
                        f" {name.removeprefix(_AUTOCAST)}: {row.left} -> {row.right} (amp-patch lists diff"
                        f" {name}@{change.before} {name}@{change.after})"
                    )


def _shorten(spelling: str) -> str:
    """Return a spelling as recordings have it: `F.rms_norm` for torch.nn.functional.rms_norm."""
    for owner, short in _SHORT.items():
        if spelling.startswith(owner):
            return short + spelling.removeprefix(owner)
    return spelling
