"""What is recorded of a run, less its faults: frozen dataclasses, each a line of JSON in the file of a recording."""

from dataclasses import dataclass
from typing import ClassVar

SCHEMA = 1
"""The version of the schema. It goes up with every change that an older reader would misread."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Under what was recorded. `low` is a dtype's name, "" where nothing is cast; `digest` that of the op lists;
    `is_native`: by no `amp.initialize`, but what the script does by itself; `prefixes`: of several models, what the
    names of their modules begin with; `steps_before`: how many steps the script took before it entered what was to be
    watched; `needs_scaler`: in float16 it would need a loss scale, and it has none.
    """

    kind: ClassVar[str] = "run"

    torch: str
    device: str
    opt_level: str
    low: str
    lists: tuple[str, ...]
    digest: str
    rank: int
    schema: int = SCHEMA
    is_native: bool = False
    prefixes: tuple[str, ...] = ()
    steps_before: int = 0
    needs_scaler: bool = False


@dataclass(frozen=True, slots=True)
class OpRecord:
    """Calls that are alike in everything but their number.

    Attributes:
        step: of the recording, from 0.
        phase: "forward", "backward", "recompute" (of a checkpoint) or "step" (of an optimizer that calls a closure).
        module: qualified name of the innermost module that ran; "" outside of all.
        op: the spelling that was called, such as "F.linear"; "aten.add" for an op that is on no list.
        rule: the list the op is on, or what else decided; "" if nothing did.
        entry: `file.yaml:line` of the rule, "" without one.
        region: "low", "float32" or "off" where a region decided in the place of the lists, else "".
        given, ran, out: dtypes of the tensors that the caller gave, of the floating ones that kernels got, and of those
            that came out; in order, but `ran`, which has each once.
        site: `file.py:line` of the user's code.
        calls, casts, avoided: how many there were; casts that copied a tensor to another dtype; tensors that would
            have been cast, but for a copy that was there already.
    """

    kind: ClassVar[str] = "op"

    step: int
    phase: str
    module: str
    op: str
    rule: str
    entry: str
    region: str
    given: tuple[str, ...]
    ran: tuple[str, ...]
    out: tuple[str, ...]
    site: str
    calls: int = 1
    casts: int = 0
    avoided: int = 0


