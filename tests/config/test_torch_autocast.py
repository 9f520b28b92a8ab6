"""The rules of torch.autocast, as observed, are those of torch's C++ header and test tables, and those of the lists
that are generated from them.

Guards: tools/torch_autocast.py, tools/generate_autocast_lists.py, tools/autocast_history.json, config/list_names.
Guards: lists/autocast-cpu.yaml, lists/autocast-cuda.yaml, lists/autocast-mps.yaml, lists/autocast-xpu.yaml.
"""

import itertools
import re
import threading
from pathlib import Path
from typing import Any

import generate_autocast_lists
import pytest
import torch
from torch import nn
from torch_autocast import DEVICE_TYPES, get_overload_rules, get_rules
from torch_state import VERSION

import amp_patch
from amp_patch.config import explain, op_lists
from amp_patch.config.list_names import NEWEST_TORCH, OLDEST_TORCH
from amp_patch.config.shipped import lists_dir
from amp_patch.errors import OpListError

HEADER = Path(torch.__path__[0], "include", "ATen", "autocast_mode.h")
POLICIES = {
    "AT_FORALL_LOWER_PRECISION_FP": "whitelist",
    "AT_FORALL_FP32": "blacklist",
    "AT_FORALL_FP32_SET_OPT_DTYPE": "blacklist",
    "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": "blacklist",
    "AT_FORALL_PROMOTE": "promote",
}
# Registered beside the macros, in source files that are not shipped.
BESIDE_THE_MACROS = {
    "binary_cross_entropy": "banned",
    "_cudnn_rnn": "whitelist",
    "cudnn_convolution": "whitelist",
    "cudnn_convolution_transpose": "whitelist",
}
if VERSION >= (2, 14):
    BESIDE_THE_MACROS["linalg_matrix_sqrth"] = "blacklist"
devices = pytest.mark.parametrize("device_type", DEVICE_TYPES)
HISTORY = generate_autocast_lists.read_history()


def rules_in_header() -> dict[str, str]:
    """The overloads of each macro in torch's header, which CUDA registers."""
    found = {}
    text = HEADER.read_text().replace("\\\n", " ")
    for macro, rule in POLICIES.items():
        body = re.search(rf"#define {macro}\(_\)(.*)", text)
        assert body, f"{macro} is gone from {HEADER}"
        if rule == "blacklist" and "ADD_NS" in body[1]:
            found |= dict.fromkeys(re.findall(r'"([\w.]+)"', body[1]), rule)
        else:
            found |= {
                ".".join(filter(None, groups)): rule for groups in re.findall(r"_\((\w+)(?:, *(\w+))?\)", body[1])
            }
    # those by the name of a dimension are left out
    return {overload: rule for overload, rule in found.items() if "name" not in overload.partition(".")[2].lower()}


@pytest.mark.skipif(not HEADER.is_file(), reason="this build of torch ships no ATen/autocast_mode.h")
def test_the_rules_for_cuda_and_xpu_are_those_of_torch_s_header() -> None:
    assert get_overload_rules("cuda") == rules_in_header() | BESIDE_THE_MACROS
    assert get_overload_rules("xpu") == rules_in_header() | {"binary_cross_entropy": "banned"}


@devices
def test_every_kernel_is_understood(device_type: str, caplog: pytest.LogCaptureFixture) -> None:
    rules = get_overload_rules(device_type)
    assert caplog.records == []
    assert len(rules) > 90
    assert {overload for overload in rules if overload.startswith("softmax")} == (
        set() if device_type == "cpu" else {"softmax.int"}
    )


# ---- what asking leaves behind ---------------------------------------------------------------------------------------


@devices
def test_the_answer_does_not_depend_on_patches_thread_or_grad_mode(device_type: str) -> None:
    expected, answers = get_rules(device_type), []
    amp_patch.initialize(nn.Linear(2, 2), opt_level="O4", lists="apex", verbosity=0)
    thread = threading.Thread(target=lambda: answers.append(get_rules(device_type)))
    thread.start()
    thread.join()
    with torch.inference_mode():
        answers.append(get_rules(device_type))
    assert answers == [expected] * 2


# ---- the committed files ---------------------------------------------------------------------------------------------


