"""`MisuseRecord`: a wrong use of GradScaler or autocast by a script, as `native` has noticed it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from ..native import Misuse
from ..tables import align
from .json_values import absent


@dataclass(frozen=True, slots=True)
class MisuseRecord:
    """A wrong use of GradScaler or autocast. Each kind is recorded once.

    Attributes:
        cause: the kind, such as "scaled gradients are clipped".
        step: the number of the step in which it was noticed, from 0.
        site: the line of the script.
        effect: what happens.
        edit: what to write instead.
    """

    kind: ClassVar[str] = "misuse"

    cause: str
    step: int
    site: str | None = absent("")
    effect: str | None = absent("")
    edit: str | None = absent("")


def record_misuse(misuse: Misuse, step: int) -> MisuseRecord:
    """Return the record of a misuse."""
    return MisuseRecord(str(misuse.kind), step, misuse.line or None, misuse.effect, misuse.edit)


def format_misuse(record: MisuseRecord) -> str:
    """Return a misuse as text."""
    rows = [("  call", record.site or "no line of the script"), ("  cause", record.effect or record.cause)]
    if record.edit:
        rows.append(("  try", record.edit))
    return "\n".join([f"step {record.step}: misused: {record.cause}", *align(rows)])


def format_misuses(records: Iterable[MisuseRecord]) -> str:
    """Return misuses as text, one after another."""
    return "\n\n".join(map(format_misuse, records))
