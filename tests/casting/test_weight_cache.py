"""The cache changes only the number of casts: whatever happens to the weights, outputs and gradients are, to the bit,
those of a model that casts its weights afresh in each forward pass.
"""

import copy
import gc
import importlib
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import cached_net
import pytest
import torch
from cached_net import LOW, SIZE, Net
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import amp_patch as amp
from amp_patch.casting import float32_products, weight_cache, wrappers
from amp_patch.casting.tensor_cast import make_plain_cast
from amp_patch.multi_tensor import copy_
from amp_patch.session import current

with (
    warnings.catch_warnings()
):  # torch scripts functions, with a warning for each, when this is first imported; that fails under patches
    warnings.simplefilter("ignore")
    importlib.import_module("torch._decomp.decompositions_for_jvp")


compute = "native"  # how products are computed in the test that runs


def by_hand(net: Net, x: Tensor) -> Tensor:
    """`net(x)` with the weights cast afresh."""
    return cached_net.by_hand(net, x, compute)


def start_amp(models: Any, optimizers: Any, **options: Any) -> None:
    amp.initialize(models, optimizers, opt_level="O4", compute=compute, verbosity=0, **options)


def batch(seed: int = 0) -> Tensor:
    return torch.randn(5, SIZE, generator=torch.Generator().manual_seed(100 + seed))


def loss_of(output: Tensor) -> Tensor:
    """A float32 scalar whose gradient is another one at each element."""
    weights = torch.linspace(0.5, 1.5, output.numel()).reshape(output.shape)
    return (output.float() * weights).square().mean()


def gradients_of(net: nn.Module) -> list[Tensor | None]:
    gradients = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    return gradients


def assert_equal_all(values: list[Tensor | None], expected: list[Tensor | None]) -> None:
    assert [value is None for value in values] == [value is None for value in expected]
    assert all(
        torch.equal(value, wanted)
        for value, wanted in zip(values, expected, strict=True)
        if value is not None and wanted is not None
    )


@pytest.fixture(params=["refreshed", "dropped", "rounded"], autouse=True)
def is_refreshed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Copies that are refreshed in place, as on a GPU; copies that are dropped, as on a CPU; and rounded copies, for
    products that are computed in float32, which are dropped on every device.
    """
    monkeypatch.setattr(weight_cache, "are_refreshed_on", lambda device_type: request.param != "dropped")
    monkeypatch.setattr(sys.modules[__name__], "compute", "float32" if request.param == "rounded" else "native")
    return request.param == "refreshed"


@pytest.fixture
def net(is_refreshed: bool) -> Net:
    """A model under O4, with an optimizer that stays alive."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.optimizer = optimizer  # type: ignore[assignment]
    start_amp(net, optimizer)
    return net


def assert_casts_are_fresh(net: Net, seed: int = 0) -> None:
    """Forward and backward as they would be with fresh casts."""
    x = batch(seed)
    net.zero_grad()
    output = net(x)
    loss_of(output).backward()
    gradients = gradients_of(net)
    with amp.disable_casts():
        expected = by_hand(net, x)
        loss_of(expected).backward()
    assert torch.equal(output, expected)
    assert_equal_all(gradients, gradients_of(net))


# ---- the frozen-weight test ------------------------------------------------------------------------------------------

RUNS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "plain": lambda net, x: net(x),
    "reentrant": lambda net, x: checkpoint(net, x, use_reentrant=True),
    "non-reentrant": lambda net, x: checkpoint(net, x, use_reentrant=False),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD-loop": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False),
    "Adam-fused": lambda parameters: torch.optim.Adam(parameters, lr=0.05, fused=True),
}


@pytest.mark.parametrize(
    ("name", "uses_scale_loss", "run"),
    [("SGD-loop", True, "plain"), *(("Adam-fused", True, run) for run in RUNS), ("Adam-fused", False, "plain")],
)
def test_steps_are_bitwise_those_of_fresh_casts(name: str, uses_scale_loss: bool, run: str) -> None:
    net, reference = Net(), Net()
    start = copy.deepcopy(list(net.parameters()))
    optimizer, expected = [OPTIMIZERS[name](model.parameters()) for model in (net, reference)]
    inputs, losses = [batch(step).requires_grad_() for step in range(6)], []
    for x in inputs:
        expected.zero_grad()
        losses.append(loss_of(by_hand(reference, x)))
        losses[-1].backward()
        expected.step()
    assert losses[-1].isfinite()
    start_amp(net, optimizer)
    for step, known in enumerate(inputs):
        optimizer.zero_grad()
        x = batch(step).requires_grad_()
        loss = loss_of(RUNS[run](net, x))
        assert torch.equal(loss, losses[step])
        if uses_scale_loss:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()
        assert torch.equal(x.grad, known.grad)
    assert_equal_all(list(net.parameters()), list(reference.parameters()))
    assert not any(torch.equal(parameter, first) for parameter, first in zip(net.parameters(), start, strict=True))


