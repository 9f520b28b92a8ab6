"""Short attention that is computed in float32 is more accurate than a CPU's 16-bit kernels, needs no more memory, and
is the same in eager mode, in compiled graphs and at every level.

Guards: casting/attention, hardware.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import amp_patch as amp
from amp_patch import hardware

LOW = torch.bfloat16
LONGEST = 8 * 8


@pytest.fixture(autouse=True)
def has_avx512_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with products of bfloat16 values, where attention of up to 8 queries and 8 keys is short."""
    for module in ("amp_patch.config.policy", "amp_patch.hardware"):
        monkeypatch.setattr(f"{module}.has_low_products", lambda device_type, dtype: dtype is LOW)
        monkeypatch.setattr(f"{module}.get_max_attention_scores", lambda device_type, dtype: LONGEST)


def start(level: str, compute: str = "auto") -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level=level, compute=compute, verbosity=0)
    start.held = model, optimizer  # type: ignore[attr-defined]


def operands(length: int = 8, *, heads: int = 2, keys: int | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, count, 16) for count in (length, keys or length, keys or length)]
    return [torch.randn(shape, generator=generator).to(LOW) for shape in shapes]


MASK = torch.ones(8, 8, dtype=torch.bool).tril()
SHORT: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "plain": ((), {}),
    "causal": ((None, 0.0, True), {}),
    "boolean mask": ((MASK,), {}),
    "named": ((), {"is_causal": True, "scale": 0.5}),
}


def outcome(dtype: torch.dtype, given: list[Tensor], how: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Tensor]:
    """The result and the gradients of its weighted sum, as float64."""
    leaves = [one.to(dtype).requires_grad_() for one in given]
    result = scaled_dot_product_attention(*leaves, *how[0], **how[1])
    direction = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result).to(LOW).to(dtype)
    gradients = torch.autograd.grad(result, leaves, direction)
    return [one.detach().double() for one in (result, *gradients)]


