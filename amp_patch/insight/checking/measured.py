"""`Measured`: the results of a run that a `ContractProbe` watched."""

from typing import NamedTuple

from ..numbers_record import ModuleNumbersRecord, StepNormsRecord
from ..recordings import Recording
from ..records import CurveRecord
from .contract import ContractOp


class Measured(NamedTuple):
    """The results of a run.

    Attributes:
        recording: all records of the probe.
        ops: the ops of the second step.
        modules: the numbers of modules by qualified name, in the order in which the modules first ran.
        curve: the losses and loss scales of each step; None if the recording has no `CurveRecord`.
        norms: the norms of the gradients and updates of each step of each optimizer.
    """

    recording: Recording
    ops: list[ContractOp]
    modules: dict[str, ModuleNumbersRecord]
    curve: CurveRecord | None
    norms: StepNormsRecord
