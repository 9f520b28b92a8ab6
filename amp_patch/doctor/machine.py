"""The machine: versions, devices, which 16-bit dtypes are fast on them, and what is installed as `apex`.

torch is imported late: scripts are read without it.
"""

import importlib.machinery
import importlib.metadata
import importlib.util
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import amp_patch

from .findings import Finding

REQUIRED = {"torch": (2, 6), "wrapt": (2, 4), "PyYAML": (6,)}
_SIZE = 256  # a product of this size takes some 30 ms in float16 where that is slow, and 0.2 ms in float32
_REPEATS = 3
_FAST, _SLOW = 1.25, 0.8  # speed relative to float32; what lies between is no difference
_INSTALLED_BY_NVIDIA = ("multi_tensor_apply", "contrib", "optimizers", "transformer")


@dataclass(frozen=True, slots=True)
class LowDtype:
    """The speed of a 16-bit dtype on a device against float32: "fast", "slow", "even" or "unknown".

    `speed` is what was measured, 1.0 being float32's; None where nothing was.
    """

    name: str
    verdict: str
    evidence: str
    speed: float | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """One device that tensors may be on."""

    name: str
    low_dtypes: tuple[LowDtype, ...]
    multiplies: tuple[str, ...] = ()
    """The 16-bit dtypes that it trains in by instructions for them; in others amp computes products in float32."""


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


def get_machine() -> Machine:
    """Look the machine over; takes about a tenth of a second, and the import of torch."""
    return Machine(platform.python_version(), amp_patch.__version__, get_versions(), tuple(get_devices()), find_apex())


def get_versions() -> dict[str, str | None]:
    """Return what is installed of the packages that amp_patch needs."""
    return {name: _version(name) for name in REQUIRED}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- devices ---------------------------------------------------------------------------------------------------------


def get_devices() -> Iterator[Device]:
    """Yield the devices, accelerators first; the CPU is measured when it is reached."""
    import torch

    from ..hardware import cpu_flags, has_low_products

    multiplies = {
        kind: tuple(name for name in ("float16", "bfloat16") if has_low_products(kind, getattr(torch, name)))
        for kind in ("cuda", "cpu")
    }
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = None if torch.version.hip else torch.cuda.get_device_capability(index)
            yield Device(f"cuda:{index} {properties.name}", judge_gpu(capability), multiplies["cuda"])
    elif torch.accelerator.is_available():
        yield Device(str(torch.accelerator.current_accelerator()), judge_gpu(None), ("float16", "bfloat16"))
    yield Device(
        f"cpu {torch.backends.cpu.get_cpu_capability()}", judge_cpu(cpu_flags(), measure_cpu()), multiplies["cpu"]
    )


def judge_gpu(capability: tuple[int, int] | None) -> tuple[LowDtype, ...]:
    """Return the verdict on each 16-bit dtype for a CUDA compute capability.

    NVIDIA's matrix units take float16 from 7.0, bfloat16 from 8.0 on. None stands for an accelerator of another make,
    of which nothing is known here.
    """
    if capability is None:
        return tuple(LowDtype(name, "unknown", "not an NVIDIA GPU: measure it") for name in ("float16", "bfloat16"))
    has = f"compute capability {capability[0]}.{capability[1]}; matrix units for"
    return tuple(
        LowDtype(name, "fast" if capability >= (first, 0) else "slow", f"{has} {name} come with {first}.0")
        for name, first in (("float16", 7), ("bfloat16", 8))
    )


def measure_cpu() -> dict[str, float]:
    """Return the speed of a small matrix product in each 16-bit dtype, relative to float32: best of a few repeats.

    On one thread: on a busy machine threads wait for each other many times as long as such a product takes.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = {name: _time_product(name) for name in ("float32", "float16", "bfloat16")}
    finally:
        torch.set_num_threads(threads)
    return {name: seconds["float32"] / taken for name, taken in seconds.items() if name != "float32"}


def _time_product(dtype: str) -> float:
    import torch

    value = torch.ones(_SIZE, _SIZE, dtype=getattr(torch, dtype))
    times = []
    for _ in range(_REPEATS + 1):  # the first one is for warming up
        started = time.perf_counter()
        torch.mm(value, value)
        times.append(time.perf_counter() - started)
    return max(min(times[1:]), 1e-9)


def judge_cpu(flags: Sequence[str], speeds: Mapping[str, float]) -> tuple[LowDtype, ...]:
    """Return the verdict on each 16-bit dtype for measured speeds, 1.0 being float32's."""
    has = ", ".join(flags) or "no instructions for 16 bits"
    size = f"{_SIZE}x{_SIZE}"
    return tuple(
        LowDtype(
            name,
            "fast" if speed >= _FAST else "slow" if speed <= _SLOW else "even",
            f"{speed:.2g} times the speed of float32 in a {size} product; {has}",
            speed,
        )
        for name, speed in speeds.items()
    )


def get_advice() -> str:
    """Return which level is for speed on the first device."""
    return recommend(next(get_devices()))


def recommend(device: Device) -> str:
    """Return which level is for speed on a device, and what is known of it that says so."""
    low = {dtype.name: dtype for dtype in device.low_dtypes}
    if device.name.startswith("cpu"):
        return _recommend_for_cpu(device, low["bfloat16"])
    if low["bfloat16"].verdict == "fast":
        return f"use O4 or O5: {device.name} has bfloat16, which needs no loss scaling; O1 and O2 (float16) are as fast"
    if low["float16"].verdict == "fast":
        return f"use O1 or O2: {device.name} has fast float16 products, and no fast bfloat16 ones"
    if low["float16"].verdict == "unknown":
        return f"time a few steps at O0, O1 and O4 on {device.name}, and take the fastest: nothing is known of it here"
    return f"keep O0 here: 16 bits save memory on {device.name}, and no time"


def _recommend_for_cpu(device: Device, bfloat16: LowDtype) -> str:
    if "bfloat16" in device.multiplies:
        return "use O4 or O5: this CPU has bfloat16 products; float16 levels are for trying out what a GPU will run"
    slow = [
        f"{1 / dtype.speed:.0f} times slower in {dtype.name}"
        for dtype in device.low_dtypes
        if dtype.speed and dtype.verdict == "slow"
    ]
    measured = f": products are {' and '.join(slow)} than in float32" if slow else ""
    return (
        f"keep O0 here{measured or ': this CPU has no fast 16-bit products'}, so amp computes them in float32. Other"
        " levels are for trying out what a GPU will run"
    )


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


def machine_findings(
    apex: ApexInstall | None = None, versions: Mapping[str, str | None] | None = None
) -> list[Finding]:
    """Return what is wrong with what is installed, here or as it is said."""
    return list(_findings(apex or find_apex(), versions or get_versions()))


def _findings(apex: ApexInstall, versions: Mapping[str, str | None]) -> Iterator[Finding]:
    if apex.kind in _FOREIGN:
        where = f" ({apex.location})" if apex.location else ""
        advice = "Take it away (`pip uninstall apex`), and run scripts by `amp-patch run`, or import amp_patch."
        yield Finding("AMP901", "warning", _FOREIGN[apex.kind] + where, advice)
    for name, required in REQUIRED.items():
        version = versions[name]
        if version is None or _numbers(version) < required:
            wanted = ".".join(map(str, required))
            message = f"{name} {version or 'is not installed'}: amp_patch needs {wanted} or later"
            yield Finding("AMP902", "error", message, f'pip install "{name}>={wanted}"')


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) of `2.13.0+cpu`."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()
