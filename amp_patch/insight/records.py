"""Records of runs, comparisons and searches: frozen dataclasses, each a line of JSON in the file of a recording.

Other records, such as `FaultRecord`, have modules of their own.
"""

from dataclasses import dataclass
from typing import ClassVar

SCHEMA = 1
"""The version of the schema. It goes up with every change that an older version of amp_patch would misread."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The settings of the run that was recorded.

    Attributes:
        torch, device: the version of torch, and the type of the device.
        opt_level: the opt_level; without one, "autocast" or "as-is" (see `native.AS_IS`).
        low: the short name of the 16-bit dtype to which values are cast; "" if nothing is cast.
        lists, digest: the names of the op lists, and a hash of their rules.
        rank: the rank of the process.
        schema: the version of the schema of the records.
        is_native: whether the script uses torch.autocast or no amp at all, and not `amp.initialize`.
        prefixes: the prefix of the module names of each model, if there are several models.
        steps_before: the number of steps that the script took before its session was opened.
        needs_scaler: whether the script has no loss scale and would need one in float16.
        script_low: the short name of the 16-bit dtype of weights of a script without amp; "" for other scripts.
        not_widened: the parts of the script that stayed in 16 bits in a run that was to be in float32.
        is_timed: whether its times can be compared. False if steps also took time to change dtypes to float32.
        hardware: the kind of the device: on two of the same kind, torch usually runs the same kernels.
        threads: the number of threads that an op on the CPU uses; 0 if unknown.
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
    script_low: str = ""
    not_widened: tuple[str, ...] = ()
    is_timed: bool = True
    hardware: str = ""
    threads: int = 0


MOST_CONSTANTS = 8
"""The largest number of constants in an `OpRecord`. If its calls have more different constants, it has none."""


@dataclass(frozen=True, slots=True)
class OpRecord:
    """Equal calls of an op, counted.

    Attributes:
        step: the number of the step in the recording, from 0.
        phase: "forward", "backward", "recompute" (of a checkpoint), or "step" (of an optimizer). Ops of a step are only
            recorded in a step with a closure, and for an optimizer that `events.Watcher` is not told of.
        module: qualified name of the innermost module that ran; "" outside of all modules, and in the model itself if
            there is only one model.
        op: the spelling that was called, such as "F.linear", or the op that torch ran, such as "aten.add".
        rule: the list of the op, such as "blacklist", or another rule that decided, such as "run: float32" of a module
            rule, or "cast_model_type"; "" if none did.
        entry: the place of the rule, `file.yaml:line`, or the opt_level if the rule is one of its properties; else "".
        region: the setting of the region that decided instead of the lists, such as the region of a module rule: "low",
            "float32" or "off"; "" without such a region.
        given: dtypes of the tensors among the arguments, in order.
        ran: dtypes of the floating tensors that kernels got, each once.
        out: dtypes of the tensors in the result, in order.
        site: the line of the user's code, `file.py:line`.
        calls: the number of calls.
        casts: the number of tensors that were copied to another dtype.
        avoided: the number of tensors that needed no cast because a copy was there already.
        constants: the numbers and words among the arguments of all calls, sorted: an eps, a factor, "tanh"; () if more
            than `MOST_CONSTANTS`, as in a loop over time steps.
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
    constants: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UndoneCastRecord:
    """Casts that undo each other: the op `producer` casts its input from dtype `outside` to dtype `between`, and the op
    `consumer` casts the result back to `outside`.
    """

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
    """The end of a step: the loss scales, and whether the step was skipped (None on a GPU: reading it would wait)."""

    kind: ClassVar[str] = "step"

    step: int
    skipped: bool | None
    loss_scales: tuple[float, ...]


# ---- runs that are compared ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ComparisonRecord:
    """The plan of a comparison.

    Attributes:
        reference: the name of the run that the others are compared with.
        steps, seeds: the number of steps from each seed, and the seeds.
        machine, command: the machine and the command line.
        left_out: which of the default runs were left out, and why; "" for none.
        not_float32: why the reference is not in float32 although that was planned; else "".
    """

    kind: ClassVar[str] = "comparison"

    reference: str
    steps: int
    seeds: tuple[int, ...]
    machine: str
    command: str
    left_out: str = ""
    not_float32: str = ""


