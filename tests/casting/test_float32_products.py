"""Products that are computed in float32 are as close to the truth as one rounding allows, wherever they are called
from.

Guards: casting/float32_products, config/product_names, hardware.
"""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hand_casts import each, is_same, lows, tensors_of
from op_samples import Sample, find_sample
from torch import Tensor, nn
from torch.nn import functional

import amp_patch as amp
from amp_patch import hardware
from amp_patch.config import product_names

SPELLINGS = {
    f"{getattr(owner, '__name__', owner)}.{name}": (owner, name)
    for owner, name in product_names.find_float32_spellings("cuda")
}
CASTING = {torch.float16: "O1", torch.bfloat16: "O4"}
CAST = {torch.float16: "O2", torch.bfloat16: "O5"}
HALF_ULP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
TINY = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}  # half the smallest number above 0
FLOAT32_ERROR = 1e-5  # of sums of at most 16 terms of size 1, and of an exponential
ROUGH = {"_native_multi_head_attention", "_transformer_encoder_layer_fwd"}  # know no gradients


def start(level: str, compute: str = "float32", **options: Any) -> nn.Module:
    model = Bound()
    amp.initialize(model, model.optimizer, opt_level=level, compute=compute, verbosity=0, loss_scale=1.0, **options)
    return model


def round_to(low: torch.dtype, value: Any, dtype: torch.dtype) -> Any:
    return each(value, lambda tensor: tensor.to(low).to(dtype))


def leaves_of(sample: Sample, low: torch.dtype, dtype: torch.dtype) -> tuple[list[Tensor], tuple[Any, ...], Any]:
    """The operands rounded to `low`, in `dtype`: leaves that take gradients, and arguments made of them."""
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        rounded = tensor.detach().to(low).to(dtype)
        if tensor.layout != torch.strided:  # no cast of a sparse operand has a gradient, nor has autocast's
            return rounded
        leaves.append(rounded.requires_grad_())
        return leaves[-1] * 1

    return leaves, each(sample.args, leaf), each(sample.kwargs, leaf)


class Bound(nn.Linear):
    """A layer whose parameters an optimizer steps on: only of those copies are kept."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.optimizer = torch.optim.SGD(self.parameters(), 0.1)


def outcome(name: str, low: torch.dtype, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor | None]]:
    """Results of a product on operands rounded to `low`, and the gradients of their sum, which is its first row's."""
    owner, attribute = SPELLINGS[name]
    sample = find_sample(owner.__name__, attribute)
    assert sample is not None, name
    leaves, args, kwargs = leaves_of(sample, low, dtype)
    if attribute in ROUGH:
        with torch.no_grad():
            return [next(tensors_of(getattr(owner, attribute)(*args, **kwargs)))], []
    function = getattr(owner, attribute)
    if attribute.endswith("grouped_mm") and dtype is torch.float64:
        function = torch.bmm  # the same of groups in one tensor, with a kernel for float64
    results = [one for one in tensors_of(function(*args, **kwargs)) if one.is_floating_point()]
    with_graph = [one for one in results if one.requires_grad]
    if not with_graph:
        return results, []
    grads = torch.autograd.grad(with_graph, leaves, [torch.ones_like(one) for one in with_graph], allow_unused=True)
    return results, list(grads)


def is_rounded_once(found: Tensor, truth: Tensor, low: torch.dtype) -> bool:
    if found.dtype is not low:
        return False
    found, truth = found.to_dense(), truth.to_dense()
    allowed = HALF_ULP[low] * truth.abs() * 1.01 + FLOAT32_ERROR * truth.abs().max().clamp(min=1) + TINY[low]
    return bool(((found.double() - truth).abs() <= allowed).all())


@lows
def test_a_product_of_low_operands_and_its_gradients_are_the_exact_ones_rounded_once(low: torch.dtype) -> None:
    truths = {name: outcome(name, low, torch.float64) for name in SPELLINGS}
    start(CAST[low])
    faults = []
    for name, (truth, true_grads) in truths.items():
        found, grads = outcome(name, low, low)
        pairs = [(one, exact.double()) for one, exact in zip(found, truth, strict=True)]
        pairs += [(one, exact) for one, exact in zip(grads, true_grads, strict=False) if exact is not None]
        if not all(one is not None and is_rounded_once(one, exact, low) for one, exact in pairs):
            faults.append(name)
    assert faults == []