def distance(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [float((one - exact).detach().norm() / exact.norm()) for one, exact in zip(found, truth, strict=True)]


@pytest.mark.parametrize("level", ["O4", "O5"])
@pytest.mark.parametrize("how", SHORT.values(), ids=list(SHORT))
def test_short_attention_and_its_gradients_are_nearer_to_the_truth(level: str, how: Any) -> None:
    truth, native = outcome(torch.float64, operands(), how), outcome(LOW, operands(), how)
    start(level)
    found = outcome(LOW, operands(), how)
    ours, theirs = distance(found, truth), distance(native, truth)
    assert ours[0] < theirs[0] and max(ours) < max(theirs) < 0.02
    exact = scaled_dot_product_attention(*(one.float() for one in operands()), *how[0], **how[1])
    assert torch.equal(found[0], exact.to(LOW).double())


LEFT_TO_TORCH: dict[str, tuple[list[Tensor], dict[str, Any]]] = {
    "longer": (operands(9), {}),
    "more keys": (operands(8, keys=9), {}),
    "added mask": (operands(), {"attn_mask": torch.zeros(8, 8, dtype=LOW)}),
    "no heads": ([one[:, 0] for one in operands()], {}),
    "grouped queries": ([operands(heads=4)[0], *operands()[1:]], {"enable_gqa": True}),
    "narrow values": ([*operands()[:2], operands()[2][..., :8]], {}),
}


@pytest.mark.parametrize("compute", ["auto", "native"])
@pytest.mark.parametrize("level", ["O4", "O5"])
def test_other_attention_is_torchs(level: str, compute: str) -> None:
    cases = {**LEFT_TO_TORCH, **({"short": (operands(), {})} if compute == "native" else {})}
    expected = {name: scaled_dot_product_attention(*given, **how) for name, (given, how) in cases.items()}
    start(level, compute)
    for name, (given, how) in cases.items():
        assert torch.equal(scaled_dot_product_attention(*given, **how), expected[name]), name
    torch.manual_seed(0)
    dropped = scaled_dot_product_attention(*operands(), dropout_p=0.5)
    amp.reset()
    torch.manual_seed(0)
    assert torch.equal(dropped, scaled_dot_product_attention(*operands(), dropout_p=0.5))


def test_wrong_calls_are_refused_in_torchs_words() -> None:
    query, key, value = operands()
    calls: list[Callable[[], object]] = [
        lambda: scaled_dot_product_attention(query, key),
        lambda: scaled_dot_product_attention(query, key, value, nonsense=1),
        lambda: scaled_dot_product_attention(query, key, 3),
        lambda: scaled_dot_product_attention(query, key, value.float()),
    ]

    def refusals() -> list[str]:
        told = []
        for call in calls:
            with pytest.raises((TypeError, RuntimeError)) as refusal:
                call()
            told.append(str(refusal.value))
        return told

    expected = refusals()
    start("O5")
    assert refusals() == expected


def saved_bytes(given: list[Tensor]) -> int:
    """The size of what a forward leaves for backward, beside its operands and its result."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = scaled_dot_product_attention(*[one.requires_grad_() for one in given])
        result.transpose(1, 2).reshape(2, 8, -1)
    return (
        sum(event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
        - result.numel() * result.element_size()
    )


@pytest.mark.parametrize("is_packed", [False, True], ids=["apart", "packed"])
def test_no_more_is_saved_for_backward(is_packed: bool) -> None:
    given = operands()
    if is_packed:  # as models do that project all three at once
        given = list(torch.stack([one.transpose(1, 2) for one in given], 2).permute(2, 0, 3, 1, 4))
    given = [one.detach() for one in given]
    native = saved_bytes(given)
    start("O5")
    assert saved_bytes(given) <= native


def test_a_result_that_is_edited_in_place_is_noticed_in_backward() -> None:
    start("O5")
    result = scaled_dot_product_attention(*[one.requires_grad_() for one in operands()])
    with torch.no_grad():
        result.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_function_transforms_give_the_same_gradient() -> None:
    start("O5")
    query, key, value = operands()
    expected = outcome(LOW, [query, key, value], ((), {}))[1]
    direction = torch.linspace(-1, 1, query.numel(), dtype=torch.float64).view_as(query).to(LOW)

    def loss(given: Tensor) -> Tensor:
        return (scaled_dot_product_attention(given, key, value) * direction).float().sum()

    found = torch.func.grad(loss)(query).detach().double()
    assert distance([found], [expected])[0] < 5e-3  # what a transform saves is not rounded


@pytest.mark.slow
def test_a_compiled_graph_computes_it_so_too() -> None:
    start("O5")
    eager = scaled_dot_product_attention(*operands())
    compiled = torch.compile(lambda *given: scaled_dot_product_attention(*given), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*operands()), eager)
    longer = operands(9)
    assert torch.equal(compiled(*longer), scaled_dot_product_attention(*longer))


@pytest.mark.parametrize(
    ("flags", "expected"), [({"avx512_bf16"}, 40_000), ({"avx512_bf16", "amx_tile"}, 4096), ({"avx_ne_convert"}, 0)]
)
def test_how_long_is_short_follows_the_hardware(
    flags: set[str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(hardware, "onednn_takes_bfloat16", lambda: True)
    monkeypatch.setattr(hardware, "has_cpu_flag", flags.__contains__)
    monkeypatch.setattr(hardware, "_is_x86", lambda: True)
    assert hardware.get_max_attention_scores("cpu", LOW) == expected
    assert (
        hardware.get_max_attention_scores("cpu", torch.float16) == hardware.get_max_attention_scores("cuda", LOW) == 0
    )
    monkeypatch.setattr(hardware, "onednn_takes_bfloat16", lambda: False)  # AVX2: all products are in float32
    assert hardware.get_max_attention_scores("cpu", LOW) == 0


def count_casts(output: Tensor, weight: Tensor) -> int:
    """How many casts of a weight the graph of an output holds."""
    seen: set[Any] = set()
    waiting, casts = [output.grad_fn], 0
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        after = [function for function, _ in node.next_functions]
        casts += "ToCopy" in node.name() and getattr(after[0], "variable", None) is weight
        waiting += after
    return casts


@pytest.mark.parametrize(("width", "expected"), [(8, 3), (256, 1)], ids=["small", "large"])
def test_a_weight_that_an_unrolled_network_uses_often_is_cast_a_few_times(width: int, expected: int) -> None:
    model = nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    for _ in range(2):  # a step forgets what was counted
        state = torch.ones(2, width)
        for _ in range(10):
            state = model(state)
        assert count_casts(state, model.weight) == expected
        with amp.scale_loss(state.float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
