"""Every construct that models are made of trains under amp as under torch: with the list `autocast-cpu` bit by bit as
under `torch.autocast("cpu", torch.bfloat16)`, and in float16 with a dynamic loss scale as in float32, up to rounding.

Results, their dtypes, gradients of inputs and weights, and the weights after two steps are compared. Where a list
cannot do what autocast does, `EXCEPTIONS` gives the reason, and the test checks that the difference still exists.

Guards: casting/wrappers, casting/op_patches, casting/replacement, lists/autocast-cpu.yaml.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from constructs import CONSTRUCTS, LOW, Run, train
from hand_casts import is_same
from torch import Tensor

import amp_patch as amp
from amp_patch import native

pytestmark = pytest.mark.filterwarnings("ignore")

# The cases: the mode of the module, and the dtype that inputs come in.
CASES = {
    "train": (True, torch.float32),
    "eval": (False, torch.float32),
    "low inputs": (True, LOW),
}
FLOAT32, LOW_INPUTS, EVAL, ALL = ("train", "eval"), ("low inputs",), ("eval",), tuple(CASES)

PAD = "F.pad is unlisted; autocast runs the mode reflect in float32, and rounds its gradients then"
STATE = "low throughout; autocast multiplies in low and keeps the state in the dtype of the input"
FUSED = "the fused layer of inference computes in one dtype throughout; autocast casts inside it"
UNDER_VMAP = "low; under vmap autocast meets the parts of a linear layer, and adds the bias in float32"
AUTOCAST_FAILS = "autocast fails there on mixed dtypes"
ASKS_AUTOCAST = "what asks or tells torch.autocast does so of a thing that is not in force"

# Name: the cases that differ, what differs in them (a pattern for all of it), and why.
EXCEPTIONS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "conv2d padded by reflection": (LOW_INPUTS, "gradients of inputs", PAD),
    "attention, learned bias": (
        EVAL,
        "without",
        "autocast's copy of a weight asks for gradients even where none are taken, by which attention chooses another"
        " kernel",
    ),
    "TransformerEncoderLayer": (EVAL, "without", FUSED),
    "Transformer": (EVAL, "without", FUSED),
    "checkpoint of attention": (EVAL, "without", FUSED),
    "reentrant checkpoint of attention": (EVAL, "", FUSED),
    "AdaptiveLogSoftmaxWithLoss": (FLOAT32, "error of autocast", AUTOCAST_FAILS),
    "LSTM, both ways": (
        FLOAT32,
        "gradients of inputs",
        "the input is cast once, and its gradients added in low; autocast casts it for each direction",
    ),
    "LSTM of a packed sequence": (FLOAT32, "", STATE),
    "GRU": (FLOAT32, "", STATE),
    "LSTMCell": (FLOAT32, "", STATE),
    "vmap": (ALL, "", UNDER_VMAP),
    "gradients of each sample": (ALL, "", UNDER_VMAP),
    "hessian": (ALL, "", UNDER_VMAP),
    "ensemble": (ALL, "", UNDER_VMAP),
    "jvp through LayerNorm": (
        ALL,
        "error of amp",
        "layer_norm is unlisted and its derivatives in forward mode have mixed dtypes; the list bfloat16 runs them",
    ),
    "is_autocast_enabled": (ALL, "", ASKS_AUTOCAST),
}


# ---- bfloat16, beside torch.autocast ---------------------------------------------------------------------------------


def outcome(*arguments: Any) -> dict[str, Any] | Exception:
    try:
        return train(*arguments)
    except Exception as error:
        return error


def as_it_is(loss: Tensor, optimizer: Any) -> AbstractContextManager[Tensor]:
    return contextlib.nullcontext(loss)


def scaled(loss: Tensor, optimizer: Any) -> AbstractContextManager[Any]:
    return as_it_is(loss, optimizer) if optimizer is None else amp.scale_loss(loss, optimizer)


def cases_of(name: str) -> dict[str, Run]:
    construct = CONSTRUCTS[name]
    return {case: Run(construct, *how) for case, how in CASES.items() if how[1] in construct.given}


def run_by_autocast(name: str) -> dict[str, Any]:
    found = {case: outcome(run, lambda: torch.autocast("cpu", LOW), as_it_is) for case, run in cases_of(name).items()}
    if any("could not create a primitive" in str(one) for one in found.values() if isinstance(one, Exception)):
        pytest.skip("autocast itself has no kernel for this on a CPU without products of bfloat16 values")
    return found


@contextlib.contextmanager
def casts_of(runs: Mapping[str, Run]) -> Iterator[None]:
    """One session for the models of all runs, or without a model where they have no weights."""
    options = {"opt_level": "O4", "lists": "autocast-cpu", "compute": "native"}
    if all(run.optimizer is None for run in runs.values()):
        with amp.session(device="cpu", **options):
            yield
        return
    optimizers = [run.optimizer for run in runs.values()]
    amp.initialize([run.module for run in runs.values()], optimizers, verbosity=0, **options)
    yield
    amp.reset()


def differences(ours: Any, theirs: Any) -> list[str]:
    """The parts of two outcomes that differ. That both fail would be no comparison."""
    errors = [
        f"error of {who}: {result}"
        for who, result in (("amp", ours), ("autocast", theirs))
        if isinstance(result, Exception)
    ]
    assert len(errors) < 2, errors
    return errors or [part for part in ours.keys() | theirs.keys() if not is_same(ours[part], theirs[part])]


if torch.__version__.startswith("2.6."):
    KEEPS = "its autocast keeps the copy of a weight that was made without gradients, and uses it with gradients"
    EXCEPTIONS["parts without gradients"] = ALL, "", KEEPS
    del EXCEPTIONS["attention, learned bias"]  # that kernel came later


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_construct_runs_as_under_autocast(name: str, tmp_path: Path) -> None:
    expected = run_by_autocast(name)
    check_session(name, expected)
    check_rules_laid_over_autocast(name, expected, tmp_path / "rules.yaml")


def check_session(name: str, expected: dict[str, Any]) -> None:
    runs = cases_of(name)
    with casts_of(runs):
        results = {case: outcome(run, contextlib.nullcontext, scaled) for case, run in runs.items()}
    differing = {case: parts for case in runs if (parts := differences(results[case], expected[case]))}
    cases, pattern, reason = EXCEPTIONS.get(name, ((), "", ""))
    assert differing.keys() == set(cases) & runs.keys(), f"{differing} {reason}"
    assert [part for parts in differing.values() for part in parts if not re.match(pattern, part)] == []


def check_rules_laid_over_autocast(name: str, expected: dict[str, Any], path: Path) -> None:
    """Told by a list of one's own, our casts act in the regions of autocast; left to torch, they are torch's."""
    rules = (Path(amp.__file__).parent.parent / "lists" / "autocast-cpu.yaml").read_text()
    path.write_text(re.sub(r"(?m)^.*torchvision.*$", "", rules))
    runs = cases_of(name)
    with native.install(lists=path):
        results = {case: outcome(run, lambda: torch.autocast("cpu", LOW), as_it_is) for case, run in runs.items()}
    compared = runs.keys() - set(EXCEPTIONS.get(name, ((),))[0])
    failed = {case for case in compared if isinstance(expected[case], Exception)}
    assert all(isinstance(results[case], Exception) for case in failed)
    assert {case: parts for case in compared - failed if (parts := differences(results[case], expected[case]))} == {}


@pytest.mark.parametrize("name", ["linear", "LSTM"])
def test_a_construct_without_casts_is_noticed(name: str) -> None:
    expected = run_by_autocast(name)
    for case, run in cases_of(name).items():
        if case in FLOAT32:
            parts = differences(outcome(run, contextlib.nullcontext, as_it_is), expected[case])
            assert {"results 0", "gradients of inputs 0"} <= set(parts)


# ---- float16, beside float32 -----------------------------------------------------------------------------------------

IN_FLOAT16 = (
    *("linear", "linear called twice", "perceptron", "conv2d", "conv_transpose2d", "embedding", "tied weights"),
    *("BatchNorm2d", "LayerNorm", "GroupNorm", "RMSNorm", "average pooling", "MultiheadAttention, causal"),
    *("cross_entropy", "binary_cross_entropy_with_logits", "LSTM", "GRU", "functional_call", "reentrant checkpoint"),
    *("checkpoint", "weight_norm", "full backward hook", "torch.fx, traced before"),
)
TOLERANCE = 0.02  # a product of eight terms and what follows it, each rounded to 11 bits, in two steps
SCALE = 32.0


def find_error(ours: list[Tensor | None], theirs: list[Tensor | None]) -> float:
    """The largest error, relative to the largest value of all: gradients that cancel out are all rounding."""
    assert [one is None for one in ours] == [one is None for one in theirs]
    pairs = [(one.float(), other) for one, other in zip(ours, theirs, strict=True) if one is not None]
    largest = max(other.abs().max().item() for _, other in pairs)
    return max((one - other).abs().max().item() for one, other in pairs) / largest


AT_O1 = ("linear called twice", "embedding", "BatchNorm2d", "MultiheadAttention, causal", "cross_entropy", "GRU")


@pytest.mark.parametrize(("level", "name"), [*(("O2", name) for name in IN_FLOAT16), *(("O1", name) for name in AT_O1)])
def test_a_construct_trains_in_float16_as_in_float32(level: str, name: str) -> None:
    construct = CONSTRUCTS[name]
    expected = train(Run(construct, True, torch.float32), contextlib.nullcontext, as_it_is)
    run = Run(construct, True, torch.float32)
    amp.initialize(run.module, run.optimizer, opt_level=level, loss_scale={"init": SCALE}, verbosity=0)
    dtypes = dtypes_of(run.module)
    result = train(run, contextlib.nullcontext, scaled)
    assert amp.stats().loss_scales == (SCALE,) and amp.stats().steps_skipped == 0
    assert dtypes_of(run.module) == dtypes
    assert set(dtypes.values()) == {torch.float32} if level == "O1" else torch.float16 in dtypes.values()
    for part, values in expected.items():
        ours = result[part]
        if part.startswith("gradients of inputs"):  # which no optimizer has, and nobody unscales
            ours = [value / SCALE for value in ours if value is not None]
            values = [value for value in values if value is not None]
        if values:
            assert find_error(ours, values) < TOLERANCE, part
        if part == "weights" or re.match("gradients [01]", part):
            assert all(value.dtype is not torch.float16 for value in ours if value is not None)


def dtypes_of(module: torch.nn.Module) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in module.named_parameters()}
