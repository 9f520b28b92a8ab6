"""Each test file names the modules that it tests, and each module of the package is named by a test file.

Guards: tests/support/guards.py.
"""

from pathlib import Path

import pytest
from guards import WORD, exists, find_guards, is_named, read_guards

import amp_patch

PACKAGE = Path(amp_patch.__file__).parent
TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
FILES = sorted(TESTS.rglob("test_*.py"))
NAMED = {path: read_guards(path) for path in FILES}


def test_each_test_file_names_what_it_guards():
    missing = [path.relative_to(ROOT).as_posix() for path in FILES if not NAMED[path]]
    assert missing == [], (
        f"End the docstring of these files with a line such as `{WORD}training/masters, training/groups.`: "
        "the modules whose faults fail their assertions, as paths below amp_patch, without .py."
    )


def test_each_name_exists():
    gone = [
        f"{path.relative_to(ROOT).as_posix()}: {name}"
        for path, names in NAMED.items()
        for name in names
        if not exists(name, ROOT)
    ]
    assert gone == [], f"Correct the `{WORD.strip()}` lines of these files: there is no such module or file."


def test_each_module_is_guarded():
    modules = [path.relative_to(PACKAGE).with_suffix("").as_posix() for path in sorted(PACKAGE.rglob("*.py"))]
    names = [name for path in FILES for name in NAMED[path]]
    bare = [module for module in modules if not module.endswith("__init__") and not is_named(module, names)]
    assert bare == [], (
        f"Name each of these modules in the `{WORD.strip()}` line of a test file that fails if the module is wrong, "
        "or write a test of its behavior."
    )


@pytest.mark.parametrize(
    ("docstring", "names"),
    [
        ("Laws.\n\nGuards: training/masters, training/groups.", ["training/masters", "training/groups"]),
        ("Laws.\n\nGuards: apex/amp/*.\nGuards: errors.", ["apex/amp/*", "errors"]),
        ("Laws.\n\nGuards: training/masters", []),
        ("Guards: training/masters.\n\nLaws.", []),
        ("Laws.", []),
    ],
    ids=["one line", "two lines", "no full stop", "not at the end", "none"],
)
def test_names_are_read_from_the_last_lines(tmp_path, docstring, names):
    path = tmp_path / "test_laws.py"
    path.write_text(f'"""{docstring}\n"""\n')
    assert read_guards(path) == names


def test_a_folder_stands_for_its_modules_and_a_missing_name_is_noticed(tmp_path):
    (tmp_path / "test_folder.py").write_text('"""Laws.\n\nGuards: apex/amp/*, errors.\n"""\n')
    (tmp_path / "test_module.py").write_text('"""Laws.\n\nGuards: apex/amp/opt.\n"""\n')
    assert [path.stem for path in find_guards("apex/amp/opt", tmp_path)] == ["test_module", "test_folder"]
    assert find_guards("apex/amp/lists/torch_overrides", tmp_path) == find_guards("apex/_core", tmp_path) == []
    assert exists("training/masters", ROOT) and exists("apex/amp/*", ROOT) and exists("lists/fast.yaml", ROOT)
    assert not any(exists(name, ROOT) for name in ("training/no_module", "no_wing/*", "training/masters.py", "docs/-"))
