"""The machine: versions, devices, which 16-bit dtypes are fast on them, and what is installed as `apex`."""

import importlib.machinery
import importlib.metadata
import importlib.util
import platform
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import amp_patch

from ..hardware import cpu_flags, has_low_products
from .findings import Finding
from .levels import presets_in_force

REQUIRED = {"torch": (2, 6), "wrapt": (2, 4), "PyYAML": (6,)}
_SIZE = 256  # a product of this size takes some 30 ms in float16 where that is slow, and 0.2 ms in float32
_REPEATS = 3
_FAST, _SLOW = 1.25, 0.8  # speed relative to float32; what lies between is no difference
_INSTALLED_BY_NVIDIA = ("multi_tensor_apply", "contrib", "optimizers", "transformer")


@dataclass(frozen=True, slots=True)
class LowDtype:
    """The speed of a 16-bit dtype on a device against float32: "fast", "slow", "even" or "unknown"."""

    name: str
    verdict: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Device:
    """One device that tensors may be on."""

    name: str
    low_dtypes: tuple[LowDtype, ...]


@dataclass(frozen=True, slots=True)
class ApexInstall:
    """What `import apex` would find: "none", "with amp", "without amp", "pyramid", "stand-in" or "other"."""

    kind: str
    location: str | None
    version: str | None


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine as the report shows it."""

    python: str
    amp_patch: str
    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    apex: ApexInstall

    def as_dict(self) -> dict[str, Any]:
        """Return plain dictionaries and lists, for JSON."""
        return asdict(self)


def get_machine() -> Machine:
    """Look the machine over; takes about a tenth of a second."""
    versions = {name: torch.__version__ if name == "torch" else _version(name) for name in REQUIRED}
    return Machine(platform.python_version(), amp_patch.__version__, versions, tuple(_devices()), find_apex())


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- devices ---------------------------------------------------------------------------------------------------------


def _devices() -> Iterator[Device]:
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = None if torch.version.hip else torch.cuda.get_device_capability(index)
            yield Device(f"cuda:{index} {properties.name}", judge_gpu(capability))
    elif torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        yield Device(str(accelerator), judge_gpu(None))
    yield Device(f"cpu {torch.backends.cpu.get_cpu_capability()}", judge_cpu(cpu_flags(), measure_cpu()))


def judge_gpu(capability: tuple[int, int] | None) -> tuple[LowDtype, ...]:
    """Return the verdict on each 16-bit dtype for a CUDA compute capability.

    NVIDIA's matrix units take float16 from 7.0, bfloat16 from 8.0 on. None stands for an accelerator of another make,
    of which nothing is known here.
    """
    if capability is None:
        return tuple(LowDtype(name, "unknown", "not an NVIDIA GPU: measure it") for name in ("float16", "bfloat16"))
    verdicts = []
    for name, first in (("float16", (7, 0)), ("bfloat16", (8, 0))):
        has = capability >= first
        evidence = (
            f"compute capability {capability[0]}.{capability[1]}; matrix units for {name} come with"
            f" {first[0]}.{first[1]}"
        )
        verdicts.append(LowDtype(name, "fast" if has else "slow", evidence))
    return tuple(verdicts)


def measure_cpu() -> dict[str, float]:
    """Return the speed of a small matrix product in each 16-bit dtype, relative to float32: best of a few repeats."""
    seconds = {dtype: _time_product(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
    return {
        str(dtype).removeprefix("torch."): seconds[torch.float32] / taken
        for dtype, taken in seconds.items()
        if dtype is not torch.float32
    }


def _time_product(dtype: torch.dtype) -> float:
    value = torch.ones(_SIZE, _SIZE, dtype=dtype)
    times = []
    for _ in range(_REPEATS + 1):  # the first one is for warming up
        started = time.perf_counter()
        torch.mm(value, value)
        times.append(time.perf_counter() - started)
    return max(min(times[1:]), 1e-9)


def judge_cpu(flags: Sequence[str], speeds: dict[str, float]) -> tuple[LowDtype, ...]:
    """Return the verdict on each 16-bit dtype for measured speeds, 1.0 being float32's."""
    verdicts = []
    for name, speed in speeds.items():
        verdict = "fast" if speed >= _FAST else "slow" if speed <= _SLOW else "even"
        has = ", ".join(flags) or "no instructions for 16 bits"
        verdicts.append(
            LowDtype(name, verdict, f"{speed:.2g} times the speed of float32 in a {_SIZE}x{_SIZE} product; {has}")
        )
    return tuple(verdicts)