@devices
def test_the_shipped_list_is_what_the_generator_writes(device_type: str) -> None:
    text = (lists_dir() / f"autocast-{device_type}.yaml").read_text(encoding="utf-8")
    assert generate_autocast_lists.render(HISTORY, device_type) == text


@devices
def test_the_installed_torch_does_what_the_history_says(device_type: str) -> None:
    """A release of torch with other rules fails here: record it by tools/generate_autocast_lists.py --record."""
    version = torch.__version__.partition("+")[0]
    observed = {op: rule for rule, ops in get_rules(device_type).items() for op in ops}
    assert by_spelling(observed) == by_spelling(generate_autocast_lists.get_rules_of(HISTORY, device_type, version))


def by_spelling(rules: dict[str, str]) -> dict[str, str]:
    """The rule of each function that names mean in this torch."""
    return {
        ".".join(key): rule for op, rule in rules.items() for key in op_lists.find_spellings(op, may_be_missing=True)
    }


def test_a_history_grows_by_versions_in_any_order() -> None:
    rules = {"2.6.0": {"a": "whitelist"}, "2.8.0": {"a": "blacklist", "b": "promote"}, "2.10.0": {"b": "promote"}}
    for order in itertools.permutations(rules):
        history: dict[str, Any] = {"versions": []}
        for version in order:
            history = generate_autocast_lists.add_version(history, version, {"cpu": rules[version]})
        assert history == {
            "versions": ["2.6.0", "2.8.0", "2.10.0"],
            "cpu": {"2.6.0": rules["2.6.0"], "2.8.0": {"a": "blacklist", "b": "promote"}, "2.10.0": {"a": None}},
        }
    text = generate_autocast_lists.render(history, "cpu")
    assert '  - {op: a, why: parity, until: "2.8"}' in text
    assert '  - {op: a, why: parity, since: "2.8", until: "2.10"}' in text
    assert '  - {op: b, why: parity, since: "2.8"}' in text


# ---- lists for a version of torch ------------------------------------------------------------------------------------


def test_a_list_can_be_read_for_another_torch() -> None:
    assert [HISTORY["versions"][0], HISTORY["versions"][-1]] == [
        ".".join(map(str, version)) for version in (OLDEST_TORCH, NEWEST_TORCH)
    ]
    changed = {}
    for before, after in itertools.pairwise(HISTORY["versions"]):
        left, right = (op_lists.load_oplists(f"autocast-cuda@{version}") for version in (before, after))
        differences = (*explain.compare(left, right), *explain.compare_missing(left, right))
        if differences:
            # a torch that lacks an op shows its full name
            changed[after] = {(row.op.rpartition(".")[2], row.left, row.right) for row in differences}
    assert changed == {
        "2.11.0": {("flex_attention", "unlisted", "whitelist")},
        "2.12.0": {("rms_norm", "unlisted", "blacklist")},
        "2.14.0": {("matrix_sqrth", "unlisted", "blacklist")},
    }


def test_a_file_passes_its_version_on_to_the_lists_that_it_extends(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: autocast-cuda\nwhitelist: [{op: gelu, since: '2.12'}]")
    for version, has_rms_norm in (("2.11", False), ("2.12", True)):
        names = {spelling.name for spelling in op_lists.load_oplists(f"{path}@{version}").spellings}
        assert ("rms_norm" in names, "gelu" in names, "linear" in names) == (has_rms_norm, has_rms_norm, True)
    path.write_text("extends: autocast-cuda@2.11")
    assert "rms_norm" not in {spelling.name for spelling in op_lists.load_oplists(path).spellings}


@pytest.mark.parametrize(
    ("version", "nearest"),
    [("2.1", "2.6"), ("2.5", "2.6"), ("2.5.1.0", "2.6"), ("2.16", "2.15"), ("3.0", "2.15"), ("2.12.0.1", "2.12")],
)
def test_a_version_that_the_lists_do_not_know_is_an_error(version: str, nearest: str) -> None:
    message = rf"the lists know torch 2\.6 to 2\.15, not .*; give autocast-cuda@{nearest}$"
    with pytest.raises(OpListError, match=message):
        op_lists.load_oplists(f"autocast-cuda@{version}")
