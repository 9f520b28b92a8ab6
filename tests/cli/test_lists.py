"""The tasks of `amp-patch lists`, and the hook that runs one of them, print the documented text and exit codes.

Guards: cli/lists, cli/lists_check, cli/lists_diff, cli/lists_explain, cli/lists_init, cli/lists_printing.
Guards: cli/lists_show.
"""

import json
import os
import re
import shlex
from pathlib import Path

import jsonschema
import pytest
import torch
import yaml

from amp_patch.cli.main import main
from amp_patch.config.op_lists import load_oplists
from amp_patch.config.shipped import shipped_names

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file into the current folder, and return its path from there."""
    monkeypatch.chdir(tmp_path)

    def write(content, name="mine.yaml"):
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return path

    return write


@pytest.fixture
def lists(capsys):
    """Run `amp-patch lists` and return its exit code, what it printed, and what it complained of."""

    def run(*arguments):
        capsys.readouterr()
        code = main(["lists", *map(str, arguments)])
        return (code, *capsys.readouterr())

    return run


def test_an_overlay_that_is_shown_alone_gives_no_warnings(lists, caplog):
    assert lists("show", "fast")[0] == 0
    assert lists("explain", "softmax", "--lists", "fast")[0] == 0
    assert caplog.messages == []


def test_the_op_to_explain_may_stand_before_the_lists_or_behind_them(write, lists):
    path = write("extends: float16\nwhitelist: [softmax]\n")
    code, told, _ = lists("explain", "softmax", "--lists", path)
    assert code == 0 and "mine.yaml" in told
    assert lists("explain", "--lists", path, "softmax") == (code, told, "")
    assert lists("explain", "--dtype", "float16", "--lists", path, "softmax") == (code, told, "")


@pytest.mark.parametrize("bounds", ["since: '9.0'", "until: '1.0'", "since: '2.99'"])
def test_check_warns_of_bounds_that_leave_this_torch_out(bounds, write, lists):
    path = write(f"blacklist: [{{op: gelu, {bounds}}}]")
    code, told, _ = lists("check", path)
    assert code == 0 and told.startswith(f"{path}:1:18: warning: 'gelu' has no effect")


def test_check_names_the_torch_that_the_bounds_leave_out(write, lists):
    path = write("blacklist: [{op: gelu, since: '2.11'}]")
    assert "its bounds leave out torch 2.8.0\n" in lists("check", f"{path}@2.8")[1]


# ---- show ------------------------------------------------------------------------------------------------------------

MINE = """\
extends: base.yml
blacklist: [{op: gelu, why: range}, {op: soon, optional: true}, {op: tanh, since: 99.1, until: 99.3}]
whitelist:
  - {op: torch.mm, why: speed}
  - lib_not_imported.f
neutral: [cat]
"""
BASE = "blacklist: [{op: mm, why: careful}, exp]\nsequence_promote: [cat]\n"


def test_show_tells_rule_reason_and_place(write, lists):
    write(BASE, "base.yml")
    code, shown, complaint = lists("show", write(MINE))
    assert (code, complaint) == (0, "")
    head, _, body = shown.partition("\n")
    resolved = load_oplists("mine.yaml")
    told = f"{len(resolved.spellings)} spellings on torch {torch.__version__}, digest {resolved.digest[:12]}"
    assert head == f"mine.yaml: {told}"
    assert (
        body
        == """
whitelist: runs in the low dtype
  torch.mm  speed  mine.yaml:4

blacklist: runs in float32
  mm    careful  base.yml:1  except torch.mm
  exp            base.yml:1
  gelu  range    mine.yaml:2

neutral: taken off its list, so it runs in the dtype it is given
  cat    mine.yaml:6

missing: there is no such op
  soon  blacklist    mine.yaml:2

deferred: takes effect when the package is imported
  lib_not_imported.f  whitelist    mine.yaml:5

kept out: since or until excludes the torch version that the list is read for
  tanh  blacklist    mine.yaml:2  since 99.1, until 99.3
