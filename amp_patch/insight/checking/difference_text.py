"""The differences of two recordings or contracts, as lines of text. Importing this module does not import torch."""

import math
from collections.abc import Iterator
from pathlib import Path

from ...errors import RecordError
from ...tables import wrap_item
from ..comparing.summary import Summary
from ..recordings import Recording
from ..records import ComparisonRecord
from .contract import Contract, ContractOp
from .op_differences import Moved, OpDifferences, find_differences, read_ops
from .verdict import describe_dtypes, describe_move, judge, judge_optimizers, list_constants

SAME = 1.25
"""Two errors of a layer count as equal if they differ by no more than this factor."""


def describe_files(before: Path, after: Path) -> list[str]:
    """Return lines on the differences of two files: contracts, recordings of ops, or comparisons.

    A contract and a recording are compared by their ops. Raises RecordError for other files, and for two files that
    cannot be compared with each other.
    """
    old, new = _read(before), _read(after)
    if isinstance(old, Contract) and isinstance(new, Contract):
        return list(_compare_contracts(old, new))
    old_ops, new_ops = _ops_of(old), _ops_of(new)
    if old_ops and new_ops:
        return list(describe_differences(find_differences(old_ops, new_ops)))
    comparisons = [file for file in (old, new) if isinstance(file, Recording) and file.of(ComparisonRecord)]
    if len(comparisons) == 2:
        return list(_compare_comparisons(*map(Summary, comparisons)))
    raise RecordError(
        f"{before} and {after} have nothing in common to compare: give two files with ops (of explain --json, or"
        " contracts), or two of compare --jsonl"
    )


def _read(path: Path) -> Recording | Contract:
    """Return the recording or the contract in a file."""
    try:
        with path.open("rb") as stream:
            is_array = stream.read(64).lstrip().startswith(b"[")
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from None
    return Contract.read(path) if is_array else Recording.read(path)


def _ops_of(file: Recording | Contract) -> list[ContractOp]:
    return file.ops if isinstance(file, Contract) else read_ops(file.ops)


def describe_differences(differences: OpDifferences) -> Iterator[str]:
    """Yield the name of each module whose ops differ, and after it an indented line for each difference."""
    entries: list[tuple[str, str]] = []  # the name of the module, and the text of the line
    for pair in differences.moved:
        entries.append((pair.after.module, f"moved     {_name_pair(pair)}: {describe_move(pair)}"))
    for pair in differences.changed:
        constants = f"{list_constants(pair.before)} -> {list_constants(pair.after)}"
        entries.append((pair.after.module, f"constants {_name_pair(pair)}: {constants}"))
    for verb, ops in (("vanished", differences.vanished), ("appeared", differences.appeared)):
        for op in ops:
            calls = f" ({op.calls} calls)" if op.calls > 1 else ""
            entries.append((op.module, f"{verb:9} {op.op} {op.site}: {describe_dtypes(op)}{calls}"))
    for module in dict.fromkeys(module for module, _ in entries):
        yield module or "(outside of modules)"
        for name, text in entries:
            if name == module:
                yield from wrap_item(text)


def _name_pair(pair: Moved) -> str:
    """Return the name of an op with its line: "linear model.py:12", or "linear model.py:12 -> model.py:14"."""
    before, after = pair
    if before.site == after.site:
        return f"{after.op} {after.site}".rstrip()
    return f"{after.op} {before.site} -> {after.site}".rstrip()


def _compare_contracts(old: Contract, new: Contract) -> Iterator[str]:
    """Yield lines on the differences of two contracts: in the run, the ops and the optimizers, and the numbers of `new`
    that leave the bands of `old`.
    """
    for name in ("torch", "level", "low", "device", "steps", "seed"):
        was, value = getattr(old.about, name), getattr(new.about, name)
        if was != value:
            yield f"{name}: {'none' if was == '' else was} -> {'none' if value == '' else value}"
    yield from describe_differences(find_differences(old.ops, new.ops))
    yield from (f"{broken.kind}: {broken.text}" for broken in judge_optimizers(old, new))
    for hardware in sorted(old.numbers.keys() | new.numbers.keys()):
        if hardware not in new.numbers or hardware not in old.numbers:
            yield f"numbers for {hardware}: only in {'BEFORE' if hardware in old.numbers else 'AFTER'}"
            continue
        on_hardware = Contract(new.about, new.optimizers, new.ops, {hardware: new.numbers[hardware]})
        for broken in judge(old, on_hardware).breaks:
            # ops and optimizers were compared above, once for all hardware
            if broken.kind not in ("precision", "rule", "cast", "constant", "ops", "optimizer"):
                yield f"{broken.kind}: {broken.text}"


def _compare_comparisons(old: Summary, new: Summary) -> Iterator[str]:
    """Yield a line for each final loss, failure or error of a layer that differs in two results of `compare`, and for
    each run that only one of them has.
    """
    noise = max(old.noise or 0.0, new.noise or 0.0)
    new_rows = {row.name: row for row in new.rows()}
    for before in old.rows():
        after = new_rows.pop(before.name, None)
        if after is None:
            yield f"{before.name}: only in BEFORE"
            continue
        if before.loss is not None and after.loss is not None and _is_beyond_noise(before.loss, after.loss, noise):
            yield f"{before.name}: final loss {before.loss:.5g} -> {after.loss:.5g} (noise {noise:.1g})"
        yield from _compare_failures(before.name, before.run.failed, after.run.failed)
        yield from _compare_layers(before.name, old, new)
    yield from (f"{name}: only in AFTER" for name in new_rows)


def _compare_failures(name: str, old: str, new: str) -> Iterator[str]:
    if old != new:
        yield f"{name}: {old or 'ran'} -> {new or 'ran'}"


def _compare_layers(name: str, old: Summary, new: Summary) -> Iterator[str]:
    """Yield a line for each error of a layer, against the reference, that differs. Both comparisons must have it."""
    new_layers = {layer.module: layer for layer in new.layers(name)}
    for before in old.layers(name):
        after = new_layers.get(before.module)
        if after is None:
            continue
        for field in ("output", "gradient"):
            error_before, error_after = getattr(before, field), getattr(after, field)
            if error_before is None or error_after is None:
                continue
            if _differ(error_before, error_after):
                yield f"{name}, {before.module}: error of its {field} {error_before:.2g} -> {error_after:.2g}"


def _is_beyond_noise(before: float, after: float, noise: float) -> bool:
    """Return whether two losses differ by more than `noise`."""
    return not _are_equal(before, after) and not abs(after - before) <= noise  # also true if a loss is inf or NaN


def _differ(before: float, after: float) -> bool:
    """Return whether two errors differ by more than the factor `SAME`. inf and NaN are equal only to themselves."""
    if not math.isfinite(before) or not math.isfinite(after):
        return not _are_equal(before, after)
    smaller, larger = sorted((abs(before), abs(after)))
    return larger > SAME * smaller


def _are_equal(before: float, after: float) -> bool:
    """Return whether two numbers are equal, or both NaN."""
    return before == after or (math.isnan(before) and math.isnan(after))
