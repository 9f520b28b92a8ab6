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
    "foreach": 0,
    "imports": 0,
    "places": 0,
    "retired": 0,
    "dtypes": 1,
    "faults": 1,
    "opnames": 1,
    "patching": 1,
    "scaler": 1,
    "switch": 1,
    "compiling": 1,
    "masters": 1,
    "reporting": 1,
    "yaml_loader": 1,
    "entries": 2,
    "gradients": 2,
    "outcomes": 2,
    "modulerules": 3,
    "oplists": 4,
    "torch_autocast": 2,
    "rebinding": 2,
    "weights": 2,
    "policy": 5,
    "rulings": 5,
    "casts": 3,
    "models": 6,
    "plan": 7,
    "optimizers": 7,
    "late": 8,
    "passes": 8,
    "sessions": 9,
    "current": 10,
    "api": 11,
    "amp": 12,
    "__init__": 13,
    "apex": 14,
    "demo": 14,
    "doctor": 14,
    "listing": 14,
    "running": 15,
    "cli": 16,
    "__main__": 17,
}


def name_of(path: Path, root: Path = PACKAGE) -> str:
    """The dotted name of a module below the package: "errors", "apex.parallel" for the package itself, "__init__" for
    amp_patch.
    """
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imported_modules(path: Path, root: Path = PACKAGE) -> set[str]:
    """The modules of the package that a module imports anywhere in its source, by the names that `name_of`
    gives them.
    """
    package = path.relative_to(root).parts[:-1]
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(
                tuple(alias.name.split(".")[1:]) for alias in node.names if alias.name.partition(".")[0] == "amp_patch"
            )
        elif isinstance(node, ast.ImportFrom):
            written = tuple(node.module.split(".")) if node.module else ()
            if node.level == 0 and written[0] != "amp_patch":
                continue
            target = written[1:] if node.level == 0 else (*package[: len(package) + 1 - node.level], *written)
            for alias in node.names:
                child = root.joinpath(*target, alias.name)
                found.add((*target, alias.name) if child.is_dir() or child.with_suffix(".py").exists() else target)
    return {".".join(name) or "__init__" for name in found}


def room_of(name: str) -> str:
    return name.partition(".")[0]


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_a_module_imports_only_from_lower_layers(path):
    own = LAYERS[path.stem]
    assert {name for name in imported_modules(path) if LAYERS[room_of(name)] >= own} == set()


INSIDE_PACKAGES = sorted(path for path in PACKAGE.glob("*/**/*.py"))


@pytest.mark.parametrize("path", INSIDE_PACKAGES, ids=name_of)
def test_a_module_of_a_package_inside_imports_only_from_lower_rooms_and_its_own(path):
    own = room_of(name_of(path))
    assert {
        name for name in imported_modules(path) if room_of(name) != own and LAYERS[room_of(name)] >= LAYERS[own]
    } == set()


def find_cycle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a ring, or nothing."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return trail[trail.index(name) :]
        if name in done:
            return []
        for other in sorted(imports.get(name, ())):
            ring = visit(other, [*trail, name])
            if ring:
                return ring
        done.add(name)
        return []

    return next((ring for name in sorted(imports) if (ring := visit(name, []))), [])


def test_packages_inside_have_no_cycles():
    assert find_cycle({name_of(path): imported_modules(path) for path in INSIDE_PACKAGES}) == []


def test_the_readers_of_imports_see_what_is_wrong(tmp_path):
    (tmp_path / "apex" / "inner").mkdir(parents=True)
    source = tmp_path / "errors.py"
    source.write_text(
        "def f():\n    from .sessions import Session\n    import amp_patch\n    from amp_patch.api import reset\n   "
        " import torch.nn\n"
    )
    assert imported_modules(source, tmp_path) == {"sessions", "__init__", "api"}
    init, first, second = (tmp_path / "apex" / "inner" / name for name in ("__init__.py", "first.py", "second.py"))
    init.write_text("from .first import f\nfrom . import second\n")
    first.write_text(
        "from ...cli import main\nfrom .. import inner\nfrom ...errors import AmpError\nfrom torch import nn\n"
    )
    second.write_text("import amp_patch.apex.inner.first\n")
    imports = {name_of(path, tmp_path): imported_modules(path, tmp_path) for path in (init, first, second)}
    assert imports == {
        "apex.inner": {"apex.inner.first", "apex.inner.second"},
        "apex.inner.first": {"cli", "apex.inner", "errors"},
        "apex.inner.second": {"apex.inner.first"},
    }
    assert find_cycle(imports) == ["apex.inner", "apex.inner.first"]
    assert find_cycle({**imports, "apex.inner.first": {"errors"}}) == []


def test_importing_the_package_changes_no_torch_name():
    script = (
        "import torch, torch.utils.checkpoint\nowners = [torch, torch.nn.functional, torch.Tensor, torch._VF,"
        " torch.special, torch.linalg, torch.nn.Module, torch.optim.Optimizer]\nbefore = [dict(vars(owner)) for owner"
        " in owners]\nimport amp_patch, amp_patch.cli, amp_patch.apex.amp_C, amp_patch.apex.contrib.optimizers,"
        " amp_patch.apex.normalization\nimport amp_patch.apex.optimizers, amp_patch.apex.parallel\nafter ="
        " [dict(vars(owner)) for owner in owners]\nassert all(a.get(name) is value for b, a in zip(before, after) for"
        " name, value in b.items())\nassert all(set(a) - set(b) <= {'__annotations__'} for b, a in zip(before, after)),"
        " [set(a) - set(b) for b, a in zip(before, after)]\nassert 'torch._dynamo' not in __import__('sys').modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)


def test_no_module_and_no_function_outgrows_its_limit():
    too_long = []
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name != "initialize":
                statements = node.body[1:] if ast.get_docstring(node) else node.body
                if statements and statements[-1].end_lineno - statements[0].lineno + 1 > 40:
                    too_long.append(f"{path.stem}.{node.name}")
    assert too_long == []