@lows
def test_a_whitelisted_product_takes_float32_operands_rounded(low: torch.dtype, tmp_path: Any) -> None:
    """Bitwise what somebody writes out: round the operands, compute in float32, round the result."""
    names = [name for name in SPELLINGS if not name.endswith("_") or name.endswith("__")]
    samples, expected = {}, {}
    for name in names:
        owner, attribute = SPELLINGS[name]
        samples[name] = find_sample(owner.__name__, attribute)
        args = round_to(low, samples[name].args, torch.float32)
        expected[name] = each(getattr(owner, attribute)(*args, **samples[name].kwargs), lambda one: one.to(low))
    dotted = [f"torch.{name}" if name.startswith("Tensor.") else name for name in names]
    listed = tmp_path / "all.yaml"
    listed.write_text(f"extends: {str(low).removeprefix('torch.')}\nwhitelist: [{', '.join(dotted)}]\n")
    start(CASTING[low], lists=str(listed))
    faults = []
    for name, sample in samples.items():
        owner, attribute = SPELLINGS[name]
        for given in (sample.args, each(sample.args, lambda one: one.to(low))):
            found = getattr(owner, attribute)(*given, **sample.kwargs)
            if not is_same(found, expected[name]):
                faults.append(name)
    assert faults == []


def test_a_result_that_float16_has_no_number_for_is_infinite_or_zero() -> None:
    model = start("O1")
    large, small = torch.full((4, 4), 200.0), torch.full((4, 4), 1e-4)
    assert (large @ large == torch.inf).all()
    assert (small @ small == 0.0).logical_not().any() and (1e-2 * small @ small == 0.0).all()
    assert functional.linear(torch.full((1, 4), 1e6), model.weight).isfinite().logical_not().any()


def test_a_gradient_overflows_where_float16_has_no_number_for_it() -> None:
    start("O1")
    left, right = torch.ones(4, 4, requires_grad=True), torch.full((4, 4), 200.0)
    (left @ right).backward(torch.full((4, 4), 200.0, dtype=torch.float16))
    assert (left.grad == torch.inf).all() and left.grad.dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_calls_that_name_where_the_result_is_to_be_are_the_callers(level: str) -> None:
    start(level)
    left = torch.eye(4, dtype=torch.float16)
    out = torch.empty(4, 4, dtype=torch.float16)
    assert torch.mm(left, left, out=out) is out and torch.equal(out, left)
    if level == "O1":
        wide = torch.empty(4, 4)
        assert torch.mm(left.float(), left.float(), out=wide) is wide and wide.dtype is torch.float32


def test_what_has_no_float16_kernel_on_a_cpu_runs_in_float32() -> None:
    """Those that torch refuses are named for the day when it has them."""
    start("O2")
    last_names = {name.rpartition(".")[2] for name in product_names.WITHOUT_CPU_KERNEL}
    spellings = [one for one in product_names.find_float32_spellings("cpu") if one[1].rstrip("_") in last_names]
    assert {name.rstrip("_") for _, name in spellings} == last_names
    for owner, attribute in spellings:
        sample = find_sample(owner.__name__, attribute)
        assert sample is not None
        original = amp.get_original(owner, attribute)
        args = round_to(torch.float16, sample.args, torch.float16)
        with pytest.raises(RuntimeError, match="Half"):
            original(*each(args, torch.clone), **sample.kwargs)
        expected = original(*round_to(torch.float16, sample.args, torch.float32), **sample.kwargs)
        found = getattr(owner, attribute)(*args, **sample.kwargs)
        assert is_same(found, expected if expected.is_complex() else expected.half()), attribute


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_levels_that_cast_the_model_patch_products_and_nothing_else(level: str) -> None:
    start(level)
    patched = {key for key, (owner, name) in SPELLINGS.items() if amp.is_patched(owner, name)}
    assert patched == set(SPELLINGS)
    assert not amp.is_patched(torch, "softmax")
    wide = torch.randn(4, 4)
    assert (wide @ wide).dtype is torch.float32
    with pytest.raises(RuntimeError, match="dtype"):
        wide @ wide.half()
    assert (wide.double() @ wide.double()).dtype is torch.float64


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_script_reads_the_functions_of_torch(level: str) -> None:
    model = start(level)
    scripted = torch.jit.script(nn.Linear(4, 4).to(model.weight.dtype))
    assert scripted(torch.ones(1, 4, dtype=model.weight.dtype)).dtype is model.weight.dtype


