"""Modules import only from lower layers, and importing the package changes nothing."""

import ast
import functools
import re
from pathlib import Path

import pytest

import amp_patch

PACKAGE = Path(amp_patch.__file__).parent

FLOORS = (
    "scratch",
    "patching",
    "config",
    "casting",
    "training",
    "session",
    "native",
    "insight",
    "functions",
    "saving",
    "api",
    "amp",
    "__init__",
    "apex",
    "integrations",
    "doctor",
    "cli",
    "__main__",
)
"""Wings, and the modules of public names between them, from the bottom up. Each imports from those before it. All other
modules beside the wings are the ground: every wing may import them, and they import no wing.
"""

WINGS = frozenset(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
STAND_IN = "apex"  # has the rooms and the names of the package that it stands in for
PORT = "apex._core"  # the one module of the stand-in that imports wings
LONGEST_FILE, LONGEST_FUNCTION = 500, 60  # lines: of a function those of its body, without the docstring
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """The dotted name of a module below the package: "errors", "apex.parallel" for the package itself, "__init__" for
    amp_patch.
    """
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@functools.cache
def imported_modules(path: Path) -> set[str]:
    """The modules of the package that a module imports anywhere in its source, by the names that `name_of`
    gives them.
    """
    return find_imports(path.read_text(), path.relative_to(PACKAGE).parts[:-1])


def find_imports(source: str, package: tuple[str, ...]) -> set[str]:
    """The modules that the source of a module in `package` imports: also in functions, and by `import_module`."""
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(source)):
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
                child = PACKAGE.joinpath(*target, alias.name)
                found.add((*target, alias.name) if child.is_dir() or child.with_suffix(".py").exists() else target)
        elif isinstance(node, ast.Call) and is_import_module(node.func):
            found.update(find_imported_by_call(node, package))
    return {".".join(name) or "__init__" for name in found}


def is_import_module(function: ast.expr) -> bool:
    return getattr(function, "attr", getattr(function, "id", "")) == "import_module"


def find_imported_by_call(call: ast.Call, package: tuple[str, ...]) -> set[tuple[str, ...]]:
    """The module of `import_module(".name", __package__)`. A name that is computed is a plugin's, or a door's."""
    name = call.args[0] if call.args else None
    if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
        return set()
    written = name.value.lstrip(".")
    if written == name.value:
        return {tuple(written.split(".")[1:])} if written.partition(".")[0] == "amp_patch" else set()
    level = len(name.value) - len(written)
    return {(*package[: len(package) + 1 - level], *written.split("."))}


def names_at_door(wing: str) -> set[str]:
    """The names that the `__init__` of a wing hands out."""
    door = ast.parse((PACKAGE / wing / "__init__.py").read_text())
    imports = [node for node in ast.walk(door) if isinstance(node, ast.ImportFrom) and node.level]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def floor_of(room: str) -> int:
    return FLOORS.index(room) if room in FLOORS else -1


def find_faults(name: str, imported: set[str]) -> list[str]:
    """What a module of that name may not import of `imported`: higher wings, and lower ones past their door."""
    own, faults = name.partition(".")[0], []
    for other in sorted(imported):
        room, _, inside = other.partition(".")
        if room == own:
            continue
        if own == STAND_IN and name != PORT and floor_of(room) >= 0:
            faults.append(f"{name} imports {other} past the port {PORT}")
        if floor_of(room) >= floor_of(own) and floor_of(room) >= 0:
            faults.append(f"{name} imports {other}, from a wing that is not below its own")
        elif inside and room in WINGS and inside not in names_at_door(room):
            faults.append(f"{name} imports {other} past the door of {room}")
    return faults


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


def find_too_long(path: Path) -> list[str]:
    source, name = path.read_text(), path.stem
    found = [name] if source.count("\n") > LONGEST_FILE else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if body and body[-1].end_lineno - body[0].lineno + 1 > LONGEST_FUNCTION:
                found.append(f"{name}.{node.name}")
    return found


def test_modules_import_from_lower_wings_through_their_doors():
    assert set(FLOORS) >= WINGS
    assert [fault for path in MODULES for fault in find_faults(name_of(path), imported_modules(path))] == []


def test_modules_import_each_other_in_no_ring():
    """The door of a wing imports all of its rooms; a room that imported its own door would be a ring too."""
    assert find_cycle({name_of(path): imported_modules(path) for path in MODULES}) == []


