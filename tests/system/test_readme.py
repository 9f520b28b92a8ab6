"""Every code block of the README runs as it stands."""

import re
import warnings
from pathlib import Path

import pytest
import yaml

import amp_patch as amp
from amp_patch.config.shipped import shipped_presets

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
FILES = {re.match(r"# (\S+)\n", code)[1]: code for language, code in BLOCKS if language == "yaml"}


def test_every_block_is_of_a_kind_that_is_tested():
    assert {language for language, _ in BLOCKS} == {"python", "yaml", "sh"}
    assert README.count("```") == 2 * len(BLOCKS)
    assert len(PYTHON) >= 7 and set(FILES) == {"my_presets.yaml", "my_lists.yaml", "my_modules.yaml"}


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_blocks_run_without_a_warning(code, tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


def test_the_commands_are_targets_of_the_makefile():
    commands = [line for language, code in BLOCKS if language == "sh" for line in code.splitlines()]
    assert commands == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{command.removeprefix('make ')}:", makefile, flags=re.MULTILINE) for command in commands)


def test_the_table_of_levels_is_that_of_the_presets():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in README.splitlines() if line.startswith("| ")
    ]
    header = next(row for row in rows if row[1:2] == ["O0"])
    written = {
        row[0].strip("`"): dict(zip(header[1:], row[1:], strict=True))
        for row in rows
        if len(row) == 7 and row[0].startswith("`")
    }
    presets = yaml.safe_load(shipped_presets().read_text())
    for level in header[1:]:
        own = presets[level]
        properties = {**presets.get(own.get("extends"), {}), **own}
        for name, shown in written.items():
            values = shown[level]
            assert values == {True: "yes", False: "no", None: "-"}.get(
                properties[name], str(properties[name])
            ) or values == str(properties[name]), (
                level,
                name,
            )
    assert len(written) == 7


def test_the_readme_names_every_public_function_it_needs():
    assert all(hasattr(amp, name) for name in re.findall(r"(?<!torch\.)\bamp\.(\w+)\(", README))
