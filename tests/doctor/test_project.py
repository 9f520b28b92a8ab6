"""The doctor reads the user's files and notebooks, reports unreadable ones, gives exact places, and obeys comments that
silence rules.

Guards: doctor/project, doctor/documents.
"""

import json
import os
from pathlib import Path

import pytest

from amp_patch.doctor import Project, Selection, find_files

SETUP = 'import amp_patch as amp\nmodel, optimizer = amp.initialize(model, optimizer, opt_level="O1")\n'
FAULT = "optimizer.load_state_dict(checkpoint)"


def diagnose(*files: Path):
    return Project(files).diagnose(Selection())


@pytest.fixture
def write(tmp_path):
    def write(content: bytes | str, name: str = "script.py") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def test_directories_are_walked_without_what_is_not_the_users(tmp_path):
    wanted = ["a.py", "models/net.py", "notes.ipynb"]
    passed_over = [".git/x.py", "env/lib/y.py", "__pycache__/z.py", "build/b.py", "notes.txt"]
    for name in [*wanted, *passed_over]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.py")
    again = [tmp_path / "a.py", tmp_path / "models" / ".." / "a.py"]
    assert sorted(find_files([tmp_path, *again])) == sorted(tmp_path / name for name in wanted)


@pytest.mark.parametrize(
    ("content", "place", "said"),
    [
        pytest.param(b"x = 1\nif x\n", (2, 5), "cannot be parsed", id="syntax"),
        pytest.param(b"print 'python 2'\n", (1, 1), "cannot be parsed", id="python-2"),
        pytest.param(b"\x89PNG\r\n\x1a\n\x00\x00", (1, 1), "", id="binary"),
        pytest.param(b"x = '\xe9'\n", (1, 1), "", id="latin-1-undeclared"),
        pytest.param(b"# coding: klingon\n", (1, 1), "klingon", id="unknown-encoding"),
        pytest.param(b"x = " + b"(" * 5000 + b")" * 5000, (1, 1), "", id="too-deep"),
        pytest.param(f"{SETUP}{'a' + '.b()' * 900}.backward()".encode(), (1, 1), "too deeply", id="too-deep-to-judge"),
    ],
)
def test_what_cannot_be_read_is_one_finding(content, place, said, write):
    (finding,) = diagnose(write(content))
    assert (finding.code, finding.severity) == ("AMP001", "error") and said in finding.message
    if said == "cannot be parsed":
        assert (finding.line, finding.column) == place


def test_a_file_that_vanishes_is_one_finding_and_the_others_are_read(write):
    gone, fault = diagnose(Path("gone.py"), write(SETUP + FAULT))
    assert (gone.code, fault.code) in (("AMP001", "AMP502"), ("AMP502", "AMP001"))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"# coding: latin-1\nx = '\xe9'\n", id="latin-1"),
        pytest.param(b"\xef\xbb\xbfx = 1\n", id="byte-order-mark"),
        pytest.param(b"x = '\\d'\r\n", id="invalid-escape"),
    ],
)
def test_odd_but_sound_files_have_no_findings(content, write, recwarn):
    assert diagnose(write(content)) == [] and len(recwarn) == 0


@pytest.mark.parametrize(
    ("content", "code"),
    [
        pytest.param("from lightning.pytorch import Trainer\nTrainer(precision='16-true')\n", "AMP601", id="lightning"),
        pytest.param("scaler.unscale_(optimizer)\nscaler.unscale_(optimizer)\n", "AMP704", id="scaler-from-elsewhere"),
        pytest.param("import syncbn\n", "AMP102", id="compiled-module"),
    ],
)
def test_faults_are_found_in_scripts_without_the_usual_words(content, code, write):
    assert [finding.code for finding in diagnose(write(content))] == [code]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_columns_count_characters_and_lines_are_pythons(newline, write):
    (finding,) = diagnose(write((SETUP + f"'é\f'; {FAULT}").replace("\n", newline)))
    assert (finding.line, finding.column, finding.location()) == (3, 7, f"{finding.path}:3:7")


