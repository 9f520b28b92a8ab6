"""Modules import only from lower layers, and importing the package changes nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import amp_patch

PACKAGE = Path(amp_patch.__file__).parent

LAYERS = {
    "errors": 0,
    "imports": 0,
    "places": 0,
    "retired": 0,
    "dtypes": 1,
    "opnames": 1,
    "patching": 1,
    "scaler": 1,
    "switch": 1,
    "compiling": 1,
    "reporting": 1,
    "yaml_loader": 1,
    "gradients": 2,
    "oplists": 2,
    "rebinding": 2,
    "weights": 2,
    "policy": 3,
    "casts": 3,
    "models": 4,
    "plan": 5,
    "optimizers": 5,
    "late": 6,
    "passes": 6,
    "sessions": 7,
    "current": 8,
    "api": 9,
    "amp": 10,
    "__init__": 11,
    "demo": 12,
    "cli": 13,
    "__main__": 14,
}


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            rooms.update([node.module.partition(".")[0]] if node.module else [alias.name for alias in node.names])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("amp_patch"):
            rooms.update([node.module.partition(".")[2]] if "." in node.module else ["__init__"])
        elif isinstance(node, ast.Import):
            rooms.update(["__init__" for alias in node.names if alias.name.partition(".")[0] == "amp_patch"])
    return rooms


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_a_module_imports_only_from_lower_layers(path):
    own = LAYERS[path.stem]
    assert {room for room in imported_rooms(path) if LAYERS[room] >= own} == set()


def test_the_reader_of_imports_sees_an_upward_import(tmp_path):
    source = tmp_path / "errors.py"
    source.write_text("def f():\n    from .sessions import Session\n    import amp_patch\n    from amp_patch.api import reset\n")
    assert imported_rooms(source) == {"sessions", "__init__", "api"}


def test_importing_the_package_changes_no_torch_name():
    script = (
        "import torch, torch.utils.checkpoint\n"
        "owners = [torch, torch.nn.functional, torch.Tensor, torch._VF, torch.special, torch.linalg, torch.nn.Module, torch.optim.Optimizer]\n"
        "before = [dict(vars(owner)) for owner in owners]\n"
        "import amp_patch, amp_patch.cli\n"
        "after = [dict(vars(owner)) for owner in owners]\n"
        "assert all(a.get(name) is value for b, a in zip(before, after) for name, value in b.items())\n"
        "assert all(set(a) - set(b) <= {'__annotations__'} for b, a in zip(before, after)), [set(a) - set(b) for b, a in zip(before, after)]\n"
        "assert 'torch._dynamo' not in __import__('sys').modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)


def test_no_module_and_no_function_outgrows_its_limit():
    too_long = []
    for path in PACKAGE.glob("*.py"):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name != "initialize":
                statements = node.body[1:] if ast.get_docstring(node) else node.body
                if statements and statements[-1].end_lineno - statements[0].lineno + 1 > 40:
                    too_long.append(f"{path.stem}.{node.name}")
    assert too_long == []