def recommend(machine: Machine) -> str:
    """Return a sentence on which levels are for speed here, by the first device, an accelerator if there is one."""
    device = next(iter(machine.devices), None)
    if device is None or device.name.startswith("cpu"):
        if has_low_products("cpu", torch.bfloat16):
            return (
                "for speed on this CPU use O4 or O5 (bfloat16); float16 levels are for trying out what a GPU will run"
            )
        return (
            "for speed on this CPU use O0: it has no fast products of 16-bit values. The other levels are for trying"
            " out what a GPU will run; leave out compute='native' there"
        )
    verdicts = {dtype.name: dtype.verdict for dtype in device.low_dtypes}
    if verdicts["bfloat16"] == "fast":
        return f"for speed on {device.name} use O4 or O5 (bfloat16, no loss scaling); O1 and O2 (float16) are as fast"
    if verdicts["float16"] == "fast":
        return f"for speed on {device.name} use O1 or O2 (float16): bfloat16 is slow there"
    if "unknown" in verdicts.values():
        return f"time a few steps at O0, O1 and O4 on {device.name}, and take the fastest"
    return f"for speed on {device.name} use O0: 16 bits save memory there, and no time"


# ---- apex ------------------------------------------------------------------------------------------------------------


def find_apex() -> ApexInstall:
    """Tell what `import apex` would find, from its files and metadata; it is not imported."""
    try:
        spec = importlib.util.find_spec("apex")
    except (ValueError, ImportError):  # a module without a spec, such as one that a script has made
        return ApexInstall("other", None, None)
    if spec is None:
        return ApexInstall("none", None, None)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    location = str(folders[0]) if folders else spec.origin
    return ApexInstall(_kind(folders), location, _version("apex"))


def _kind(folders: Sequence[Path]) -> str:
    if any(Path(amp_patch.__file__).parent in folder.parents for folder in folders):
        return "stand-in"
    if any((folder / "amp" / "__init__.py").is_file() for folder in folders):
        return "with amp"
    if any((folder / name).is_dir() for folder in folders for name in _INSTALLED_BY_NVIDIA):
        return "without amp"
    try:
        described = str(importlib.metadata.metadata("apex")["Summary"]).lower()
    except (importlib.metadata.PackageNotFoundError, KeyError):
        return "other"
    return "pyramid" if "pyramid" in described or "velruse" in described else "other"


# ---- findings --------------------------------------------------------------------------------------------------------

_FOREIGN = {
    "pyramid": "the package installed as apex is the web toolkit for Pyramid of that name from PyPI, and has no amp",
    "other": "what is found under the name apex is not NVIDIA's: it has no amp",
}


def machine_findings(machine: Machine) -> Iterator[Finding]:
    """Yield what is wrong with the machine."""
    if machine.apex.kind in _FOREIGN:
        where = f" ({machine.apex.location})" if machine.apex.location else ""
        fix = "Take it away (`pip uninstall apex`), and run scripts by `amp-patch run`, or import amp_patch."
        yield Finding("AMP901", "warning", _FOREIGN[machine.apex.kind] + where, fix)
    for name, required in REQUIRED.items():
        version = machine.versions[name]
        if version is None or _numbers(version) < required:
            wanted = ".".join(map(str, required))
            message = f"{name} {version or 'is not installed'}: amp_patch needs {wanted} or later"
            yield Finding("AMP902", "error", message, f'pip install "{name}>={wanted}"')
    problem = presets_in_force()[1]
    if problem is not None:
        yield Finding(
            "AMP903",
            "error",
            f"AMP_PATCH_PRESETS cannot be used: {problem}",
            "Correct the file, or unset the variable.",
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) of `2.13.0+cpu`."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()