"""
    )


def test_show_spellings(write, lists):
    _, shown, _ = lists("show", write("blacklist: [exp, torch.fft.fft]\nneutral: [cat]"), "--spellings")
    assert "    torch.exp, torch.Tensor.exp, torch.exp_ (match_self), torch.Tensor.exp_ (match_self)\n" in shown
    assert "    torch.fft.fft\n" in shown
    assert "    torch.cat, torch.concat, torch.concatenate\n" in shown


def test_show_lays_lists_over_each_other(write, lists):
    _, shown, _ = lists("show", "float16", write("whitelist: [softmax]"))
    assert shown.startswith("float16, mine.yaml: ")
    assert re.search(r"^  softmax +mine\.yaml:1$", shown, flags=re.MULTILINE)
    assert re.search(r"^  layer_norm +range +float16\.yaml:\d+$", shown, flags=re.MULTILINE)


def test_show_json_holds_the_resolved_list(lists):
    data, resolved = json.loads(lists("show", "autocast-cuda", "--json")[1]), load_oplists("autocast-cuda")
    assert (data["lists"], data["digest"]) == (["autocast-cuda"], resolved.digest)
    told = {
        (spelling["name"], spelling["kind"], entry["path"], entry["line"])
        for entry in data["entries"]
        for spelling in entry["spellings"]
    }
    assert told == {
        (f"{one.owner_name}.{one.name}", one.rule, one.entry.path, one.entry.line)
        for one in (*resolved.spellings, *resolved.neutral)
    }


def test_show_json_holds_history_and_entries_without_effect(write, lists):
    write(BASE, "base.yml")
    data = json.loads(lists("show", write(MINE), "--json")[1])
    (mm,) = (entry for entry in data["entries"] if entry["op"] == "torch.mm")
    (earlier,) = mm["spellings"][0]["overridden"]
    assert [earlier[key] for key in ("op", "rule", "path", "line")] == ["mm", "blacklist", "base.yml", 1]
    without_effect = [entry["op"] for key in ("missing", "deferred", "other_torch") for entry in data[key]]
    assert without_effect == ["soon", "lib_not_imported.f", "tanh"]


# ---- check -----------------------------------------------------------------------------------------------------------

MANY = """\
extends: [flaot16, nowhere.yaml]
whitlist: [mm]
blacklist:
  - {op: exp, wy: range}
  - mul
