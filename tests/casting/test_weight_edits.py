"""After every kind of edit of weights, between forward passes of every kind, the next pass gives bit by bit the result
of casting the weights again.

One edit is left out: writing through `p.data` between two forward passes with gradients shows nowhere. It needs
`amp.refresh()`, as the README says, and as the edit of that kind calls here.

Guards: casting/weight_cache.
"""

import copy
import os
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from cached_net import LOW, SIZE, Net, by_hand
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize, vector_to_parameters
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import amp_patch as amp
from amp_patch.casting import weight_cache
from amp_patch.session import current

EXAMPLES = int(os.environ.get("AMP_PATCH_EXAMPLES", "60"))


class Twice(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class Trial:
    """One model under the session, with what a sequence of edits needs."""

    def __init__(self, seed: int, compute: str) -> None:
        self.compute = compute
        self.net = Net(seed)
        self.optimizers = [
            torch.optim.SGD(self.net.parameters(), lr=0.1, foreach=True),
            torch.optim.AdamW(self.net.parameters(), lr=0.1, fused=True),
        ]
        self.generator = torch.Generator().manual_seed(seed)
        self.shadow = [self.random(p) for p in self.net.parameters()]
        assert current.state.session is not None
        current.state.session.adopt([self.net], self.optimizers)  # `initialize` without its search for dead models

    def random(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator)

    def weight(self, number: int) -> Tensor:
        weights = list(self.net.parameters())
        return weights[number % len(weights)]

    def batch(self) -> Tensor:
        return torch.randn(3, SIZE, generator=self.generator)


# ---- edits -----------------------------------------------------------------------------------------------------------


def assign_data(trial: Trial, number: int) -> None:
    """Three times, so that memory comes back."""
    weight = trial.weight(number)
    for _ in range(3):
        weight.data = trial.random(weight)


def assign_transposed(trial: Trial, number: int) -> None:
    weight = (trial.net.first.weight, trial.net.second.weight)[number % 2]
    weight.data = weight.data.t()


def assign_shifted_view(trial: Trial, number: int) -> None:
    weight = trial.weight(number)
    weight.data = trial.random(weight.data.new_empty(weight.numel() + 1))[1:].view(weight.shape)


def assign_and_bring_back(trial: Trial, number: int) -> None:
    weight = trial.weight(number)
    before = weight.detach().clone()
    weight.data = trial.random(weight)
    check_forward(trial)
    weight.data = before.clone()


@torch.no_grad()
def write_through_view(trial: Trial, number: int) -> None:
    weight = trial.weight(number)
    weight[number % len(weight)] = 3.0
    weight.view(weight.shape)[0].mul_(-1)


def write_through_detached(trial: Trial, number: int) -> None:
    trial.weight(number).detach().add_(0.5)


@torch.inference_mode()
def write_in_inference_mode(trial: Trial, number: int) -> None:
    weight = trial.weight(number)
    weight.copy_(trial.random(weight))


@torch.no_grad()
def write_many(trial: Trial, number: int) -> None:
    torch._foreach_mul_(list(trial.net.parameters()), 0.5 + number)


@torch.no_grad()
def set_storage(trial: Trial, number: int) -> None:
    weight = trial.weight(number)
    weight.set_(trial.random(weight))


def from_vector(trial: Trial, number: int) -> None:
    vector = torch.cat([parameter.flatten() for parameter in trial.net.parameters()])
    vector_to_parameters(trial.random(vector), trial.net.parameters())


def swap(trial: Trial, number: int) -> None:
    weight = trial.weight(number)
    if weakref.getweakrefs(weight):  # of torch's own, after a trace: it refuses to swap then
        return
    amp.refresh()  # torch swaps no tensor that a graph holds, and a copy is one
    try:
        torch.utils.swap_tensors(weight, nn.Parameter(trial.random(weight)))
    except RuntimeError as error:  # torch refuses, and swaps nothing: copies that are kept lead to the old gradient
        assert "use_count" in str(error)


def swap_average_in_and_out(trial: Trial, number: int) -> None:
    """Evaluate with averaged weights, written where torch cannot see it."""
    saved = [p.data.clone() for p in trial.net.parameters()]
    if [p.shape for p in saved] != [p.shape for p in trial.shadow]:
        return
    for parameter, average in zip(trial.net.parameters(), trial.shadow, strict=True):
        parameter.data.copy_(average)
    with torch.no_grad():
        check_forward(trial)
    for parameter, value in zip(trial.net.parameters(), saved, strict=True):
        parameter.data.copy_(value)


def load(trial: Trial, number: int) -> None:
    state = {name: trial.random(value) for name, value in trial.net.state_dict().items()}
    trial.net.load_state_dict(state, assign=bool(number % 2))


def replace_parameter(trial: Trial, number: int) -> None:
    if not parametrize.is_parametrized(trial.net.first):
        trial.net.first.weight = nn.Parameter(trial.random(trial.net.first.weight))


def parametrized(trial: Trial, number: int) -> None:
    layer = (trial.net.first, trial.net.second, trial.net.third)[number % 3]
    if parametrize.is_parametrized(layer):
        parametrize.remove_parametrizations(layer, "weight")
    else:
        parametrize.register_parametrization(layer, "weight", Twice())


def freeze(trial: Trial, number: int) -> None:
    weight = trial.weight(number)
    weight.requires_grad_(not weight.requires_grad)


def scale_data_and_refresh(trial: Trial, number: int) -> None:
    trial.weight(number).data.mul_(2)
    amp.refresh()


def step(trial: Trial, number: int) -> None:
    optimizer = trial.optimizers[number % 2]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = trial.random(parameter).view_as(parameter) if parameter.requires_grad else None
            if parameter.grad is not None and parameter.grad.stride() != parameter.stride():
                parameter.grad = None
    optimizer.step()
    optimizer.zero_grad()


def call_with_other_weights(trial: Trial, number: int) -> None:
    others = {name: trial.random(value) for name, value in trial.net.named_parameters()}
    other = copy.deepcopy(trial.net)
    for name, value in other.named_parameters():
        value.data = others[name]
    x = trial.batch()
    with amp.disable_casts():
        expected = by_hand(other, x, trial.compute)
    assert torch.equal(torch.func.functional_call(trial.net, others, (x,)), expected)
    assert torch.equal(other(x), expected)


def record(trial: Trial, number: int) -> None:
    """What records ops leaves nothing behind, and records no copy that is there already."""
    x = trial.batch()
    if number % 2:
        with FakeTensorMode(allow_non_fake_inputs=True):
            trial.net(x)
    elif not any(map(parametrize.is_parametrized, trial.net.children())):
        graph = make_fx(trial.net)(x)
        weight = trial.weight(number)
        with torch.no_grad():
            weight.add_(1)
        with amp.disable_casts():
            assert torch.equal(graph(x), by_hand(trial.net, x, trial.compute))


EDITS = (
    assign_data,
    assign_transposed,
    assign_shifted_view,
    assign_and_bring_back,
    write_through_view,
    write_through_detached,
    write_in_inference_mode,
    write_many,
    set_storage,
    from_vector,
    swap,
    swap_average_in_and_out,
    load,
    replace_parameter,
    parametrized,
    freeze,
    scale_data_and_refresh,
    step,
    call_with_other_weights,
    record,
)


# ---- forward passes --------------------------------------------------------------------------------------------------


def run_plainly(net: Net, x: Tensor) -> Tensor:
    return net(x)


def run_checkpointed(net: Net, x: Tensor) -> Tensor:
    return checkpoint(net, x, use_reentrant=False)


def run_selectively(net: Net, x: Tensor) -> Tensor:
    """All that is computed is kept: a cast that only the forward makes would shift what the recomputation gets."""

    def contexts() -> tuple[object, object]:
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)

    return checkpoint(net, x, use_reentrant=False, context_fn=contexts)


