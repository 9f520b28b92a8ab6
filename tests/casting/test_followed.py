"""The rule `match`: all tensors of a call are cast to the dtype of the argument that the entry names, wherever the call
passes it, and gradients come back in the dtypes that were passed. An argument that cannot be followed is an error with
its place.

Guards: casting/followed, config/op_arguments.
"""

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_patch as amp
from amp_patch import insight, native
from amp_patch.casting.mode import Switch
from amp_patch.casting.wrappers import OpCasts
from amp_patch.errors import ArgumentTypeError, OpListError

HALF, LOW, FULL = torch.float16, torch.bfloat16, torch.float32


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Any = None, *, keys: Any = None) -> Tensor:
    """A kernel like those of flash-attn: it refuses tensors of several dtypes."""
    assert q.dtype is k.dtype is v.dtype, (q.dtype, k.dtype, v.dtype)
    return q * k * v


def take_anything(*tensors: Tensor, **others: Any) -> None:
    pass


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    module = types.ModuleType("followed_kernels")
    for function in (attend, take_anything):
        copy = types.FunctionType(function.__code__, globals(), function.__name__, function.__defaults__)
        copy.__kwdefaults__, copy.__module__ = function.__kwdefaults__, module.__name__
        setattr(module, function.__name__, copy)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module
    amp.reset()


def write(folder: Path, rules: str) -> str:
    path = folder / "matched.yaml"
    path.write_text(f"extends: bfloat16\n{rules}\n")
    return str(path)


def ones(dtype: torch.dtype) -> Tensor:
    return torch.ones(2, dtype=dtype, requires_grad=True)


PASSED: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "positional": lambda op, q, k, v: op(q, k, v),
    "keyword": lambda op, q, k, v: op(v=v, k=k, q=q),
    "mixed": lambda op, q, k, v: op(q, k=k, v=v),
}


@pytest.mark.parametrize("call", PASSED.values(), ids=list(PASSED))
@pytest.mark.parametrize("followed", [HALF, LOW, FULL], ids=str)
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_all_tensors_take_the_dtype_of_one_argument(
    kernels: types.ModuleType, tmp_path: Path, level: str, followed: torch.dtype, call: Callable[..., Tensor]
) -> None:
    q, k, v = ones(FULL), ones(LOW), ones(followed)
    lists = write(tmp_path, "match: [{op: followed_kernels.attend, like: v}]")
    with amp.session(level, device="cpu", lists=lists):
        result = call(kernels.attend, q, k, v)
    assert result.dtype is followed
    result.sum().backward()
    assert [tensor.grad.dtype for tensor in (q, k, v) if tensor.grad is not None] == [FULL, LOW, followed]
    assert kernels.attend.__name__ == "attend" and not hasattr(kernels.attend, "__wrapped__")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(4, 12), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(self.norm(q), self.norm(k), v)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_normed_queries_follow_the_values(tmp_path: Path, is_compiled: bool) -> None:
    """Bitwise as if the model cast them, with gradients in the dtype of each parameter."""
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(1, 1, 3, 4)
    lists = write(tmp_path, "match: [{op: scaled_dot_product_attention, like: value}]")
    amp.initialize(model, opt_level="O4", lists=lists, verbosity=0)
    run = torch.compile(model, backend="aot_eager") if is_compiled else model
    result = run(x)
    result.float().sum().backward()
    with amp.disable_casts():
        project, norm = model.project.to(LOW), model.norm.to(FULL)
        q, k, v = project(x.to(LOW)).chunk(3, dim=-1)
        expected = F.scaled_dot_product_attention(norm(q.float()).to(LOW), norm(k.float()).to(LOW), v)
    assert result.dtype is LOW and torch.equal(result, expected)
    assert model.norm.weight.grad is not None and model.norm.weight.grad.dtype is FULL


def test_recordings_and_regions_of_autocast_follow_the_argument(kernels: types.ModuleType, tmp_path: Path) -> None:
    lists = write(tmp_path, "match: [{op: followed_kernels.attend, like: v}]")
    with amp.session("O4", device="cpu", lists=lists), insight.recording() as recording:
        kernels.attend(ones(FULL), ones(LOW), ones(LOW))
    (record,) = [op for op in recording.ops if op.op.endswith("attend")]
    assert (record.rule, record.entry, record.casts, record.out) == ("match", "matched.yaml:2", 1, ("bf16",))
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("match: [{op: followed_kernels.attend, like: v}]")
    with native.install(lists=str(overlay)):
        with torch.autocast("cpu", LOW):
            assert kernels.attend(ones(FULL), ones(FULL), ones(LOW)).dtype is LOW
        with pytest.raises(AssertionError):  # outside of regions nothing is cast
            kernels.attend(ones(FULL), ones(FULL), ones(LOW))


