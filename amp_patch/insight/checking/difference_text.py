"""The differences of two recordings or contracts, as lines of text. Importing this does not import torch."""

import math
from collections.abc import Iterator
from pathlib import Path

from ...errors import RecordError
from ..comparing.summary import Summary
from ..recordings import Recording
from ..records import ComparisonRecord
from .contract import Contract, ContractOp
from .op_differences import Moved, OpDifferences, find_differences, read_ops
from .verdict import describe_dtypes, describe_move, judge, list_constants

OFF = 1.25
"""Two errors of a layer are taken for equal if they differ by no more than this factor."""


def describe_files(before: Path, after: Path) -> list[str]:
    """Return a line for each difference of two files: contracts, recordings of ops, or comparisons.

    A contract and a recording are compared by their ops. Raises RecordError for other files, and for two that have
    nothing in common.
    """
    old, new = _read(before), _read(after)
    if isinstance(old, Contract) and isinstance(new, Contract):
        return list(_compare_contracts(old, new))
    ops = _ops_of(old), _ops_of(new)
    if ops[0] and ops[1]:
        return list(describe_differences(find_differences(*ops)))
    compared = [read for read in (old, new) if isinstance(read, Recording) and read.of(ComparisonRecord)]
    if len(compared) == 2:
        return list(_compare_comparisons(*map(Summary, compared)))
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


def _ops_of(read: Recording | Contract) -> list[ContractOp]:
    return read.ops if isinstance(read, Contract) else read_ops(read.ops)


def describe_differences(differences: OpDifferences) -> Iterator[str]:
    """Yield a line for each difference, by module."""
    entries: list[tuple[str, str]] = []
    for pair in differences.moved:
        entries.append((pair.after.module, f"moved     {_name(pair)}: {describe_move(pair)}"))
    for pair in differences.changed:
        constants = f"{list_constants(pair.before)} -> {list_constants(pair.after)}"
        entries.append((pair.after.module, f"constants {_name(pair)}: {constants}"))
    for verb, ops in (("vanished", differences.vanished), ("appeared", differences.appeared)):
        for op in ops:
            calls = f" ({op.calls} calls)" if op.calls > 1 else ""
            entries.append((op.module, f"{verb:9} {op.op} {op.site}: {describe_dtypes(op)}{calls}"))
    for module in dict.fromkeys(module for module, _ in entries):
        yield module or "(outside of modules)"
        yield from (f"  {text}" for name, text in entries if name == module)


def _name(pair: Moved) -> str:
    before, after = pair
    if before.site == after.site:
        return f"{after.op} {after.site}".rstrip()
    return f"{after.op} {before.site} -> {after.site}".rstrip()


def _compare_contracts(old: Contract, new: Contract) -> Iterator[str]:
    for name in ("torch", "level", "low", "device", "steps", "seed"):
        was, value = getattr(old.about, name), getattr(new.about, name)
        if was != value:
            yield f"{name}: {was or 'none'} -> {value or 'none'}"
    yield from describe_differences(find_differences(old.ops, new.ops))
    for hardware in sorted(old.numbers.keys() | new.numbers.keys()):
        if hardware not in new.numbers or hardware not in old.numbers:
            yield f"numbers for {hardware}: only in {'BEFORE' if hardware in old.numbers else 'AFTER'}"
            continue
        part = Contract(new.about, new.optimizers, new.ops, {hardware: new.numbers[hardware]})
        for each in judge(old, part).breaks:
            if each.kind not in ("precision", "rule", "cast", "constant", "ops"):
                yield f"{each.kind}: {each.text}"


def _compare_comparisons(old: Summary, new: Summary) -> Iterator[str]:
    rows = {row.name: row for row in new.rows()}
    for row in old.rows():
        other = rows.pop(row.name, None)
        if other is None:
            yield f"{row.name}: only in BEFORE"
            continue
        noise = max(old.noise or 0.0, new.noise or 0.0)
        if row.loss is not None and other.loss is not None and not abs(other.loss - row.loss) <= noise:
            yield f"{row.name}: final loss {row.loss:.5g} -> {other.loss:.5g} (noise {noise:.1g})"
        yield from _compare_failures(row.name, row.run.failed, other.run.failed)
        yield from _compare_layers(row.name, old, new)
    yield from (f"{name}: only in AFTER" for name in rows)


def _compare_failures(name: str, old: str, new: str) -> Iterator[str]:
    if old != new:
        yield f"{name}: {old or 'ran'} -> {new or 'ran'}"


def _compare_layers(name: str, old: Summary, new: Summary) -> Iterator[str]:
    """Yield a line for each layer whose error against the reference differs."""
    layers = {layer.module: layer for layer in new.layers(name)}
    for layer in old.layers(name):
        other = layers.get(layer.module)
        if other is None:
            continue
        for field in ("output", "gradient"):
            was, value = getattr(layer, field), getattr(other, field)
            if was is not None and value is not None and _is_other(was, value):
                yield f"{name}, {layer.module}: error of its {field} {was:.2g} -> {value:.2g}"


def _is_other(was: float, value: float) -> bool:
    if not math.isfinite(was) or not math.isfinite(value):
        return was != value
    low, high = sorted((abs(was), abs(value)))
    return high > OFF * low
