"""`MisuseRecord`: a wrong use of GradScaler or autocast that `amp_patch.native` has noticed in a script."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..tables import align
from .json_values import absent

if TYPE_CHECKING:
    from ..native import Misuse


@dataclass(frozen=True, slots=True)
class MisuseRecord:
    """A wrong use of GradScaler or autocast.

    Attributes:
        cause: the kind, such as "scaled gradients are clipped".
        step: the number of the step in which it was noticed, from 0.
        site: the line of the script; None if it is not known.
        effect: the consequence for the training; None if there is no text.
        edit: the edit of the script that mends it; None if there is no text.
    """

    kind: ClassVar[str] = "misuse"

    cause: str
    step: int
    site: str | None = absent("")
    effect: str | None = absent("")
    edit: str | None = absent("")


def record_misuse(misuse: "Misuse", step: int) -> MisuseRecord:
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
