"""Op lists over the regions of torch.autocast change the ops that they name and nothing else, and torch is restored.

Guards: native/takeover, native/changes, native/installation, native/script_steps, native/step_checks, native/session.
Guards: native/roots, native/whole_script, casting/autocast.
"""

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from list_files import write_list
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp_patch as amp
from amp_patch import insight, native
from amp_patch.errors import OpListError, PolicyError, SessionError
from amp_patch.insight.tracer import tracing
from amp_patch.script_settings import NoRegionError
from amp_patch.session import current
from amp_patch.training import unscaling

Run = tuple[list[float], list[Tensor]]
DTYPES = (torch.bfloat16, torch.float16)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(self.first(x), (8,))
        x = checkpoint(lambda y: torch.softmax(self.middle(y) @ y.T, -1) @ y, x, use_reentrant=False)
        with torch.autocast("cpu", enabled=False):
            x = x.float() * 2
        return self.last(x)


def train(dtype: torch.dtype = torch.bfloat16, steps: int = 4) -> Run:
    """A training with two optimizers, accumulation, clipping and a GradScaler."""
    net = Net()
    rest = [*net.middle.parameters(), *net.last.parameters()]
    optimizers = [torch.optim.AdamW(net.first.parameters()), torch.optim.SGD(rest, 0.1)]
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, init_scale=2.0**20)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        for _ in range(2):
            x = torch.randn(6, 8, generator=generator)
            with torch.autocast("cpu", dtype):
                loss = F.cross_entropy(net(x), torch.arange(6) % 4) / 2
            scaler.scale(loss).backward()
            losses.append(loss.item())
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    return losses, [weight.detach() for weight in net.parameters()]


def is_same(one: Run, other: Run) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_the_rules_of_autocast_a_training_is_bitwise_the_same(dtype: torch.dtype, tmp_path: Path) -> None:
    expected = train(dtype)
    rules = (Path(amp.__file__).parent.parent / "lists" / "autocast-cpu.yaml").read_text()
    mine = write_list(tmp_path, "\n".join(line for line in rules.splitlines() if "torchvision" not in line))
    for lists in ("autocast-cpu", mine):
        with native.install(lists=lists):
            assert is_same(train(dtype), expected)
    with insight.recording() as recording:
        assert is_same(train(dtype), expected)
    assert recording.ops
    with tracing():
        assert is_same(train(dtype), expected)


def test_sparse_gradients_are_looked_at() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    with native.install(), tracing():
        for factor in (1.0, float("inf")):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = table(torch.tensor([0, 1])).sum() * factor
            loss.backward()
            optimizer.step()
        session = current.require()
        assert session.names_of(unscaling.find_nonfinite(table.parameters())) == session.names_of([table.weight])


def dtypes_seen(act: Callable[[], Any], names: tuple[str, ...] = ("linear", "softmax")) -> dict[str, set[str]]:
    with insight.recording() as recording:
        act()
    ops = [op for op in recording.ops if op.phase in ("forward", "recompute")]
    return {name: {dtype for op in ops if op.op.endswith(f".{name}") for dtype in op.ran} for name in names}


def test_a_line_of_a_list_changes_one_op_and_nothing_else(tmp_path: Path) -> None:
    assert dtypes_seen(train) == {"linear": {"bf16"}, "softmax": set()}  # softmax is on no list of a CPU's autocast
    with native.install(lists=write_list(tmp_path, "blacklist: [softmax, linear]")):
        assert dtypes_seen(train) == {"linear": {"f32"}, "softmax": {"f32"}}
    with native.install(lists=write_list(tmp_path, 'modules: [{match: "middle", run: float32}]')):
        assert dtypes_seen(train)["linear"] == {"bf16", "f32"}
    with native.install(lists=write_list(tmp_path, "neutral: [linear]")):
        assert dtypes_seen(train)["linear"] == {"f32"}


