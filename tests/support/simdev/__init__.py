"""A simulated accelerator: import this, and `torch.device("sim")` exists, twice. It is torch's PrivateUse1 device,
computed by torch's own CPU kernels, one launch for each op.

* A device pointer is no address of the host: code that follows one dies at once. Fresh memory is NaN.
* Tensors of two devices, 0-dim ones among them, generators of another device and pinned tensors of the device are
  refused, as on CUDA. A 0-dim tensor of the CPU is taken where CUDA takes one.
* `count()` tells launches, syncs and copies; `no_sync()` raises where the host would wait. A copy to pinned memory that
  does not wait holds NaN until somebody waits for it; one to other memory of the host waits. `lag(n)` has events come
  true n launches later.

It cannot show times, races between streams, CUDA graphs, compiled code, or what cuDNN and TF32 do to numbers.

The C++ is built once for each source, torch and Python, and kept in `build/`, or in $SIMDEV_BUILD. Renaming PrivateUse1
cannot be undone, and makes `sim` the default accelerator of the process.
"""

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).resolve().parent
DEVICES = 2


def _build() -> Path:
    """Compile the sources, unless that was done, and return the path of the library."""
    sources = sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])
    text = b"".join(source.read_bytes() for source in sources)
    key = hashlib.sha256(text + torch.__version__.encode() + sys.version.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("SIMDEV_BUILD", HERE / "build"))
    library = folder / f"_sim_{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        scratch = library.with_suffix(f".{os.getpid()}")  # two processes may build at once
        subprocess.run([*_compiler_command(), "-o", str(scratch)], check=True)
        scratch.replace(library)
    return library


def _compiler_command() -> list[str]:
    root = Path(torch.__file__).parent
    headers = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    abi = int(torch.compiled_with_cxx11_abi())
    options = ["-shared", "-fPIC", "-std=c++20", "-O0", "-w", "-fmax-errors=9", "-DTORCH_EXTENSION_NAME=_sim"]
    options += [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *(f"-I{header}" for header in headers)]
    libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    return ["g++", *options, str(HERE / "sim.cpp"), *libraries]


def _load(library: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("_sim", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


torch.utils.rename_privateuse1_backend("sim")
_sim = _load(_build())


# ---- torch.sim -------------------------------------------------------------------------------------------------------


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return _sim.current_device() if index is None else index


@contextlib.contextmanager
def _device(device: Any) -> Iterator[None]:
    before = _sim.current_device()
    _sim.set_device(_index(device))
    try:
        yield
    finally:
        _sim.set_device(before)


def _manual_seed_all(seed: int) -> None:
    for index in range(DEVICES):
        _sim.seed(seed % 2**64, index)


def _make_module() -> types.ModuleType:
    module = types.ModuleType("torch.sim")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: DEVICES,
        "current_device": _sim.current_device,
        "set_device": lambda device: _sim.set_device(_index(device)),
        "device": _device,
        "synchronize": lambda device=None: _sim.synchronize(),
        "empty_cache": lambda: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "manual_seed": lambda seed: _sim.seed(seed % 2**64, _sim.current_device()),
        "manual_seed_all": _manual_seed_all,
        "get_rng_state": lambda device="sim": _sim.get_rng_state(_index(device)),
        "set_rng_state": lambda state, device="sim": _sim.set_rng_state(state, _index(device)),
        "memory_allocated": lambda device=None: _sim.memory_allocated(_index(device)),
        "max_memory_allocated": lambda device=None: _sim.max_memory_allocated(_index(device)),
        "reset_peak_memory_stats": lambda device=None: _sim.reset_peak_memory_stats(_index(device)),
        "Event": lambda **options: torch.Event("sim", **options),
        "Stream": torch.Stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


torch._register_device_module("sim", _make_module())
torch.utils.generate_methods_for_privateuse1_backend(for_packed_sequence=True, for_storage=True)


# ---- what the device does --------------------------------------------------------------------------------------------


class Record(NamedTuple):
    """One launch, sync or copy. Dtypes are those of the first tensor that came in, and of the last that came out."""

    op: str
    kind: str
    dtype: str
    result_dtype: str
    shape: list[int]
    bytes: int


@dataclass
class Counts:
    """What the device did in a `count()` block: how many of each kind, and bytes, and each record in its order."""

    launches: int = 0
    syncs: int = 0
    copies: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    records: list[Record] = field(default_factory=list)

    def _fill(self) -> None:
        totals = _sim.totals()
        self.launches = totals.get("launch", 0)
        self.syncs = totals.get("sync", 0) + totals.get("event_wait", 0)
        for kind in ("h2d", "d2h", "p2p"):
            self.copies[kind] = totals.get(kind, 0)
            self.bytes[kind] = totals.get(f"{kind}_bytes", 0)
        self.records += [Record(*one) for one in _sim.records()]


@contextlib.contextmanager
def count() -> Iterator[Counts]:
    """Count what the device does in the block; the numbers are there when it has ended. Does not nest."""
    counts = Counts()
    _sim.start_recording()
    try:
        yield counts
    finally:
        _sim.stop_recording()
        counts._fill()


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """Raise RuntimeError where the host would wait for the device."""
    before = _sim.forbid_waits(True)
    try:
        yield
    finally:
        _sim.forbid_waits(before)


@contextlib.contextmanager
def lag(launches: int) -> Iterator[None]:
    """Have the device be so many launches behind the host: events come true that many later."""
    before = _sim.set_lag(launches)
    try:
        yield
    finally:
        _sim.set_lag(before)