def test_a_step_of_an_optimizer_that_amp_has_not_seen_is_seen(net: Net) -> None:
    foreign = torch.optim.Adam(net.parameters(), lr=0.1, fused=True)  # it bumps no version
    loss_of(net(batch())).backward()
    foreign.step()
    assert_casts_are_fresh(net)


# ---- how many casts --------------------------------------------------------------------------------------------------


class CastCounter:
    """Counts casts of the weights to the low dtype, one by one and many in a kernel. No dispatch mode, which would be
    shown fresh casts.
    """

    def __init__(self, net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses = {parameter.data_ptr() for parameter in net.parameters()}
        self.single = self.together = self.kernels = 0
        for module in (wrappers, float32_products):
            monkeypatch.setattr(module, "make_plain_cast", self.make_plain_cast)
        monkeypatch.setattr(weight_cache, "copy_", self.copy_)

    def make_plain_cast(self, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Callable[[Tensor], Tensor]:
        cast = make_plain_cast(dtype, *args, **kwargs)

        def counted(tensor: Tensor) -> Tensor:
            self.single += dtype is LOW and tensor.data_ptr() in self.addresses
            return cast(tensor)

        return counted

    def copy_(self, groups: Any) -> None:
        self.kernels += len(groups)
        self.together += sum(len(targets) for targets, _ in groups)
        copy_(groups)


@pytest.mark.parametrize("how", [{"foreach": False}, {"fused": True}], ids=["loop", "fused"])
def test_each_weight_is_cast_once_per_optimizer_step(
    how: dict[str, bool], is_refreshed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net()
    counter = CastCounter(net, monkeypatch)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, **how)
    start_amp(net, optimizer)
    counts = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = sum(loss_of(net(batch(index))) for index in range(3))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        counts.append((counter.single, counter.together, counter.kernels))
    assert counts == (
        [(5, 0, 0), (5, 5, 1), (5, 10, 2), (5, 15, 3)]
        if is_refreshed
        else [(5, 0, 0), (10, 0, 0), (15, 0, 0), (20, 0, 0)]
    )


# ---- graphs that outlive things --------------------------------------------------------------------------------------


def test_double_backward_is_that_of_fresh_casts(net: Net) -> None:
    def run(forward: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Tensor | None]]:
        x = batch().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(forward(x)), x, create_graph=True)
        gradient.square().sum().backward()
        return gradient, gradients_of(net)

    gradient, gradients = run(net)
    with amp.disable_casts():
        expected, expected_gradients = run(lambda x: by_hand(net, x))
    assert torch.equal(gradient, expected)
    assert_equal_all(gradients, expected_gradients)


def take_fused_step(net: Net) -> None:
    loss_of(net(batch(2))).backward()
    torch.optim.Adam(net.parameters(), lr=0.1, fused=True).step()
    net.zero_grad()


@torch.no_grad()
def edit_in_place(net: Net) -> None:
    net.second.weight.mul_(2)
    net.first.bias.add_(1)


def replace_data(net: Net) -> None:
    net.second.weight.data = net.second.weight.data * 2