RUNS = (run_plainly, run_plainly, run_checkpointed, run_selectively)


def check_forward(trial: Trial, run: Callable[[Net, Tensor], Tensor] = run_plainly) -> None:
    """Compare an output, and the gradients that it gives, with fresh casts."""
    x = trial.batch().requires_grad_()
    variables = [x, *(p for p in trial.net.parameters() if p.requires_grad)]
    output = run(trial.net, x)
    with amp.disable_casts():
        expected = by_hand(trial.net, x, trial.compute)
    assert torch.equal(output, expected)
    if output.requires_grad:
        direction = torch.linspace(-1, 1, output.numel()).view_as(output)
        for got, wanted in zip(
            torch.autograd.grad(output, variables, direction.to(LOW), allow_unused=True),
            torch.autograd.grad(expected, variables, direction.to(LOW), allow_unused=True),
            strict=True,
        ):
            assert (got is None and wanted is None) or torch.equal(got, wanted)


def check_without_gradients(trial: Trial, number: int) -> None:
    with torch.no_grad() if number % 2 else torch.inference_mode():
        check_forward(trial)


def check_with_gradients(trial: Trial, number: int) -> None:
    check_forward(trial, RUNS[number % len(RUNS)])


Move = Callable[[Trial, int], None]
MOVES: tuple[Move, ...] = (*EDITS, *[check_with_gradients] * 8, *[check_without_gradients] * 2)
sequences = st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 7)), min_size=1, max_size=12)


@pytest.fixture(params=["refreshed", "dropped", "rounded"])
def compute(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The three ways with copies; a session that stays open, to which each example adds its model."""
    monkeypatch.setattr(weight_cache, "are_refreshed_on", lambda device_type: request.param != "dropped")
    compute = "float32" if request.param == "rounded" else "native"
    holder = nn.Linear(2, 2)
    amp.initialize(holder, opt_level="O4", compute=compute, verbosity=0)
    yield compute
    assert holder in current.state.session.models()


def test_no_forward_uses_old_weights(compute: str) -> None:
    @settings(max_examples=EXAMPLES, derandomize="AMP_PATCH_EXAMPLES" not in os.environ, deadline=None)
    @given(st.integers(0, 99), sequences)
    @example(1, [(check_with_gradients, 0), (assign_and_bring_back, 0), (assign_and_bring_back, 0)])
    @example(2, [(check_with_gradients, 0), (assign_transposed, 0)])
    @example(3, [(check_with_gradients, 3)])
    @example(4, [(record, 1)])
    @example(5, [(check_with_gradients, 0), (record, 0)])
    @example(6, [(check_with_gradients, 0), (swap_average_in_and_out, 0)])
    def run(seed: int, moves: list[tuple[Move, int]]) -> None:
        trial = Trial(seed, compute)
        check_forward(trial)
        for move, number in moves:
            move(trial, number)
            check_forward(trial)

    run()


def check_edit(edit: Move, number: int, compute: str) -> None:
    trial = Trial(number, compute)
    check_forward(trial)
    edit(trial, number)
    check_without_gradients(trial, number)
    check_forward(trial)


def test_each_edit_is_seen(compute: str) -> None:
    for edit in EDITS:
        for number in range(4):
            check_edit(edit, number, compute)
