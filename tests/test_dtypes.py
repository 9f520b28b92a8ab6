"""Names of dtypes are read as documented, and `cast_tree` casts every tensor of a structure and nothing else: structure
and classes stay, the caller's objects stay, and a structure without a tensor to cast is returned as the same object.

Guards: dtypes, casting/tensor_cast.
"""

import collections
import dataclasses
import threading
import types
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from amp_patch.casting.tensor_cast import cast_tree
from amp_patch.dtypes import CASTABLE, dtype_name, is_castable, parse_dtype
from amp_patch.errors import PolicyError

NAMES = {
    torch.float16: ("float16", "half", "fp16"),
    torch.bfloat16: ("bfloat16", "bf16"),
    torch.float32: ("float32", "float", "fp32"),
}
OTHER_DTYPES = (torch.float64, torch.complex64, torch.bool, torch.uint8, torch.int64, torch.float8_e4m3fn)


def to_low(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if is_castable(tensor) else tensor


def ones() -> Tensor:
    return torch.ones(2)


# ---- names, and which tensors ----------------------------------------------------------------------------------------


def test_a_dtype_means_itself_and_a_name_means_its_dtype() -> None:
    for dtype, names in NAMES.items():
        assert dtype_name(dtype) in names and parse_dtype(dtype, "x") is dtype
        for name in names:
            assert parse_dtype(name, "x") is parse_dtype(f"torch.{name}", "x") is dtype


def test_anything_else_is_refused_with_the_argument_named() -> None:
    for value in [*OTHER_DTYPES, "float64", "torch.torch.half", "Half", "", None, 16, True, float]:
        with pytest.raises(PolicyError) as raised:
            parse_dtype(value, "cast_model_type")
        assert str(raised.value).startswith(f"cast_model_type={value!r} is not a dtype to train in (float16, bfloat16,")


def test_float16_bfloat16_and_float32_may_be_cast_and_other_dtypes_are_never() -> None:
    assert all(is_castable(torch.zeros(2, dtype=dtype)) for dtype in CASTABLE)
    assert not any(is_castable(torch.zeros(2).to(dtype)) for dtype in OTHER_DTYPES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 says that it will drop them
        quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    assert not is_castable(quantised)


# ---- trees: containers keep their class ------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Plain:
    tensor: Any
    label: str = "kept"


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    tensor: Any
    label: str = "kept"


@dataclasses.dataclass(frozen=True)
class FrozenBySlotsOfItsOwn:
    __slots__ = ("tensor",)
    tensor: Any


@dataclasses.dataclass
class Derived:
    """A field that `__init__` does not take, and one that is never set."""

    length: int
    tensor: Any = dataclasses.field(init=False)
    unset: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.tensor = torch.ones(self.length)


class Tagged(dict[str, Any]):
    """A dict with attributes and a constructor of its own, as model outputs often are."""

    def __init__(self, tag: str, **values: Any) -> None:
        super().__init__(**values)
        self.tag = tag


class Batch(MutableMapping[str, Any]):
    """A mapping over a dict that it holds, with another attribute beside it."""

    def __init__(self, values: dict[str, Any], tag: str) -> None:
        self.values_by_name = values
        self.tag = tag

    def __getitem__(self, key: str) -> Any:
        return self.values_by_name[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.values_by_name[key] = value

    def __delitem__(self, key: str) -> None:
        del self.values_by_name[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)


class Boxes(list[Any]):
    """Has a constructor that needs more than items, and takes them one by one."""

    def __init__(self, *items: Any, size: int) -> None:
        super().__init__(items)
        self.size = size


class Span(tuple[Any, ...]):
    """A tuple of two that are given one by one."""

    def __new__(cls, first: Any, second: Any) -> "Span":
        return super().__new__(cls, (first, second))


FIRST: Callable[[Any], Any] = lambda value: next(iter(value))  # noqa: E731
KEY: Callable[[Any], Any] = lambda value: value["a"]  # noqa: E731
FIELD: Callable[[Any], Any] = lambda value: value.tensor  # noqa: E731

TREES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "list": (lambda t: [t, 1, "s", None], FIRST),
    "tuple": (lambda t: (t, 1.5, b"s"), FIRST),
    "set": (lambda t: {t}, FIRST),
    "frozenset": (lambda t: frozenset({t}), FIRST),
    "list-other-constructor": (lambda t: Boxes(t, size=3), FIRST),
    "namedtuple": (lambda t: Pair(t, "kept"), FIRST),
    "dict": (lambda t: {"a": t, 2: "kept"}, KEY),
    "defaultdict": (lambda t: collections.defaultdict(list, a=t), KEY),
    "UserDict": (lambda t: collections.UserDict(a=t), KEY),
    "MappingProxyType": (lambda t: types.MappingProxyType({"a": t, "b": 1}), KEY),
    "dict-subclass": (lambda t: Tagged("kept", a=t, b=1), KEY),
    "MutableMapping": (lambda t: Batch({"a": t, "b": 1}, "kept"), KEY),
    "dataclass": (Plain, FIELD),
    "dataclass-frozen-slots": (FrozenSlotted, FIELD),
    "dataclass-frozen-own-slots": (FrozenBySlotsOfItsOwn, FIELD),
    "nested": (lambda t: {"a": [Pair(1, (Plain({"b": t}),))]}, lambda value: value["a"][0].second[0].tensor["b"]),
}


@pytest.mark.parametrize("name", TREES)
def test_a_container_keeps_its_class_and_only_its_copy_has_the_cast_tensor(name: str) -> None:
    make, pick = TREES[name]
    tensor = ones()
    value = make(tensor)
    result = cast_tree(value, to_low)
    assert type(result) is type(value)
    assert torch.equal(pick(result), tensor.to(torch.bfloat16)) and pick(result).dtype is torch.bfloat16
    assert result is not value and pick(value) is tensor
    unchanged = make(torch.arange(3))
    before = pick(unchanged)
    assert cast_tree(unchanged, to_low) is unchanged
    assert pick(unchanged) is before


def test_a_container_that_cannot_be_made_again_passes_through() -> None:
    value = Span(ones(), 4.0)
    before = list(value)
    assert cast_tree(value, to_low) is value
    assert all(new is old for new, old in zip(value, before, strict=True))


def test_all_that_is_not_a_cast_tensor_stays() -> None:
    count = torch.arange(2)
    result = cast_tree({"a": ones(), "n": count, 3: "three", None: [1, 2]}, to_low)
    assert list(result) == ["a", "n", 3, None]
    assert result["n"] is count and (result[3], result[None]) == ("three", [1, 2])
    assert cast_tree(collections.defaultdict(list, a=ones()), to_low).default_factory is list
    assert cast_tree(Tagged("kept", a=ones()), to_low).tag == "kept"
    boxes = cast_tree(Boxes(ones(), count, size=7), to_low)
    assert boxes.size == 7 and len(boxes) == 2 and boxes[1].dtype is torch.int64


@pytest.mark.parametrize("make_extra", [threading.Lock, lambda: torch.ones(1, requires_grad=True) * 2])
def test_the_attributes_of_a_mapping_are_not_copied(make_extra: Callable[[], Any]) -> None:
    value = Batch({"a": ones()}, "kept")
    extra = value.extra = make_extra()  # type: ignore[attr-defined]
    result = cast_tree(value, to_low)
    assert result.extra is extra and result.tag == "kept"
    assert (result["a"].dtype, value["a"].dtype) == (torch.bfloat16, torch.float32)


def test_a_dataclass_keeps_its_other_fields_and_one_that_init_does_not_take() -> None:
    value = Derived(3)
    result = cast_tree(value, to_low)
    assert (type(result), result.length, result.tensor.dtype) == (Derived, 3, torch.bfloat16)
    assert not hasattr(result, "unset")
    assert value.tensor.dtype is torch.float32


def test_torchs_own_containers_keep_their_class() -> None:
    result = cast_tree(torch.eye(2).max(dim=0), to_low)
    assert type(result) is torch.return_types.max
    assert (result.values.dtype, result.indices.dtype) == (torch.bfloat16, torch.int64)
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    result = cast_tree(packed, to_low)
    assert type(result) is PackedSequence and result.data.dtype is torch.bfloat16
    assert result.batch_sizes is packed.batch_sizes


def test_a_generator_becomes_a_lazy_generator_of_cast_values() -> None:
    drawn: list[int] = []

    def batches() -> Iterator[Any]:
        for index in range(2):
            drawn.append(index)
            yield {"x": ones(), "index": index}

    result = cast_tree(batches(), to_low)
    assert isinstance(result, types.GeneratorType)
    assert drawn == []
    first = next(result)
    assert (first["x"].dtype, first["index"], drawn) == (torch.bfloat16, 0, [0])
    assert [item["index"] for item in result] == [1]


def test_every_other_object_passes_through() -> None:
    holder = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1))])
    for value in [holder, torch.Size([2, 3]), "text", 2.5, None, range(3), object(), Plain, [], {}, [[], ({},)]]:
        assert cast_tree(value, to_low) is value


def test_gradients_flow_back() -> None:
    tensor = ones().requires_grad_()
    cast_tree({"x": (tensor,)}, to_low)["x"][0].sum().backward()
    assert tensor.grad is not None and torch.equal(tensor.grad, torch.ones(2))