promote: mm
neutral: [mul]
"""


def positions(printed):
    """The `line:column` of each printed line about mine.yaml, with the last words of what it says."""
    return [match[1] for line in printed.splitlines() if (match := re.match(r"mine\.yaml:(\d+:\d+): \S", line))]


def test_check_finds_every_fault_in_the_order_of_the_file(write, lists):
    code, printed, complaint = lists("check", write(MANY))
    assert (code, complaint) == (1, "")
    assert positions(printed) == ["1:11", "1:20", "2:1", "4:15", "6:10", "7:11"]
    assert len(printed.splitlines()) == 6
    assert "mine.yaml:2:1: unknown key 'whitlist'; " in printed


def test_check_goes_on_to_the_next_file_and_into_extended_ones(write, lists):
    write("whitelist: [sofmax]", "base.yaml")
    write("extends: base.yaml\nblacklist: [nope_nope]", "a.yaml")
    write("extends: [base.yaml, broken.yaml]\nneutral: [exp]", "b.yaml")
    write("a: [", "broken.yaml")
    code, printed, _ = lists("check", "a.yaml", write("{}"), "b.yaml")
    places = [line.partition(": ")[0] for line in printed.splitlines()]
    assert (code, places) == (1, ["base.yaml:1:13", "a.yaml:2:13", "broken.yaml:2:1"])


def test_check_names_lists_without_faults_and_what_they_extend(write, lists):
    code, printed, _ = lists("check", write("blacklist: [exp]"), *shipped_names())
    first, *others = printed.splitlines()
    assert first == "mine.yaml: no faults; it extends no list, so it applies alone or on top of the lists before it"
    assert code == 0 and all(": no faults; it extends " in line for line in others)


def test_check_warns_of_entries_without_effect_in_files_without_faults(write, lists):
    code, printed, _ = lists("check", write("extends: [apex]\nneutral: [relu]"))
    assert (code, positions(printed), printed.count(": warning: ")) == (0, ["2:11"], 1)
    code, printed, _ = lists("check", write("extends: [apex, flaot16]\nneutral: [relu]"))
    assert (code, positions(printed)) == (1, ["1:17"])


def test_check_of_what_is_no_file_is_trouble(write, lists, tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    write("{}", "folder.yaml/inside.yaml")
    faulty = write("whitelist: [sofmax]")
    for name, told in {
        "folder.yaml": "this is a directory",
        "absent.yaml": "there is no such file",
        "pipe.yaml": "this is not a regular file",
        "flaot16": "'flaot16' is not a shipped list",
    }.items():
        code, printed, complaint = lists("check", name, faulty)
        assert (code, complaint) == (2, "")
        assert told in printed and positions(printed) == ["1:13"]  # and the other is checked nevertheless


def test_check_json_holds_places_and_messages(write, lists):
    write("blacklist: [exp]", "base.yaml")
    faulty, warned = write("whitelist: [sofmax]"), write("extends: base.yaml\nblacklist: [exp]", "warned.yaml")
    code, printed, _ = lists("check", faulty, warned, "--json")
    message = f"torch {torch.__version__} has no op 'sofmax'. Did you mean 'softmax'?"
    warning = "'exp' is on blacklist without this entry, by 'exp' at base.yaml:1:13"
    assert code == 1 and json.loads(printed) == {
        "lists": ["mine.yaml", "warned.yaml"],
        "faults": [{"message": message, "path": "mine.yaml", "line": 1, "column": 13}],
        "warnings": [{"message": warning, "path": "warned.yaml", "line": 2, "column": 13}],
    }


# ---- diff ------------------------------------------------------------------------------------------------------------


def test_diff_prints_one_line_for_each_op(write, lists):
    path = write("blacklist: [gelu]\nwhitelist: [torch.nn.functional.softmax]\nneutral: [cat]")
    code, printed, _ = lists("diff", "float16", f"float16,{path}")
    assert code == 1
    assert printed.splitlines() == [
        "torch.nn.functional.softmax  blacklist -> whitelist",
        "cat                          sequence_promote -> (unlisted)",
        "gelu                         (unlisted) -> blacklist",
    ]
    assert lists("diff", path, path) == (0, "", "")
    assert lists("diff", "float16,bfloat16", "bfloat16") == (0, "", "")


def test_diff_json(write, lists):
    code, printed, _ = lists("diff", write("blacklist: [sin]"), write("promote: [torch.sin]", "b.yaml"), "--json")
    data = json.loads(printed)
    assert (code, data["left"], data["right"]) == (1, ["mine.yaml"], ["b.yaml"])
    assert data["differences"] == [
        {"op": "torch.sin", "spellings": ["torch.sin"], "left": "blacklist", "right": "promote"},
        {"op": "torch.Tensor.sin", "spellings": ["torch.Tensor.sin"], "left": "blacklist", "right": "unlisted"},
    ]


def test_a_list_that_cannot_be_used_is_trouble(write, lists):
    write("whitelist: [sofmax]", "bad.yaml")
    for task in ["show", "explain softmax --lists", "diff float16"]:
        for name in ["flaot16", "absent.yaml", "bad.yaml"]:
            code, printed, complaint = lists(*task.split(), name)
            assert (code, printed, complaint.count("\n")) == (2, "", 1)
            assert complaint.startswith("amp-patch lists: failed: ")
    assert lists("explain", "sofmax")[0] == 2


# ---- explain ---------------------------------------------------------------------------------------------------------


def test_explain_prints_rule_reason_history_and_effects(write, lists):
    write("blacklist: [{op: pow, why: range}]", "base.yaml")
    code, printed, complaint = lists(
        "explain", "pow", "--lists", write("extends: base.yaml\nwhitelist: [torch.pow]"), "--dtype", "bfloat16"
    )
    assert (code, complaint) == (0, "")
    assert (
        printed
        == """\
pow, by mine.yaml with bfloat16 as the low dtype