@dataclass(frozen=True, slots=True)
class ComparedRecord:
    """One run of a comparison.

    Attributes:
        run: its name, such as "O4" or "O4+my_lists.yaml".
        opt_level, lists, digest: as in `RunRecord`; empty without a recording of the run.
        low: the short name of the 16-bit dtype, of casts or of the script's own weights; "" without one.
        peak: bytes in use at the peak of a step, with weights and optimizer; None if unknown.
        loss_scale: the loss scale of the step in which layers are measured; None if they are not.
        has_equal_weights: False if the step in which layers are measured began with other weights than in the
            reference, apart from rounding.
        gradient_error: the largest relative error (L2) of a layer's gradients in the step in which layers are measured;
            None if not compared. Layers with small gradients do not count.
        gradient_worst: the name of the layer with this error; "" if not compared.
        kept: the share of elements whose change survives the rounding to 16 bits: of the weights, if these lose
            changes, else of the other tensors that lose most. None if no tensor loses any, or if not measured.
        kept_worst: the name of the tensor that loses most, or the line of the script that changes it; "" if none does.
        lost_by: what loses these changes: "weights", "sum" (a sum within one call), "tensor" (another tensor with a
            name), "line" (a tensor without a name); "" if no tensor loses any, or if not measured.
        update_error: the relative error (L2) of these changes, or of the sum; None if not measured.
        failed: why the run ended early, or that it did not run; "" if it came to its end.
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
    gradient_error: float | None = None
    gradient_worst: str = ""
    kept: float | None = None
    kept_worst: str = ""
    lost_by: str = ""
    update_error: float | None = None
    failed: str = ""


@dataclass(frozen=True, slots=True)
class CurveRecord:
    """The losses of a run from one seed.

    Attributes:
        run, seed: the name of the run, and its seed.
        losses, scales: for each step, the mean of its losses, and the smallest of the loss scales at its end.
        skipped: numbers of the skipped steps.
        ms: the median time of a step, in milliseconds; NaN if it was not measured.
        is_noise: whether this run is the reference once more, with weights that are off by one unit in the last place.
        is_frozen: whether this run is the reference once more, with weights that are put back after each step.
        batches: how many batches the steps have used: the calls, with gradients enabled, of the module that is called
            first in each step.
    """

    kind: ClassVar[str] = "curve"

    run: str
    seed: int
    losses: tuple[float, ...]
    scales: tuple[float, ...]
    skipped: tuple[int, ...]
    ms: float
    is_noise: bool = False
    is_frozen: bool = False
    batches: int = 0


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """The relative errors (L2) of a layer in one step that begins with the weights of the reference.

    `input`, `output` and `gradient` are the errors of its input, of its output, and of the gradients of its weights.
    None means that there is nothing to compare.
    """

    kind: ClassVar[str] = "layer"

    run: str
    module: str
    input: float | None
    output: float | None
    gradient: float | None


@dataclass(frozen=True, slots=True)
class OpErrorRecord:
    """The error that an op adds in 16 bits in one step, if its inputs are the float32 run's, rounded to 16 bits.

    Attributes:
        run: the name of the run in which the op ran in 16 bits; "" in the recording of a single run.
        low: the short name of the 16-bit dtype.
        module, op, site: the innermost module that ran, the name of the function, and the line of the script.
        error: the largest relative error (L2) of a result, or of the gradients of the inputs; inf for an overflow. It
            is 0 in the recording of a run in 16 bits, where the record only says that the op had a 16-bit result.
        is_backward: whether `error` is the error of the gradients, and not of the result.
        is_random: whether the op draws other random numbers in 16 bits than in float32.
    """

    kind: ClassVar[str] = "op_error"

    run: str
    low: str
    module: str
    op: str
    site: str
    error: float = 0.0
    is_backward: bool = False
    is_random: bool = False


CLASSES = 4
"""How many counts a power of two has in `GradientRecord.counts`: see `comparing.exponents`."""


@dataclass(frozen=True, slots=True)
class GradientRecord:
    """The unscaled gradients in one step, counted by magnitude: see `comparing.exponents`.

    Attributes:
        run: the name of the run.
        lowest: the exponent of two at the first count.
        counts: `CLASSES` counts for each power of two.
        zeros, nonfinite: the number of zeros, and of inf and NaN.
    """

    kind: ClassVar[str] = "gradients"

    run: str
    lowest: int
    counts: tuple[int, ...]
    zeros: int
    nonfinite: int


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """Values of the input, the output and the weights' gradients of a layer, at the same positions in each run.

    A comparison reads them and does not store them. The record of module "" has values of all weights as its output.
    """

    kind: ClassVar[str] = "sample"

    module: str
    input: tuple[float, ...]
    output: tuple[float, ...]
    gradient: tuple[float, ...]


# ---- runs that tune lists --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckedStepRecord:
    """A step of an optimizer, to compare its losses and gradients with another run.

    Attributes:
        step: the number of the step of this optimizer, from 0.
        optimizer: the number of the optimizer, in the order of first steps.
        losses: the unscaled losses since the previous step. For a loss with several elements, their mean.
        skipped: whether the step was skipped for an overflow.
        loss_scale: the loss scale of the first scaler.
        is_dynamic: whether a scaler changes its loss scale.
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
        parameter: the qualified name of the parameter.
        norm, largest: the L2 norm and the largest magnitude of the gradient, in float32.
        sketch: at most 4,096 float32 values, little-endian in base64: the gradient itself, or sums of its elements with
            fixed signs. The norm of the difference of two sketches estimates the norm of the difference of gradients.
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
    """The errors that an op of a run in float32 would have in 16 bits, as `Shadow` measures them.

    Attributes:
        module: the name of the innermost named module that the op ran in; "**": the model itself; "": outside.
        op: its name in the op lists, or the name of the function if it is on no list.
        is_listed: whether it casts its inputs: because a list says so, or because it uses weights of a cast model.
        overflow_in, overflow: largest share of the values of an argument, and of a result, that overflow.
        error: largest relative error (L2) of a result.
        gradient_error: largest relative error (L2) of the scaled gradient of a result, once it is rounded.
        gradient: largest magnitude in the unscaled gradient of a result.
        backward_error: largest relative error (L2) of the gradients of the inputs if the backward pass of the op runs
            in 16 bits; 0 for products (see `Shadow`), and if not measured.
        effect: the change of the loss by rounding, to first order: the sum over all calls of |gradient . error|.
        site: the line of the script; "" if calls at all lines count together.
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
    backward_error: float = 0.0
    site: str = ""


@dataclass(frozen=True, slots=True)
class ModulesRecord:
    """Qualified names of all modules below the models, and of the modules in which ops ran."""

    kind: ClassVar[str] = "modules"

    names: tuple[str, ...]
    ran: tuple[str, ...]
