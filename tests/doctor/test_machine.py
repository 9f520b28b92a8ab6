"""What the doctor says of the machine: verdicts on dtypes, and which package is found under the name apex without
importing it.
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

SOUND = Machine(
    "3.12.1", "0.2.0", {"torch": "2.13.0+cpu", "wrapt": "2.4", "PyYAML": "6.0.3"}, (), ApexInstall("none", None, None)
)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a package apex of these files, and metadata with this summary, where Python looks first; importing it would
    fail.
    """

    def put(files: list[str], summary: str | None = None, version: str = "0.1") -> Path:
        for name in files:
            (tmp_path / "apex" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "apex" / name).write_text("raise SystemExit('imported')\n")
        if summary is not None:
            info = tmp_path / f"apex-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: apex\nVersion: {version}\nSummary: {summary}\n"
            )
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "apex", raising=False)
        importlib.invalidate_caches()
        return tmp_path / "apex"

    return put


PYRAMID = "Pyramid toolkit to add Velruse, Flash Messages,CSRF, ReCaptcha and Sessions"


@pytest.mark.parametrize(
    ("files", "summary", "kind", "codes"),
    [
        pytest.param(
            ["__init__.py", "amp/__init__.py", "optimizers/__init__.py"],
            "PyTorch Extensions",
            "with amp",
            [],
            id="with-amp",
        ),
        pytest.param(
            ["__init__.py", "optimizers/__init__.py", "contrib/__init__.py"],
            "PyTorch Extensions",
            "without amp",
            [],
            id="without-amp",
        ),
        pytest.param(["__init__.py", "models.py", "lib/libapex.py"], PYRAMID, "pyramid", ["AMP901"], id="pyramid"),
        pytest.param(["__init__.py"], "Something else", "other", ["AMP901"], id="other"),
        pytest.param(["__init__.py"], None, "other", ["AMP901"], id="no-metadata"),
        pytest.param(["setup.txt"], None, "other", ["AMP901"], id="folder-without-init"),
    ],
)
def test_apex_is_told_by_its_files_and_never_imported(
    files: list[str], summary: str | None, kind: str, codes: list[str], install
) -> None:
    folder = install(files, summary)
    found = machine.find_apex()
    assert (found.kind, found.location, found.version) == (kind, str(folder), "0.1" if summary else None)
    assert "apex" not in sys.modules
    assert [finding.code for finding in machine.machine_findings(found, SOUND.versions)] == codes


def test_no_apex_is_no_finding() -> None:
    assert machine.find_apex() == ApexInstall("none", None, None)
    assert machine.machine_findings(SOUND.apex, SOUND.versions) == []


def test_a_module_named_apex_without_a_spec_is_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", type(sys)("apex"))
    assert machine.find_apex().kind == "other"


def test_the_standin_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("apex")
    folder = str(Path(amp_patch.__file__).parent / "apex")
    module.__spec__ = importlib.machinery.ModuleSpec("apex", None, is_package=True)
    module.__spec__.submodule_search_locations = [folder]
    monkeypatch.setitem(sys.modules, "apex", module)
    assert machine.find_apex() == ApexInstall("stand-in", folder, None)


@pytest.mark.parametrize(
    ("name", "version", "is_fault"),
    [
        ("torch", "2.5.1+cu121", True),
        ("torch", "2.6.0a0+git123", False),
        ("torch", "2.10.0", False),
        ("torch", "3", False),
        ("wrapt", "2.3.9", True),
        ("wrapt", "2.4.0", False),
        ("PyYAML", "5.4.1", True),
        ("PyYAML", None, True),
        ("PyYAML", "unknown", True),
    ],
)
def test_old_packages_are_an_error(name: str, version: str | None, is_fault: bool) -> None:
    findings = machine.machine_findings(SOUND.apex, {**SOUND.versions, name: version})
    assert [(finding.code, finding.severity) for finding in findings] == [("AMP902", "error")] * is_fault
    assert all(name in finding.message and name in finding.advice for finding in findings)


@pytest.mark.parametrize(
    ("capability", "verdicts"),
    [
        ((6, 1), {"float16": "slow", "bfloat16": "slow"}),
        ((7, 0), {"float16": "fast", "bfloat16": "slow"}),
        ((7, 5), {"float16": "fast", "bfloat16": "slow"}),
        ((8, 0), {"float16": "fast", "bfloat16": "fast"}),
        ((10, 0), {"float16": "fast", "bfloat16": "fast"}),
        (None, {"float16": "unknown", "bfloat16": "unknown"}),
    ],
)
def test_a_gpu_is_judged_by_its_compute_capability(
    capability: tuple[int, int] | None, verdicts: dict[str, str]
) -> None:
    judged = machine.judge_gpu(capability)
    assert {dtype.name: dtype.verdict for dtype in judged} == verdicts
    assert capability is None or all(f"{capability[0]}.{capability[1]}" in dtype.evidence for dtype in judged)


