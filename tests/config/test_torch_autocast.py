"""The rules of torch.autocast, as observed, are those of torch's C++ header and test tables, and those of the lists
that are generated from them.

Guards: tools/torch_autocast.py, tools/generate_autocast_lists.py, lists/autocast-cpu.yaml, lists/autocast-cuda.yaml.
"""

import re
import threading
from pathlib import Path

import generate_autocast_lists
import pytest
import torch
from torch import nn
from torch_autocast import get_overload_rules, get_rules
from torch_state import VERSION

import amp_patch
from amp_patch.config.shipped import lists_dir

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
devices = pytest.mark.parametrize("device_type", ["cpu", "cuda"])


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
def test_the_rules_for_cuda_are_those_of_torch_s_header() -> None:
    assert get_overload_rules("cuda") == rules_in_header() | BESIDE_THE_MACROS


@devices
def test_every_kernel_is_understood(device_type: str, caplog: pytest.LogCaptureFixture) -> None:
    rules = get_overload_rules(device_type)
    assert caplog.records == []
    assert len(rules) > 100
    assert {overload for overload in rules if overload.startswith("softmax")} == (
        {"softmax.int"} if device_type == "cuda" else set()
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
    recorded = re.search(r"^description: .* as of torch (\d+\.\d+\.\d+)$", text, re.M)
    assert recorded
    running = torch.__version__.partition("+")[0]
    if recorded[1] != running:
        pytest.skip(f"the list is of torch {recorded[1]}, and this is torch {running}")
    assert generate_autocast_lists.render(device_type) == text