torch.pow
  rule              whitelist: runs in bfloat16
  entry             torch.pow at mine.yaml:2
  overrides         pow on blacklist at base.yaml:1, why: range
  float16, float32  cast to bfloat16
  bfloat16          as it is

torch.Tensor.pow, torch.Tensor.__pow__, torch.Tensor.__rpow__
  rule               blacklist: runs in float32
  entry              pow at base.yaml:1, why: range
  float16, bfloat16  cast to float32
  float32            as it is

torch.Tensor.__ipow__, torch.Tensor.pow_
  rule                        blacklist: writes to its first argument, in the dtype of that argument
  entry                       pow at base.yaml:1, why: range
  float16, bfloat16, float32  cast to the dtype of the first argument

float64, complex, integer and quantized arguments are never cast.
A call with out= or dtype= runs as it was written.
"""
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("linear", "linear, by float16 with float16 as the low dtype"),
        ("linear --lists over_bfloat16.yaml", "with bfloat16 as the low dtype"),
        ("lib_not_imported.f --lists mine.yaml", "is not imported yet; the entry takes effect when it is"),
        ("tanh --lists mine.yaml", "without effect: since 99.1, until 99.3 keeps it out on torch"),
        ("soon --lists float16 mine.yaml", "blacklist by mine.yaml:2, without effect: torch"),
        ("torch.concat --lists float16 mine.yaml", "cat on sequence_promote at base.yml:2"),
    ],
)
def test_explain_tells(arguments, said, write, lists):
    write(BASE, "base.yml")
    write(MINE)
    write("extends: bfloat16\nblacklist: [gelu]", "over_bfloat16.yaml")
    code, printed, _ = lists("explain", *arguments.split())
    assert code == 0 and said in printed


def test_explain_tells_of_rounding_only_where_operands_may_have_16_bits(write, lists):
    assert "values are rounded to float16" in lists("explain", "matmul")[1]
    assert "rounded" not in lists("explain", "avg_pool3d")[1]
    path = write("extends: float16\nwhitelist: [avg_pool3d]")
    assert "its result is rounded" in " ".join(lists("explain", "avg_pool3d", "--lists", path)[1].split())


def test_explain_json(lists):
    data = json.loads(lists("explain", "torch.exp", "--dtype", "bfloat16", "--json")[1])
    assert (data["op"], data["lists"], data["low"]) == ("torch.exp", ["bfloat16"], "bfloat16")
    rulings = [(ruling["spellings"], ruling["kind"], ruling["entry"]["op"]) for ruling in data["rulings"]]
    assert rulings == [(["torch.exp"], "blacklist", "exp"), (["torch.exp_"], "match_self", "exp")]
    cast = "cast to float32"
    assert data["effects"]["blacklist"] == {"float16": cast, "bfloat16": cast, "float32": "as it is"}


# ---- init ------------------------------------------------------------------------------------------------------------


def test_init_writes_a_list_that_is_right_and_changes_nothing_yet(write, lists):
    write("extends: apex\nneutral: [torch.nn.functional.gelu]", "my base.yaml")
    schema = jsonschema.Draft7Validator(json.loads((ROOT / "lists" / "schema.json").read_text()))
    for base in ("bfloat16", "my base.yaml"):
        path = Path(f"{base[:2]}.yaml")
        code, printed, complaint = lists("init", path, "--extends", base)
        assert (code, complaint) == (0, "") and printed.startswith(f"{path}: a list that extends {base}\n")
        code, printed, complaint = lists("check", path)
        assert (code, complaint) == (0, "") and "no faults" in printed and "warning" not in printed
        assert lists("diff", path, base) == (0, "", "")
        text = path.read_text()
        assert text.startswith("# yaml-language-server: $schema=lists.schema.json\n")
        assert json.loads(Path("lists.schema.json").read_text()) == schema.schema
        schema.validate(yaml.safe_load(text))
        path.write_text(re.sub(r"^  # - ", "  - ", text, flags=re.MULTILINE))  # the examples are right, too
        assert lists("check", path)[0] == 0
        schema.validate(yaml.safe_load(path.read_text()))


def test_init_names_the_level_of_the_dtype_for_which_the_base_is_written(lists, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path, base, level in [("a.yaml", "bfloat16", "O4"), ("b.yaml", "a.yaml", "O4"), ("c.yaml", "paper", "O1")]:
        assert lists("init", path, "--extends", base)[0] == 0
        assert f'opt_level="{level}"' in Path(path).read_text()


def test_init_refuses_and_writes_nothing(write, lists, tmp_path):
    for arguments, told in [
        ("mine.yaml", "mine.yaml exists already; give another name, or remove it first"),
        ("mine.txt", "'mine.txt' does not end in .yaml or .yml; give a name that does"),
        ("new.yaml --extends bfloat61", "Did you mean 'bfloat16'?"),
        ("new.yaml --extends mine.yaml", "mine.yaml:1:13: torch"),
        ("nowhere/new.yaml", "nowhere/new.yaml cannot be written: "),
    ]:
        write("whitelist: [sofmax]")
        code, printed, complaint = lists("init", *arguments.split())
        assert (code, printed, complaint.count("\n")) == (2, "", 1) and told in complaint
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"mine.yaml": "whitelist: [sofmax]"}


def test_init_leaves_a_schema_that_is_there(write, lists):
    write("{}", "lists.schema.json")
    assert lists("init", "new.yaml")[1].count("\n") == 1
    assert Path("lists.schema.json").read_text() == "{}"


# ---- module rules ----------------------------------------------------------------------------------------------------

RULES = """\
extends: bfloat16
modules:
  - {match: encoder.*.norm, run: float32, why: range}
  - {type: torch.nn.GELU, run: low}