@pytest.mark.parametrize(("speed", "verdict"), [(0.015, "slow"), (1.0, "even"), (4.4, "fast")])
def test_a_cpu_is_judged_by_its_speed_and_the_flags_are_named(speed: float, verdict: str) -> None:
    (judged,) = machine.judge_cpu(("avx512_bf16",), {"bfloat16": speed})
    assert (judged.name, judged.verdict) == ("bfloat16", verdict)
    assert "avx512_bf16" in judged.evidence and f"{speed:g} times" in judged.evidence


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


def test_both_low_dtypes_are_measured_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"float32": 4.0, "float16": 8.0, "bfloat16": 1.0}
    threads: list[int] = []
    threads_now = [4]

    def time_product(name: str) -> float:
        threads.append(torch.get_num_threads())
        return seconds[name]

    monkeypatch.setattr(machine, "_time_product", time_product)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads_now[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads_now.append)
    assert machine.measure_cpu() == {"float16": 0.5, "bfloat16": 4.0}
    assert (threads, threads_now) == ([1, 1, 1], [4, 1, 4])


def test_the_gpus_come_before_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: type("Properties", (), {"name": f"card {index}"})
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7 + index, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(machine, "measure_cpu", lambda: {"float16": 0.5})
    monkeypatch.setattr(hardware, "has_low_products", lambda kind, dtype: True)
    devices = machine.get_machine().devices
    assert [device.name.partition(" ")[0] for device in devices] == ["cuda:0", "cuda:1", "cpu"]
    assert [device.low_dtypes[1].verdict for device in devices[:2]] == ["slow", "fast"]


def test_presets_that_cannot_be_read_leave_the_shipped_ones(tmp_path, monkeypatch, capsys) -> None:
    presets = tmp_path / "presets.yaml"
    presets.write_text("Careful: {extends: O2\n")
    monkeypatch.setenv("AMP_PATCH_PRESETS", str(presets))
    script = tmp_path / "script.py"
    script.write_text('import amp_patch as amp\namp.initialize(m, o, opt_level="Careful")\n')
    assert main(["doctor", "--no-advice", str(script)]) == 1
    assert "[AMP201]" in capsys.readouterr().out


def test_levels_of_the_users_own_presets_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    presets = tmp_path / "presets.yaml"
    presets.write_text("Careful: {extends: O2, loss_scale: 128}\n")
    monkeypatch.setenv("AMP_PATCH_PRESETS", str(presets))
    script = tmp_path / "script.py"
    script.write_text(
        'import amp_patch as amp\namp.initialize(m, o, opt_level="Careful")\ntorch.save(o.state_dict(), path)\n'
    )
    assert main(["doctor", "--no-advice", str(script)]) == 0
    assert "[AMP" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["none", "with amp", "without amp", "pyramid", "stand-in", "other"])
def test_every_kind_of_apex_has_its_words(kind: str) -> None:
    found = replace(SOUND, apex=ApexInstall(kind, "/somewhere", None))
    assert "/somewhere" in Report([], 0, machine=found).as_text()


GPU = machine.Device("cuda:0 Some GPU", ())
SLOW = machine.judge_cpu((), {"float16": 0.016, "bfloat16": 0.2})
EVEN = machine.judge_cpu((), {"float16": 1.0, "bfloat16": 1.0})


@pytest.mark.parametrize(
    ("device", "advice"),
    [
        (replace(GPU, low_dtypes=machine.judge_gpu((9, 0))), "use O4 or O5: cuda:0 Some GPU has bfloat16"),
        (replace(GPU, low_dtypes=machine.judge_gpu((7, 5))), "use O1 or O2: cuda:0 Some GPU has fast float16"),
        (replace(GPU, low_dtypes=machine.judge_gpu((6, 1))), "keep O0 here: 16 bits save memory on cuda:0 Some GPU"),
        (replace(GPU, low_dtypes=machine.judge_gpu(None)), "time a few steps at O0, O1 and O4"),
        (
            machine.Device("cpu AVX2", SLOW),
            "keep O0 here: products are 62 times slower in float16 and 5 times slower in bfloat16 than in float32, so",
        ),
        (machine.Device("cpu AVX2", EVEN), "keep O0 here: this CPU has no fast 16-bit products, so amp computes"),
        (machine.Device("cpu AVX512", SLOW, ("bfloat16",)), "use O4 or O5: this CPU has bfloat16 products"),
    ],
    ids=["hopper", "turing", "pascal", "other", "slow-cpu", "even-cpu", "cpu-with"],
)
def test_the_machine_ends_with_advice(device, advice):
    found = Report([], 0, machine=replace(SOUND, devices=(device,)))
    last = found.as_text().splitlines()[-1]
    assert last.startswith("  advice ") and advice in last
    assert advice in json.loads(found.as_json())["machine"]["advice"]


def test_without_scripts_the_machine_alone_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert torch.__version__.partition("+")[0] in said and "float16" in said and "bfloat16" in said
    assert "files" not in said


@pytest.mark.parametrize(
    ("multiplies", "named"), [(("bfloat16",), "of float16 values"), ((), "of float16 and bfloat16 values")]
)
def test_how_products_are_computed_here_is_told(multiplies, named) -> None:
    found = replace(SOUND, devices=(machine.Device("cpu AVX2", SLOW, multiplies),))
    assert f"products {named} are computed in float32 by default" in Report([], 0, machine=found).as_text()
