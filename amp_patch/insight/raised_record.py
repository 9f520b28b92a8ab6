"""`RaisedRecord`: an exception of the script that dtypes explain, or its use of a GradScaler."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from . import display
from .fault_record import Phase, Word
from .json_values import absent


class RaisedCause(Word):
    """Why the call raised. `raised_text` describes each."""

    MIXED = "mixed dtypes"  # operands have several dtypes, and the call takes one
    UNSUPPORTED = "unsupported dtype"  # the call takes no operand of this dtype
    LOW_WEIGHTS = "16-bit weights"  # a GradScaler unscales no float16 gradients
    NO_GRADIENTS = "no gradients"  # no parameter of the optimizer has a gradient
    SCALER_ORDER = "order of calls"  # of the methods of a GradScaler

    @property
    def is_of_scaler(self) -> bool:
        """Whether a GradScaler has raised the exception."""
        return self in (RaisedCause.LOW_WEIGHTS, RaisedCause.NO_GRADIENTS, RaisedCause.SCALER_ORDER)


class OperandOrigin(Word):
    """What gave an operand its dtype."""

    RULE = "rule"  # of a list, a module rule or a level
    CAST = "cast"  # of the script
    OP = "op"  # an op that made it so, such as torch.zeros
    WEIGHT = "weight"  # a parameter or buffer
    INPUT = "input"  # made before the recording began, or outside of torch
    UNKNOWN = "unknown"


class Operand(NamedTuple):
    """A tensor among the arguments of the call.

    Attributes:
        name: how the script writes it, else the name of the argument.
        dtype: its short dtype.
        origin: an `OperandOrigin`.
        made_by: the call that made it so, the name of the weight, or the name under which it came in.
        module, site: where that was.
        rule, entry: the rule that decided, and its place.
    """

    name: str
    dtype: str
    origin: str
    made_by: str = ""
    module: str = ""
    site: str = ""
    rule: str = ""
    entry: str = ""


@dataclass(frozen=True, slots=True)
class RaisedRecord:
    """An exception that left the script, or the function that ran under a recording.

    Attributes:
        error, message: the class and the text of the exception.
        cause: "mixed dtypes", "unsupported dtype", "16-bit weights", "no gradients" or "order of calls".
        step, phase: the number of the step, and the part of it that ran.
        op: the call that raised, as the script writes it, or as lists name it.
        module, site: the module and the line of the script. In the backward pass, those of the forward op.
        raised_at: the line of the script that was running, if it is not `site`.
        called_from: the line of the user's own code, if `site` is in an installed package.
        operands: each tensor with its dtype and what made it so: the fields of `Operand`.
        details: further facts, a line each.
        entries: lines of op lists. Each repairs the call without the others.
        regions: module rules. Each repairs the call without the others.
        edits: edits of the script. Each repairs the call without the others.
        list_name: the shipped list that a new list extends if the run has no lists.
        rank: the rank of the process.
    """

    kind: ClassVar[str] = "raised"

    error: str
    message: str
    cause: RaisedCause
    step: int
    phase: Phase
    op: str
    module: str | None = absent("")
    site: str | None = absent("")
    raised_at: str | None = absent("")
    called_from: str | None = absent("")
    operands: tuple[tuple[str, str, str, str, str, str, str, str], ...] = ()
    details: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    edits: tuple[str, ...] = ()
    list_name: str = "float16"
    rank: int = 0

    @property
    def given(self) -> list[Operand]:
        """The operands."""
        return [Operand(*row) for row in self.operands]

    @property
    def choices(self) -> tuple[str, ...]:
        """Lines of lists, the best first. Each repairs the call without the others."""
        return (*self.entries, *self.regions)

    def __str__(self) -> str:
        return display.as_text(self)