def test_nothing_of_a_script_is_run(write, tmp_path):
    diagnose(write(f"open({str(tmp_path / 'trace')!r}, 'w')\nimport amp_patch\n"))
    assert not (tmp_path / "trace").exists()


# ---- notebooks -------------------------------------------------------------------------------------------------------


def notebook(*cells: object) -> str:
    text = {"cell_type": "markdown", "source": "not = = code"}
    code = [{"cell_type": "code", "source": source} for source in cells]
    return json.dumps({"nbformat": 4, "cells": [text, *code]})


def test_findings_in_notebooks_name_cell_and_line(write):
    magics = "pip install -q torch==2.6\n%matplotlib inline\n!pip install apex \\\n    --quiet 2gb\n"
    magics += "files = !ls\nmodel?\nif files:\n    %time\n"
    cells = [
        magics + SETUP,
        "\n%%bash\nrm -r = =",
        "%%time\nx = (7\n% 3\n!= 1)\n" + FAULT,
        (FAULT + "\n# more").splitlines(True),
    ]
    (finding,) = diagnose(write(notebook(*cells), "train.ipynb"))
    assert finding.location() == f"{finding.path}:cell 3:5:1"


def test_a_cell_that_is_no_python_is_one_finding_and_the_others_are_read(write):
    broken, fault = diagnose(write(notebook(SETUP, "x = = 1", FAULT), "train.ipynb"))
    assert (broken.code, broken.cell, broken.line) == ("AMP001", 2, 1)
    assert (fault.code, fault.cell, fault.line) == ("AMP502", 3, 1)


def test_cells_without_a_source_or_a_type_are_passed_over(write):
    text = json.dumps({"cells": [{"cell_type": "code"}, {}, {"cell_type": "code", "source": SETUP + FAULT}]})
    (finding,) = diagnose(write(text, "train.ipynb"))
    assert (finding.code, finding.cell) == ("AMP502", 2)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"cells": 3}', '{"cells": [3]}', "\ud800".encode("utf-8", "surrogatepass"), "[" * 100_000],
    ids=["empty", "cut", "list", "no-cells", "no-cell", "no-text", "deep"],
)
def test_what_is_no_notebook_is_one_finding(content, write):
    (finding,) = diagnose(write(content, "train.ipynb"))
    assert (finding.code, finding.severity) == ("AMP001", "error")


# ---- silencing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        pytest.param("  # amp-patch: ignore[AMP502]", [], id="code"),
        pytest.param("  # amp-patch: ignore[AMP305, AMP502] because", [], id="several"),
        pytest.param("  # amp-patch: ignore", [], id="every-code"),
        pytest.param("  # amp-patch: ignore[AMP501]", ["AMP502"], id="another-code"),
        pytest.param("  # amp-patch: ignore[AMP401, AMP502]", [], id="code-of-no-rule"),
        pytest.param("  # amp-patch: ignore[]", ["AMP502"], id="no-code"),
        pytest.param("  # amp-patch: ignore[HALF]", ["AMP502"], id="unknown-code"),
        pytest.param(" if '# amp-patch: ignore' else x", ["AMP502"], id="in-a-string"),
    ],
)
def test_a_comment_silences_its_codes_on_its_line(comment, expected, write):
    assert [finding.code for finding in diagnose(write(SETUP + FAULT + comment))] == expected


def test_a_comment_on_any_line_of_a_call_silences_it_and_on_the_next_does_not(write):
    call, comment = SETUP + "optimizer.load_state_dict(\n    checkpoint{}\n)\n{}", "  # amp-patch: ignore[AMP502]"
    assert diagnose(write(call.format(comment, ""))) == []
    assert [finding.code for finding in diagnose(write(call.format("", comment)))] == ["AMP502"]
