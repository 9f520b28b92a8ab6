"""What each rule of `OpCasts` does to one call: the result and the gradients are those of the same call with its
arguments cast by hand, and all that a rule has no business with reaches the op as the very object that was passed.
"""

import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import amp_patch
from amp_patch.casting.mode import Mode, Switch
from amp_patch.casting.weight_cache import WeightCache
from amp_patch.casting.wrappers import OpCasts
from amp_patch.errors import AmpError, BannedOpError

PACKAGE = str(Path(amp_patch.__file__).parent)
RULES = ("whitelist", "blacklist", "promote", "sequence_promote", "match_self", "inplace_error", "banned")
CASTING = ("whitelist", "blacklist", "match_self", "inplace_error")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
Op = Callable[..., Any]


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_casts(low: torch.dtype = torch.bfloat16, *, cache: WeightCache | None = None) -> OpCasts:
    switch = Switch()
    switch.turn_on()
    return OpCasts(switch, low, "cpu", cache)


@pytest.fixture
def casts() -> OpCasts:
    return make_casts()


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_hand(value: Any, dtype: torch.dtype) -> Any:
    """The reference: one argument as somebody who writes the casts out would pass it."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in FLOATS else value
    return [by_hand(item, dtype) for item in value] if type(value) is list else value


def recorder() -> tuple[Op, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """An op that takes anything, and the calls it has seen."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "result"

    return record, calls


