"""`RaisedRecord`: an exception of the script that dtypes, or the use of a GradScaler, explain."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from . import display
from .fault_record import Phase, Word
from .json_values import absent


class RaisedCause(Word):
    """Why the call raised. `raised_text` describes each."""

    MIXED = "mixed dtypes"  # the operands have several floating dtypes, and the call refuses that
    UNSUPPORTED = "unsupported dtype"  # all floating operands have one dtype, and the call refuses it
    LOW_WEIGHTS = "16-bit weights"  # a GradScaler refuses to unscale float16 gradients
    NO_GRADIENTS = "no gradients"  # no parameter of the optimizer has a gradient
    SCALER_ORDER = "order of calls"  # the methods of a GradScaler were called in an order that it refuses
    TWO_SCALES = "two loss scales"  # a GradScaler was used beside `amp.initialize`, which has a loss scale of its own

    @property
    def is_of_scaler(self) -> bool:
        """Whether a GradScaler has raised the exception."""
        return self not in (RaisedCause.MIXED, RaisedCause.UNSUPPORTED)


class OperandOrigin(Word):
    """What gave an operand its dtype."""

    RULE = "rule"  # of a list, a module rule or an opt_level
    CAST = "cast"  # of the script
    OP = "op"  # an op that made it so, such as torch.zeros
    WEIGHT = "weight"  # a parameter, a buffer or a gradient
    INPUT = "input"  # a variable of the script, such as a batch, whose tensor was not made by a recorded op
    UNKNOWN = "unknown"


class Operand(NamedTuple):
    """A tensor among the arguments of the call.

    Attributes:
        name: how the script writes it, else the name of the weight or of the argument.
        dtype: the short name of its dtype, such as "bf16".
        origin: an `OperandOrigin`.
        made_by: the op that gave it this dtype; for a weight, its name; for an input, its variable; "" if unknown.
        module, site: the module and the line of that op. For an input, `site` is the line that the function with the
            variable was running.
        rule: the reason for the dtype: the rule that decided, the line that cast the model, or the tensor whose dtype
            the op took; "" for none.
        entry: the place of the rule, or the opt_level that cast the model; "" without one.
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
    """An exception that has ended the script or a recorded function, or an earlier exception that led to that one.

    Attributes:
        error: the class of the exception.
        message: the beginning of its text, on one line.
        cause: "mixed dtypes", "unsupported dtype", "16-bit weights", "no gradients", "order of calls" or
            "two loss scales".
        step: the number of the step.
        phase: the part of the step that ran.
        op: the call that raised, by its name on lists; if lists cannot name it, by its name in the script.
        module: the module that ran; for the backward pass of an op, the module in which the op itself ran.
        site: the line of the script; for the backward pass of an op, the line of the op itself.
        raised_at: for the backward pass of an op, the line that was running, such as `loss.backward()`; else None.
        called_from: the line of the user's own code, if `site` is in an installed package.
        operands: the floating tensors among the arguments, each as the fields of an `Operand`.
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
        """The operands as `Operand`s."""
        return [Operand(*row) for row in self.operands]

    @property
    def choices(self) -> tuple[str, ...]:
        """`entries`, then `regions`. Entries come first because they change one op and not a module."""
        return (*self.entries, *self.regions)

    def __str__(self) -> str:
        return display.as_text(self)
