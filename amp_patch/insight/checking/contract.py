"""`Contract`: what a training does, as a file to commit; `amp-patch check` compares later runs with it.

The file is a JSON array with a record on each line. Ops and modules stand in the order in which they first ran, so a
diff of two versions of the file is readable. Importing this module does not import torch.
"""

import base64
import json
import math
import os
import struct
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from ...errors import RecordError
from ...files import write_file
from ..json_values import flatten, plain, read_array
from ..numbers_record import OptimizerRecord

SCHEMA = 1
"""The version of the schema. It goes up with every change that an older reader would misread."""


@dataclass(frozen=True, slots=True)
class ContractRecord:
    """The run from which the contract was made.

    Attributes:
        schema: the version of the schema.
        script: the file name of the script, or `-m` and its module.
        opt_level, lists, everywhere: the options of the command. Paths of lists are relative to the folder of the
            contract.
        steps, seed: the number of optimizer steps, and the seed.
        amp_patch, torch: versions.
        level, low: the level that ran, and the short name of the 16-bit dtype in which ops ran, or "" if none did.
        device: the type of the device.
    """

    kind: ClassVar[str] = "contract"

    schema: int
    script: str
    opt_level: str
    lists: tuple[str, ...]
    everywhere: bool
    steps: int
    seed: int
    amp_patch: str
    torch: str
    level: str
    low: str
    device: str


@dataclass(frozen=True, slots=True)
class ContractOp:
    """Calls of an op with equal properties, in the forward pass of one step.

    Attributes:
        module, op, site: the innermost module that ran, the name that was called, and the line of the script.
        given, out: dtypes of the tensors among the arguments, and in the result.
        rule: the rule that decided in which dtype the op runs; "" if none did.
        entry: the entry of the op list with the rule, as `file.yaml:line`; "" if no entry decided.
        calls: the number of calls.
        constants: numbers and words among the arguments, as in `OpRecord`.
        is_promised: whether the runs that made the contract agree about the op; if not, a check ignores the op.
    """

    kind: ClassVar[str] = "op"

    module: str
    op: str
    given: tuple[str, ...]
    out: tuple[str, ...]
    rule: str
    entry: str
    site: str
    calls: int
    constants: tuple[str, ...] = ()
    is_promised: bool = True


@dataclass(frozen=True, slots=True)
class HardwareRecord:
    """The hardware on which the numbers in the records from this one to the next `HardwareRecord` were measured.

    Attributes:
        name: the kind of the hardware, for example "x86_64 AVX512 avx512_bf16".
        threads: the number of threads of the run whose numbers are promised. The bands also come from runs with another
            number of threads.
        kept: the share of elements whose change survives the rounding to 16 bits: of the weights, if these lose
            changes, else of the other tensors that lose most. None if no tensor loses any, or if the run that measures
            it failed.
        kept_worst: the name of the tensor that loses most, or the line of the script that changes it; "" if none does.
        problem: why no number is promised; "" if numbers are promised.
    """

    kind: ClassVar[str] = "hardware"

    name: str
    threads: int
    kept: float | None = None
    kept_worst: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """L2 norms of a module's tensors, each with its band: the share of the norm by which a later run may differ.

    A band is None if the number is not promised.

    Attributes:
        module, type: the qualified name, and the name of the class.
        dtype: the dtype of the output.
        error: the relative error (L2) of the output against a run in float32; None if it was not measured, or is not
            finite.
        weights: the norm of the parameters in the first call with gradients enabled; None if an optimizer began a step
            for them before this call.
        output: the norm of the output of this call.
        gradient, update: the norms of the gradients, and of the changes of the parameters, in the first step with
            finite gradients.
        last_gradient, last_update: the same norms in the last step.
        of_weights, of_output, of_gradient: the sketches (see `ModuleNumbersRecord`) from which the norms `weights`,
            `output` and `gradient` are computed, as `pack` writes them. For these three, a check compares sketches.
    """

    kind: ClassVar[str] = "module"

    module: str
    type: str
    dtype: str
    error: float | None
    weights: float | None
    weights_band: float | None
    output: float | None
    output_band: float | None
    gradient: float | None
    gradient_band: float | None
    update: float | None
    update_band: float | None
    last_gradient: float | None
    last_gradient_band: float | None
    last_update: float | None
    last_update_band: float | None
    of_weights: str = ""
    of_output: str = ""
    of_gradient: str = ""


@dataclass(frozen=True, slots=True)
class StepsRecord:
    """A number of each step, such as the loss, with its bands.

    Attributes:
        name: "loss scale", "skipped", "loss", "gradient norm" or "update norm".
        values: the number in each step; a norm in each step of each optimizer. For "skipped", it is 1 in a skipped
            step, else 0.
        bands: by how much a later run may differ in each step, in the unit of the values; None if the number of the
            step is not promised.
    """

    kind: ClassVar[str] = "steps"

    name: str
    values: tuple[float, ...]
    bands: tuple[float | None, ...]

    @property
    def noun(self) -> str:
        """The noun for what has a value: "step", or "optimizer step" for a norm."""
        return "optimizer step" if self.name.endswith("norm") else "step"


ContractLine = ContractRecord | OptimizerRecord | ContractOp | HardwareRecord | ModuleRecord | StepsRecord
_KINDS: dict[str, type[ContractLine]] = {
    kind.kind: kind for kind in (ContractRecord, OptimizerRecord, ContractOp, HardwareRecord, ModuleRecord, StepsRecord)
}


