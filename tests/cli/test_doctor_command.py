"""`amp-patch doctor`: exit codes, formats of output, settings, mending in place."""

import io
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

import amp_patch
from amp_patch.cli import doctor as command
from amp_patch.cli.main import main
from amp_patch.doctor.rules import sorted_rules

ROOT = Path(amp_patch.__file__).parent.parent
SETUP = 'import amp_patch as amp\nmodel, optimizer = amp.initialize(model, optimizer, opt_level="O4")\n'
WARNING = SETUP + "output = model(x.half())\n"
ERROR = SETUP.replace("O4", "o4")
NOTE = "from apex import amp\n"


@pytest.fixture
def diagnose(tmp_path, monkeypatch, capsys):
    """Writes files, and runs the command in their folder: exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.doctor, "get_advice", lambda: "use O9 here")

    def run(*options, **sources):
        for name, source in sources.items():
            Path(f"{name}.py").write_bytes(source.encode())
        try:
            code = main(["doctor", *(options or ["."])])
        except SystemExit as left:
            code = left.code
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("source", "code"),
    [("x = 1\n", 0), (NOTE, 0), (WARNING, 1), (ERROR, 1), ("x = = 1\n", 1)],
    ids=["sound", "note", "warning", "error", "unreadable"],
)
def test_what_is_found_makes_the_exit_code_1_but_for_notes(source, code, diagnose):
    assert diagnose(train=source)[0] == code


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["absent.py"], "neither a file nor a directory"),
        (["--select", "AMP3O5"], "'AMP3O5' is no code of a rule, and begins none. Did you mean 'AMP30"),
        (["--select", "amp3"], "'amp3' is no code of a rule, and begins none. Did you mean 'AMP3'?"),
        (["--select", ""], "--select: '' names no rule: write codes or their beginnings, such as AMP3,AMP401"),
        (["--ignore", " ,"], "--ignore: ' ,' names no rule: write codes or their beginnings, such as AMP3,AMP401"),
        (["--diff", "--output-format", "json"], "--diff prints a diff, and takes no --output-format json"),
        (["--explain", "AMP999"], "'AMP999' is no code of a rule"),
        (["--fix", "--diff"], "not allowed with argument"),
        (["--output-format", "xml"], "'xml' is no choice (text, json, github, sarif)"),
    ],
)
def test_what_cannot_be_used_is_2(options, said, diagnose):
    code, _, errors = diagnose(*options, ".", train=WARNING)
    assert code == 2 and said in errors


@pytest.mark.parametrize("options", [["--list"], ["--explain", "AMP201"], ["--diff", "."]], ids=" ".join)
def test_a_reader_that_has_seen_enough_is_no_error(options, diagnose, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    Path("train.py").write_text(ERROR)
    monkeypatch.setattr(sys, "stdout", Closed())
    assert main(["doctor", *options]) == 1
    monkeypatch.undo()
    assert diagnose("--list")[2] == ""


def test_a_file_that_cannot_be_written_is_2(diagnose, monkeypatch):
    def refuse(path, data):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_bytes", lambda path, data: path.open("wb").write(data))
    diagnose(train=ERROR)
    monkeypatch.setattr(Path, "write_bytes", refuse)
    code, _, errors = diagnose("--fix", ".")
    assert code == 2 and "Permission denied: 'train.py'" in errors


def test_lines_for_people_count_notes_and_end_with_advice(diagnose):
    _, said, _ = diagnose(train=WARNING + NOTE)
    place, advice, summary, notes, last = said.splitlines()
    assert place.startswith("train.py:3:16: warning: a cast to 16 bits by hand: ") and place.endswith("[AMP207]")
    assert advice.startswith("    Leave the cast out")
    assert (summary, last) == ("0 errors, 1 warning in 1 file", "use O9 here")
    assert notes == "1 note (AMP101): shown by --notes"
    _, said, _ = diagnose("--notes", "--no-advice", ".")
    assert "train.py:4:1: note: apex.amp: covered by" in said and "`amp-patch run train.py`" in said
    assert said.splitlines()[-1] == "0 errors, 1 warning, 1 note in 1 file"


def test_what_can_be_mended_is_marked(diagnose):
    assert "[AMP201, --fix mends it]" in diagnose(train=ERROR)[1]


def test_json(diagnose):
    code, said, _ = diagnose("--output-format", "json", ".", train=ERROR)
    report = json.loads(said)
    assert code == 1 and set(report) == {"findings", "summary"}
    assert report["summary"] == {"error": 1, "warning": 0, "note": 0, "files": 1, "fixed": 0}
    (finding,) = report["findings"]
    assert (finding["code"], finding["severity"], finding["path"], finding["line"]) == (
        "AMP201",
        "error",
        "train.py",
        2,
    )
    assert finding["fixable"] and "Did you mean 'O4'?" in finding["message"]


def test_github(diagnose):
    _, said, _ = diagnose("--output-format", "github", ".", **{"100%": WARNING + NOTE})
    warning, note = said.splitlines()
    assert warning.startswith("::warning file=100%25.py,line=3,col=16,title=AMP207::a cast to 16 bits by hand: ")
    assert note.startswith("::notice file=100%25.py,line=4,col=1,title=AMP101::apex.amp: covered")


SARIF = {
    "type": "object",
    "required": ["version", "runs"],
    "properties": {
        "version": {"const": "2.1.0"},
        "runs": {
            "items": {
                "required": ["tool", "results"],
                "properties": {
                    "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                    "results": {
                        "items": {
                            "required": ["message", "ruleId", "level", "locations"],
                            "properties": {"level": {"enum": ["none", "note", "warning", "error"]}},
                        }
                    },
                },
            }
        },
    },
}
"""The parts of the schema of SARIF 2.1.0 that a change here could break."""


def test_sarif_tells_rules_places_and_fixes(diagnose):
    text = "# é\n" + ERROR + WARNING
    log = json.loads(diagnose("--output-format", "sarif", ".", **{"my train": text})[1])
    jsonschema.validate(log, SARIF)
    (run,) = log["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == [rule.code for rule in sorted_rules()]
    error, warning = run["results"]
    place = error["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "my%20train.py" and place["region"] == {
        "startLine": 3,
        "startColumn": 63,
    }
    ((replacement,),) = [change["replacements"] for change in error["fixes"][0]["artifactChanges"]]
    start, length = replacement["deletedRegion"]["charOffset"], replacement["deletedRegion"]["charLength"]
    assert (text[start : start + length], replacement["insertedContent"]["text"]) == ('"o4"', '"O4"')
    assert "fixes" not in warning


def test_list_and_explain(diagnose):
    assert [line.split()[0] for line in diagnose("--list")[1].splitlines()] == [rule.code for rule in sorted_rules()]
    code, said, _ = diagnose("--explain", "AMP305")
    assert code == 0 and said.startswith("AMP305: clipping inside scale_loss\n\nInside the block gradients are still")


def test_fix_writes_and_reports_the_rest_and_diff_writes_nothing(diagnose):
    text = ERROR + "output = model(x.half())\n"
    code, diff, _ = diagnose("--diff", ".", train=text)
    assert code == 1 and Path("train.py").read_text() == text
    code, said, _ = diagnose("--fix", ".")
    assert code == 1 and "[AMP207]" in said and "AMP201" not in said
    assert said.splitlines()[-2] == "0 errors, 1 warning in 1 file; 1 finding mended"
    mended = Path("train.py").read_text()
    assert mended == text.replace('"o4"', '"O4"')
    Path("train.py").write_text(text)
    subprocess.run(["patch", "-p0", "--silent"], input=diff, text=True, check=True)
    assert Path("train.py").read_text() == mended


def test_the_hook_of_pre_commit_is_this_command(diagnose):
    _, hook = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    program, name, *options = hook["entry"].split()
    assert (program, name, hook["types_or"]) == ("amp-patch", "doctor", ["python", "jupyter"])
    assert diagnose(*options, "train.py", train=WARNING)[0] == 1
    assert diagnose(*options, "--fix", "train.py", train=ERROR)[0] == 0


# ---- settings --------------------------------------------------------------------------------------------------------


def configure(table, folder="."):
    Path(folder).mkdir(exist_ok=True)
    Path(folder, "pyproject.toml").write_text(table)


@pytest.mark.parametrize(
    ("table", "options", "found"),
    [
        ('ignore = ["AMP2"]', [], ["AMP101"]),
        ('ignore = ["AMP2"]', ["--ignore", "AMP1"], ["AMP207"]),
        ('select = ["AMP1"]', [], ["AMP101"]),
        ('select = ["AMP1"]', ["--select", "AMP207,AMP3"], ["AMP207"]),
        ('exclude = ["train.py"]', [], []),
        ('exclude = ["tr*"]', [], []),
        ('exclude = ["other/"]', [], ["AMP207", "AMP101"]),
        ('per-file-ignores = {"train.py" = ["AMP207"]}', [], ["AMP101"]),
        ('per-file-ignores = {"other/*" = ["AMP207"]}', [], ["AMP207", "AMP101"]),
    ],
)
def test_a_table_sets_what_the_command_line_does_not(table, options, found, diagnose):
    configure(f"[tool.amp-patch.doctor]\n{table}\n")
    _, said, _ = diagnose("--output-format", "json", *options, ".", train=WARNING + NOTE)
    assert [finding["code"] for finding in json.loads(said)["findings"]] == found


def test_the_nearest_file_with_a_table_counts(diagnose):
    configure('[tool.amp-patch.doctor]\nignore = ["AMP207"]\n')
    configure("[tool.amp-patch.doctor]\n", "inner")
    configure("[project]\nname = 'amp-patch'\n", "inner/without")
    for place in ("train.py", "inner/train.py", "inner/without/train.py"):
        Path(place).write_text(WARNING)
    _, said, _ = diagnose("--output-format", "json", ".")
    assert [one["path"] for one in json.loads(said)["findings"]] == ["inner/train.py", "inner/without/train.py"]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('slect = ["AMP1"]', "has no key 'slect' (select, ignore, exclude, per-file-ignores). Did you mean 'select'?"),
        ('select = "AMP1"', "select is 'AMP1', and must be a list of strings"),
        ("exclude = [1]", "exclude is [1], and must be a list of strings"),
        ('per-file-ignores = ["a"]', "must be a table of lists of codes, by pattern"),
        ('ignore = ["AMP888"]', "'AMP888' is no code of a rule"),
        ("select = [", "pyproject.toml: "),
    ],
)
def test_a_table_that_cannot_be_used_is_2(table, said, diagnose):
    configure(f"[tool.amp-patch.doctor]\n{table}\n")
    code, _, errors = diagnose(".", train=WARNING)
    assert code == 2 and said in errors.replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tool = 'amp-patch'", "tool is 'amp-patch', and must be a table"),
        ("[tool]\namp-patch = 'yes'", "tool.amp-patch is 'yes', and must be a table"),
        ("[tool.amp-patch]\ndoctor = ['AMP3']", "tool.amp-patch.doctor is ['AMP3'], and must be a table"),
        ("# café\n[tool.amp-patch.doctor]", "is not UTF-8"),
    ],
)
def test_a_file_of_another_form_is_2_and_is_named(text, said, diagnose):
    Path("pyproject.toml").write_bytes(text.encode("latin-1"))
    code, _, errors = diagnose(".", train=WARNING)
    assert code == 2 and said in errors.replace("\n", " ") and "pyproject.toml" in errors


def test_what_a_file_without_a_word_of_ours_holds_is_not_our_affair(diagnose):
    Path("pyproject.toml").write_bytes(b"# caf\xe9\n[tool.other]\n")
    assert diagnose(".", train="x = 1\n")[0] == 0


def test_scripts_are_read_without_torch(tmp_path):
    (tmp_path / "train.py").write_text(ERROR)
    code = (
        "import sys\n"
        "from amp_patch.cli.main import main\n"
        "code = main(['doctor', '--no-advice', '--fix', '--output-format', 'sarif', 'train.py'])\n"
        "sys.exit(code or 3 * ('torch' in sys.modules))"
    )
    root = Path(amp_patch.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(root)}, capture_output=True
    )
    assert done.returncode == 0, done