@dataclass(frozen=True)
class Case:
    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def leaf(value: Any) -> Any:
    """A copy of an argument that takes gradients."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.is_floating_point())
    return [leaf(item) for item in value] if type(value) is list else value


def leaves_of(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            yield value
        elif type(value) is list:
            yield from leaves_of(value)


def outputs_and_gradients(op: Op, case: Case, cast: Callable[[Any], Any]) -> tuple[Tensor, list[Tensor | None]]:
    args, kwargs = tuple(leaf(value) for value in case.args), {name: leaf(value) for name, value in case.kwargs.items()}
    output = op(*(cast(value) for value in args), **{name: cast(value) for name, value in kwargs.items()})
    weights = rand(*output.shape, dtype=output.dtype, seed=9) if output.dim() else torch.ones((), dtype=output.dtype)
    (output * weights).sum().backward()
    return output, [value.grad for value in leaves_of([*args, *kwargs.values()])]


def assert_same_as_by_hand(replacement: Op, case: Case, dtype: torch.dtype) -> None:
    output, gradients = outputs_and_gradients(replacement, case, lambda value: value)
    expected, expected_gradients = outputs_and_gradients(case.op, case, functools.partial(by_hand, dtype=dtype))
    assert output.dtype is dtype
    assert torch.equal(output, expected)
    arguments = list(leaves_of([leaf(value) for value in (*case.args, *case.kwargs.values())]))
    assert [gradient.dtype for gradient in gradients if gradient is not None] == [
        argument.dtype for argument in arguments
    ]
    assert all(torch.equal(gradient, wanted) for gradient, wanted in zip(gradients, expected_gradients, strict=True))


ways = pytest.mark.parametrize("as_keyword", [False, True], ids=["positional", "keyword"])


# ---- whitelist -------------------------------------------------------------------------------------------------------

WHITELIST = [
    Case(F.linear, (rand(2, 4), rand(3, 4, seed=1), rand(3, seed=2))),
    Case(F.linear, (), {"input": rand(2, 4), "weight": rand(3, 4, seed=1), "bias": rand(3, seed=2)}),
    Case(F.linear, (rand(2, 4), rand(3, 4, seed=1), None)),
    Case(torch.matmul, (rand(2, 3), rand(3, 2, seed=1))),
    Case(torch.Tensor.matmul, (rand(2, 3), rand(3, 2, seed=1))),
    Case(torch.Tensor.__matmul__, (rand(2, 3), rand(3, 2, seed=1))),
    Case(torch.addmm, (rand(2, 2), rand(2, 3, seed=1), rand(3, 2, seed=2)), {"beta": 0.5, "alpha": 2}),
    Case(F.conv2d, (rand(1, 2, 4, 4), rand(2, 2, 3, 3, seed=1), rand(2, seed=2), (1, 1), (1, 1))),
    Case(torch.linalg.multi_dot, ([rand(2, 3), rand(3, 2, seed=1), rand(2, 2, seed=2)],)),
    Case(torch.einsum, ("ij,kj->ik", [rand(2, 3), rand(4, 3, seed=1)])),
    Case(torch.matmul, (rand(2, 3, dtype=torch.bfloat16), rand(3, 2, dtype=torch.float16, seed=1))),
    Case(torch.mm, (rand(2, 3, dtype=torch.bfloat16), rand(3, 2, seed=1))),
]


@pytest.mark.parametrize("is_general", [False, True], ids=["chosen", "general"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_a_whitelisted_op_runs_in_the_low_dtype_as_if_cast_by_hand(low: torch.dtype, is_general: bool) -> None:
    casts = make_casts(low)
    for case in WHITELIST:
        assert_same_as_by_hand(
            casts.wrap("whitelist", case.op) if is_general else casts.wrap("whitelist", case.op), case, low
        )


def named(op: Op, name: str) -> Op:
    op.__name__ = name
    return op


@pytest.mark.parametrize("name", ["linear", "conv2d", "matmul", "mm", "__matmul__", "other"])
@ways
def test_every_whitelisted_name_treats_its_arguments_alike(casts: OpCasts, name: str, as_keyword: bool) -> None:
    op, calls = recorder()
    replacement = casts.wrap("whitelist", named(op, name))
    keywords = {"keyword": rand(2), "count": 3} if as_keyword else {}
    given = [rand(2), rand(2, dtype=torch.bfloat16), rand(2).double(), torch.arange(2)]
    expected = [torch.bfloat16, torch.bfloat16, torch.float64, torch.int64]
    for count in range(5):
        assert replacement(*given[:count], **keywords) == "result"
        args, kwargs = calls[-1]
        assert [value.dtype for value in args] == expected[:count]
        assert all(value is original for value, original in zip(args[1:], given[1:count], strict=True))
        assert {key: getattr(value, "dtype", value) for key, value in kwargs.items()} == (
            {"keyword": torch.bfloat16, "count": 3} if as_keyword else {}
        )


def test_an_embedding_s_indices_stay_integers(casts: OpCasts) -> None:
    case = Case(F.embedding, (torch.tensor([0, 2]), rand(3, 4)))
    assert_same_as_by_hand(casts.wrap("whitelist", F.embedding), case, torch.bfloat16)


def test_whitelisted_inputs_in_the_low_dtype_are_not_copied(casts: OpCasts) -> None:
    op, calls = recorder()
    x = rand(2, dtype=torch.bfloat16)
    casts.wrap("whitelist", op)(x, y=x)
    assert calls[0][0][0] is x
    assert calls[0][1]["y"] is x


# ---- blacklist -------------------------------------------------------------------------------------------------------

LOW_ROWS = rand(3, 4, dtype=torch.bfloat16)
BLACKLIST = [
    Case(torch.exp, (LOW_ROWS,)),
    Case(torch.Tensor.exp, (LOW_ROWS,)),
    Case(torch.softmax, (LOW_ROWS, 1)),
    Case(F.softmax, (), {"input": LOW_ROWS, "dim": -1}),
    Case(F.softmax, (LOW_ROWS,), {"dim": -1, "dtype": None}),
    Case(F.layer_norm, (LOW_ROWS, (4,), rand(4, dtype=torch.bfloat16, seed=1), rand(4, seed=2))),
    Case(F.cross_entropy, (LOW_ROWS, torch.tensor([0, 3, 1]))),
    Case(F.mse_loss, (LOW_ROWS, rand(3, 4, seed=1))),
    Case(torch.sum, (LOW_ROWS,)),
    Case(torch.cumsum, (LOW_ROWS, 0)),
    Case(torch.pow, (LOW_ROWS.abs(), 1.5)),
    Case(torch.exp, (rand(3, dtype=torch.float16),)),
    Case(torch.exp, (rand(3),)),
    Case(torch.cat, ([LOW_ROWS, LOW_ROWS.float()],)),
]


def test_a_blacklisted_op_runs_in_float32_as_if_cast_by_hand(casts: OpCasts) -> None:
    for case in BLACKLIST:
        assert_same_as_by_hand(casts.wrap("blacklist", case.op), case, torch.float32)


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        (torch.sum, (), {"dtype": torch.bfloat16}),
        (torch.sum, (), {"dtype": torch.float64}),
        (torch.softmax, (1, torch.bfloat16), {}),
        (F.softmax, (1, 3, torch.bfloat16), {}),
    ],
    ids=["sum-low", "sum-float64", "softmax-positional", "F.softmax-positional"],
)
def test_a_dtype_that_the_call_names_is_honoured_and_nothing_is_cast(
    casts: OpCasts, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    result, expected = casts.wrap("blacklist", op)(LOW_ROWS, *args, **kwargs), op(LOW_ROWS, *args, **kwargs)
    assert result.dtype is expected.dtype and torch.equal(result, expected)
    record, calls = recorder()
    casts.wrap("blacklist", record)(LOW_ROWS, *args, **kwargs)
    assert calls == [((LOW_ROWS, *args), kwargs)] and calls[0][0][0] is LOW_ROWS


# ---- out= ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "op", "args", "dtype"),
    [
        ("whitelist", torch.mm, (rand(2, 3), rand(3, 2, seed=1)), torch.float32),
        ("blacklist", torch.exp, (LOW_ROWS,), torch.bfloat16),
        ("promote", torch.add, (LOW_ROWS, rand(3, 4, seed=1)), torch.float32),
        ("sequence_promote", torch.cat, ([LOW_ROWS, rand(3, 4, seed=1)],), torch.float32),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_call_with_out_runs_as_it_was_written(
    casts: OpCasts, rule: str, op: Op, args: tuple[Any, ...], dtype: torch.dtype
) -> None:
    out, expected = torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype)
    op(*args, out=expected)
    assert casts.wrap(rule, op)(*args, out=out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("rule", "low"), [("whitelist", torch.bfloat16), ("blacklist", torch.float32)], ids=str)
def test_out_none_is_no_out(casts: OpCasts, rule: str, low: torch.dtype) -> None:
    assert casts.wrap(rule, torch.mm)(rand(2, 3, dtype=torch.float16), rand(3, 2), out=None).dtype is low


# ---- what no rule touches --------------------------------------------------------------------------------------------


class Named(NamedTuple):
    value: Any


UNTOUCHED = {
    "float64": rand(2).double(),
    "complex64": rand(2).to(torch.complex64),
    "complex128": rand(2).to(torch.complex128),
    "int64": torch.arange(2),
    "bool": torch.tensor([True]),
    "uint8": torch.ones(2, dtype=torch.uint8),
    "float8": rand(2).to(torch.float8_e4m3fn),
    "meta-float32": torch.empty(2, device="meta"),
    "meta-bfloat16": torch.empty(2, device="meta", dtype=torch.bfloat16),
    "int": 3,
    "float": 2.5,
    "str": "ij,jk->ik",
    "none": None,
    "int-tuple": (1, 2),
    "int-list": [1, 2],
    "empty-tuple": (),
    "empty-list": [],
    "size": torch.Size([2, 3]),
    "namedtuple": Named(3),
    "dict": {"a": rand(2)},
    "generator-object": torch.Generator(),
}


@pytest.mark.parametrize("rule", [*CASTING, "promote", "sequence_promote"])
def test_an_argument_that_is_no_business_of_a_rule_arrives_as_itself(casts: OpCasts, rule: str) -> None:
    op, calls = recorder()
    replacement = casts.wrap(rule, op)
    first = rand(2)
    for value in UNTOUCHED.values():
        assert replacement(first, value, value) == "result"
        seen = calls[-1][0][1:]
        if rule == "match_self" and type(value) in (list, tuple):  # it goes through every sequence, and makes a new one
            assert seen == (value, value)
            assert [type(item) for item in seen] == [type(value)] * 2
        else:
            assert all(item is value for item in seen)


@pytest.mark.parametrize("rule", RULES)
def test_it_arrives_as_itself_as_a_first_and_as_a_keyword_argument_too(casts: OpCasts, rule: str) -> None:
    op, calls = recorder()
    replacement = casts.wrap(rule, op)
    for name in ("float64", "complex64", "int64", "float8", "meta-float32", "meta-bfloat16", "none", "str", "int"):
        value = UNTOUCHED[name]
        replacement(value)
        assert calls[-1][0][0] is value
        replacement(rand(2), keyword=value)
        assert calls[-1][1]["keyword"] is value


@pytest.mark.parametrize("rule", RULES)
def test_a_call_without_arguments_reaches_the_op(casts: OpCasts, rule: str) -> None:
    op, calls = recorder()
    assert casts.wrap(rule, op)() == "result"
    assert calls == [((), {})]


# ---- sequences -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "given_dtype", "dtype"),
    [
        ("whitelist", torch.float32, torch.bfloat16),
        ("blacklist", torch.bfloat16, torch.float32),
        ("match_self", torch.bfloat16, torch.float32),
    ],
    ids=["whitelist", "blacklist", "match_self"],
)
@ways
def test_tensors_in_lists_and_tuples_are_cast_and_the_caller_s_lists_are_not(
    casts: OpCasts, rule: str, given_dtype: torch.dtype, dtype: torch.dtype, as_keyword: bool
) -> None:
    op, calls = recorder()
    x, count = rand(2, dtype=given_dtype), torch.arange(2)
    value = [x, (x, count), [[x]], None, "text", 2.5]
    casts.wrap(rule, op)(rand(2), **{"weights": value}) if as_keyword else casts.wrap(rule, op)(rand(2), value)
    seen = calls[0][1]["weights"] if as_keyword else calls[0][0][1]
    assert [type(item) for item in seen] == [Tensor, tuple, list, type(None), str, float]
    assert (seen[0].dtype, seen[1][0].dtype, seen[2][0][0].dtype) == (dtype, dtype, dtype)
    assert seen[1][1] is count
    assert value[0] is x
    assert value[1][0] is x  # type: ignore[index]


# ---- promote ---------------------------------------------------------------------------------------------------------

WIDEST = [
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float32, torch.float16, torch.float32),
    (torch.float16, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16, torch.float16),
    (torch.float32, torch.float32, torch.float32),
]


@pytest.mark.parametrize(("first", "second", "widest"), WIDEST, ids=dtype_id)
def test_promoted_ops_and_sequences_run_in_the_widest_dtype(
    casts: OpCasts, first: torch.dtype, second: torch.dtype, widest: torch.dtype
) -> None:
    one, other = rand(4, dtype=first), rand(4, dtype=second, seed=1)
    for case in (Case(torch.dot, (one, other)), Case(torch.dot, (one,), {"tensor": other})):
        assert_same_as_by_hand(casts.wrap("promote", torch.dot), case, widest)
    for case in (Case(torch.stack, ([one, other],), {"dim": 1}), Case(torch.stack, (), {"tensors": [one, other]})):
        assert_same_as_by_hand(casts.wrap("sequence_promote", torch.stack), case, widest)


@pytest.mark.parametrize("rule", ["promote", "sequence_promote"])
@pytest.mark.parametrize("other", [torch.float64, torch.complex64, torch.int64], ids=dtype_id)
def test_beside_a_dtype_that_is_never_cast_torch_s_own_promotion_stands(
    casts: OpCasts, rule: str, other: torch.dtype
) -> None:
    op, calls = recorder()
    tensors = [rand(2, dtype=torch.bfloat16), rand(2).to(other)]
    casts.wrap(rule, op)(*tensors) if rule == "promote" else casts.wrap(rule, op)(tensors)
    seen = calls[0][0] if rule == "promote" else calls[0][0][0]
    assert all(value is tensor for value, tensor in zip(seen, tensors, strict=True))


def test_integers_do_not_keep_the_others_from_being_promoted(casts: OpCasts) -> None:
    op, calls = recorder()
    casts.wrap("promote", op)(rand(2, dtype=torch.bfloat16), torch.arange(2), 0.5, rand(2))
    seen = calls[0][0]
    assert [value.dtype for value in (seen[0], seen[1], seen[3])] == [torch.float32, torch.int64, torch.float32]
    assert seen[2] == 0.5


def test_keyword_arguments_are_promoted_also_where_the_positional_ones_differ(casts: OpCasts) -> None:
    op, calls = recorder()
    casts.wrap("promote", op)(rand(2, dtype=torch.bfloat16), rand(2), other=rand(2, dtype=torch.bfloat16))
    assert calls[0][1]["other"].dtype is torch.float32


def test_a_first_argument_that_is_no_sequence_reaches_the_op(casts: OpCasts) -> None:
    op, calls = recorder()
    values = iter([rand(2)])
    casts.wrap("sequence_promote", op)(values)
    assert calls[0][0][0] is values


# ---- match_self ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "other"),
    [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
    ids=dtype_id,
)
def test_an_op_in_place_runs_in_its_target_s_dtype(casts: OpCasts, target: torch.dtype, other: torch.dtype) -> None:
    x, y, z = rand(3, dtype=target), rand(3, dtype=other, seed=1), rand(3, dtype=other, seed=2)
    expected = x.clone().addcmul_(y.to(target), z.to(target), value=0.5)
    pointer = x.data_ptr()
    result = casts.wrap("match_self", torch.Tensor.addcmul_)(x, y, tensor2=z, value=0.5)
    assert result is x
    assert (x.data_ptr(), x.dtype) == (pointer, target)
    assert torch.equal(x, expected)


@ways
@pytest.mark.parametrize("target", FLOATS, ids=dtype_id)
def test_the_other_arguments_of_an_op_in_place_are_cast_to_its_target_s_dtype(
    casts: OpCasts, target: torch.dtype, as_keyword: bool
) -> None:
    op, calls = recorder()
    x, others = rand(2, dtype=target), [rand(2, dtype=dtype) for dtype in FLOATS]
    replacement = casts.wrap("match_self", op)
    replacement(input=x, others=others) if as_keyword else replacement(x, others, *others)
    args, kwargs = calls[0]
    seen = [*kwargs["others"]] if as_keyword else [*args[1], *args[2:]]
    assert (kwargs["input"] if as_keyword else args[0]) is x
    assert [value.dtype for value in seen] == [target] * (3 if as_keyword else 6)


def test_gradients_flow_through_an_op_in_place_to_arguments_in_their_own_dtype(casts: OpCasts) -> None:
    x, y = rand(3, dtype=torch.bfloat16), rand(3).requires_grad_()
    casts.wrap("match_self", torch.Tensor.mul_)(x * 1, y).sum().backward()
    expected = rand(3).requires_grad_()
    (x * 1).mul_(expected.to(torch.bfloat16)).sum().backward()
    assert y.grad is not None and expected.grad is not None
    assert y.grad.dtype is torch.float32
    assert torch.equal(y.grad, expected.grad)


@pytest.mark.parametrize("target", [torch.float64, torch.int64], ids=dtype_id)
def test_beside_a_target_that_is_never_cast_the_others_stay(casts: OpCasts, target: torch.dtype) -> None:
    op, calls = recorder()
    other = rand(2, dtype=torch.bfloat16)
    casts.wrap("match_self", op)(torch.zeros(2, dtype=target), other)
    assert calls[0][0][1] is other


# ---- inplace_error and banned ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
def test_inplace_error_refuses_a_16_bit_target_and_names_the_way_out(casts: OpCasts, dtype: torch.dtype) -> None:
    x = rand(2, dtype=dtype)
    before = x.clone()
    with pytest.raises(BannedOpError, match=rf"exp_ .* {dtype} tensor\. Call exp instead") as raised:
        casts.wrap("inplace_error", torch.Tensor.exp_)(x)
    assert isinstance(raised.value, (AmpError, NotImplementedError))
    assert torch.equal(x, before)


def test_inplace_error_lets_a_float32_target_through_and_casts_the_others_to_float32(casts: OpCasts) -> None:
    x, power = rand(3).abs(), rand(3, dtype=torch.bfloat16)
    expected = x.clone().pow_(power.float())
    assert casts.wrap("inplace_error", torch.Tensor.pow_)(x, power) is x
    assert torch.equal(x, expected)


def test_inplace_error_refuses_a_16_bit_target_passed_by_keyword(casts: OpCasts) -> None:
    with pytest.raises(BannedOpError):
        casts.wrap("inplace_error", torch.exp_)(input=rand(2, dtype=torch.bfloat16))


@ways
@pytest.mark.parametrize(("dtype", "position"), [(torch.float16, 0), (torch.bfloat16, 1)], ids=["input", "target"])
def test_a_banned_op_refuses_any_16_bit_tensor(
    casts: OpCasts, dtype: torch.dtype, position: int, as_keyword: bool
) -> None:
    arguments = [torch.full((2,), 0.5), torch.ones(2)]
    arguments[position] = arguments[position].to(dtype)
    banned = casts.wrap("banned", F.binary_cross_entropy)
    with pytest.raises(BannedOpError, match="binary_cross_entropy_with_logits"):
        banned(input=arguments[0], target=arguments[1]) if as_keyword else banned(*arguments)


@pytest.mark.parametrize("rule", ["banned", "inplace_error"])
def test_a_16_bit_tensor_on_another_device_type_is_not_refused(casts: OpCasts, rule: str) -> None:
    op, calls = recorder()
    value = torch.empty(2, dtype=torch.bfloat16, device="meta")
    casts.wrap(rule, op)(value)
    assert calls[0][0][0] is value


# ---- the switch ------------------------------------------------------------------------------------------------------


def turn_off(casts: OpCasts) -> Any:
    casts.switch.turn_off()
    return casts.switch.region(Mode.BY_LISTS)


@pytest.mark.parametrize(
    "off", [turn_off, lambda casts: casts.switch.region(Mode.OFF)], ids=["turned-off", "in-a-region"]
)
@pytest.mark.parametrize("rule", RULES)
def test_while_casts_are_off_every_argument_arrives_as_itself(
    casts: OpCasts, rule: str, off: Callable[[OpCasts], Any]
) -> None:
    op, calls = recorder()
    full, low = rand(2), rand(2, dtype=torch.bfloat16)
    values = [low, full]
    with off(casts):
        casts.wrap(rule, op)(low, full, values, keyword=values)
    args, kwargs = calls[0]
    assert (args[0] is low, args[1] is full, args[2] is values, kwargs["keyword"] is values) == (True,) * 4


# ---- wrong arguments and the frame budget ----------------------------------------------------------------------------

WRONG = {
    "whitelist": (F.linear, ("text", rand(2, 2))),
    "whitelist-three": (F.linear, ("text", rand(2, 2), None)),
    "whitelist-einsum": (torch.einsum, ("i,i->", 3)),
    "whitelist-shapes": (torch.mm, (rand(2, 3), rand(2, 3))),
    "blacklist": (torch.exp, ("text",)),
    "blacklist-missing": (torch.softmax, (LOW_ROWS,)),
    "promote": (torch.dot, (rand(2), "text")),
    "sequence_promote": (torch.cat, (["text"],)),
    "match_self": (torch.Tensor.add_, (rand(2), "text")),
    "inplace_error": (torch.Tensor.pow_, (rand(2), "text")),
    "banned": (F.binary_cross_entropy_with_logits, (rand(2), "text")),
}
# A look before the blacklist's own function: whether it may run in place, whether its only tensor is float32 as it is.
INNER_FRAMES = {"inplace_error": 2, "blacklist": 2, "blacklist-missing": 2}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_raise_torch_s_own_error_through_one_frame_of_ours(casts: OpCasts, name: str) -> None:
    op, args = WRONG[name]
    rule = name.partition("-")[0]
    in_low = {"whitelist-shapes": torch.bfloat16, "blacklist-missing": torch.float32}.get(name, torch.float32)
    with pytest.raises(Exception) as expected:
        op(*(by_hand(value, in_low) for value in args))
    with pytest.raises(expected.type) as raised:
        casts.wrap(rule, op)(*args)
    assert str(raised.value) == str(expected.value)
    frames = [frame for frame in traceback.extract_tb(raised.value.__traceback__) if frame.filename.startswith(PACKAGE)]
    assert len(frames) == INNER_FRAMES.get(name, 1)


def count_frames(function: Callable[[], Any]) -> int:
    """How many Python frames of the package one call opens."""
    count = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_product_with_a_cached_weight_takes_one_frame_for_each_operand() -> None:
    cache = WeightCache(torch.bfloat16, "cpu")
    weight = torch.nn.Parameter(rand(4, 4))
    cache.own([weight])
    mm = make_casts(cache=cache).wrap("whitelist", torch.mm)
    for operands in ((rand(4, 4), weight), (weight, weight)):
        mm(*operands)
        assert count_frames(lambda operands=operands: mm(*operands)) == 3  # type: ignore[misc]


@pytest.mark.parametrize("is_float", [True, False], ids=["float32", "float64"])
@pytest.mark.parametrize("op", [F.linear, torch.mm, torch.matmul])
def test_a_cached_weight_that_is_an_input_too_is_cast_and_has_its_gradient(op: Op, is_float: bool) -> None:
    """Tied weights: the gradient comes by the plain cast and by the cached copy."""
    cache = WeightCache(torch.bfloat16, "cpu")
    weight = torch.nn.Parameter(rand(4, 4).to(torch.float32 if is_float else torch.float64))
    cache.own([weight])
    replacement = make_casts(cache=cache).wrap("whitelist", op)
    for _ in range(2):
        output = replacement(weight, weight)
        (gradient,) = torch.autograd.grad(output.float().square().sum(), weight)
        low = weight.to(torch.bfloat16) if is_float else weight
        expected = op(low, low)
        assert torch.equal(output, expected)
        assert torch.equal(gradient, torch.autograd.grad(expected.float().square().sum(), weight)[0])


@pytest.mark.parametrize(
    ("rule", "op", "args"),
    [
        ("whitelist", torch.mm, (rand(2, 2, dtype=torch.bfloat16), rand(2, 2, dtype=torch.bfloat16))),
        ("whitelist", F.scaled_dot_product_attention, (rand(1, 2, 2, dtype=torch.bfloat16),) * 3),
        ("blacklist", torch.exp, (rand(2),)),
        ("blacklist", torch.logsumexp, (rand(2), 0)),
        ("blacklist", torch.layer_norm, (rand(2, 4), (4,), rand(4), None)),
        ("promote", torch.dot, (rand(2), rand(2))),
        ("banned", torch.exp, (rand(2),)),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_call_that_needs_no_cast_takes_one_frame(casts: OpCasts, rule: str, op: Op, args: tuple[Any, ...]) -> None:
    replacement = casts.wrap(rule, op)
    allowed = 1 + (len(args) if rule == "banned" else 0)  # banned looks at every argument through a helper
    assert count_frames(lambda: replacement(*args)) <= allowed


def test_while_casts_are_off_a_call_takes_one_frame(casts: OpCasts) -> None:
    mm = casts.wrap("whitelist", torch.mm)
    casts.switch.turn_off()
    assert count_frames(lambda: mm(rand(2, 2), rand(2, 2))) == 1


def test_the_frame_counter_can_fail(casts: OpCasts) -> None:
    mm = casts.wrap("whitelist", torch.mm)
    assert count_frames(lambda: mm(rand(2, 2), rand(2, 2))) == 3  # the wrapper, and the cast of each tensor


# ---- functions of users that have the name of one of torch's ---------------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum() / weight.square().sum()


def layer_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return residual


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return mask


def linear(x: Tensor, weight: Tensor, bias: Tensor, extra: Tensor) -> Tensor:
    return extra


@pytest.mark.parametrize(
    ("rule", "op", "dtypes", "expected"),
    [
        ("blacklist", norm, "fl", torch.float32),
        ("blacklist", layer_norm, "f(ffl", torch.float32),
        ("whitelist", scaled_dot_product_attention, "lllf", torch.bfloat16),
        ("whitelist", linear, "lllf", torch.bfloat16),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_name_of_torchs_says_nothing_of_a_users_function(
    casts: OpCasts, rule: str, op: Op, dtypes: str, expected: torch.dtype
) -> None:
    values = {"f": rand(4), "l": rand(4, dtype=torch.bfloat16), "(": (4,)}
    assert casts.wrap(rule, op)(*(values[kind] for kind in dtypes)).dtype is expected
    if op is norm:
        assert torch.equal(casts.wrap(rule, op)(values["f"], values["l"]), norm(values["f"], values["l"].float()))
