"""`Contract`: the promises about a training, as a file to commit. Importing this does not import torch.

The file is a JSON array with a record on each line, in the order of the training, so that its changes are readable.
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
    """The run that the contract is of.

    Attributes:
        schema: the version of the schema.
        script: the file name of the script, or `-m` and its module.
        opt_level, lists, everywhere: the options of the command; lists are relative to the folder of the contract.
        steps, seed: the number of optimizer steps, and the seed.
        amp_patch, torch: versions.
        level, low: the level that ran, and the short name of its 16-bit dtype; "" if nothing was cast.
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
    """Equal calls of an op in the forward pass of one step.

    Attributes:
        module, op, site: the innermost module that ran, the name that was called, and the line of the script.
        given, out: dtypes of the tensors among the arguments, and in the result.
        rule: the rule that decided; "" if none did.
        entry: the line of the list with the rule; "" without one.
        calls: the number of calls.
        constants: as in `OpRecord`.
        is_promised: whether equal runs agree about the calls; if not, they are not judged.
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
    """The hardware on which the numbers after it were measured.

    Attributes:
        name: the kind of the hardware, for example "x86_64 AVX512 avx512_bf16".
        threads: the number of threads of the runs.
        kept: the share of elements whose change is stored, in the 16-bit tensors that lose changes; None without any.
        kept_worst: the name of the tensor that loses most, or its line; "" without any.
        problem: why no number is promised; "" if numbers are.
    """

    kind: ClassVar[str] = "hardware"

    name: str
    threads: int
    kept: float | None = None
    kept_worst: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """Numbers of a module, each with its band: by which part of the number another run may differ.

    A band is None if the number is not promised. Sketches are texts that `pack` makes.

    Attributes:
        module, type: the qualified name, and the name of the class.
        error: the relative error (L2) of the output against float32, in the first step; None if not measured.
        weights: the norm of the parameters before the first step. The other norms are as in `ModuleNumbersRecord`.
        of_weights, of_output, of_gradient: the sketches.
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
    """A number of each step, with its band: by how much another run may differ; None if the number is not promised.

    Attributes:
        name: "loss scale", "skipped", "loss", "gradient norm" or "update norm".
        values, bands: a number for each step. Bands are in the unit of the values. A skipped step has the value 1.
    """

    kind: ClassVar[str] = "steps"

    name: str
    values: tuple[float, ...]
    bands: tuple[float | None, ...]


ContractLine = ContractRecord | OptimizerRecord | ContractOp | HardwareRecord | ModuleRecord | StepsRecord
_KINDS: dict[str, type[ContractLine]] = {
    kind.kind: kind for kind in (ContractRecord, OptimizerRecord, ContractOp, HardwareRecord, ModuleRecord, StepsRecord)
}


@dataclass(slots=True)
class Numbers:
    """The numbers of one kind of hardware."""

    hardware: HardwareRecord
    modules: list[ModuleRecord]
    curves: list[StepsRecord]

    def curve(self, name: str) -> StepsRecord | None:
        """Return the numbers of each step by their name; None without them."""
        return next((curve for curve in self.curves if curve.name == name), None)


@dataclass(slots=True)
class Contract:
    """A contract: the run, the settings of optimizers, the ops of a step, and numbers for each kind of hardware.

    All hardware shares the ops: a script has the same ones on each device of a type.
    """

    about: ContractRecord
    optimizers: list[OptimizerRecord]
    ops: list[ContractOp]
    numbers: dict[str, Numbers]

    def format(self) -> str:
        """Return the text of the file."""
        lines: list[ContractLine] = [self.about, *self.optimizers, *self.ops]
        for name in sorted(self.numbers):
            part = self.numbers[name]
            lines.extend([part.hardware, *part.modules, *part.curves])
        texts = [json.dumps(plain({"kind": line.kind, **flatten(line)}), allow_nan=False) for line in lines]
        return "[\n" + ",\n".join(texts) + "\n]\n"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all."""
        write_file(path, self.format())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Contract":
        """Read a file that `write` wrote. Raises RecordError, with the reason, for any other file."""
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
        if isinstance(line, OptimizerRecord):
            self.optimizers.append(line)
        elif isinstance(line, ContractOp):
            self.ops.append(line)
        elif isinstance(line, HardwareRecord):
            self.numbers[line.name] = Numbers(line, [], [])
        elif isinstance(line, (ModuleRecord, StepsRecord)):
            if not self.numbers:
                raise RecordError(f"{path}: a number without hardware before it: this is not a contract")
            last = list(self.numbers.values())[-1]
            if isinstance(line, ModuleRecord):
                last.modules.append(line)
            else:
                last.curves.append(line)
        elif isinstance(line, ContractRecord):
            raise RecordError(f"{path}: two records of kind 'contract'")


def _find_problem(line: ContractLine | None) -> str:
    """Return what no contract that was written has, but one that was edited may have; "" if nothing."""
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
        return f"{line.module if isinstance(line, ModuleRecord) else 'a curve'} has a band that is no width"
    return ""


def pack(sketch: tuple[float, ...]) -> str:
    """Return the values of a sketch as little-endian float32 in base64."""
    return base64.b64encode(struct.pack(f"<{len(sketch)}f", *sketch)).decode()


def unpack(text: str) -> tuple[float, ...]:
    """Return the values of a sketch that `pack` made; () for other text."""
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
