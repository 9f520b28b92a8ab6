"""Names on op lists mean the documented ops, conflicts are errors, files extend each other in order, and no file can do
more than name functions.

Guards: config/op_lists, config/list_file, config/list_names, config/op_names, config/op_rules, config/shipped.
"""

import os
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_patch.config import op_lists, op_names, shipped
from amp_patch.config.op_lists import OpLists, Spelling, check_oplists, load_oplists
from amp_patch.config.shipped import lists_dir, shipped_names
from amp_patch.errors import OpListError

Write = Callable[..., Path]
Load = Callable[..., OpLists]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a list file and return its path."""

    def write(text: str, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def kinds(lists: OpLists) -> dict[str, str]:
    """The kind of each spelling, by its full name."""
    return {f"{spelling.owner_name}.{spelling.name}": spelling.rule for spelling in lists.spellings}


@pytest.fixture
def load(write: Write) -> Load:
    """Write texts to files of their own, and load them over each other."""
    return lambda *texts: load_oplists([write(text, f"{index}.yaml") for index, text in enumerate(texts)])


# ---- shipped lists ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_entry_has_a_reason(name: str) -> None:
    lists = load_oplists(name)
    entries = {*(spelling.entry for spelling in (*lists.spellings, *lists.deferred)), *lists.missing}
    assert {entry.why for entry in entries} <= {"range", "kernel", "speed", "dtype-match", "parity"}
    late = {"torchvision.ops", "torch.nn.attention.flex_attention", "torch.nn.attention.varlen"}
    assert {spelling.owner_name for spelling in lists.deferred} <= late


def test_bfloat16_differs_from_float16_only_where_range_was_the_reason() -> None:
    low, brain = kinds(load_oplists("float16")), kinds(load_oplists("bfloat16"))
    gone = {name.rpartition(".")[2] for name in low.keys() - brain.keys()}
    assert gone == set("square square_ reciprocal reciprocal_ rsqrt rsqrt_ std var std_mean var_mean".split())  # noqa: SIM905
    assert not brain.keys() - low.keys()
    changed = {name: (low[name], brain[name]) for name in brain if low[name] != brain[name]}
    assert changed == dict.fromkeys(["torch.rms_norm", "torch.nn.functional.rms_norm"], ("blacklist", "promote"))


RECURRENT = "rnn_relu rnn_tanh gru lstm rnn_relu_cell rnn_tanh_cell gru_cell lstm_cell"


def test_a_rule_is_its_name() -> None:
    for rule in op_lists.RULE_KEYS:
        name = rule.value
        assert rule == name and (str(rule), repr(rule), f"{rule:20}|") == (name, repr(name), f"{name:20}|")


# ---- what a name means -----------------------------------------------------------------------------------------------


def test_spellings_of_a_name(write: Write) -> None:
    for op, expected in [
        ("softmax", "torch.softmax torch.nn.functional.softmax torch.Tensor.softmax torch.special.softmax"),
        ("linear", "torch.nn.functional.linear"),
        ("conv2d", "torch.conv2d torch.nn.functional.conv2d"),
        (
            "matmul",
            "torch.matmul torch.linalg.matmul torch.Tensor.matmul torch.Tensor.__matmul__ torch.Tensor.__rmatmul__",
        ),
        ("norm", "torch.norm torch.Tensor.norm torch.linalg.norm"),
        ("concatenate", "torch.cat torch.concat torch.concatenate"),
        ("inv", "torch.inverse torch.Tensor.inverse torch.linalg.inv"),
        ("lgamma", "torch.lgamma torch.Tensor.lgamma torch.Tensor.lgamma_ torch.special.gammaln"),
        ("cond", "torch.linalg.cond"),  # torch.cond is control flow
        ("solve", "torch.linalg.solve torch.Tensor.solve"),  # torch.solve only raises
        ("torch.nn.functional.softmax", "torch.nn.functional.softmax"),
        ("torch.Tensor.__matmul__", "torch.Tensor.__matmul__"),
        ("torch.fft.rfft", "torch.fft.rfft"),
        *((name, f"torch.{name} torch._VF.{name}") for name in RECURRENT.split()),
    ]:
        assert kinds(load_oplists(write(f"whitelist: [{op}]"))).keys() == set(expected.split())


# ---- in-place twins, and files over files ----------------------------------------------------------------------------


def test_what_lists_come_to(load: Load) -> None:
    cases = yaml.safe_load(Path(__file__).with_name("rulings.yaml").read_text(encoding="utf-8"))
    wrong = {}
    for name, case in cases.items():
        found = kinds(load(*case["files"]))
        told = {spelling: found.get(spelling, "none") for spelling in case["rules"]}
        if told != case["rules"]:
            wrong[name] = told
    assert wrong == {}


def test_neutral_without_effect_is_said(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    path = write("extends: float16\nneutral: [relu, exp, exp_]")
    load_oplists(path)
    assert caplog.messages == [f"{path}:2:11: 'relu' is neutral, but it was on no list"]


def test_names_and_digest(write: Write) -> None:
    here = write("whitelist: [mm]\nblacklist: [{op: exp, why: range}]\n")
    there = write("# moved\nblacklist: [exp]\nwhitelist: [mm]\n", "elsewhere/other.yml")
    assert load_oplists(here).digest == load_oplists(there).digest == load_oplists([here, there]).digest
    assert load_oplists(here).digest != load_oplists(write("whitelist: [mm, exp]")).digest
    assert load_oplists(["float16", there]).names == ("float16", str(there))
    assert len({load_oplists(name).digest for name in shipped_names()}) == len(shipped_names())


# ---- versions and missing ops ----------------------------------------------------------------------------------------


def test_since_and_until(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    for bounds, running, applies in [
        ("since: 2.13", "2.13.0+cpu", True),
        ("since: '2.13'", "2.12.9", False),
        ("since: 2.9", "2.13.0", True),  # numbers, not text
        ("until: 2.13", "2.13.0", False),
        ("until: 2.13", "2.12.1", True),
        ("until: 2.13.1", "2.13.0a0+git1234", True),
        ("since: 2, until: 3", "2.13.0", True),
        ("since: 2.10, until: 2.12", "2.12.0", False),
    ]:
        monkeypatch.setattr(torch, "__version__", running)
        assert bool(load_oplists(write(f"blacklist: [{{op: exp, {bounds}}}]")).spellings) is applies


def test_missing_ops(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lists = load_oplists(
        write("blacklist: [{op: soon_to_come, optional: true}, {op: torch.fft.soon, optional: 'true'}, exp]")
    )
    assert [entry.op for entry in lists.missing] == ["soon_to_come", "torch.fft.soon"]
    assert {"torch.exp", "torch.Tensor.exp"} <= kinds(lists).keys()
    monkeypatch.setattr(op_lists, "lists_dir", lambda: tmp_path)
    shipped = load_oplists(write("blacklist: [soon_to_come]", "float16.yaml"))
    assert [entry.op for entry in shipped.missing] == ["soon_to_come"]


# ---- names outside torch ---------------------------------------------------------------------------------------------


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """An imported package `somelib` with a module `somelib.ops`."""

    def roi_align(x: torch.Tensor) -> torch.Tensor:
        return x

    roi_align.__module__ = "somelib.ops"
    top, ops = types.ModuleType("somelib"), types.ModuleType("somelib.ops")
    top.ops, ops.roi_align, ops.os, ops.SIZE, ops.getenv, top.linear = ops, roi_align, os, 3, os.getenv, F.linear  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somelib", top)
    monkeypatch.setitem(sys.modules, "somelib.ops", ops)
    return ops


def test_a_name_of_a_package_resolves_or_is_deferred_until_it_is_imported(
    write: Write, monkeypatch: pytest.MonkeyPatch, package: types.ModuleType
) -> None:
    path = write("blacklist: [somelib.ops.roi_align]\nwhitelist: [somelib.linear]")
    lists = load_oplists(path)
    wide, low = sorted(lists.spellings, key=lambda one: one.rule)
    assert lists.deferred == ()
    assert wide == Spelling(package, "somelib.ops", "roi_align", "blacklist", wide.entry) and low.rule == "whitelist"
    monkeypatch.delitem(sys.modules, "somelib")
    monkeypatch.delitem(sys.modules, "somelib.ops")
    later = load_oplists(path)
    assert {spelling.entry.op for spelling in later.deferred} == {"somelib.ops.roi_align", "somelib.linear"}
    assert later.spellings == () and later.digest == lists.digest


@pytest.mark.usefixtures("package")
def test_a_submodule_not_imported_and_a_lazy_module_are_deferred_not_run(
    write: Write, package: types.ModuleType
) -> None:
    def fail(name: str) -> object:
        raise AssertionError(f"ran code for {name}")

    package.__getattr__ = fail  # type: ignore[method-assign]
    lists = load_oplists(write("blacklist: [somelib.other.f, somelib.ops.lazy]"))
    assert [spelling.entry.op for spelling in lists.deferred] == ["somelib.other.f", "somelib.ops.lazy"]


def test_reading_a_list_imports_nothing(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("raise SystemExit('imported')", "trap.py")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    lists = load_oplists(write("blacklist: [trap.f, torchaudio.functional.resample, sqlite_x.y]"))
    deferred = [spelling.entry.op for spelling in lists.deferred]
    assert deferred == ["trap.f", "torchaudio.functional.resample", "sqlite_x.y"]
    assert set(sys.modules) == before


@pytest.mark.usefixtures("package")
def test_bad_names_of_a_package(write: Write, package: types.ModuleType) -> None:
    for op, problem in [
        ("somelib.ops.roi_algn", "Did you mean 'roi_align'?"),
        ("somelib.ops.os.system", "leads through 'os'"),
        ("somelib.ops.SIZE", "constant"),
        ("somelib.ops.SIZE.real", "leads through 'SIZE'"),
        ("somelib.ops", "a module"),
        ("somelib.ops.getenv", "standard library"),
        ("somelib.ops.__dict__", "not an operator"),
        ("somelib.ops.__builtins__.eval", "not an op"),
    ]:
        package.ops = package
        refused(write(f"blacklist: [{op}]"), "1:13", problem)


# ---- checks ----------------------------------------------------------------------------------------------------------


def test_a_check_finds_what_comes_after_a_fault(write: Write) -> None:
    path = write(
        "whitelist: [mm, sofmax]\n"
        "blacklist: [exp, {op: tan, wy: x}]\n"
        "promote: [{op: sin, optional: maybe}, exp]\n"
        "neutral: relu\n"
    )
    places = [f"{fault.line}:{fault.column}" for fault in check_oplists(path).errors]
    assert places == ["1:17", "2:28", "3:31", "3:39", "4:10"]


def test_a_fault_of_a_file_reached_twice_is_found_once(write: Write) -> None:
    write("blacklist: [sofmax]", "base.yaml")
    write("extends: base.yaml", "left.yaml")
    write("extends: base.yaml", "right.yaml")
    assert len(check_oplists(write("extends: [left.yaml, right.yaml, base.yaml]")).errors) == 1
    write("blacklist: [", "base.yaml")
    assert len(check_oplists(write("extends: [left.yaml, right.yaml, base.yaml]")).errors) == 1


RULED = [(rule, op) for rule in ("whitelist", "blacklist", "neutral") for op in ("exp", "exp_", "torch.exp")]


def test_an_entry_is_warned_of_only_if_the_rules_are_the_same_without_it(write: Write) -> None:
    for base in RULED:
        lower = write(f"{base[0]}: [{base[1]}]", "base.yaml")
        for rule, op in RULED:
            upper = write(f"extends: base.yaml\n{rule}: [{op}]")
            is_warned_of = any(str(warning).startswith(f"{upper}:") for warning in check_oplists(upper).warnings)
            changes_rules = kinds(load_oplists(upper)) != kinds(load_oplists(lower))
            assert not (is_warned_of and changes_rules), (rule, op)
            assert is_warned_of or (rule, op) != base, (rule, op)


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(path: Path, position: str, *problems: str) -> None:
    with pytest.raises(OpListError) as caught:
        load_oplists(path)
    assert str(caught.value).startswith(f"{path}:{position}: ")
    assert (caught.value.path, f"{caught.value.line}:{caught.value.column}") == (str(path), position)
    for problem in problems:
        assert problem in str(caught.value)


NOT_OPS = [
    *("torch.Size", "torch.nn", "fft", "torch.Tensor.shape", "nn", "torch.nn.Linear.forward", "torch.os.system"),
    *("torch.jit.script", "torch.serialization.load", "torch._C._jit_init", "torch.load", "save", "compile"),
    *("torch.Tensor.float", "manual_seed", "torch.set_default_dtype", "torch.cond", "torch.vmap"),
    *("torch.nn.functional.has_torch_function", "__init__", "__getattribute__", "torch.Tensor.__torch_function__"),
    *("torch.Tensor.__reduce_ex__", "subprocess.run", "builtins.eval", "amp_patch.initialize", "'os.system(1)'"),
    *("torch..mm", ".mm", "torch.mm.", "''", "'2'", "søftmax", '"mm\\n"'),
]


def test_names_that_no_list_may_hold(write: Write) -> None:
    for op in NOT_OPS:
        refused(write(f"blacklist: [{op}]"), "1:13")
        refused(write(f"blacklist:\n  - {{why: range, op: {op}}}"), "2:22")


def test_extends_cycles(write: Write) -> None:
    write("extends: b.yaml", "a.yaml")
    write("description: x\nextends: [float16, sub/../c.yaml]", "b.yaml")
    path = write("extends: a.yaml", "c.yaml")
    (path.parent / "sub").mkdir()
    with pytest.raises(
        OpListError, match=r"b\.yaml:2:20: the files extend each other: c\.yaml -> a\.yaml -> b\.yaml -> c\.yaml"
    ):
        load_oplists(path)
    refused(write("extends: mine.yaml"), "1:10", "extend each other")


def test_bad_specs() -> None:
    for spec, problem in [
        ("flaot16", "Did you mean 'float16'?"),
        ("presets", "not a shipped list"),
        ("", "not a shipped list"),
        ("absent.yaml", "no such file"),
        ("./absent", "no such file"),
        (Path("absent"), "no such file"),
        ("null\0byte.yaml", "cannot be read"),
        ([], "non-empty"),
        (None, "non-empty"),
        (3, "non-empty"),
        (["float16", None], "non-empty"),
        (b"float16", "non-empty"),
        (["float16", "apx"], "Did you mean 'apex'?"),
    ]:
        with pytest.raises(OpListError) as caught:
            load_oplists(spec)  # type: ignore[arg-type]
        assert problem in str(caught.value)


def test_lists_are_looked_for_inside_the_package_then_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "__file__", str(tmp_path / "pkg" / "config" / "shipped.py"))
    with pytest.raises(OpListError, match="reinstall"):
        lists_dir()
    for folder in (tmp_path / "lists", tmp_path / "pkg" / "lists"):
        folder.mkdir(parents=True)
        (folder / "presets.yaml").write_text("")
        assert lists_dir() == folder


# ---- lists that are remembered ---------------------------------------------------------------------------------------


def test_a_list_is_read_again_only_after_an_edit(write: Write) -> None:
    path = write("extends: base.yaml\nwhitelist: [mm]")
    base = write("blacklist: [exp]", "base.yaml")
    first = load_oplists(path)
    assert load_oplists(path) is first
    write("extends: base.yaml\nwhitelist: [mv]")
    assert "torch.mv" in kinds(load_oplists(path))
    base.write_text("blacklist: [tan]")
    assert {"torch.tan", "torch.mv"} <= kinds(load_oplists(path)).keys()
    base.unlink()
    with pytest.raises(OpListError, match="there is no such file"):
        load_oplists(path)
    write("blacklist: [exp]", "base.yaml")
    write("extends: base.yaml\nwhitelist: [mm]")
    assert load_oplists(path) == first


def test_the_same_name_in_another_folder_is_another_list(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("whitelist: [mm]", "here/mine.yaml")
    monkeypatch.chdir(write("whitelist: [mv]", "there/mine.yaml").parent)
    assert "torch.mv" in kinds(load_oplists("mine.yaml"))
    monkeypatch.chdir("../here")
    assert "torch.mm" in kinds(load_oplists("mine.yaml"))


def test_a_package_that_is_imported_in_between_is_seen(
    write: Write, monkeypatch: pytest.MonkeyPatch, package: types.ModuleType
) -> None:
    monkeypatch.setattr(op_names, "is_installed", lambda root: True)  # else a warning comes each time
    path = write("blacklist: [somelib.ops.roi_align]\nmodules: [{type: somelib.ops.Block, run: low}]")
    with monkeypatch.context() as before:
        before.delitem(sys.modules, "somelib")
        before.delitem(sys.modules, "somelib.ops")
        assert len(load_oplists(path).deferred) == 1
    with pytest.raises(OpListError, match="has no 'Block'"):
        load_oplists(path)
    package.Block = torch.nn.Linear  # type: ignore[attr-defined]
    (spelling,) = load_oplists(path).spellings
    assert spelling.owner is package
    monkeypatch.setitem(sys.modules, "somelib.ops", again := types.ModuleType("somelib.ops"))  # imported anew
    vars(again).update(vars(package))
    monkeypatch.setattr(sys.modules["somelib"], "ops", again)
    assert load_oplists(path).spellings[0].owner is again


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_list_is_read_once(name: str) -> None:
    assert load_oplists(name, may_be_overlay=True) is load_oplists(name, may_be_overlay=True)


def test_only_functions_of_torch_write_in_place_by_the_suffix_out(write: Write, package: types.ModuleType) -> None:
    package.project_out = lambda x, weight: x @ weight  # type: ignore[attr-defined]
    package.project_out.__module__ = "somelib.ops"
    varlen = "{op: torch.nn.attention.varlen.varlen_attn, optional: true}"
    lists = load_oplists(write(f"whitelist: [somelib.ops.project_out, {varlen}]"))
    rules = {spelling.name: spelling.rule for spelling in (*lists.spellings, *lists.deferred)}
    assert rules.pop("varlen_attn_out", "match_self") == "match_self"  # not in each torch
    assert rules.pop("project_out") == "whitelist"


def test_what_is_defined_again_is_seen_without_any_import(write: Write, package: types.ModuleType) -> None:
    """Modules are reloaded, and cells of notebooks run again."""

    def define(name: str) -> Any:
        kind = type(name, (torch.nn.Module,), {"scores": lambda self, x: x * 2, "__module__": "somelib.ops"})
        setattr(package, name, kind)
        return kind

    define("Attention")
    define("Block")
    path = write(
        "blacklist: [somelib.ops.Attention.scores, {op: somelib.ops.later, optional: true}]\n"
        "modules: [{type: somelib.ops.Block, run: low}]"
    )
    first = load_oplists(path)
    assert load_oplists(path) is first and len(first.missing) == 1
    again = define("Attention")
    (spelling,) = load_oplists(path).spellings
    assert spelling.owner is again
    package.later = package.roi_align  # type: ignore[attr-defined]
    assert len(load_oplists(path).spellings) == 2
    del package.Block  # type: ignore[attr-defined]
    with pytest.raises(OpListError, match="has no 'Block'"):
        load_oplists(path)


def test_lists_are_forgotten_when_there_are_many(write: Write) -> None:
    paths = [write("whitelist: [mm]", f"{index}.yaml") for index in range(op_lists.MAX_CACHED + 1)]
    first, *_ = [load_oplists(path) for path in paths]
    assert load_oplists(paths[0]) is not first


# ---- anything at all -------------------------------------------------------------------------------------------------


EXAMPLES = int(os.environ.get("AMP_PATCH_EXAMPLES", "30"))


BARE_RULES = [rule for rule in op_lists.RULE_KEYS if not rule.takes_argument]
OPS = ["exp", "mm", "tan", "sum", "cat", "softmax", "matmul", "acos", "bmm", "log", "linear", "add"]


@given(st.lists(st.dictionaries(st.sampled_from(OPS), st.sampled_from(BARE_RULES), min_size=1), min_size=1, max_size=3))
@settings(max_examples=EXAMPLES, deadline=None)
def test_overlays_equal_one_file_with_the_last_word_of_each_op(layers: list[dict[str, str]]) -> None:
    def text(rules: dict[str, str]) -> str:
        return "\n".join(
            f"{rule}: [{', '.join(op for op in rules if rules[op] == rule)}]" for rule in op_lists.RULE_KEYS
        )

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{index}.yaml") for index in range(len(layers) + 1)]
        for path, rules in zip(
            paths, [*layers, {op: rule for layer in layers for op, rule in layer.items()}], strict=True
        ):
            path.write_text(text(rules))
        layered, flat = load_oplists(paths[:-1]), load_oplists(paths[-1])
    assert kinds(layered) == kinds(flat)
    assert layered.digest == flat.digest


# ---- lists that would do nothing -------------------------------------------------------------------------------------


def test_a_package_that_is_not_installed_is_said(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    path = write("extends: float16\nblacklist: [torchvison.ops.box_iou, {op: no_such_pkg.f, optional: true}]")
    (warning,) = map(str, check_oplists(path).warnings)
    assert "mine.yaml:2:13" in warning and "no package 'torchvison' installed." in warning
    load_oplists(path)
    assert len(caplog.records) == 1
    load_oplists(write("blacklist: [hypothesis_free.f, hypothesis.nowhere.f]"))
    assert "no package 'hypothesis_free' installed." in caplog.messages[1] and len(caplog.records) == 2


def test_a_name_without_its_beginning_points_to_the_op(write: Write) -> None:
    for op, meant in [
        ("tensor.exp", "torch.Tensor.exp"),
        ("functional.gelu", "torch.nn.functional.gelu"),
        ("functional.sofmax", "torch.nn.functional.softmax"),
        ("linalg.norm", "torch.linalg.norm"),
        ("fft.rfft", "torch.fft.rfft"),
        ("linalg.xyzzy", None),
    ]:
        (warning,) = check_oplists(write(f"blacklist: [{op}]")).warnings
        hint = f" Did you mean {meant!r}?" if meant else ""
        assert warning.message == f"{op!r} has no effect: there is no package {op.partition('.')[0]!r} installed.{hint}"


def test_a_file_that_extends_null_stands_alone_wherever_it_is(write: Write) -> None:
    alone = write("extends: null\nblacklist: [softsign]\nmodules: [{match: head, run: low}]")
    overlay = write("blacklist: [softsign]", "over.yaml")
    assert load_oplists(["apex", alone]).digest == load_oplists(alone).digest
    assert load_oplists([alone, "apex"]).digest != load_oplists("apex").digest
    assert len(load_oplists(["apex", overlay]).spellings) > len(load_oplists("apex").spellings)
    assert kinds(load_oplists(overlay)) == kinds(load_oplists(alone)) == {"torch.nn.functional.softsign": "blacklist"}
    with pytest.raises(OpListError, match="'null' is not a shipped list"):
        load_oplists(write("extends: 'null'"))


def test_a_name_of_torch_that_was_replaced_for_a_while_is_found_again(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("whitelist: [mm]\nblacklist: [exp]")
    expected = kinds(load_oplists(path))
    with monkeypatch.context() as patched:
        patched.setattr(torch, "mm", type("Spy", (), {}))
        patched.delattr(torch, "exp_")
        assert not {"torch.mm", "torch.exp_"} & kinds(load_oplists(path)).keys()
    assert kinds(load_oplists(path)) == expected
    assert {"torch.mm", "torch.exp_"} <= expected.keys()
