"""Each rule of `OpCasts` casts the arguments that it has to, to the right dtype, and passes all others on as the same
objects. test_every_op compares results.

Guards: casting/wrappers, casting/replacement, casting/tensor_cast, config/op_rules.
"""

import traceback
from collections.abc import Callable
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
from amp_patch.errors import BannedOpError

PACKAGE = str(Path(amp_patch.__file__).parent)
CASTING = ("whitelist", "blacklist", "match_self")
RULES = (*CASTING, "promote", "sequence_promote", "banned")
HALF, LOW, FULL = FLOATS = (torch.float16, torch.bfloat16, torch.float32)
Op = Callable[..., Any]


def make_casts(low: torch.dtype = LOW, *, cache: WeightCache | None = None) -> OpCasts:
    switch = Switch()
    switch.turn_on()
    return OpCasts(switch, low, "cpu", cache)


@pytest.fixture
def casts() -> OpCasts:
    return make_casts()


def rand(*shape: int, dtype: torch.dtype = FULL, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Recorder:
    """An op that takes anything, by the name of one of torch's or as a function of a user's, and the calls of it."""

    def __init__(self, name: str = "recorded", module: str = "torch") -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def record(*args: Any, **kwargs: Any) -> str:
            self.calls.append((args, kwargs))
            return "result"

        record.__name__, record.__module__ = name, module
        self.op = record

    def seen(self, rule: Op, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a replacement; return its positional arguments, or its keyword arguments if there are no others."""
        assert rule(*args, **kwargs) == "result"
        seen_args, seen_kwargs = self.calls[-1]
        return seen_args or tuple(seen_kwargs.values())


ways = pytest.mark.parametrize("as_keyword", [False, True], ids=["positional", "keyword"])
kinds = pytest.mark.parametrize("module", ["torch", "mine"], ids=["of-torch", "of-a-user"])


# ---- whitelist and blacklist -----------------------------------------------------------------------------------------

LOW_ROWS = rand(3, 4, dtype=LOW)


@pytest.mark.parametrize("name", ["linear", "conv2d", "other"])
@kinds
@ways
def test_every_whitelisted_name_treats_its_arguments_alike(
    casts: OpCasts, name: str, module: str, as_keyword: bool
) -> None:
    recorder = Recorder(name, module)
    replacement = casts.wrap("whitelist", recorder.op)
    keywords = {"keyword": rand(2), "count": 3} if as_keyword else {}
    given = [rand(2), rand(2, dtype=LOW), rand(2).double(), torch.arange(2), torch.empty(2, device="meta")]
    for count in range(6):
        assert replacement(*given[:count], **keywords) == "result"
        args, kwargs = recorder.calls[-1]
        assert [value.dtype for value in args] == [LOW, LOW, torch.float64, torch.int64, FULL][:count]
        assert all(value is original for value, original in zip(args[1:], given[1:count], strict=True))
        assert {key: getattr(value, "dtype", value) for key, value in kwargs.items()} == (
            {"keyword": LOW, "count": 3} if as_keyword else {}
        )


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        (torch.sum, (), {"dtype": LOW}),
        (torch.sum, (), {"dtype": torch.float64}),
        (torch.softmax, (1, LOW), {}),
        (F.softmax, (1, 3, LOW), {}),
    ],
    ids=["sum-low", "sum-float64", "softmax-positional", "F.softmax-positional"],
)
def test_a_dtype_that_the_call_names_is_honoured_and_nothing_is_cast(
    casts: OpCasts, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    result, expected = casts.wrap("blacklist", op)(LOW_ROWS, *args, **kwargs), op(LOW_ROWS, *args, **kwargs)
    assert result.dtype is expected.dtype and torch.equal(result, expected)
    for module in ("torch", "mine"):
        recorder = Recorder(module=module)
        assert recorder.seen(casts.wrap("blacklist", recorder.op), LOW_ROWS, *args, **kwargs)[0] is LOW_ROWS
        assert recorder.calls == [((LOW_ROWS, *args), kwargs)]


@pytest.mark.parametrize("mode", [Mode.LOW, Mode.FLOAT32])
@pytest.mark.parametrize(("args", "kwargs"), [((-1,), {"dtype": FULL}), ((-1, FULL), {})], ids=["named", "positional"])
def test_a_dtype_that_the_call_names_is_honoured_in_a_region(
    casts: OpCasts, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    rows, replacement = rand(3, 4), casts.wrap("blacklist", torch.softmax)
    with casts.switch.region(mode):
        assert torch.equal(replacement(rows, *args, **kwargs), torch.softmax(rows, *args, **kwargs))


@pytest.mark.parametrize("rule", ["whitelist", "blacklist"])
@ways
def test_a_call_that_works_in_place_by_a_flag_runs_as_it_was_written(
    casts: OpCasts, rule: str, as_keyword: bool
) -> None:
    replacement = casts.wrap(rule, F.relu)
    for mode in (Mode.BY_LISTS, Mode.LOW, Mode.FLOAT32):
        x = rand(4, dtype=HALF)
        with casts.switch.region(mode):
            result = replacement(x, inplace=True) if as_keyword else replacement(x, True)
        assert result is x and torch.equal(x, rand(4, dtype=HALF).relu())
    x = rand(4, dtype=HALF)
    result = replacement(x, inplace=False) if as_keyword else replacement(x, False)
    assert result.dtype is (LOW if rule == "whitelist" else FULL)


@pytest.mark.parametrize(
    ("rule", "op", "args", "dtype"),
    [
        ("whitelist", torch.mm, (rand(2, 3), rand(3, 2, seed=1)), FULL),
        ("blacklist", torch.exp, (LOW_ROWS,), LOW),
        ("promote", torch.add, (LOW_ROWS, rand(3, 4, seed=1)), FULL),
        ("sequence_promote", torch.cat, ([LOW_ROWS, rand(3, 4, seed=1)],), FULL),
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


@pytest.mark.parametrize(("rule", "dtype"), [("whitelist", LOW), ("blacklist", FULL)], ids=str)
def test_out_none_is_no_out(casts: OpCasts, rule: str, dtype: torch.dtype) -> None:
    assert casts.wrap(rule, torch.mm)(rand(2, 3, dtype=HALF), rand(3, 2), out=None).dtype is dtype


# ---- what no rule touches --------------------------------------------------------------------------------------------


class Named(NamedTuple):
    value: Any


NEVER_CAST = {
    "float64": rand(2).double(),
    "complex64": rand(2).to(torch.complex64),
    "float8": rand(2).to(torch.float8_e4m3fn),
    "meta-float32": torch.empty(2, device="meta"),
    "none": None,
    "str": "ij,jk->ik",
    "int": 3,
}
UNTOUCHED = {
    **NEVER_CAST,
    "int64": torch.arange(2),
    "float": 2.5,
    "int-tuple": (1, 2),
    "list-without-tensors": [None, "text"],
    "empty-list": [],
    "size": torch.Size([2, 3]),
    "namedtuple": Named(3),
    "dict": {"a": rand(2)},
}


@kinds
@pytest.mark.parametrize("rule", RULES)
def test_an_argument_that_is_no_business_of_a_rule_arrives_as_itself(casts: OpCasts, rule: str, module: str) -> None:
    recorder = Recorder(module=module)
    replacement = casts.wrap(rule, recorder.op)
    assert recorder.seen(replacement) == ()
    for value in UNTOUCHED.values():
        assert all(item is value for item in recorder.seen(replacement, rand(2), value, value)[1:])
    for value in NEVER_CAST.values():
        assert recorder.seen(replacement, value)[0] is value
        assert recorder.seen(replacement, keyword=value)[0] is value
        recorder.seen(replacement, rand(2), keyword=value)
        assert recorder.calls[-1][1]["keyword"] is value


@pytest.mark.parametrize(
    "off",
    [lambda switch: switch.turn_off() or switch.region(Mode.BY_LISTS), lambda switch: switch.region(Mode.OFF)],
    ids=["turned-off", "in-a-region"],
)
@pytest.mark.parametrize("rule", RULES)
def test_while_casts_are_off_every_argument_arrives_as_itself(
    casts: OpCasts, rule: str, off: Callable[[Switch], Any]
) -> None:
    recorder, full, low = Recorder(), rand(2), rand(2, dtype=LOW)
    values = [low, full]
    with off(casts.switch):
        recorder.seen(casts.wrap(rule, recorder.op), low, full, values, keyword=values)
    args, kwargs = recorder.calls[0]
    assert (args[0] is low, args[1] is full, args[2] is values, kwargs["keyword"] is values) == (True,) * 4


@pytest.mark.parametrize(
    ("rule", "given", "dtype"), [("whitelist", FULL, LOW), ("blacklist", LOW, FULL), ("match_self", LOW, FULL)], ids=str
)
@kinds
@ways
def test_tensors_in_lists_and_tuples_are_cast_and_the_caller_s_lists_are_not(
    casts: OpCasts, rule: str, given: torch.dtype, dtype: torch.dtype, module: str, as_keyword: bool
) -> None:
    recorder = Recorder(module=module)
    x, count = rand(2, dtype=given), torch.arange(2)
    value = [x, (x, count), [[x]], None, "text", 2.5]
    replacement = casts.wrap(rule, recorder.op)
    replacement(rand(2), weights=value) if as_keyword else replacement(rand(2), value)
    seen = recorder.calls[0][1]["weights"] if as_keyword else recorder.calls[0][0][1]
    assert [type(item) for item in seen] == [Tensor, tuple, list, type(None), str, float]
    assert (seen[0].dtype, seen[1][0].dtype, seen[2][0][0].dtype) == (dtype, dtype, dtype)
    assert seen[1][1] is count
    assert value[0] is x and value[1][0] is x  # type: ignore[index]


# ---- promote ---------------------------------------------------------------------------------------------------------

WIDEST = [(LOW, FULL, FULL), (FULL, HALF, FULL), (HALF, LOW, FULL), (LOW, LOW, LOW), (HALF, HALF, HALF)]


def test_promoted_ops_and_sequences_run_in_the_widest_dtype(casts: OpCasts) -> None:
    recorder = Recorder()
    promoted, in_sequence = casts.wrap("promote", recorder.op), casts.wrap("sequence_promote", recorder.op)
    for first, second, widest in WIDEST:
        one, other = rand(4, dtype=first), rand(4, dtype=second, seed=1)
        calls = [
            recorder.seen(promoted, one, other),
            recorder.seen(promoted, input=one, tensor=other),
            recorder.seen(in_sequence, [one, other])[0],
            recorder.seen(in_sequence, tensors=[one, other])[0],
        ]
        for seen in calls:
            assert [value.dtype for value in seen] == [widest, widest]


@pytest.mark.parametrize("rule", ["promote", "sequence_promote"])
@pytest.mark.parametrize("other", [torch.float64, torch.complex64, torch.int64], ids=str)
def test_beside_a_dtype_that_is_never_cast_torch_s_own_promotion_stands(
    casts: OpCasts, rule: str, other: torch.dtype
) -> None:
    recorder, tensors = Recorder(), [rand(2, dtype=LOW), rand(2).to(other)]
    replacement = casts.wrap(rule, recorder.op)
    seen = recorder.seen(replacement, *tensors) if rule == "promote" else recorder.seen(replacement, tensors)[0]
    assert all(value is tensor for value, tensor in zip(seen, tensors, strict=True))


def test_other_arguments_do_not_keep_tensors_from_being_promoted(casts: OpCasts) -> None:
    recorder = Recorder()
    replacement = casts.wrap("promote", recorder.op)
    seen = recorder.seen(replacement, rand(2, dtype=LOW), torch.arange(2), 0.5, rand(2), other=rand(2, dtype=LOW))
    assert [value.dtype for value in (seen[0], seen[1], seen[3])] == [FULL, torch.int64, FULL] and seen[2] == 0.5
    assert recorder.calls[0][1]["other"].dtype is FULL
    in_sequence, tensors = casts.wrap("sequence_promote", recorder.op), (rand(2, dtype=LOW), torch.arange(2), rand(2))
    for (seen,) in (recorder.seen(in_sequence, tensors), recorder.seen(in_sequence, tensors=tensors)):
        assert [value.dtype for value in seen] == [FULL, torch.int64, FULL]


def test_a_first_argument_that_is_no_sequence_reaches_the_op(casts: OpCasts) -> None:
    recorder, values = Recorder(), iter([rand(2)])
    assert recorder.seen(casts.wrap("sequence_promote", recorder.op), values)[0] is values


# ---- in place --------------------------------------------------------------------------------------------------------


@ways
@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_the_other_arguments_of_an_op_in_place_are_cast_to_its_target_s_dtype(
    casts: OpCasts, target: torch.dtype, as_keyword: bool
) -> None:
    recorder = Recorder()
    x, others = rand(2, dtype=target), [rand(2, dtype=dtype) for dtype in FLOATS]
    replacement = casts.wrap("match_self", recorder.op)
    replacement(input=x, others=others) if as_keyword else replacement(x, others, *others)
    args, kwargs = recorder.calls[0]
    seen = [*kwargs["others"]] if as_keyword else [*args[1], *args[2:]]
    assert (kwargs["input"] if as_keyword else args[0]) is x
    assert [value.dtype for value in seen] == [target] * (3 if as_keyword else 6)


@pytest.mark.parametrize("target", [torch.float64, torch.int64], ids=str)
def test_beside_a_target_that_is_never_cast_the_others_stay(casts: OpCasts, target: torch.dtype) -> None:
    recorder, other = Recorder(), rand(2, dtype=LOW)
    assert recorder.seen(casts.wrap("match_self", recorder.op), torch.zeros(2, dtype=target), other)[1] is other


# ---- refusals: see also test_every_op --------------------------------------------------------------------------------


@ways
def test_refusals_name_the_way_out_and_leave_the_tensor(casts: OpCasts, as_keyword: bool) -> None:
    x = rand(2, dtype=LOW)
    in_place, banned = casts.wrap("banned", torch.exp_), casts.wrap("banned", F.binary_cross_entropy)
    with pytest.raises(BannedOpError, match=f"exp_ is banned on {LOW} tensors"):
        in_place(input=x) if as_keyword else in_place(x)
    assert torch.equal(x, rand(2, dtype=LOW))
    with pytest.raises(BannedOpError, match="binary_cross_entropy_with_logits"):
        banned(input=rand(2), target=x) if as_keyword else banned(rand(2), x)


# ---- wrong arguments and the frame budget ----------------------------------------------------------------------------

WRONG = {
    "whitelist": (F.linear, ("text", rand(2, 2))),
    "whitelist-einsum": (torch.einsum, ("i,i->", 3)),
    "blacklist": (torch.exp, ("text",)),
    "promote": (torch.dot, (rand(2), "text")),
    "sequence_promote": (torch.cat, (["text"],)),
    "match_self": (torch.Tensor.add_, (rand(2), "text")),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_raise_torch_s_own_error_through_one_frame_of_ours(casts: OpCasts, name: str) -> None:
    op, args = WRONG[name]
    with pytest.raises(Exception) as expected:
        op(*args)
    with pytest.raises(expected.type) as raised:
        casts.wrap(name.partition("-")[0], op)(*args)
    assert str(raised.value) == str(expected.value)
    frames = [frame for frame in traceback.extract_tb(raised.value.__traceback__) if frame.filename.startswith(PACKAGE)]
    assert len(frames) == 1


@pytest.mark.parametrize("is_float", [True, False], ids=["float32", "float64"])
@pytest.mark.parametrize("op", [F.linear, torch.mm, torch.matmul])
def test_a_cached_weight_that_is_an_input_too_is_cast_and_has_its_gradient(op: Op, is_float: bool) -> None:
    """Tied weights: the gradient comes by the plain cast and by the cached copy."""
    cache = WeightCache(LOW, "cpu")
    weight = torch.nn.Parameter(rand(4, 4).to(FULL if is_float else torch.float64))
    cache.own([weight])
    replacement = make_casts(cache=cache).wrap("whitelist", op)
    for _ in range(2):
        output = replacement(weight, weight)
        (gradient,) = torch.autograd.grad(output.float().square().sum(), weight)
        low = weight.to(LOW) if is_float else weight
        expected = op(low, low)
        assert torch.equal(output, expected)
        assert torch.equal(gradient, torch.autograd.grad(expected.float().square().sum(), weight)[0])


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped_mm")
def test_a_product_that_names_another_dtype_for_its_result_runs_as_it_was_written() -> None:
    matrices = torch.randn(2, 16, 16)
    expected = F.grouped_mm(matrices, matrices, out_dtype=torch.float32)
    model = torch.nn.Linear(2, 2)
    amp_patch.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O4", verbosity=0)
    assert torch.equal(F.grouped_mm(matrices, matrices, out_dtype=torch.float32), expected)
    assert F.grouped_mm(matrices, matrices).dtype is not torch.float32