@pytest.mark.parametrize(("level", "dtype", "expected"), [("O4", torch.float16, "bf16"), ("O1", torch.float16, "f16")])
def test_a_level_takes_the_place_of_dtype_and_lists(level: str, dtype: torch.dtype, expected: str) -> None:
    with native.install(level, compute="native"):
        assert dtypes_seen(lambda: train(dtype)) == {"linear": {expected}, "softmax": {"f32"}}


def state_of_autocast() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled(),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


def test_questions_are_answered_as_without(tmp_path: Path) -> None:
    def ask() -> list[Any]:
        answers = [state_of_autocast()]
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            answers.append(state_of_autocast())
            thread = threading.Thread(target=lambda: answers.append(state_of_autocast()))
            thread.start()
            thread.join()
            with torch.autocast("cpu", enabled=False):
                answers.append(state_of_autocast())
            torch.softmax(torch.ones(2), 0)
            answers.append(state_of_autocast())
        return [*answers, state_of_autocast()]

    expected = ask()
    with native.install(lists=write_list(tmp_path, "blacklist: [softmax]")):
        assert ask() == expected
        torch.set_autocast_enabled("cpu", True)
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
        torch.set_autocast_enabled("cpu", False)


def test_what_is_wrong_is_as_wrong_as_under_autocast(tmp_path: Path) -> None:
    def misuse() -> list[Any]:
        found: list[Any] = []
        region = torch.autocast("cpu", torch.bfloat16)
        with pytest.raises(ZeroDivisionError), region:
            raise ZeroDivisionError
        found.append(state_of_autocast())
        region.__enter__()
        region.__exit__(None, None, None)
        region.__exit__(None, None, None)
        found.append(state_of_autocast())
        torch.autocast_increment_nesting()
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.float16):
            found += [torch.ones(2, 2) @ torch.ones(2, 2), torch.softmax(torch.ones(2).half(), 0)]
        with pytest.raises(RuntimeError):
            torch.autocast("no_such_device")
        return found

    expected = misuse()
    with native.install(lists=write_list(tmp_path, "blacklist: [softmax]")):
        for one, other in zip(misuse(), expected, strict=True):
            assert one == other if isinstance(one, tuple) else (torch.equal(one, other) and one.dtype is other.dtype)