@dataclass(slots=True)
class Numbers:
    """The numbers of a training on one kind of hardware."""

    hardware: HardwareRecord
    modules: list[ModuleRecord]
    curves: list[StepsRecord]

    def curve(self, name: str) -> StepsRecord | None:
        """Return the record of the curve with a name such as "loss", or None if there is none."""
        return next((curve for curve in self.curves if curve.name == name), None)


@dataclass(slots=True)
class Contract:
    """A contract: the run, the settings of optimizers, the ops of a step, and numbers for each kind of hardware.

    Attributes:
        numbers: by `HardwareRecord.name`.
    """

    about: ContractRecord
    optimizers: list[OptimizerRecord]
    ops: list[ContractOp]
    numbers: dict[str, Numbers]

    def format(self) -> str:
        """Return the text of the file."""
        lines: list[ContractLine] = [self.about, *self.optimizers, *self.ops]
        for hardware_name in sorted(self.numbers):
            numbers = self.numbers[hardware_name]
            lines.extend([numbers.hardware, *numbers.modules, *numbers.curves])
        texts = [json.dumps(plain({"kind": line.kind, **flatten(line)}), allow_nan=False) for line in lines]
        return "[\n" + ",\n".join(texts) + "\n]\n"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all."""
        write_file(path, self.format())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Contract":
        """Read a file that `write` wrote. Raises RecordError, with the reason, for a file that is no valid contract."""
        lines = read_array(Path(path), _KINDS, "a contract")
        if not lines or not isinstance(lines[0], ContractRecord):
            raise RecordError(f"{path}: its first record is not of kind 'contract': this is not a contract")
        about = lines[0]
        if about.schema > SCHEMA:
            raise RecordError(
                f"{path}: schema {about.schema} is newer than {SCHEMA}, the newest of this version: upgrade"
            )
        contract = cls(about, [], [], {})
        for line in lines:
            problem = _find_problem(line)
            if problem:
                raise RecordError(f"{path}: {problem}: write the contract anew with amp-patch check --write")
        for line in lines[1:]:
            contract._add(line, path)
        if not contract.numbers:
            raise RecordError(f"{path}: no record of kind 'hardware': this is only a part of a contract")
        return contract

    def _add(self, line: ContractLine | None, path: str | os.PathLike[str]) -> None:
        """Add the record on a line after the first. Raises RecordError for a record at a wrong place."""
        if isinstance(line, OptimizerRecord):
            self.optimizers.append(line)
        elif isinstance(line, ContractOp):
            self.ops.append(line)
        elif isinstance(line, HardwareRecord):
            self.numbers[line.name] = Numbers(line, [], [])
        elif isinstance(line, (ModuleRecord, StepsRecord)):
            if not self.numbers:
                raise RecordError(f"{path}: a number without hardware before it: this is not a contract")
            numbers = list(self.numbers.values())[-1]  # of the hardware that was added last
            if isinstance(line, ModuleRecord):
                numbers.modules.append(line)
            else:
                numbers.curves.append(line)
        elif isinstance(line, ContractRecord):
            raise RecordError(f"{path}: two records of kind 'contract'")


def _find_problem(line: ContractLine | None) -> str:
    """Return a message about a wrong value in a record, because users may edit records by hand; "" if there is none."""
    bands: list[float | None] = []
    if isinstance(line, ContractRecord) and (line.schema < 1 or line.steps < 2):
        return f"schema {line.schema} and {line.steps} steps"
    if isinstance(line, OptimizerRecord) and not all("=" in setting for setting in line.settings):
        return f"a setting of {line.type} without ="
    if isinstance(line, ContractOp) and line.calls < 1:
        return f"{line.op} has {line.calls} calls"
    if isinstance(line, ModuleRecord):
        bands = [getattr(line, field.name) for field in fields(line) if field.name.endswith("_band")]
        sketches = (line.of_weights, line.of_output, line.of_gradient)
        if any(sketch and not unpack(sketch) for sketch in sketches):
            return f"a sketch of {line.module} cannot be read"
    if isinstance(line, StepsRecord):
        bands = list(line.bands)
        if len(bands) != len(line.values):
            return f"{line.name} has {len(line.values)} values and {len(bands)} bands"
    if any(band is not None and not 0 <= band < math.inf for band in bands):
        return f"{line.module if isinstance(line, ModuleRecord) else 'a curve'} has a band that is negative, inf or NaN"
    return ""


def pack(sketch: tuple[float, ...]) -> str:
    """Return the values of a sketch as little-endian float32 in base64."""
    return base64.b64encode(struct.pack(f"<{len(sketch)}f", *sketch)).decode()


def unpack(text: str) -> tuple[float, ...]:
    """Return the values of a sketch that `pack` made; () for text that is no base64 of whole float32 values."""
    try:
        data = base64.b64decode(text, validate=True)
        return struct.unpack(f"<{len(data) // 4}f", data)
    except (ValueError, struct.error):
        return ()


def round_number(value: float | None, digits: int = 6) -> float | None:
    """Return a number rounded to `digits` significant digits. inf, NaN and None stay."""
    if value is None or not math.isfinite(value):
        return value
    return float(f"{value:.{digits}g}")
