"""A script without mixed precision runs in one region from the first call of a model on, wherever that call is.

Guards: native/whole_script, native/roots.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from list_files import write_list
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint as imported_checkpoint

from amp_patch import native

LOW = torch.bfloat16
X = torch.ones(2, 4)


@pytest.fixture
def whole_script() -> Iterator[None]:
    with native.install("O4", everywhere=True):
        yield
    assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
    with torch.autocast("cpu", LOW):  # torch's cache of weights ends with this block
        weight = nn.Parameter(torch.ones(4, 4))
        torch.mm(X, weight)
        weight.data.zero_()
    with torch.autocast("cpu", LOW):
        assert not torch.mm(X, weight).any()


def in_thread(model: nn.Module) -> None:
    thread = threading.Thread(target=model, args=(X,))
    thread.start()
    thread.join()


def in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        model(X)


def in_inference_mode_compiled(model: nn.Module) -> None:
    with torch.inference_mode():
        torch.compile(model, backend="eager")(X)


def in_island(model: nn.Module) -> None:
    with torch.autocast("cpu", enabled=False):
        assert model(X).dtype is torch.float32


def in_backward_hook(model: nn.Module) -> None:
    def call(gradient: Tensor) -> None:
        model(gradient)

    y = X.clone().requires_grad_() * 1
    y.register_hook(call)
    y.sum().backward()


def in_checkpoint(model: nn.Module) -> None:
    imported_checkpoint(model, X.clone().requires_grad_(), use_reentrant=False).float().sum().backward()


def in_nested_modes(model: nn.Module) -> None:
    with torch.inference_mode():
        with torch.inference_mode(), torch.inference_mode(False):
            model(X)
        assert model(X).dtype is LOW


FIRST: dict[str, Callable[[nn.Module], object]] = {
    "thread": in_thread,
    "inference mode": in_inference_mode,
    "inference mode, compiled": in_inference_mode_compiled,
    "nested inference modes": in_nested_modes,
    "island": in_island,
    "backward hook": in_backward_hook,
    "checkpoint": in_checkpoint,
    "jit.trace": lambda model: torch.jit.trace(model, X),
    "make_fx": lambda model: make_fx(model)(X),
    "export": lambda model: torch.export.export(model, (X,)),
    "meta": lambda _: nn.Linear(4, 4, device="meta")(X.to("meta")),
    "compiled in place": lambda model: model.compile(backend="eager"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning", "ignore:Using `torch.compile:UserWarning")
@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
def test_wherever_the_first_call_is_the_later_ones_are_in_the_region(
    first: Callable[[nn.Module], object], whole_script: None
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first(model)
    for _ in range(2):
        assert model(X).dtype is LOW and model(X).dtype is LOW
        in_island(model)


def test_a_thread_that_calls_models_leaves_the_region_of_another_alone(whole_script: None) -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: in_thread(other))  # while the step has left the region
    for _ in range(3):
        loss = model(X)
        seen.append(loss.dtype)
        loss.float().sum().backward()
        optimizer.step()
    assert seen == [LOW] * 3


def test_threads_that_begin_at_once_open_one_session() -> None:
    barrier, dtypes = threading.Barrier(3), []
    before = {name: vars(torch)[name] for name in ("matmul", "softmax", "exp")}

    def work() -> None:
        model = nn.Linear(4, 4)
        barrier.wait()
        with torch.autocast("cpu", LOW):
            dtypes.append(model(X).dtype)

    with native.install("O4"):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert dtypes == [LOW] * 3 and all(vars(torch)[name] is function for name, function in before.items())


# ---- rules -----------------------------------------------------------------------------------------------------------


class Interrupted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


def test_autocast_is_as_before_after_an_interrupt_that_is_caught_in_the_region(tmp_path: Path) -> None:
    with native.install(lists=write_list(tmp_path, "modules: [{match: '0', run: float32}]")):
        with torch.autocast("cpu", LOW):
            with pytest.raises(KeyboardInterrupt):
                nn.Sequential(Interrupted())(X)
            assert torch.mm(X, X.T).dtype is LOW and torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", LOW), pytest.raises(KeyboardInterrupt):
            nn.Sequential(Interrupted())(X)
        with torch.autocast("cpu", LOW), torch.autocast("cpu", enabled=False):
            assert torch.mm(X, X.T).dtype is torch.float32


class ByMethods(nn.Module):
    """Is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def training_step(self, x: Tensor) -> list[torch.dtype]:
        return [self.a(x).dtype, self.b(x).dtype]


def test_rules_follow_names_where_the_script_calls_methods_of_the_model(tmp_path: Path) -> None:
    model = ByMethods()
    with native.install(lists=write_list(tmp_path, "modules: [{match: a, run: float32}]")):
        for _ in range(2):
            with torch.autocast("cpu", LOW):
                assert model.training_step(X) == [torch.float32, LOW]
            model.a, model.b = model.b, model.a


def test_the_last_rule_wins_where_a_part_was_called_before_the_whole(tmp_path: Path) -> None:
    model = ByMethods()
    model.forward = model.a.__call__  # type: ignore[method-assign]
    rules = "modules: [{type: torch.nn.Linear, run: low}, {match: a, run: float32}]"
    with native.install(lists=write_list(tmp_path, rules)):
        for _ in range(2):
            with torch.autocast("cpu", LOW):
                model.a(X)
                assert model(X).dtype is torch.float32 and model.a(X).dtype is torch.float32
                assert model.b(X).dtype is LOW


def test_a_part_that_gets_another_rule_follows_it_in_its_first_call(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    rules = "modules: [{match: '0', run: float32}, {match: '1', run: low}]"
    with native.install(lists=write_list(tmp_path, rules)), torch.autocast("cpu", LOW):
        model(X)
        model[0], model[1] = model[1], model[0]
        assert [model[0](X).dtype, model[1](X).dtype] == [torch.float32, LOW]


def test_a_wrapper_of_a_moment_leaves_no_rule_behind(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    with native.install(lists=write_list(tmp_path, "modules: [{match: '1', run: float32}]")):
        for _ in range(2):
            with torch.autocast("cpu", LOW):
                assert model(X).dtype is LOW
                nn.Sequential(model[0], model[2])(X)
        with torch.autocast("cpu", LOW):
            model(X)
            assert model[2](X).dtype is LOW


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_part_may_stand_beside_what_a_rule_names(tmp_path: Path) -> None:
    model = nn.Sequential(torch.jit.script(nn.ReLU()), nn.Linear(4, 4))
    with (
        native.install(lists=write_list(tmp_path, "modules: [{match: '1', run: float32}]")),
        torch.autocast("cpu", LOW),
    ):
        assert model(X).dtype is torch.float32
