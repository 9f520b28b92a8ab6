"""Code that answers calls by itself (`__torch_function__`, function modes, tables of functions, graphs of torch.fx,
mocks) is given the public name, as in plain torch, and casts happen below it, as in torch.autocast.

Guards: casting/replacement, casting/op_patches.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.masked import masked_tensor
from torch.overrides import TorchFunctionMode

import amp_patch as amp

LOW = torch.bfloat16

# each by its public name, looked up when it is called, with what it is called with after a first tensor of shape (3, 4)
OPS: dict[str, tuple[Callable[[], Any], Callable[[Tensor], Any]]] = {
    "F.linear": (lambda: F.linear, lambda x: F.linear(x, torch.ones(2, 4))),
    "F.linear, by keyword": (lambda: F.linear, lambda x: F.linear(input=x, weight=torch.ones(2, 4))),
    "torch.matmul": (lambda: torch.matmul, lambda x: torch.matmul(x, torch.ones(4, 2))),
    "@": (lambda: Tensor.matmul, lambda x: x @ torch.ones(4, 2)),
    "F.conv1d": (lambda: F.conv1d, lambda x: F.conv1d(x[None], torch.ones(1, 3, 2))),
    "torch.einsum": (lambda: torch.einsum, lambda x: torch.einsum("ij,kj", [torch.ones(2, 4), x])),
    "torch.exp": (lambda: torch.exp, lambda x: torch.exp(x)),
    "F.layer_norm": (lambda: F.layer_norm, lambda x: F.layer_norm(x, (4,))),
    "F.mse_loss": (lambda: F.mse_loss, lambda x: F.mse_loss(x, torch.ones(3, 4))),
    "torch.cat": (lambda: torch.cat, lambda x: torch.cat([torch.ones(3, 4), x])),
    "torch.stack, by keyword": (lambda: torch.stack, lambda x: torch.stack(tensors=[x, x])),
    "F.gelu": (lambda: F.gelu, lambda x: F.gelu(x)),
}


def make_recorder() -> tuple[type[Tensor], list[Any]]:
    seen: list[Any] = []

    class Recorded(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    return Recorded, seen


class Listener(TorchFunctionMode):
    """Records what is called, and calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["native", "float32"])
