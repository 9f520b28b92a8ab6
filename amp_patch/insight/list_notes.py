"""Notes about the op lists of a recording: avoidable casts, rules that versions of torch changed, and uncalled entries.

Imports torch only if there may be something to say: commands that read recordings start without it.
"""

from collections.abc import Iterator
from pathlib import Path

from .. import config
from ..errors import AmpError
from ..tables import count_of
from .recordings import Recording

_FAST = "fast"
_AUTOCAST = "autocast-"
_MOST = 8  # the most names in a note
_SHORT = {"torch.nn.functional.": "F.", "torch.Tensor.": "Tensor."}


def note_lists(recording: Recording) -> Iterator[str]:
    """Yield the notes about a recording."""
    yield from _note_avoidable(recording)
    yield from _note_changes(recording)
    yield from _note_uncalled(recording)


def _note_avoidable(recording: Recording) -> Iterator[str]:
    """Yield a line about casts to float32 that are avoidable. They are needless for ops on the list `fast`, whose
    kernels compute in float32 inside, if the next op casts the result back to 16 bits.
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
    """Yield a line for each change that a version of torch made to the rule of an op that ran.

    Only the lists of torch's autocast that decided for an op of the recording are compared.
    """
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


def _note_uncalled(recording: Recording) -> Iterator[str]:
    """Yield a line with the ops on the user's own lists that have no recorded call, if there are any.

    The softmax inside of fused attention, for example, is no call of `torch.softmax`.
    """
    run = recording.run
    own_lists = [name for name in run.lists if not config.list_names.is_shipped(name)]
    if not (own_lists and run.low and recording.ops) or not _acts_on_ops(run.opt_level):
        return
    try:
        lists = config.load_oplists(own_lists, may_be_overlay=True)
    except (AmpError, OSError):  # the recording may be from a file, and a list may have changed since
        return
    called = {op.op for op in recording.ops}
    deciding = {op.entry for op in recording.ops}
    is_called: dict[str, bool] = {}  # by the op and the line of the entry
    for spelling in (*lists.spellings, *lists.deferred):
        entry, name = spelling.entry, _shorten(f"{spelling.owner_name}.{spelling.name}")
        if Path(entry.path).parent == config.shipped.lists_dir():
            continue
        place = f"{Path(entry.path).name}:{entry.line}"
        shown = f"{entry.op} ({place})"
        # an alias of an op is recorded under its own name, but with the entry of the op
        is_called[shown] = is_called.get(shown, False) or name in called or place in deciding
    uncalled = [shown for shown, has_call in is_called.items() if not has_call]
    if uncalled:
        more = f" and {len(uncalled) - _MOST} more" if len(uncalled) > _MOST else ""
        yield f"no recorded call of: {', '.join(uncalled[:_MOST])}{more}"


def _acts_on_ops(opt_level: str) -> bool:
    """Return whether op lists decide at an opt_level. True for other names, such as "autocast"."""
    return all(level.patches_functions for level in config.levels.read_levels() if level.name == opt_level)


def _shorten(spelling: str) -> str:
    """Return a spelling as recordings have it: `F.rms_norm` for torch.nn.functional.rms_norm."""
    for owner, short in _SHORT.items():
        if spelling.startswith(owner):
            return short + spelling.removeprefix(owner)
    return spelling