@pytest.mark.parametrize(
    "source",
    [
        "from .notebook import show",
        "def show(): from . import notebook",
        'def show(): return importlib.import_module(".notebook", __package__)',
        'def show(): return import_module("amp_patch.insight.notebook")',
    ],
    ids=["at the top", "in a function", "by its relative name", "by its full name"],
)
def test_a_planted_ring_is_found(source):
    planted = find_imports(source, ("insight",))
    assert planted == {"insight.notebook"}
    imports = {"insight.records": planted, "insight.notebook": {"insight.recordings"}}
    assert find_cycle({**imports, "insight.recordings": {"insight.records"}}) != []


def test_files_and_functions_have_a_length_that_can_be_read():
    assert [found for path in MODULES for found in find_too_long(path)] == []


@pytest.mark.parametrize(
    ("name", "imported", "fault"),
    [
        ("casting.mode", "training", "casting.mode imports training, from a wing that is not below its own"),
        ("training.model", "casting.mode", "training.model imports casting.mode past the door of casting"),
        ("errors", "api", "errors imports api, from a wing that is not below its own"),
        ("apex.amp.handle", "session", "apex.amp.handle imports session past the port apex._core"),
        ("casting.mode", "config", None),
        ("apex._core", "session", None),
    ],
)
def test_a_planted_import_is_found(name, imported, fault):
    assert find_faults(name, {imported, "errors"} - {name}) == ([fault] if fault else [])


def test_importing_the_package_changes_no_torch_name(fork_server):
    script = (
        "import torch, torch.utils.checkpoint\n"
        "owners = [torch, torch.nn.functional, torch.Tensor, torch._VF, torch.special, torch.linalg]\n"
        "owners += [torch.nn.Module, torch.optim.Optimizer]\n"
        "before = [dict(vars(owner)) for owner in owners]\n"
        "import amp_patch, amp_patch.cli, amp_patch.apex.amp_C, amp_patch.apex.contrib.optimizers\n"
        "import amp_patch.apex.normalization, amp_patch.apex.optimizers, amp_patch.apex.parallel\n"
        "after = [dict(vars(owner)) for owner in owners]\n"
        "assert all(a.get(name) is value for b, a in zip(before, after) for name, value in b.items())\n"
        "added = [set(a) - set(b) for b, a in zip(before, after)]\n"
        "assert all(names <= {'__annotations__'} for names in added), added\n"
        "assert 'torch._dynamo' not in __import__('sys').modules\n"
    )
    done = fork_server.run("-c", script, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


# ---- ARCHITECTURE.md -------------------------------------------------------------------------------------------------

ARCHITECTURE = (PACKAGE.parent / "ARCHITECTURE.md").read_text()


def rooms_in_table():
    """The modules that the table of wings names, by the folder in its first column; "" is the ground."""
    rooms: dict[str, set[str]] = {}
    folder = ""
    for line in ARCHITECTURE.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != 5 or not cells[3].startswith(("`", "listed")):
            continue
        first = cells[1].strip("`/")
        if first:
            folder = first if (PACKAGE / first).is_dir() else ""
        rooms.setdefault(folder, set()).update(re.findall(r"`([\w./*]+)`", " | ".join(cells[2:4])))
    return rooms


def is_named_by_us(path):
    """Whether a module has a name of ours. In the stand-in, only those that begin with an underscore have."""
    folder = path.parent.relative_to(PACKAGE).as_posix()
    return path.stem != "__init__" and (not folder.startswith(STAND_IN) or (folder, path.stem[0]) == (STAND_IN, "_"))


@pytest.mark.parametrize("path", list(filter(is_named_by_us, MODULES)), ids=name_of)
def test_every_module_is_in_the_table_of_wings(path):
    folder = path.parent.relative_to(PACKAGE).as_posix().strip(".")
    named = rooms_in_table()
    is_named = path.stem in named.get(folder, ()) or name_of(path).replace(".", "/") in named[""]
    assert is_named, f"write `{path.stem}` into the row of {folder or 'the ground'} in ARCHITECTURE.md"


def test_every_file_that_architecture_names_is_there():
    """Also in shortened form, as `comparing/text.py`."""
    folders = [PACKAGE.parent, PACKAGE, PACKAGE / "insight"]
    named = set(re.findall(r"`([\w./*]*/[\w.*]+\.(?:py|md|yaml))`", ARCHITECTURE))
    assert len(named) > 60
    assert [name for name in sorted(named) if not any(list(folder.glob(name)) for folder in folders)] == []