def test_what_cannot_be_followed_runs_as_it_was_written(kernels: types.ModuleType) -> None:
    seen: list[torch.dtype] = []
    kernels.see = lambda x, bias=None: seen.append(x.dtype)
    amp.register_match_function(kernels, "see", like="bias")
    with amp.session("O4", device="cpu"):
        for bias in (None, ones(torch.float64), torch.ones(2, dtype=torch.int64), ones(FULL).to("meta")):
            kernels.see(ones(LOW), bias)
        kernels.see(ones(LOW))
    assert seen == [LOW] * 5


@pytest.mark.parametrize("given", [3.0, [ones(LOW)], torch.ones(2, dtype=torch.int64)], ids=["number", "list", "int64"])
def test_an_argument_that_is_no_floating_tensor_is_refused(
    kernels: types.ModuleType, tmp_path: Path, given: Any
) -> None:
    lists = write(tmp_path, "match: [{op: followed_kernels.attend, like: bias}]")
    with (
        amp.session("O4", device="cpu", lists=lists),
        pytest.raises(OpListError, match=r"matched\.yaml:2:14: attend is to run in the dtype of 'bias', which is"),
    ):
        kernels.attend(ones(FULL), ones(LOW), ones(LOW), given)


WRONG = {
    "missing": ("attend", "value", "2:14: attend has no argument 'value'; it has q, k, v, bias, keys"),
    "catch-all": ("take_anything", "v", r"2:14: take_anything takes \*tensors and \*\*others"),
}


@pytest.mark.parametrize(("op", "like", "message"), WRONG.values(), ids=list(WRONG))
def test_an_argument_that_an_op_does_not_name_is_an_error(
    kernels: types.ModuleType, tmp_path: Path, op: str, like: str, message: str
) -> None:
    lists = write(tmp_path, f"match: [{{op: followed_kernels.{op}, like: {like}}}]")
    with pytest.raises(OpListError, match=message), amp.session("O4", device="cpu", lists=lists):
        pass


def test_ops_in_c_and_of_torch_library_name_their_arguments() -> None:
    from amp_patch.config.op_arguments import find_position

    if not hasattr(torch.ops.followed, "scale"):
        library = torch.library.custom_op("followed::scale", mutates_args=())

        @library
        def scale(x: Tensor, factor: Tensor) -> Tensor:
            return x * factor

        assert find_position(scale, "factor") == 1
    assert find_position(torch.ops.followed.scale, "factor") == 1
    assert find_position(F.scaled_dot_product_attention, "value") == 2
    assert find_position(torch.Tensor.lerp, "end") == 1
    assert find_position(torch.add, "alpha") is None
    with pytest.raises(OpListError, match="does not tell the names of its arguments"):
        find_position(torch.rms_norm, "weight")


def test_the_decorator_and_the_registration_check_the_argument(kernels: types.ModuleType) -> None:
    decorated = amp.match_function("v")(attend)
    with amp.session("O4", device="cpu"):
        assert decorated(ones(FULL), ones(FULL), ones(LOW)).dtype is LOW
    for wrong in (
        lambda: amp.match_function("value")(attend),
        lambda: amp.register_match_function(kernels, "attend", "x"),
        lambda: amp.register_match_function(kernels, "attend", ""),
    ):
        with pytest.raises(OpListError, match="attend has no argument"):
            wrong()
    with pytest.raises(ArgumentTypeError, match="as text, not attend: write like='value'"):
        amp.match_function(attend)  # type: ignore[arg-type]


RULES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "promote": (torch.dot, (torch.ones(2), torch.ones(2, dtype=LOW))),
    "sequence_promote": (torch.cat, ([torch.ones(2), torch.ones(2, dtype=LOW)],)),
    "match_self": (torch.Tensor.add_, (torch.ones(2), torch.ones(2, dtype=LOW))),
    "match": (attend, (torch.ones(2), torch.ones(2), torch.ones(2, dtype=LOW))),
}


@pytest.mark.parametrize("rule", list(RULES))
def test_a_call_that_casts_takes_three_frames(rule: str) -> None:
    """The replacement, what prepares the call, and what finds the dtype: casts themselves take none."""
    op, args = RULES[rule]
    switch = Switch()
    switch.turn_on()
    replacement = OpCasts(switch, LOW, "cpu", None).wrap(rule, op, "v")
    package, names = str(Path(amp.__file__).parent), []

    def note(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        replacement(*args)
    finally:
        sys.setprofile(None)
    names = [name for name in names if "overrides" not in name]  # ops that take lists look into them first
    assert len(names) == 3 and names[:2] == ["wrapper", "prepare"]
