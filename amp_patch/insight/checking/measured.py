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
        ops: the ops of its second step.
        modules: the numbers of modules by name, in the order of first calls.
        curve: the losses and loss scales; None if no loss was recorded.
        norms: of the gradients and updates of each step.
    """

    recording: Recording
    ops: list[ContractOp]
    modules: dict[str, ModuleNumbersRecord]
    curve: CurveRecord | None
    norms: StepNormsRecord