def test_regions_that_autocast_knows_are_known_here(tmp_path: Path) -> None:
    """Decorators, custom_fwd, and a module that enters autocast in its own forward."""

    class Own(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.softmax(x, -1) @ x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    @torch.autocast("cpu", torch.bfloat16)
    def decorated(x: Tensor) -> tuple[Tensor, ...]:
        return torch.softmax(x, -1), x @ x, Own.apply(x @ x)

    with native.install(lists=write_list(tmp_path, "blacklist: [mm, softmax, matmul]")):
        outer = decorated(torch.ones(2, 2).bfloat16())
        assert [one.dtype for one in outer] == [torch.float32, torch.float32, torch.float32]
        assert torch.softmax(torch.ones(2).bfloat16(), 0).dtype is torch.bfloat16

    class Entering(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return F.linear(x, x)

    model = nn.Sequential(nn.Linear(2, 2), Entering())
    with native.install(lists=write_list(tmp_path, 'modules: [{match: "1", run: float32}]')):
        with torch.autocast("cpu", enabled=True):
            assert model(torch.ones(2, 2)).dtype is torch.float32
        assert model(torch.ones(2, 2)).dtype is torch.float32


def test_an_assignment_by_index_casts_where_a_list_says_so(tmp_path: Path) -> None:
    index = torch.tensor([0, 2])

    def assign(dtype: torch.dtype, given: torch.dtype) -> Tensor:
        x = torch.zeros(3, 2, dtype=dtype)
        x[index] = torch.ones(2, 2, dtype=given)
        return x

    with native.install(lists=write_list(tmp_path, "promote: [__setitem__]")):
        with torch.autocast("cpu", torch.bfloat16):
            for dtype, given in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
                assert assign(dtype, given).sum() == 4
            assert assign(torch.int64, torch.int64).sum() == 4
        with pytest.raises(RuntimeError):
            assign(torch.float32, torch.bfloat16)
    assert "__setitem__" not in vars(Tensor)


# ---- what is refused -------------------------------------------------------------------------------------------------


def train_plainly() -> None:
    net = nn.Linear(2, 2)
    net(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()


def test_what_cannot_be_done_is_refused_before_a_step() -> None:
    with (
        native.install("O2"),
        pytest.raises(PolicyError, match=r"amp\.initialize\(model, optimizer, opt_level=\"O2\"\)"),
    ):
        train()
    with native.install("O1"), pytest.raises(PolicyError, match="GradScaler"):
        train(torch.bfloat16)
    with pytest.raises(PolicyError, match="scales no loss"):
        native.install("O1", everywhere=True)
    with pytest.raises(PolicyError, match="compute='native' needs a level"):
        native.install(lists="bfloat16", compute="native")
    with native.install("O4", everywhere=True), pytest.raises(PolicyError, match="leave --everywhere"):
        train()
    with pytest.raises(OpListError):
        native.install(lists="no_such_list")


def lbfgs() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def test_a_fused_step_on_float16_weights_runs_where_steps_are_watched() -> None:
    model = nn.Linear(4, 4).half()
    optimizer, scaler = torch.optim.Adam(model.parameters(), fused=True), torch.amp.GradScaler("cpu")
    end = native.start(native.Takeover(needs_region=True), is_watched=True)
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.ones(2, 4)).float().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    end()
    assert optimizer.state


@pytest.mark.filterwarnings("ignore:the lists apply to")
def test_nothing_is_cast_without_casts_in_a_region_of_another_dtype() -> None:
    with native.install(lists="bfloat16"):
        for dtype in DTYPES:
            with torch.autocast("cpu", dtype):
                with current.without_casts():
                    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
                assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is dtype


def test_o0_disables_regions_on_each_type_of_device() -> None:
    with native.install("O0"):
        with torch.autocast("cpu", torch.bfloat16):
            current.require().device_type = "cuda"
        with torch.autocast("cpu", torch.bfloat16):
            assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32


def evaluate_then_train_plainly() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        nn.Linear(2, 2)(torch.ones(1, 2))
    train_plainly()


def test_a_step_of_an_optimizer_that_is_none_of_torchs_is_no_skip() -> None:
    net = nn.Linear(2, 2)

    class Own:
        param_groups = [{"params": list(net.parameters())}]

        def step(self) -> None:
            pass

    optimizer, scaler = Own(), torch.amp.GradScaler("cpu", init_scale=2.0)
    with insight.recording() as recording:
        for factor in (1.0, float("inf")):
            with torch.autocast("cpu", torch.float16):
                loss = net(torch.ones(1, 2)).float().sum() * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [step.skipped for step in recording.steps] == [False, True]


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize(
    "before", [train_plainly, lbfgs, evaluate_then_train_plainly], ids=["plain", "closure", "evaluated"]
)
def test_steps_before_the_first_region_are_left_alone(
    before: Callable[[], None], level: str, caplog: pytest.LogCaptureFixture
) -> None:
    with native.install(level):
        wanted = train(torch.float16)
    caplog.clear()
    with native.install(level) as takeover:
        before()
        told = [record.getMessage() for record in caplog.records if "without mixed precision" in record.getMessage()]
        assert len(told) == (before is not evaluate_then_train_plainly)
        assert is_same(train(torch.float16), wanted)
        takeover.check_end()


def test_a_script_that_never_had_a_region_is_refused_at_its_end() -> None:
    with native.install("O4") as takeover:
        train_plainly()
        with pytest.raises(NoRegionError, match=r"test_takeover\.py:\d+ steps"):
            takeover.check_end()
    with native.install("O0") as takeover:
        train_plainly()
        takeover.check_end()  # there is nothing to be missed


def test_install_under_a_recording_names_the_recording_as_the_reason():
    with insight.recording(), pytest.raises(SessionError, match="a recording uses amp_patch.native"):
        native.install("O4")


def test_another_install_replaces_the_first_and_remove_needs_no_handle():
    def look_into_a_region():
        with torch.autocast("cpu", torch.bfloat16):
            return torch.is_autocast_enabled("cpu"), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    native.install("O4", lists=None)
    assert look_into_a_region() == (True, torch.bfloat16)
    native.install("O0")
    assert look_into_a_region() == (False, torch.float32)
    with pytest.raises(SessionError, match=r"call amp_patch.native.remove\(\) first"):
        insight.compare(lambda: None)
    native.remove()
    native.remove()
    assert look_into_a_region() == (True, torch.bfloat16)


class Encoder(nn.Module):
    """Is called by a method of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Sequential(nn.Linear(2, 2)))
        self.name = name

    def encode(self, x: Tensor) -> Tensor:
        return getattr(self, self.name)(x)


def test_a_rule_acts_from_the_first_call_on_and_is_missed_only_where_no_model_has_its_module(tmp_path: Path) -> None:
    path = write_list(
        tmp_path, "modules: [{match: text, run: float32}, {match: image, run: float32}, {match: x, run: low}]"
    )
    encoders = [Encoder("text"), Encoder("image")]
    optimizer = torch.optim.SGD([weight for one in encoders for weight in one.parameters()], 0.1)
    with native.install(lists=path), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                outputs = [one.encode(torch.ones(1, 2)) for one in encoders]
                assert [one.dtype for one in outputs] == [torch.float32] * 2
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
            sum(one.sum() for one in outputs).backward()
            optimizer.step()
    told = [str(one.message) for one in caught]
    assert len(told) == 1 and "'x' matches no module" in told[0]


def test_a_rule_for_a_model_that_is_called_after_the_first_steps_is_not_missed(tmp_path: Path) -> None:
    path = write_list(tmp_path, "modules: [{match: image, run: float32}]")
    critic, actor = Encoder("text"), Encoder("image")
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (critic, actor)]
    with warnings.catch_warnings(), native.install(lists=path):
        warnings.simplefilter("error")
        for step in range(4):
            for model, optimizer in zip((critic, actor) if step % 2 else (critic,), optimizers, strict=False):
                with torch.autocast("cpu", torch.bfloat16):
                    output = model.encode(torch.ones(1, 2))
                output.sum().backward()
                optimizer.step()
    assert output.dtype is torch.float32


@pytest.mark.parametrize("match", ["text", "text.0"])
def test_a_rule_acts_in_a_part_that_the_script_has_called_by_itself_before(match: str, tmp_path: Path) -> None:
    encoder, x = Encoder("text"), torch.ones(1, 2)
    with native.install(lists=write_list(tmp_path, f"modules: [{{match: {match}, run: float32}}]")):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                encoder.text(x)  # such as a check of shapes
                assert encoder.encode(x).dtype is torch.float32


class OnePart(nn.Module):
    """Has its only part under the name that wrappers use."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


@pytest.mark.parametrize("wrap", [lambda net: net, nn.DataParallel], ids=["plain", "wrapped"])
def test_names_are_those_of_the_scripts_own_model(wrap: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    net = OnePart()
    path = write_list(tmp_path, "modules: [{match: module.1, run: float32}]")
    with native.install(lists=path), torch.autocast("cpu", torch.bfloat16):
        assert wrap(net)(torch.ones(1, 2)).dtype is torch.float32
        assert net.module[0](torch.ones(1, 2)).dtype is torch.bfloat16


class InRegion(nn.Module):
    """Enters autocast in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x)


def test_a_first_region_in_compiled_code_is_refused_before_a_step(tmp_path: Path) -> None:
    net = InRegion()
    before = net.layer.weight.detach().clone()
    with native.install(lists=write_list(tmp_path, "blacklist: [linear]")):
        torch.compile(net, backend="eager")(torch.ones(1, 2)).float().sum().backward()
        with torch.autocast("cpu", torch.bfloat16):
            torch.ones(2, 2) @ torch.ones(2, 2)
        with pytest.raises(PolicyError, match="around the call of the compiled model"):
            torch.optim.SGD(net.parameters(), 0.1).step()
    assert torch.equal(net.layer.weight, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_code_keeps_the_rules_of_torch_in_regions_of_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    with warnings.catch_warnings(), native.install(lists=write_list(tmp_path, "blacklist: [linear]")):
        warnings.simplefilter("ignore")
        with torch.autocast("cpu", torch.float16):
            assert net(torch.ones(1, 2)).dtype is torch.float32
        with torch.autocast("cpu", dtype):
            compiled = torch.compile(net, backend="eager")(torch.ones(1, 2))
            assert compiled.dtype is net(torch.ones(1, 2)).dtype
            assert compiled.dtype is (torch.float32 if dtype is torch.float16 else dtype)


def test_without_any_amp_the_whole_script_is_one_region() -> None:
    with native.install("O4", everywhere=True):
        net = nn.Linear(2, 2)
        assert net(torch.ones(1, 2)).dtype is torch.bfloat16
        with torch.autocast("cpu", enabled=False):  # as libraries write it
            assert net(torch.ones(1, 2)).dtype is torch.float32
        train_plainly()
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


class Multiplying(torch.optim.SGD):
    """Multiplies matrices in its step, as Shampoo and Muon do; fails in the first where it is told to."""

    seen: torch.dtype | None = None
    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.fails:
            self.fails = False
            raise ArithmeticError
        self.seen = torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def test_gradients_and_steps_are_outside_of_the_region_of_a_whole_script(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, inputs = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    optimizer = Multiplying(net.parameters(), 0.1)
    lists = write_list(tmp_path, 'modules: [{match: "1", run: float32}]')
    with native.install("O4", lists=lists, everywhere=True):
        output = net(inputs)
        output.square().sum().backward()
        hidden = net[0](inputs)
        assert hidden.dtype is torch.bfloat16
        optimizer.fails = True
        with pytest.raises(ArithmeticError):
            optimizer.step()
        assert net[0](inputs).dtype is torch.bfloat16
        optimizer.step()
        assert optimizer.seen is torch.float32
        assert torch.mm(inputs, inputs.T).dtype is torch.bfloat16
        (gradient,) = torch.autograd.grad(net(inputs).square().sum(), net[1].weight)
    expected = (2 * output.detach()).T @ hidden.detach().float()
    assert torch.equal(net[1].weight.grad, expected)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_computes_again_what_the_region_of_a_whole_script_computed(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def train(*, with_checkpoint: bool) -> Tensor:
        net = nn.Sequential(first, second)
        net.zero_grad()
        with native.install("O4", everywhere=True):
            hidden = net[0](torch.ones(4, 8))
            output = net[1](hidden)
            if with_checkpoint:
                output = checkpoint(net[1], hidden, use_reentrant=use_reentrant)
            output.float().square().sum().backward()
        assert first.weight.grad is not None
        return first.weight.grad.clone()

    assert torch.equal(train(with_checkpoint=True), train(with_checkpoint=False))


def test_amp_of_the_scripts_own_comes_first(tmp_path: Path) -> None:
    with native.install("O4"):
        with torch.autocast("cpu", torch.bfloat16):
            torch.ones(2, 2) @ torch.ones(2, 2)
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        amp.initialize(net, optimizer, opt_level="O1", verbosity=0)
        assert net(torch.ones(1, 2)).dtype is torch.float16
        with torch.autocast("cpu", torch.bfloat16):
            assert amp.stats().opt_level == "O1"
        with amp.scale_loss(net(torch.ones(1, 2)).float().sum() / 100, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert amp.stats().steps == 1


def test_functions_of_amp_without_initialize_say_to_initialize() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    with native.install(lists="bfloat16"):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(1, 2)).float().sum()
        scaler.scale(loss)
        calls: list[Callable[[], Any]] = [
            lambda: amp.scale_loss(loss, optimizer).__enter__(),
            lambda: amp.scale(loss),
            lambda: amp.unscale(loss),
            lambda: amp.state_dict(),
            lambda: amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}}),
        ]
        for call in calls:
            with pytest.raises(SessionError, match="amp.initialize has not been called yet"):
                call()
