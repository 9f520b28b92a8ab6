"""Examines the machine: the versions of packages, the devices, the speed of 16-bit dtypes on them, and `apex`.

torch is imported only when devices are examined.
"""

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import amp_patch

from ..config import levels
from .rules import Finding

LOW_DTYPES = ("float16", "bfloat16")
_FOLDERS_OF_NVIDIA = ("multi_tensor_apply", "contrib", "optimizers", "transformer")
"""Folders of NVIDIA's package `apex`. One of them is enough to recognize it."""


@dataclass(frozen=True, slots=True)
class LowDtype:
    """The speed of products (matrix products, convolutions, ...) in a 16-bit dtype on a device.

    Attributes:
        name: "float16" or "bfloat16".
        verdict: "fast" or "slow", compared with float32, or "unknown".
        evidence: the reason for the verdict.
    """

    name: str
    verdict: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Device:
    """A device for tensors.

    Attributes:
        name: the device and its model, such as "cuda:0 NVIDIA H100" or "cpu AVX512".
        low_dtypes: its speed in float16 and bfloat16.
    """

    name: str
    low_dtypes: tuple[LowDtype, ...]


@dataclass(frozen=True, slots=True)
class ApexInstall:
    """The package that `import apex` would import.

    Attributes:
        kind: "none"; "with amp" or "without amp" for NVIDIA's; "stand-in" for amp_patch's; "other".
        location: its folder, or its file; None if there is no package, or if it is only in memory.
        version: of the installed distribution `apex`; None if there is none.
    """

    kind: str
    location: str | None
    version: str | None


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, as the report describes it.

    Attributes:
        python, amp_patch: their versions.
        versions: the version of each other package that amp_patch needs; None if it is not installed.
        malloc: advice on how the C library allocates memory, or "".
    """

    python: str
    amp_patch: str
    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    apex: ApexInstall
    malloc: str = ""


def get_machine() -> Machine:
    """Examine the machine, and return the result. Imports torch."""
    versions = {name: _version(name) for name in ("torch", "wrapt", "PyYAML")}
    devices = tuple(get_devices())
    malloc = describe_malloc(devices[0], platform.libc_ver()[0], os.environ)
    return Machine(platform.python_version(), amp_patch.__version__, versions, devices, find_apex(), malloc)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- devices ---------------------------------------------------------------------------------------------------------


def get_devices() -> Iterator[Device]:
    """Yield all CUDA devices, or else the current accelerator if there is one; and last the CPU."""
    import torch

    from ..hardware import cpu_flags, has_low_products

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            capability = None
            # on AMD GPUs (ROCm), the compute capability has another meaning
            if not torch.version.hip:
                capability = torch.cuda.get_device_capability(index)
            yield Device(f"cuda:{index} {torch.cuda.get_device_properties(index).name}", rate_gpu(capability))
    elif torch.accelerator.is_available():
        yield Device(str(torch.accelerator.current_accelerator()), rate_gpu(None))
    fast_dtypes = [name for name in LOW_DTYPES if has_low_products("cpu", getattr(torch, name))]
    yield Device(f"cpu {torch.backends.cpu.get_cpu_capability()}", rate_cpu(cpu_flags(), fast_dtypes))


def rate_gpu(capability: tuple[int, int] | None) -> tuple[LowDtype, ...]:
    """Return how fast each 16-bit dtype is on an NVIDIA GPU with this compute capability, such as (8, 0).

    NVIDIA's matrix units (tensor cores) compute in float16 from 7.0 on, and in bfloat16 from 8.0 on. `capability` is
    None for another accelerator: its speed is unknown.
    """
    if capability is None:
        return tuple(LowDtype(name, "unknown", "not an NVIDIA GPU: measure it") for name in LOW_DTYPES)
    rated = []
    for name, needed in (("float16", 7), ("bfloat16", 8)):
        verdict = "slow"
        if capability >= (needed, 0):
            verdict = "fast"
        evidence = f"compute capability {capability[0]}.{capability[1]}; matrix units for {name} come with {needed}.0"
        rated.append(LowDtype(name, verdict, evidence))
    return tuple(rated)


def rate_cpu(flags: Sequence[str], fast_dtypes: Sequence[str]) -> tuple[LowDtype, ...]:
    """Return how fast each 16-bit dtype is on a CPU.

    Args:
        flags: the names of the CPU's instructions for 16 bits, such as "avx512_bf16".
        fast_dtypes: the dtypes in which the CPU computes products fast (see `hardware.has_low_products`).
    """
    instructions = ", ".join(flags) or "no instructions for 16 bits"
    rated = []
    for name in LOW_DTYPES:
        if name in fast_dtypes:
            rated.append(LowDtype(name, "fast", instructions))
        else:
            rated.append(LowDtype(name, "slow", f"amp computes products in float32 here by default; {instructions}"))
    return tuple(rated)


class Advice(NamedTuple):
    """Advice on the fastest opt_level for a device.

    Attributes:
        text: the advice, with the reason.
        levels: the 16-bit opt_levels that the text recommends; empty if it recommends O0 (float32), or to measure.
        low: the 16-bit dtype of these opt_levels, "bf16" or "f16"; "" if there are none.
    """

    text: str
    levels: tuple[str, ...] = ()
    low: str = ""

    def name_only(self, levels: Sequence[str]) -> str:
        """Return the text with `levels` in place of the opt_levels that it recommends."""
        _, colon, reason = self.text.partition(":")
        return f"use {' or '.join(levels)}{colon}{reason}"


def get_advice(device_type: str = "") -> Advice:
    """Return advice on the fastest opt_level for the first device, or for the first device of a type such as "cpu".

    The machine must have a device of that type.
    """
    return recommend(next(device for device in get_devices() if device.name.startswith(device_type)))


def recommend(device: Device) -> Advice:
    """Return advice on the fastest opt_level for a device."""
    verdicts = {dtype.name: dtype.verdict for dtype in device.low_dtypes}
    name, is_cpu = device.name, device.name.startswith("cpu")
    if verdicts["bfloat16"] == "fast":
        reason = f"{name} has bfloat16, which needs no loss scaling; O1 and O2 (float16) are as fast"
        if is_cpu:
            reason = "this CPU has bfloat16 instructions. Float16 levels are for testing GPU code"
        return _use_levels("bfloat16", reason)
    if is_cpu:
        reason = "this CPU has no fast 16-bit products, so amp computes them in float32"
        return Advice(f"keep O0 here: {reason}. Other levels are for testing GPU code")
    if verdicts["float16"] == "fast":
        reason = f"{name} has fast float16 products, and no fast bfloat16 ones"
        return _use_levels("float16", reason)
    if verdicts["float16"] == "unknown":
        return Advice(
            f"time a few steps at O0, O1 and O4 on {name}, and take the fastest: amp_patch has no figures for it"
        )
    return Advice(f"keep O0 here: 16 bits save memory on {name}, but no time")


def _use_levels(low: str, reason: str) -> Advice:
    names = levels.find_patching_level(low).name, levels.find_master_level(low).name
    return Advice(f"use {names[0]} or {names[1]}: {reason}", names, "bf16" if low == "bfloat16" else "f16")


def describe_malloc(device: Device, library: str, environment: Mapping[str, str]) -> str:
    """Return the advice to set two environment variables of glibc for a training on a CPU, or "" if it does not apply.

    glibc returns freed memory to the system, which then has to clear it for the next tensor. With these variables, a
    step of a small network takes 0.7 to 0.95 of the time that it takes without them. This holds with amp and without
    amp (measured with torch 2.13.0 on a CPU with AVX512_BF16).

    Args:
        device: the first device. On an accelerator, tensors do not use the memory of the C library.
        library: the name of the C library, such as "glibc".
        environment: the environment variables. If MALLOC_TRIM_THRESHOLD_ is set already, there is no advice.
    """
    if not device.name.startswith("cpu") or library != "glibc" or "MALLOC_TRIM_THRESHOLD_" in environment:
        return ""
    return (
        "glibc returns freed memory to the system; MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_MMAP_MAX_=0 in"
        " the environment avoids that, and saves 5 to 30 % of a small step, with amp and without"
    )


# ---- apex ------------------------------------------------------------------------------------------------------------


def find_apex() -> ApexInstall:
    """Return the package that `import apex` would find, by its files and metadata. Does not import it."""
    try:
        spec = importlib.util.find_spec("apex")
    except (ValueError, ImportError):  # a program has put a module without a spec into sys.modules
        return ApexInstall("other", None, None)
    if spec is None:
        return ApexInstall("none", None, None)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    location = str(folders[0]) if folders else spec.origin
    return ApexInstall(_kind_of_package(folders), location, _version("apex"))


def _kind_of_package(folders: Sequence[Path]) -> str:
    """Return the `kind` of an `ApexInstall` from the folders of the package."""
    if any(Path(amp_patch.__file__).parent in folder.parents for folder in folders):
        return "stand-in"
    if any((folder / "amp" / "__init__.py").is_file() for folder in folders):
        return "with amp"
    if any((folder / name).is_dir() for folder in folders for name in _FOLDERS_OF_NVIDIA):
        return "without amp"
    return "other"


# ---- findings --------------------------------------------------------------------------------------------------------


def machine_findings() -> list[Finding]:
    """Return a list with one finding if `import apex` finds the files of another project; else an empty list."""
    apex = find_apex()
    if apex.kind != "other" or apex.location is None:  # without a location: a program has made the module itself
        return []
    message = (
        f"`import apex` finds {apex.location}, which has no amp: PyPI has a package of that name that is not NVIDIA's"
    )
    advice = "Remove it (`pip uninstall apex`), and run scripts with `amp-patch run`, or import amp_patch."
    return [Finding("AMP901", "warning", message, advice)]
