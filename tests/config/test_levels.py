"""Facts about levels: those that are read without torch are those of the policies, and code asks for nothing else."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import amp_patch
from amp_patch import amp
from amp_patch.config import levels, make_policy, shipped

PACKAGE = Path(amp_patch.__file__).parent
MORE = """
O6:
  description: ops run in bfloat16 or float32 by the op lists, with a static loss scale
  extends: O4
  loss_scale: 128
O7:
  description: a bfloat16 model without masters
  extends: O5
  master_weights: false
  keep_batchnorm_fp32: false
"""


@pytest.fixture
def more_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two levels more in the shipped file."""
    folder = tmp_path / "lists"
    shutil.copytree(shipped.lists_dir(), folder)
    with (folder / "presets.yaml").open("a") as file:
        file.write(MORE)
    monkeypatch.setattr(shipped, "lists_dir", lambda: folder)


@pytest.mark.parametrize("name", [level.name for level in levels.read_levels()])
def test_a_level_that_is_read_without_torch_is_that_of_its_policy(name: str) -> None:
    assert next(level for level in levels.read_levels() if level.name == name) == make_policy(name, {}).as_level()


def test_levels_are_found_by_what_they_do() -> None:
    assert levels.find_plain_level().name == "O0"
    assert [levels.find_patching_level(low).name for low in ("float16", "bfloat16")] == ["O1", "O4"]
    assert [levels.find_master_level(low).name for low in ("float16", "bfloat16")] == ["O2", "O5"]
    facts = {level.name: (level.fits_autocast, level.keeps_small_updates) for level in levels.read_levels()}
    assert [name for name, (fits, _) in facts.items() if fits] == ["O0", "O1", "O4"]
    assert [name for name, (_, keeps) in facts.items() if not keeps] == ["O3"]


def test_reading_levels_imports_no_torch() -> None:
    code = "import sys; from amp_patch.config import levels; levels.read_levels(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.usefixtures("more_levels")
def test_a_level_is_added_in_the_presets_alone() -> None:
    from amp_patch.cli import values
    from amp_patch.doctor.script import Script, expect
    from amp_patch.insight.comparing.campaign import plan_runs

    added = values.get_level("O6")
    assert added == make_policy("O6", {}).as_level() and added.fits_whole_script and not added.has_dynamic_scale
    assert values.opt_level("O6") == "O6"
    plan = plan_runs(None, "O0", 2, range(1))
    assert list(plan.runs) == ["O0", "O1", "O2", "O4", "O5", "O6"]  # O7 loses small updates
    assert list(plan.native_runs) == ["as-is", "O0", "O1", "O4", "O6"]
    script = "from apex import amp\nmodel, optimizer = amp.initialize(model, optimizer, opt_level='O6')\n"
    assert not expect([Script("train.py", script)]).skips
    model = torch.nn.Linear(4, 4)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O6", verbosity=0)
    with amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as scaled:
        assert model(torch.ones(2, 4)).dtype is torch.bfloat16 and amp_patch.stats().loss_scales == (128.0,)
        scaled.backward()
    optimizer.step()
    amp_patch.reset()


def is_level(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in LEVELS


LEVELS = {level.name for level in levels.read_levels()}


def test_code_names_the_default_level_and_those_of_one_message() -> None:
    named = []
    for path in PACKAGE.rglob("*.py"):
        if "apex" not in path.relative_to(PACKAGE).parts:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            named += [path.relative_to(PACKAGE).as_posix() for node in ast.walk(tree) if is_level(node)]
    assert sorted(named) == ["config/levels.py", "hardware.py"]