@dataclass(frozen=True, slots=True)
class UndoneCastRecord:
    """Casts that undo each other: from `outside` to `between` for `producer`, and what it gave back for `consumer`."""

    kind: ClassVar[str] = "undone"

    step: int
    module: str
    producer: str
    consumer: str
    outside: str
    between: str
    calls: int = 1


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The end of a step: the loss scales by then, and whether it was skipped; None where the host does not know yet."""

    kind: ClassVar[str] = "step"

    step: int
    skipped: bool | None
    loss_scales: tuple[float, ...]


# ---- runs that are compared ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ComparisonRecord:
    """What was compared: runs with `reference`, for so many steps from each seed, on what machine, by what command; and
    which runs that are compared by default were left out, and why.
    """

    kind: ClassVar[str] = "comparison"

    reference: str
    steps: int
    seeds: tuple[int, ...]
    machine: str
    command: str
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class ComparedRecord:
    """One run of a comparison.

    Attributes:
        run: its name, such as "O4" or "O4+my_lists.yaml".
        opt_level, low, lists, digest: as in `RunRecord`; empty where it never began.
        peak: bytes in use at the peak of a step, weights and optimizer included; None where that is not known.
        loss_scale: that of the step whose layers are compared; None where they are not.
        has_equal_weights: whether that step began with the weights of the reference, but for rounding.
        failed: why it ended early, "" if it did not.
    """

    kind: ClassVar[str] = "compared"

    run: str
    opt_level: str = ""
    low: str = ""
    lists: tuple[str, ...] = ()
    digest: str = ""
    peak: int | None = None
    loss_scale: float | None = None
    has_equal_weights: bool = True
    failed: str = ""


@dataclass(frozen=True, slots=True)
class CurveRecord:
    """A run from one seed, a value for each step: the loss, and the first loss scale when the step had ended.

    `ms` is the median time of a step, `skipped` the numbers of the steps that were skipped. `is_noise` is said of the
    run of the reference whose weights are off by one unit in the last place.
    """

    kind: ClassVar[str] = "curve"

    run: str
    seed: int
    losses: tuple[float, ...]
    scales: tuple[float, ...]
    skipped: tuple[int, ...]
    ms: float
    is_noise: bool = False


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """By how much a layer is off the same layer of the reference, in one step from equal weights: the norm of the
    difference over the norm, of what it was given, of its output and of its weights' gradients. None where there is
    nothing to compare.
    """

    kind: ClassVar[str] = "layer"

    run: str
    module: str
    input: float | None
    output: float | None
    gradient: float | None


CLASSES = 4
"""How many counts a power of two has in `GradientRecord.counts`: see `comparing.exponents`."""


@dataclass(frozen=True, slots=True)
class GradientRecord:
    """Unscaled gradients of all weights in one step, counted by magnitude: see `comparing.exponents`."""

    kind: ClassVar[str] = "gradients"

    run: str
    lowest: int
    counts: tuple[int, ...]
    zeros: int
    nonfinite: int


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """Values of a layer at positions that are the same in each run: of its input, its output, and its weights'
    gradients. They are compared, and not kept. The record of module "" has values of all weights as its output.
    """

    kind: ClassVar[str] = "sample"

    module: str
    input: tuple[float, ...]
    output: tuple[float, ...]
    gradient: tuple[float, ...]


# ---- runs by which lists are tuned -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckedStepRecord:
    """A step of an optimizer whose losses and gradients are to be compared with those of another run.

    Attributes:
        step: of this optimizer, from 0.
        optimizer: its number, in the order in which they step first.
        losses: those scaled since the step before, unscaled: float32 means of their elements.
        skipped: whether the step was skipped for an overflow.
        loss_scale: of the first scaler, at the step.
        is_dynamic: whether it follows the gradients.
    """

    kind: ClassVar[str] = "checked"

    step: int
    optimizer: int
    losses: tuple[float, ...]
    skipped: bool
    loss_scale: float
    is_dynamic: bool


@dataclass(frozen=True, slots=True)
class SketchRecord:
    """The unscaled gradient of a parameter at a step, small enough to keep.

    Attributes:
        step, optimizer: as in CheckedStepRecord.
        parameter: its qualified name.
        norm, largest: of the gradient, L2 and largest magnitude, float32.
        sketch: at most 4,096 float32 values, little-endian in base64: the gradient itself, or sums of its elements with
            fixed signs. The norm of the difference of two sketches is about that of the gradients.
    """

    kind: ClassVar[str] = "sketch"

    step: int
    optimizer: int
    parameter: str
    norm: float
    largest: float
    sketch: str


@dataclass(frozen=True, slots=True)
class LowOpRecord:
    """What would become of an op in 16 bits, by calls in float32 with rounded arguments and results.

    Attributes:
        module: the pattern that matches the innermost named module it ran in; "**": the model itself; "": outside.
        op: the entry of the op lists that has it run low; the function's name if it is on none.
        is_listed: whether there is such an entry.
        overflow_in, overflow: largest share of the values that went in, and came out, that overflow.
        error: largest relative error of a result (L2).
        gradient_error: that of the scaled gradient of a result, rounded.
        gradient: largest magnitude in the unscaled gradient of a result.
        effect: by how much rounding moves the loss, to first order: sum over calls of |sum of gradient times error|.
    """

    kind: ClassVar[str] = "low_op"

    module: str
    op: str
    is_listed: bool
    overflow_in: float
    overflow: float
    error: float
    gradient_error: float
    gradient: float
    effect: float


@dataclass(frozen=True, slots=True)
class ModulesRecord:
    """Qualified names of all modules below the models, and of those among them whose forward ran."""

    kind: ClassVar[str] = "modules"

    names: tuple[str, ...]
    ran: tuple[str, ...]
