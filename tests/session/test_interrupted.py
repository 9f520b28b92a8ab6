"""After Ctrl-C at any line of `initialize`, `reset` and a module with a rule, the next call finds or makes everything
right.

Guards: interrupts, session/current, session/session, session/installer, training/rule_regions.
"""

import copy
import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from interrupt_tracer import choose, count_lines, interrupted_at
from torch import nn
from torch_state import find_changes

import amp_patch as amp
from amp_patch import torch_private

current = sys.modules["amp_patch.session.current"]
INTERRUPTS = int(os.environ.get("AMP_PATCH_INTERRUPTS", "100")) // 25  # of each kind, at each level
LEVELS = ["O1", "O2", "O4", "O5"]
RULES = "modules: [{match: '2', run: float32, why: a test}, {match: '3', run: low, why: a test}]\n"


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lists") / "rules.yaml"
    path.write_text(f"extends: float16\n{RULES}")
    return path


class Script:
    """A training script: a model whose optimizer has a state before `initialize`."""

    def __init__(self, level: str, rules: Path) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125, momentum=0.5)
        self.inputs = torch.linspace(-1.0, 1.0, 12).reshape(4, 3)
        self.options = {"opt_level": level, "verbosity": 0, "max_loss_scale": 512.0}
        self.options["lists"] = ["float16" if level in ("O1", "O2") else "bfloat16", str(rules)]
        F.cross_entropy(self.model(self.inputs), torch.tensor([0, 1, 1, 0])).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.found = self.look()

    def initialize(self, **options: bool) -> None:
        amp.initialize(self.model, self.optimizer, **self.options, **options)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            loss = F.cross_entropy(self.model(self.inputs), torch.tensor([0, 1, 1, 0]))
            with amp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        parameters = list(self.model.parameters())
        states = [self.optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
        return [tensor.detach().clone() for tensor in (*parameters, *self.model.buffers(), *states)]

    def look(self) -> dict[str, object]:
        """Everything but values that a session may change."""
        return {
            "hooks": [
                len(v) for m in self.model.modules() for k, v in vars(m).items() if "hook" in k and v is not None
            ],
            "groups": [id(p) for group in self.optimizer.param_groups for p in group["params"]],
            "states": [id(p) for p in self.optimizer.state],
            "attributes": sorted(set(vars(self.optimizer)) - {"_opt_called"}),
            "dtypes": [tensor.dtype for tensor in self.tensors()],
            "step hooks": len(torch_private.GLOBAL_POST_HOOKS),
            "cache key": torch.compiler.config.cache_key_tag,
            "autocast": torch.is_autocast_enabled(torch_private.IDLE_DEVICE_TYPES[0]),  # torch 2.6 has no other
            "class": hasattr(torch.optim.Optimizer, "step_was_skipped"),
        }

    def check_that_all_is_clean(self) -> None:
        assert find_changes() == []
        assert {**self.look(), "states": set(self.look()["states"])} == {
            **self.found,
            "states": set(self.found["states"]),
        }


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.fixture(scope="module", autouse=True)
def collections_pass_over_what_other_tests_left():
    """They come before each interrupted call, and take long where other tests have imported much."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the search names what tests hold
        yield


def count(action: Callable[[], object]) -> int:
    gc.collect()
    return count_lines(action)


class Sweep:
    """Calls interrupted at a sample of their lines. Other calls than the one that was counted may have fewer lines, so
    one in ten may end uninterrupted.
    """

    def __init__(self, places: int, count: int, seed: str) -> None:
        self._places, self._count, self._seed = places, count, seed
        self._missed = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        yield from enumerate(choose(self._places, self._count, seed=self._seed))
        assert self._missed <= max(1, self._count / 10)

    def interrupt(self, position: int, call: Callable[[], object], *, is_without_patching: bool = False) -> None:
        if not is_without_patching:
            gc.collect()  # replacements that are garbage are looked for, those that are gone are not
        self._missed += not interrupted_at(position, call)


def uninterrupted(level: str, rules: Path, steps: int = 2) -> list[torch.Tensor]:
    script = Script(level, rules)
    script.initialize()
    script.train(steps)
    amp.reset()
    return script.tensors()


def initialized(level: str, rules: Path) -> Script:
    script = Script(level, rules)
    script.initialize()
    script.train()
    return script


@pytest.mark.parametrize("level", LEVELS)
def test_an_interrupt_in_initialize(level, rules):
    """Afterwards `reset` leaves all as it was, and another `initialize` gives what an uninterrupted one gives."""
    expected = uninterrupted(level, rules)
    places = count(Script(level, rules).initialize)
    amp.reset()
    sweep = Sweep(places, INTERRUPTS, f"initialize {level}")
    for turn, position in sweep:
        script = Script(level, rules)
        before = script.tensors()
        sweep.interrupt(position, script.initialize)
        if turn % 2:
            if not hasattr(script.optimizer, "_amp_stash"):  # else it came when all was done
                script.initialize()
            script.train(2)
        amp.reset()
        script.check_that_all_is_clean()
        assert same(expected if turn % 2 else before, script.tensors()), position


def test_an_interrupt_as_masters_are_made(rules):
    """It is the error that `initialize` raises, and leaves nothing; nor does one as a second model joins the first."""
    expected = uninterrupted("O2", rules)
    options = {"places": ("training/masters.py",)}
    places = count_lines(Script("O2", rules).initialize, **options)
    amp.reset()
    for position in choose(places, 2 * INTERRUPTS, seed="masters O2"):
        alone, first, second = (Script("O2", rules) for _ in range(3))
        assert interrupted_at(position, alone.initialize, **options)
        amp.reset()
        alone.check_that_all_is_clean()
        first.initialize()
        first.train()
        interrupted_at(position, second.initialize, **options)
        first.train()
        amp.reset()
        second.check_that_all_is_clean()
        assert same(expected, first.tensors()), position


@pytest.mark.parametrize("level", LEVELS)
def test_an_interrupt_in_reset(level, rules):
    """It has undone all or nothing, or whatever is called next undoes the rest."""
    once, twice = uninterrupted(level, rules, 1), uninterrupted(level, rules, 2)
    script = initialized(level, rules)
    places = count(amp.reset)
    sweep = Sweep(places, INTERRUPTS, f"reset {level}")
    for turn, position in sweep:
        script = initialized(level, rules)
        sweep.interrupt(position, amp.reset)
        session = current.state.session
        if session is None or not session.is_whole:
            script.check_that_all_is_clean()
            assert same(once, script.tensors()), position
        if turn % 2:
            script.initialize(replace=True)
            script.train()
        amp.reset()
        script.check_that_all_is_clean()
        assert same(twice if turn % 2 else once, script.tensors()), position


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_no_interrupt_is_lost_as_a_session_is_freed(level, rules):
    """Python only prints what is raised in the callback of a weak reference: Ctrl-C there would end nothing."""
    called: list[str] = []

    def note(frame, event, _):
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if event == "call" and name in ("remove", "_remove") and "weakref" in file:
            called.append(f"{name} in {file}")

    script = initialized(level, rules)
    script.train()
    sys.setprofile(note)
    try:
        amp.reset()
        gc.collect()
    finally:
        sys.setprofile(None)
    assert not called


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_an_interrupt_in_a_forward_with_rules(level, rules):
    """The next forward gives what it gives without the interrupt, and so does an op outside of any module."""
    script = Script(level, rules)
    script.initialize()
    script.model.eval()
    a, b = torch.linspace(0.0, 1.0, 35).reshape(5, 7), torch.linspace(-1.0, 2.0, 21).reshape(7, 3)
    expected = script.model(script.inputs), a @ b, F.softmax(a, 0)
    session = current.state.session
    places = count(lambda: script.model(script.inputs))
    sweep = Sweep(places, 10 * INTERRUPTS, f"forward {level}")
    for _, position in sweep:
        sweep.interrupt(position, lambda: script.model(script.inputs), is_without_patching=True)
        product, softmax = a @ b, F.softmax(a, 0)
        found = script.model(script.inputs), product, softmax
        assert [one.dtype for one in found] == [one.dtype for one in expected], position
        assert same(expected, found), position
        assert session.switch.regions == 0 and session.switch._local.regions == []
        assert script.look()["autocast"] == script.found["autocast"]


# ---- what else may pass through a module -----------------------------------------------------------------------------


class Raise(nn.Module):
    """Raises what it is told to, or calls a function."""

    def __init__(self, error=None, call=None):
        super().__init__()
        self.error, self.call = error, call

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return x if self.call is None else self.call(x)


@pytest.mark.parametrize(
    ("error", "run"),
    [
        (KeyboardInterrupt(), "low"),
        (SystemExit(3), "float32"),
        (ValueError(), "low"),
    ],
    ids=repr,
)
def test_an_exception_of_any_kind_closes_the_regions_it_passes(error, run, tmp_path):
    (tmp_path / "list.yaml").write_text(f"modules: [{{match: 'part', run: {run}, why: a test}}]\n")
    part = nn.Sequential(nn.Linear(6, 6), Raise(error))
    model = nn.Sequential()
    model.add_module("part", part)
    amp.initialize(model, opt_level="O4", lists=["bfloat16", tmp_path / "list.yaml"], verbosity=0)
    logits = torch.linspace(-4.0, 4.0, 18).reshape(3, 6)
    expected = F.softmax(logits, 1).dtype, F.linear(logits, torch.ones(2, 6)).dtype
    for _ in range(3):
        with pytest.raises(type(error)):
            model(logits)
    assert (F.softmax(logits, 1).dtype, F.linear(logits, torch.ones(2, 6)).dtype) == expected
    assert expected == (torch.float32, torch.bfloat16)
    part[1].error = None
    assert part(logits).dtype is (torch.float32 if run == "float32" else torch.bfloat16)


def test_a_region_outlives_an_interrupt_that_was_caught_inside_it(tmp_path):
    """An inner module is interrupted and the outer one goes on: only the inner region is over."""
    (tmp_path / "list.yaml").write_text(
        "modules: [{match: 'part', run: float32, why: a test}, {match: 'part.inner', run: low, why: a test}]\n"
    )
    dtypes = []

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Raise(KeyboardInterrupt())

        def forward(self, x):
            try:
                self.inner(x)
            except KeyboardInterrupt:
                dtypes.append((x @ x.T).dtype)
            return x @ x.T

    model = nn.Sequential(nn.Linear(9, 9))
    model.add_module("part", Part())
    amp.initialize(model, opt_level="O4", lists=["bfloat16", tmp_path / "list.yaml"], verbosity=0)
    x = torch.ones(2, 9)
    assert model(x).dtype is torch.float32 and dtypes == [torch.float32]
    assert (x @ x.T).dtype is torch.bfloat16


def test_regions_in_generators_copies_and_recomputation(tmp_path):
    (tmp_path / "list.yaml").write_text("modules: [{match: 'part', run: float32, why: a test}]\n")
    dtypes = []

    def note(x):
        dtypes.append((x @ x.T).dtype)
        return x * 1.0

    model = nn.Sequential()
    model.add_module("part", Raise(call=note))
    model.add_module("last", nn.Linear(4, 4))
    amp.initialize(model, opt_level="O4", lists=["bfloat16", tmp_path / "list.yaml"], verbosity=0)

    def batches():
        for _ in range(2):
            yield model(torch.ones(3, 4))

    for _ in batches():
        dtypes.append((torch.ones(1, 2) @ torch.ones(2, 1)).dtype)
    copy.deepcopy(model)(torch.ones(3, 4))
    x = torch.ones(3, 4, requires_grad=True)
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).float().sum().backward()
    low, full = torch.bfloat16, torch.float32
    assert dtypes == [full, low, full, low, full, full, full]


# ---- undo ------------------------------------------------------------------------------------------------------------


def test_two_interrupts_in_a_row_are_made_good_by_the_next_call(rules, monkeypatch):
    script = Script("O5", rules)
    script.initialize()
    before = [p.detach().clone() for p in amp.master_params(script.optimizer)]
    session = current.state.session
    calls = []

    def interrupt():
        calls.append(None)
        if len(calls) < 3:
            raise KeyboardInterrupt

    session.undo.callback(interrupt)
    with pytest.raises(KeyboardInterrupt):
        amp.reset()
    assert find_changes() != [] and not session.is_whole
    with pytest.raises(amp.SessionError, match="has not been called"):
        amp.state_dict()
    assert len(calls) == 3
    script.check_that_all_is_clean()
    assert same(before, [p.detach() for p in script.model.parameters()])
    assert amp.stats().opt_level is None
