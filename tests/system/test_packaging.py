"""The wheel holds exactly the sources, its metadata is right, and the files around the package agree with each other.

Guards: pyproject.toml, setup.py, MANIFEST.in, requirements-*.txt, .ci/run, Makefile, __init__, amp.
"""

import email.message
import email.parser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from fork_server import ForkServer
from torch_state import VERSION

ROOT = Path(__file__).resolve().parent.parent.parent
SHIPPED = (
    "setup.py",
    "pyproject.toml",
    "LICENSE",
    "README.md",
    "amp_patch",
    "lists",
    "examples",
    "tools",
    "benchmarks",
)
NOT_SOURCE = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")
# Top-level modules that an import of amp_patch may load beyond those of torch alone.
ALLOWED_IMPORTS = {"amp_patch", "wrapt", "yaml", "_yaml", "cython_runtime"}
if VERSION < (2, 7):
    ALLOWED_IMPORTS |= {"sympy", "mpmath"}  # torch.utils.checkpoint does


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the sources, so that no build folder is left among them."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=NOT_SOURCE)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        built,
        source,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return zipfile.ZipFile(next(built.glob("amp_patch-*.whl")))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    """The METADATA file of the wheel."""
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.parser.Parser().parsestr(wheel.read(name).decode())


def sources(folder: str, prefix: str, patterns: tuple[str, ...]) -> set[str]:
    """The files below a folder of the repository, under the names that they must have in a wheel."""
    return {
        f"{prefix}/{path.relative_to(ROOT / folder).as_posix()}"
        for pattern in patterns
        for path in (ROOT / folder).rglob(pattern)
        if "__pycache__" not in path.parts
    }


def test_wheel_holds_exactly_the_sources(wheel: zipfile.ZipFile) -> None:
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = sources("amp_patch", "amp_patch", ("*.py", "py.typed", "*.css", "*.js")) | sources(
        "lists", "amp_patch/lists", ("*.py", "*.yaml", "*.json")
    )
    assert shipped == expected
    assert any(name.startswith("amp_patch/lists/") and name.endswith(".yaml") for name in shipped)


@pytest.mark.slow
def test_installed_wheel_works_away_from_the_sources(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = (
        "import torch, amp_patch as amp\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model, optimizer = amp.initialize(model, optimizer, opt_level='O4', verbosity=0)\n"
        "assert amp.stats().names_patched > 0\n"
        "print(amp.__file__)\n"
    )
    # The extracted wheel comes before an editable install, and a safe path keeps the current folder out.
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)


def test_metadata_of_the_wheel(metadata: email.message.Message) -> None:
    assert (metadata["Name"].replace("-", "_"), metadata["Version"], metadata["Requires-Python"]) == (
        "amp_patch",
        "0.3.0",
        ">=3.11",
    )
    requirements = metadata.get_all("Requires-Dist", [])
    assert {re.split(r"[<>=; ]", line)[0] for line in requirements if "extra ==" not in line} == {
        "torch",
        "wrapt",
        "PyYAML",
    }
    examples = {re.split(r"[<>=; ]", line)[0] for line in requirements if re.search(r"extra == .examples.", line)}
    assert examples == {"scikit-learn", "matplotlib"}
    qlora = {re.split(r"[<>=; ]", line)[0] for line in requirements if re.search(r"extra == .qlora.", line)}
    assert qlora == {"bitsandbytes", "peft", "transformers"}
    assert any(line.startswith("argcomplete") and re.search(r"extra == .completion.", line) for line in requirements)


def test_the_description_has_no_link_that_leads_nowhere(metadata: email.message.Message) -> None:
    text = metadata.get_payload()
    assert "I already use torch.autocast" in text and "docs/autocast.md" in text
    assert re.findall(r"\]\((?!https?:)", text) == []


def test_a_source_distribution_holds_what_the_readme_leads_to() -> None:
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    grafted = {words[1] for words in lines if words[0] == "graft"}
    included = {name for words in lines if words[0] == "include" for name in words[1:]}
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text()):
        assert target.partition("/")[0] in grafted or target in included or re.fullmatch(r"\w+\.md", target), target


def test_the_version_is_the_same_everywhere(metadata: email.message.Message) -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.search(r"^## (\d\S+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released is not None
    assert released.groups() == (metadata["Version"], str(citation["date-released"]))
    assert citation["version"] == metadata["Version"] and citation["license"] == metadata["License-Expression"]


def test_wheel_declares_the_command(wheel: zipfile.ZipFile) -> None:
    name = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "amp-patch = amp_patch.cli:main" in wheel.read(name).decode()


def pinned() -> dict[str, str]:
    """Name and exact version of every requirement of development, of the documentation and of the extra qlora."""
    files = ("requirements-dev.txt", "requirements-docs.txt", "requirements-qlora.txt")
    written = [line for file in files for line in (ROOT / file).read_text().splitlines()]
    lines = [line for line in written if line and not line.startswith("#")]
    return dict(re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups() for line in lines)  # type: ignore[union-attr]


def test_every_requirement_is_pinned(metadata: email.message.Message) -> None:
    needed = {re.split(r"[<>=; ]", line)[0].lower() for line in metadata.get_all("Requires-Dist", [])}
    assert needed <= {name.lower() for name in pinned()}


@pytest.mark.parametrize("name", ["requirements-clients.txt", "requirements-tests.txt"])
def test_every_client_is_pinned(name: str) -> None:
    for line in (ROOT / name).read_text().splitlines():
        if not line.startswith(("#", "--")):  # a name without a version has that of requirements-dev.txt
            assert line in pinned() or re.fullmatch(r"[\w-]+==[\w.]+", line), line


def test_ci_runs_what_a_developer_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    made = [line.split()[1] for line in script.read_text().splitlines() if line.startswith("make ")]
    assert made == ["docs", "test", "test-clients", "test-examples"]


def test_import_loads_nothing_heavy(fork_server: ForkServer) -> None:
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import amp_patch\n"
        "print('\\n'.join(sorted(set(sys.modules) - before)))\n"
    )
    done = fork_server.run("-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    # PyYAML's compiled half registers the runtime it was built with, as `_cython_` and a version.
    loaded = {name.partition(".")[0] for name in done.stdout.split() if not name.startswith("_cython_")}
    assert "amp_patch" in loaded
    assert loaded - ALLOWED_IMPORTS - sys.stdlib_module_names - {"torch"} == set()
    # torch loads these by itself only when they are used, and they cost more than the rest of the import together.
    assert not {"torch._dynamo", "torch._inductor", "torch.distributed.fsdp"} & set(done.stdout.split())
