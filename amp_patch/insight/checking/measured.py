"""`Measured`: the results of a run that a `ContractProbe` watched."""

from typing import NamedTuple

from ..numbers_record import ModuleNumbersRecord, StepNormsRecord
from ..recordings import Recording
from ..records import CurveRecord
from .contract import ContractOp


class Measured(NamedTuple):
    """The results of a run.

    Attributes:
        recording: of a `ContractProbe`.
        ops: the ops of its second step.
        modules: the numbers of modules by name, in the order of first calls.
        curve: losses; None if the script scales none.
        norms: of gradients and updates.
    """

    recording: Recording
    ops: list[ContractOp]
    modules: dict[str, ModuleNumbersRecord]
    curve: CurveRecord | None
    norms: StepNormsRecord