CHANGES: dict[str, tuple[Callable[[Net], Any], bool]] = {  # and whether the graph may be refused then
    "fused step": (take_fused_step, True),
    "in place": (edit_in_place, True),
    "replaced": (replace_data, False),
    "invalidated": (lambda net: amp.refresh(), False),
    "step without gradients": (lambda net: net.optimizer.step(), False),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("change", CHANGES)
def test_a_graph_that_is_alive_while_the_weights_change_is_right_or_refused(
    net: Net, change: str, mode: Callable[[], Any]
) -> None:
    with amp.disable_casts():
        loss_of(by_hand(net, batch())).backward()
    expected = gradients_of(net)
    loss = loss_of(net(batch()))
    make_change, may_be_refused = CHANGES[change]
    make_change(net)
    with mode():
        net(batch(1))  # whatever this does to the copies, the old graph may not use the new values
    try:
        loss.backward()
    except RuntimeError as error:
        assert may_be_refused and "modified by an inplace operation" in str(error)
    else:
        assert_equal_all(gradients_of(net), expected)
    assert_casts_are_fresh(net, seed=1)


# ---- two networks against each other ---------------------------------------------------------------------------------


def train_adversaries(*, uses_amp: bool) -> list[Tensor]:
    """G's graph is alive while D takes a step of its own."""
    generator, discriminator = Net(seed=1), Net(seed=2)
    of_g = torch.optim.Adam(generator.parameters(), lr=0.05, fused=True)
    of_d = torch.optim.Adam(discriminator.parameters(), lr=0.05, fused=True)
    if uses_amp:
        start_amp([generator, discriminator], [of_g, of_d], num_losses=2)
    generate = generator if uses_amp else lambda x: by_hand(generator, x)
    judge = discriminator if uses_amp else lambda x: by_hand(discriminator, x)

    def step(loss: Tensor, optimizer: Optimizer, loss_id: int) -> None:
        optimizer.zero_grad()
        if uses_amp:
            with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()

    for index in range(4):
        fake = generate(batch(index))
        step(loss_of(judge(fake.detach())), of_d, 0)
        generate(batch(20 + index))  # another forward of G while the first graph waits
        step(-loss_of(judge(fake)), of_g, 1)
    trained = [*generator.parameters(), *discriminator.parameters()]
    amp.reset()
    return trained


def test_a_generator_s_graph_outlives_the_discriminator_s_step() -> None:
    assert_equal_all(train_adversaries(uses_amp=True), train_adversaries(uses_amp=False))


# ---- threads, transforms ---------------------------------------------------------------------------------------------


def test_two_threads_in_forward_at_once_get_what_each_gets_alone(net: Net) -> None:
    rounds = 20
    with amp.disable_casts():
        expected = [
            torch.autograd.grad(loss_of(by_hand(net, batch(seed))), list(net.parameters())) for seed in range(2)
        ]
    results: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    barrier = threading.Barrier(2, action=amp.refresh, timeout=60)  # no entry is valid when both start

    def run(seed: int) -> None:
        for index in range(rounds):
            barrier.wait()
            results[seed, index] = torch.autograd.grad(loss_of(net(batch(seed))), list(net.parameters()))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == 2 * rounds
    for (seed, _), gradients in results.items():
        assert_equal_all(list(gradients), list(expected[seed]))


TRANSFORMS: dict[str, Callable[[Net], Any]] = {
    "grad": lambda net: torch.func.grad(lambda x: loss_of(net(x)))(batch()),
    "jvp": lambda net: torch.func.jvp(net, (batch(),), (batch(1),)),
    "vmap": lambda net: torch.vmap(net)(batch()),
    "functional_call": lambda net: torch.func.functional_call(net, {"first.bias": torch.zeros(SIZE)}, (batch(),)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=list(TRANSFORMS))
def test_a_function_transform_leaves_copies_that_train(net: Net, transform: Callable[[Net], Any]) -> None:
    transform(net)
    assert_casts_are_fresh(net)
    transform(net)
    assert_casts_are_fresh(net)


# ---- which tensors have a copy, and for how long ---------------------------------------------------------------------


@amp.half_function
def low_argument(tensor: Tensor) -> Tensor:
    return tensor


def low_copy_of(tensor: Tensor) -> Tensor:
    """What a whitelisted op is given for `tensor`; where products are computed in float32, what a product is given."""
    if compute == "native":
        return low_argument(tensor)
    casts = current.require().casts
    assert casts is not None and casts.in_float32 is not None
    return casts.in_float32.to_operand(tensor)


def test_a_parameter_of_a_bound_optimizer_is_cached_and_keeps_its_copy(net: Net) -> None:
    copies = [low_copy_of(parameter) for parameter in net.parameters()]
    assert all(held.dtype is (LOW if compute == "native" else torch.float32) for held in copies)
    assert all(torch.equal(held.to(LOW), value.to(LOW)) for value, held in zip(net.parameters(), copies, strict=True))
    assert all(low_copy_of(parameter) is held for parameter, held in zip(net.parameters(), copies, strict=True))


def test_any_other_tensor_is_cast_at_each_use(net: Net) -> None:
    weight = net.second.weight
    unowned = nn.Parameter(torch.ones(2))
    for tensor in (torch.ones(2), unowned, weight * 2, weight.t(), weight.detach()):
        assert low_copy_of(tensor) is not low_copy_of(tensor)
        assert torch.equal(low_copy_of(tensor), tensor.to(LOW).to(low_copy_of(tensor).dtype))


def test_the_copies_are_freed_with_their_optimizer_and_the_model_after_it() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    start_amp(net, optimizer)
    loss_of(net(batch())).backward()
    copies = [weakref.ref(low_copy_of(parameter)) for parameter in net.parameters()]
    gc.collect()
    assert all(copy_() is not None for copy_ in copies)
    del optimizer
    gc.collect()
    assert all(copy_() is None for copy_ in copies)
    assert low_copy_of(net.first.weight) is not low_copy_of(net.first.weight)
    held = [weakref.ref(net), *(weakref.ref(parameter) for parameter in net.parameters())]
    del net
    gc.collect()
    assert [reference() for reference in held] == [None] * 6


def test_a_parameter_of_two_optimizers_keeps_its_copy_while_one_lives() -> None:
    net = Net()
    first, second = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(net.second.parameters(), lr=0.1)
    start_amp(net, [first, second])
    shared, alone = weakref.ref(low_copy_of(net.second.weight)), weakref.ref(low_copy_of(net.first.weight))
    del first
    gc.collect()
    assert shared() is low_copy_of(net.second.weight)
    assert alone() is None