"""


def test_module_rules_are_shown_and_told_of_ops_that_follow_them(write, lists):
    path = write(RULES)
    assert "  encoder.*.norm  float32  range  mine.yaml:3\n  torch.nn.GELU   low " in lists("show", path)[1]
    rule = {"chooser": "encoder.*.norm", "run": "float32", "why": "range", "path": "mine.yaml", "line": 3, "column": 5}
    assert json.loads(lists("show", path, "--json")[1])["modules"][0] == rule
    assert json.loads(lists("explain", "mm", "--lists", path, "--json")[1])["modules"][0] == rule
    told = (
        "Within encoder.*.norm it runs in float32 (mine.yaml:3).\n"
        "Within torch.nn.GELU it runs in bfloat16 (mine.yaml:4).\n"
    )
    for op, is_told in {"linear": True, "softmax": True, "cat": False, "relu": False}.items():
        assert (told in lists("explain", op, "--lists", path)[1]) is is_told


def test_module_rules_are_compared(write, lists):
    first, second = "{match: a, run: low}", "{match: b, run: float32}"
    left, right = "left.yaml", "right.yaml"
    for of_left, of_right, told in [
        (first, first, ""),
        (first, second, "modules a  low -> (unlisted)\nmodules b  (unlisted) -> float32\n"),
        (f"{first}, {second}", f"{second}, {first}", "modules  a low, b float32 -> b float32, a low\n"),
    ]:
        write(f"modules: [{of_left}]", left)
        write(f"modules: [{of_right}]", right)
        assert lists("diff", left, right)[1] == told


# ---- the hook --------------------------------------------------------------------------------------------------------


def test_the_hook_s_command_passes_good_files_and_stops_bad_ones(write, lists):
    hook = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())[0]
    assert (hook["id"], hook["language"]) == ("amp-patch-lists-check", "python")
    write("extends: float16\nneutral: [softmax]\n", "good_lists.yaml")
    write("extends: flaot16\nneutral: [sofmax]\n", "bad_lists.yaml")
    program, _, *task = shlex.split(hook["entry"])
    assert program == "amp-patch" and lists(*task, "good_lists.yaml")[::2] == (0, "")
    assert lists(*task, "good_lists.yaml", "bad_lists.yaml")[0] == 1
    named = ["my_lists.yaml", "lists.yml", "conf/op-list.yaml", "oplists.yaml", "a/b.lists.yml", "conf/amp_list.yaml"]
    other = ["playlists.yaml", "lists/presets.yaml", "lists.yaml.bak", "lists.py", "checklist.yml"]
    assert [name for name in named + other if re.search(hook["files"], name)] == named