def test_regions_say_what_is_cast_and_not_how_a_product_is_computed() -> None:
    start("O1")
    left = torch.full((4, 4), 1 + 2.0**-13)
    with amp.disable_casts():
        assert torch.equal(left @ torch.eye(4), left)
        assert (left.half() @ torch.eye(4).half()).dtype is torch.float16
    assert torch.equal(left @ torch.eye(4), torch.ones(4, 4).half())


# ---- which way is taken ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device, dtype, takes, flags, expected",
    [
        ("cpu", torch.bfloat16, True, {"amx_tile"}, True),
        ("cpu", torch.bfloat16, True, {"avx512_bf16"}, True),
        ("cpu", torch.bfloat16, True, set(), False),  # oneDNN imitates it by AVX-512
        ("cpu", torch.bfloat16, False, {"avx512_bf16"}, False),  # ONEDNN_MAX_CPU_ISA, or AVX2
        ("cpu", torch.float16, True, {"avx512_fp16", "amx_fp16"}, False),
        ("mps", torch.bfloat16, False, set(), True),
        ("cuda", torch.float16, False, set(), True),
    ],
)
def test_auto_looks_at_the_hardware(
    device: str, dtype: torch.dtype, takes: bool, flags: set[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "onednn_takes_bfloat16", lambda: takes)
    monkeypatch.setattr(hardware, "has_cpu_flag", flags.__contains__)
    monkeypatch.setattr(hardware, "_is_x86", lambda: True)
    assert hardware.has_low_products(device, dtype) is expected


@pytest.mark.parametrize("has_products", [True, False])
def test_auto_patches_products_where_the_hardware_has_none(
    has_products: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("amp_patch.config.policy.has_low_products", lambda *_: has_products)
    monkeypatch.setattr("amp_patch.hardware.has_low_products", lambda *_: has_products)
    amp.initialize(nn.Linear(2, 2), opt_level="O2")
    assert amp.is_patched(torch, "mm") is not has_products
    assert ("products are computed in float32" in capsys.readouterr().out) is not has_products


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_an_einsum_of_one_operand_stays_a_view(level: str) -> None:
    start(level)
    square = torch.ones(3, 3, dtype=torch.bfloat16)
    torch.einsum("ii->i", square).zero_()
    assert square.sum() == 6.0
    assert torch.einsum("ij->ji", torch.ones(2, 3)).dtype is (torch.bfloat16 if level == "O4" else torch.float32)


def test_a_forward_without_backward_leaves_nothing_behind() -> None:
    """Ops that save their results hold no cycle: what is saved of a result has no graph."""
    start("O5")
    low = torch.bfloat16
    calls: dict[Callable[..., Tensor], list[Tensor]] = {
        functional.scaled_dot_product_attention: [torch.randn(1, 2, 4, 8, dtype=low) for _ in range(3)],
        functional.linear: [torch.randn(2, 4, dtype=low), torch.randn(4, 4, dtype=low)],
        torch.gru_cell: [torch.randn(*shape, dtype=low) for shape in ((2, 4), (2, 4), (12, 4), (12, 4))],
    }
    for op, tensors in calls.items():
        for goes_backward in (False, True):
            result = op(*[tensor.requires_grad_() * 1 for tensor in tensors])
            node, probe = result.grad_fn.next_functions[0][0], Probe()
            node.metadata["probe"], freed = probe, weakref.ref(probe)
            if goes_backward:
                result.sum().backward(retain_graph=True)
            del result, node, probe
            assert freed() is None, (op, goes_backward)


class Probe:
    """Lives as long as what it is attached to."""
