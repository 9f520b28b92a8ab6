"""What is recorded of runs that are compared."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class ComparisonRecord:
    """What was compared: runs with `reference`, for so many steps from each seed, on what machine, by what command."""

    kind: ClassVar[str] = "comparison"

    reference: str
    steps: int
    seeds: tuple[int, ...]
    machine: str
    command: str


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
    run of the reference whose inputs are off by one unit in the last place.
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