def compute(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_subclass_is_given_the_public_name_and_the_call_is_cast(compute: str) -> None:
    plain = torch.linspace(-1, 1, 12).view(3, 4)
    kind, seen = make_recorder()
    with amp.session("O4", device="cpu", compute=compute):
        for get, call in OPS.values():
            seen.clear()
            expected = call(plain)
            result = call(plain.as_subclass(kind))
            assert any(one is get() for one in seen)
            assert result.dtype is expected.dtype
            assert type(result) is kind and torch.equal(result.as_subclass(Tensor), expected)
            with amp.disable_casts():
                seen.clear()
                assert call(plain.as_subclass(kind)).dtype is torch.float32
                assert any(one is get() for one in seen)


def test_a_mode_is_given_the_public_name_and_sees_no_cast(compute: str) -> None:
    plain = torch.linspace(-1, 1, 12).view(3, 4)
    with amp.session("O4", device="cpu", compute=compute):
        for get, call in OPS.values():
            expected = call(plain)
            with Listener() as mode:
                result = call(plain)
            assert torch.equal(result, expected) and result.dtype is expected.dtype
            assert any(one is get() for one in mode.seen) and Tensor.to not in mode.seen


def test_one_function_with_two_names_stays_one() -> None:
    assert torch.conv2d is F.conv2d and torch._C._nn.linear is F.linear
    with amp.session("O4", device="cpu"):
        assert torch.conv2d is F.conv2d and torch._C._nn.linear is F.linear
        assert amp.is_patched(torch, "conv2d") and amp.is_patched(torch._C._nn, "linear")


def test_a_table_made_before_and_one_made_under_the_patches_are_both_found() -> None:
    table: dict[Any, str] = {}
    handlers = {"made": table}

    class Handled(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            table[func] = "here"
            return NotImplemented

    x = torch.ones(2, 2).as_subclass(Handled)
    with amp.session("O4", device="cpu"):
        with pytest.raises(TypeError, match="no implementation found"):
            torch.exp(x)
        assert handlers["made"][torch.exp] == "here"


def test_an_operator_that_nobody_answers_is_left_to_the_other_operand() -> None:
    class Other:
        """Answers no function of torch, and `@` by its own method."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return NotImplemented

        def __rmatmul__(self, left: Tensor) -> str:
            return "mine"

    assert torch.ones(2, 2) @ Other() == "mine"
    with amp.session("O4", device="cpu"):
        assert torch.ones(2, 2) @ Other() == "mine"


def jagged(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.nested.nested_tensor(
        [torch.randn(length, *shape, generator=generator) for length in (3, 5)], layout=torch.jagged
    )


NESTED: list[Callable[[], Tensor]] = [
    lambda: F.linear(jagged(8), torch.ones(4, 8) / 8),
    lambda: jagged(8) @ (torch.ones(8, 4) / 8),
    lambda: F.gelu(jagged(8)),
    lambda: F.layer_norm(jagged(8), (8,)),
    lambda: torch.softmax(jagged(8), -1),
    lambda: jagged(8).sum(-1),
    lambda: torch.cat([jagged(8), jagged(8)], -1),
]


def test_nested_tensors_run_as_under_autocast() -> None:
    with torch.autocast("cpu", LOW):
        expected = [call() for call in NESTED]
    with amp.session("O4", device="cpu", lists="autocast-cpu", compute="native"):
        results = [call() for call in NESTED]
    for result, wanted in zip(results, expected, strict=True):
        assert type(result) is type(wanted) and result.dtype is wanted.dtype
        assert torch.equal(result.values(), wanted.values())


def test_nested_attention_runs_and_is_right(compute: str) -> None:
    heads = jagged(2, 8).transpose(1, 2)
    expected = F.scaled_dot_product_attention(heads, heads, heads)
    with amp.session("O4", device="cpu", compute=compute):
        result = F.scaled_dot_product_attention(heads, heads, heads)
    assert result.is_nested
    torch.testing.assert_close(result.values().float(), expected.values(), rtol=0.02, atol=0.02)


MASKED: list[Callable[[Any], Any]] = [
    lambda m: torch.sum(m, 1),
    lambda m: m.sum(),
    lambda m: torch.mean(m, 0),
    lambda m: torch.prod(m),
    lambda m: torch.exp(m),
    lambda m: m * m,
    lambda m: torch.softmax(m, -1),
    lambda m: torch.cat([m, m]),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_masked_tensors_keep_their_masks() -> None:
    masked = masked_tensor(torch.linspace(-1, 2, 9).view(3, 3), torch.eye(3) > 0)
    with torch.autocast("cpu", LOW):
        expected = [call(masked) for call in MASKED]
    with amp.session("O4", device="cpu", lists="autocast-cpu", compute="native"):
        results = [call(masked) for call in MASKED]
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result.get_mask(), wanted.get_mask()) and result.dtype is wanted.dtype
        assert torch.equal(result.get_data()[result.get_mask()], wanted.get_data()[wanted.get_mask()])


def test_a_graph_of_fx_calls_ops_by_their_home_module_and_they_are_cast() -> None:
    graph = torch.fx.symbolic_trace(lambda x, y: torch.einsum("ij,jk->ik", x, y))
    assert "torch.functional.einsum" in graph.code
    x, y = torch.ones(2, 4), torch.ones(4, 3, dtype=LOW)
    model = nn.Linear(4, 4)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O4", verbosity=0)
    assert graph(x, y).dtype is LOW
    amp.reset()
    assert graph(x, x.T).dtype is torch.float32


def test_a_mock_in_the_place_of_a_function_is_called_with_cast_arguments() -> None:
    with mock.patch("torch.nn.functional.linear", wraps=F.linear) as spy:
        model = nn.Linear(4, 3)
        amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O4", verbosity=0)
        assert model(torch.ones(2, 4)).dtype is LOW
        assert spy.call_count == 1 and spy.call_args.args[0].dtype is LOW
        amp.reset()
        assert F.linear is spy and model(torch.ones(2, 4)).dtype is torch.float32
