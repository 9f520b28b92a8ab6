"""The doctor judges the dtypes of a machine, and finds out which package has the name apex without importing it.

Guards: doctor/machine, doctor/report, hardware.
"""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import amp_patch
from amp_patch import hardware
from amp_patch.cli.main import main
from amp_patch.doctor import machine
from amp_patch.doctor.machine import ApexInstall, Machine
from amp_patch.doctor.report import Report

GPU = machine.Device("cuda:0 Some GPU", ())
CPU = machine.Device("cpu AVX2", machine.rate_cpu((), []))
SOUND = Machine("3.12.1", "0.2.0", {"torch": "2.13.0+cpu", "wrapt": None}, (CPU,), ApexInstall("none", None, None))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a package apex of these files, with metadata, where Python looks first; importing it would fail."""

    def put(files: list[str]) -> Path:
        for name in files:
            (tmp_path / "apex" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "apex" / name).write_text("raise SystemExit('imported')\n")
        info = tmp_path / "apex-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "apex", raising=False)
        importlib.invalidate_caches()
        return tmp_path / "apex"

    return put


@pytest.mark.parametrize(
    ("files", "kind", "codes"),
    [
        (["__init__.py", "amp/__init__.py", "optimizers/__init__.py"], "with amp", []),
        (["__init__.py", "optimizers/__init__.py", "contrib/__init__.py"], "without amp", []),
        (["__init__.py"], "other", ["AMP901"]),
        (["setup.txt"], "other", ["AMP901"]),
    ],
    ids=["with-amp", "without-amp", "other", "folder-without-init"],
)
def test_apex_is_told_by_its_files_and_never_imported(files: list[str], kind: str, codes: list[str], install) -> None:
    folder = install(files)
    found = machine.find_apex()
    assert (found.kind, found.location, found.version) == (kind, str(folder), "0.1")
    assert "apex" not in sys.modules
    assert [finding.code for finding in machine.machine_findings()] == codes


def test_no_apex_is_no_finding() -> None:
    assert machine.find_apex() == ApexInstall("none", None, None)
    assert machine.machine_findings() == []


def test_a_module_named_apex_without_a_spec_is_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", type(sys)("apex"))
    assert machine.find_apex().kind == "other"
    assert machine.machine_findings() == []  # there are no files to remove


def test_the_standin_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("apex")
    folder = str(Path(amp_patch.__file__).parent / "apex")
    module.__spec__ = importlib.machinery.ModuleSpec("apex", None, is_package=True)
    module.__spec__.submodule_search_locations = [folder]
    monkeypatch.setitem(sys.modules, "apex", module)
    assert machine.find_apex() == ApexInstall("stand-in", folder, None)


@pytest.mark.parametrize(
    ("capability", "verdicts"),
    [
        ((6, 1), {"float16": "slow", "bfloat16": "slow"}),
        ((7, 0), {"float16": "fast", "bfloat16": "slow"}),
        ((8, 0), {"float16": "fast", "bfloat16": "fast"}),
        (None, {"float16": "unknown", "bfloat16": "unknown"}),
    ],
)
def test_a_gpu_is_rated_by_its_compute_capability(capability: tuple[int, int] | None, verdicts: dict[str, str]) -> None:
    rated = machine.rate_gpu(capability)
    assert {dtype.name: dtype.verdict for dtype in rated} == verdicts
    assert capability is None or all(f"{capability[0]}.{capability[1]}" in dtype.evidence for dtype in rated)


def test_flags_are_those_that_torch_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    monkeypatch.delattr(torch.cpu, "_is_amx_fp16_supported", raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_tile": True}, raising=False)
    assert hardware.cpu_flags() == ("avx512_bf16",)  # what has a question of its own is not looked up
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_fp16": True}, raising=False)
    assert hardware.cpu_flags() == ("avx512_bf16", "avx512_fp16")
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert hardware.cpu_flags() == ("avx512_bf16",)


def test_the_gpus_come_before_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: type("Properties", (), {"name": f"card {index}"})
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7 + index, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(hardware, "has_low_products", lambda kind, dtype: True)
    devices = machine.get_machine().devices
    assert [device.name.partition(" ")[0] for device in devices] == ["cuda:0", "cuda:1", "cpu"]
    assert [device.low_dtypes[1].verdict for device in devices[:2]] == ["slow", "fast"]


@pytest.mark.parametrize(
    ("device", "advice"),
    [
        (replace(GPU, low_dtypes=machine.rate_gpu((9, 0))), "use O4 or O5: cuda:0 Some GPU has bfloat16"),
        (replace(GPU, low_dtypes=machine.rate_gpu((7, 5))), "use O1 or O2: cuda:0 Some GPU has fast float16"),
        (replace(GPU, low_dtypes=machine.rate_gpu((6, 1))), "keep O0 here: 16 bits save memory on cuda:0 Some GPU"),
        (replace(GPU, low_dtypes=machine.rate_gpu(None)), "time a few steps at O0, O1 and O4"),
        (CPU, "keep O0 here: this CPU has no fast 16-bit products"),
        (
            replace(CPU, low_dtypes=machine.rate_cpu((), ["bfloat16"])),
            "use O4 or O5: this CPU has bfloat16 instructions",
        ),
    ],
    ids=["hopper", "turing", "pascal", "other", "cpu", "cpu-with"],
)
def test_the_lines_on_the_machine_begin_with_advice(device, advice):
    found = Report([], 0, machine=replace(SOUND, devices=(device,)))
    assert found.as_text().startswith(f"advice: {advice}")
    assert advice in json.loads(found.as_json())["machine"]["advice"]


def test_without_scripts_the_machine_alone_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert torch.__version__.partition("+")[0] in said and "float16" in said and "bfloat16" in said
    assert "files" not in said


def test_malloc_is_told_of_where_tensors_are_in_its_memory() -> None:
    told = machine.describe_malloc(CPU, "glibc", {})
    assert "MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_MMAP_MAX_=0" in told
    assert told in " ".join(Report([], 0, replace(SOUND, malloc=told)).as_text().split())
    assert machine.describe_malloc(GPU, "glibc", {}) == machine.describe_malloc(CPU, "musl", {}) == ""
    assert machine.describe_malloc(CPU, "glibc", {"MALLOC_TRIM_THRESHOLD_": "1073741824"}) == ""
    assert "malloc" not in Report([], 0, SOUND).as_text()
