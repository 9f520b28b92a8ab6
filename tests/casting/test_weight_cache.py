"""The cache changes only the number of casts: whatever happens to the weights, outputs and gradients are, to the bit,
those of a model that casts its weights afresh in each forward pass.
"""

import copy
import gc
import importlib
import math
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import amp_patch as amp
from amp_patch.casting import products, weight_cache, wrappers
from amp_patch.casting.mode import Switch
from amp_patch.casting.products import Products
from amp_patch.casting.tensor_cast import make_plain_cast
from amp_patch.casting.weight_cache import WeightCache
from amp_patch.casting.wrappers import OpCasts
from amp_patch.config.products import is_product
from amp_patch.multi_tensor import copy_
from amp_patch.session import current

LOW = torch.bfloat16

with (
    warnings.catch_warnings()
):  # torch scripts functions, with a warning for each, when this is first imported; that fails under patches
    warnings.simplefilter("ignore")
    importlib.import_module("torch._decomp.decompositions_for_jvp")


# ---- models, written twice: as a user writes them, and with the casts by hand ----------------------------------------


class Net(nn.Module):
    """linear, relu, linear; the second weight is needed by the backward pass of the first."""

    def __init__(self, seed: int = 0, inputs: int = 6, outputs: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first, self.second = nn.Linear(inputs, 8), nn.Linear(8, outputs)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.first.weight, self.first.bias).relu(), self.second.weight, self.second.bias)


compute = "native"  # how products are computed in the test that runs


def product_by_hand(op: Callable[..., Tensor], *operands: Tensor, **how: Any) -> Tensor:
    """A product with its operands cast afresh."""
    low = [value.to(LOW) for value in operands]
    return op(*low, **how) if compute == "native" else op(*[value.float() for value in low], **how).to(LOW)


def by_hand(net: Net, x: Tensor) -> Tensor:
    """`net(x)` with the weights cast afresh."""
    hidden = product_by_hand(F.linear, x, net.first.weight, net.first.bias).relu()
    return product_by_hand(F.linear, hidden, net.second.weight, net.second.bias)


def start_amp(models: Any, optimizers: Any, **options: Any) -> None:
    amp.initialize(models, optimizers, opt_level="O4", compute=compute, verbosity=0, **options)


def batch(seed: int = 0, size: int = 5, width: int = 6) -> Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(100 + seed))


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

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD-loop": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False),
    "AdamW-foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, foreach=True),
    "Adam-fused": lambda parameters: torch.optim.Adam(parameters, lr=0.05, fused=True),
    "Adagrad-fused": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, fused=True),
}


@pytest.mark.parametrize(
    ("name", "uses_scale_loss"),
    [*((name, True) for name in OPTIMIZERS), ("SGD-loop", False), ("Adam-fused", False)],
)
def test_ten_steps_are_bitwise_those_of_fresh_casts(name: str, uses_scale_loss: bool) -> None:
    net, reference = Net(), Net()
    start = copy.deepcopy(list(net.parameters()))
    optimizer, expected = [OPTIMIZERS[name](model.parameters()) for model in (net, reference)]
    losses = []
    for step in range(10):
        expected.zero_grad()
        loss = loss_of(by_hand(reference, batch(step)))
        losses.append(loss.item())
        loss.backward()
        expected.step()
    assert math.isfinite(losses[-1])
    start_amp(net, optimizer)
    for step in range(10):
        optimizer.zero_grad()
        loss = loss_of(net(batch(step)))
        assert loss.item() == losses[step]
        if uses_scale_loss:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()
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
        for module in (wrappers, products):
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
        [(4, 0, 0), (4, 4, 1), (4, 8, 2), (4, 12, 3)]
        if is_refreshed
        else [(4, 0, 0), (8, 0, 0), (12, 0, 0), (16, 0, 0)]
    )


def test_accumulating_without_scale_loss_exits_casts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    counter = CastCounter(net, monkeypatch)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    start_amp(net, optimizer)
    for index in range(3):
        loss_of(net(batch(index))).backward()
    assert (counter.single, counter.together) == (4, 0)


def test_the_counter_sees_fresh_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    counter = CastCounter(net, monkeypatch)
    start_amp(net, None)  # weights of no optimizer are cast at each use
    for _ in range(3):
        net(batch())
    assert counter.single == 12


# ---- edits of the weights: see test_weight_edits ---------------------------------------------------------------------


def test_the_check_sees_an_edit_that_nobody_was_told_of(net: Net) -> None:
    net(batch())
    net.second.weight.data.mul_(2)
    with pytest.raises(AssertionError):
        assert_casts_are_fresh(net)


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


def test_backward_twice_through_a_retained_graph_adds_up(net: Net) -> None:
    loss = loss_of(net(batch()))
    loss.backward(retain_graph=True)
    loss.backward()
    gradients = gradients_of(net)
    with amp.disable_casts():
        for _ in range(2):
            loss_of(by_hand(net, batch())).backward()
    assert_equal_all(gradients, gradients_of(net))


def test_a_graph_that_is_alive_while_the_weights_are_replaced_gives_the_old_weights_gradients(net: Net) -> None:
    with amp.disable_casts():
        loss_of(by_hand(net, batch())).backward()
    expected = gradients_of(net)
    loss = loss_of(net(batch()))
    net.second.weight.data = net.second.weight.data * 2
    assert_casts_are_fresh(net, seed=1)
    loss.backward()
    assert_equal_all(gradients_of(net), expected)


@pytest.mark.parametrize(
    "mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__
)
@pytest.mark.parametrize("is_step", [True, False], ids=["fused-step", "in-place"])
def test_a_graph_that_is_alive_while_the_weights_change_in_place_is_right_or_refused(
    net: Net, is_step: bool, mode: Callable[[], Any]
) -> None:
    with amp.disable_casts():
        loss_of(by_hand(net, batch())).backward()
    expected = gradients_of(net)
    loss_of(net(batch(2))).backward()
    loss = loss_of(net(batch()))
    if is_step:
        torch.optim.Adam(net.parameters(), lr=0.1, fused=True).step()
    else:
        with torch.no_grad():
            net.second.weight.mul_(2)
            net.first.bias.add_(1)
    net.zero_grad()
    with mode():
        net(batch(1))  # whatever this does to the copies, the old graph may not use the new values
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert_equal_all(gradients_of(net), expected)


OPS: list[tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = [
    (F.linear, (3, 4), (3, 4)),
    (torch.matmul, (3, 4), (4, 3)),
    (torch.mm, (3, 4), (4, 3)),
    (torch.matmul, (3, 4), (4,)),
    (torch.bmm, (2, 3, 4), (2, 4, 3)),
    (F.conv1d, (1, 2, 5), (2, 2, 3)),
    (F.conv2d, (1, 2, 5, 5), (2, 2, 3, 3)),
    (F.conv_transpose2d, (1, 2, 5, 5), (2, 2, 3, 3)),
    (F.prelu, (3, 4), (4,)),
]


def invalidates(cache: WeightCache, _: nn.Parameter) -> None:
    cache.invalidate_all()


def invalidates_by_a_step_without_a_gradient(cache: WeightCache, parameter: nn.Parameter) -> None:
    cache.mark_updated([parameter])


@pytest.mark.parametrize("invalidate", [invalidates, invalidates_by_a_step_without_a_gradient])
def test_a_live_graph_outlives_an_invalidation_of_weights_that_did_not_change(
    invalidate: Callable[[WeightCache, nn.Parameter], None],
) -> None:
    for op, input_shape, weight_shape in OPS:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(input_shape, generator=generator).requires_grad_()
        weight = nn.Parameter(torch.randn(weight_shape, generator=generator))
        cache, switch = WeightCache(LOW, "cpu", is_rounded=compute == "float32"), Switch()
        cache.own([weight])
        switch.turn_on()
        if compute == "float32":
            products = Products(LOW, "cpu", cache)
            products.switch.turn_on()
            replacement = OpCasts(switch, LOW, "cpu", cache, products).wrap("whitelist", op)
        else:
            replacement = OpCasts(switch, LOW, "cpu", cache).wrap("whitelist", op)
        by_hand = product_by_hand(op, x, weight) if is_product(op.__name__) else op(x.to(LOW), weight.to(LOW))
        expected = torch.autograd.grad(loss_of(by_hand), (x, weight))
        loss = loss_of(replacement(x, weight))
        invalidate(cache, weight)
        later = loss_of(replacement(x, weight))
        assert_equal_all(list(torch.autograd.grad(loss, (x, weight))), list(expected))
        assert_equal_all(list(torch.autograd.grad(later, (x, weight))), list(expected))


# ---- two networks against each other ---------------------------------------------------------------------------------


class ConvGenerator(nn.Module):
    """Two convolutions: the second weight itself is what the graph saves."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.second = nn.Conv1d(1, 2, 3, padding=1), nn.Conv1d(2, 1, 3, padding=1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x[:, None]).relu())[:, 0]


def generate_by_hand(net: nn.Module, x: Tensor) -> Tensor:
    if isinstance(net, ConvGenerator):
        hidden = product_by_hand(F.conv1d, x[:, None], net.first.weight, net.first.bias, padding=1).relu()
        return product_by_hand(F.conv1d, hidden, net.second.weight, net.second.bias, padding=1)[:, 0]
    return by_hand(net, x)


def train_adversaries(make_generator: Callable[[], nn.Module], *, uses_amp: bool) -> list[Tensor]:
    """G's graph is alive while D takes a step of its own."""
    generator, discriminator = make_generator(), Net(seed=2)
    of_g = torch.optim.Adam(generator.parameters(), lr=0.05, fused=True)
    of_d = torch.optim.Adam(discriminator.parameters(), lr=0.05, fused=True)
    if uses_amp:
        start_amp([generator, discriminator], [of_g, of_d], num_losses=2)
    generate = generator if uses_amp else lambda x: generate_by_hand(generator, x)
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


@pytest.mark.parametrize("make_generator", [lambda: Net(seed=1, outputs=6), ConvGenerator], ids=["linear", "conv"])
def test_a_generator_s_graph_outlives_the_discriminator_s_step(make_generator: Callable[[], nn.Module]) -> None:
    assert_equal_all(
        train_adversaries(make_generator, uses_amp=True), train_adversaries(make_generator, uses_amp=False)
    )


# ---- threads, checkpoints, transforms --------------------------------------------------------------------------------


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


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_a_checkpoint_imported_by_name_trains_like_fresh_casts(use_reentrant: bool) -> None:
    net, reference = Net(), Net()
    optimizer, expected = (torch.optim.Adam(model.parameters(), lr=0.05, fused=True) for model in (net, reference))
    inputs = []
    for step in range(4):
        expected.zero_grad()
        inputs.append(batch(step).requires_grad_())
        loss_of(by_hand(reference, inputs[-1])).backward()
        expected.step()
    start_amp(net, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        x = batch(step).requires_grad_()
        loss = loss_of(checkpoint(net, x, use_reentrant=use_reentrant))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert torch.equal(x.grad, inputs[step].grad)
    assert_equal_all(list(net.parameters()), list(reference.parameters()))


TRANSFORMS: dict[str, Callable[[Net], Any]] = {
    "grad": lambda net: torch.func.grad(lambda x: loss_of(net(x)))(batch()),
    "jvp": lambda net: torch.func.jvp(net, (batch(),), (batch(1),)),
    "vmap": lambda net: torch.vmap(net)(batch()),
    "functional_call": lambda net: torch.func.functional_call(net, {"first.bias": torch.zeros(8)}, (batch(),)),
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


def test_the_copies_are_freed_with_their_optimizer() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    start_amp(net, optimizer)
    copies = [weakref.ref(low_copy_of(parameter)) for parameter in net.parameters()]
    gc.collect()
    assert all(copy_() is not None for copy_ in copies)
    del optimizer
    gc.collect()
    assert all(copy_() is None for copy_ in copies)
    assert low_copy_of(net.first.weight) is not low_copy_of(net.first.weight)


def test_a_parameter_of_two_optimizers_keeps_its_copy_while_one_lives() -> None:
    net = Net()
    first, second = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(net.second.parameters(), lr=0.1)
    start_amp(net, [first, second])
    shared, alone = weakref.ref(low_copy_of(net.second.weight)), weakref.ref(low_copy_of(net.first.weight))
    del first
    gc.collect()
    assert shared() is low_copy_of(net.second.weight)
    assert alone() is None


def test_reset_frees_the_copies(net: Net) -> None:
    copies = [weakref.ref(low_copy_of(parameter)) for parameter in net.parameters()]
    amp.reset()
    gc.collect()
    assert all(copy_() is None for copy_ in copies)


def test_the_model_can_be_freed_with_its_optimizer() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    start_amp(net, optimizer)
    loss_of(net(batch())).backward()
    held = [weakref.ref(net), *(weakref.ref(parameter) for parameter in net.parameters())]
    del net, optimizer
    for _ in range(2):  # the first tells amp that the optimizer is gone, the second takes what amp kept for it
        gc.collect()
    assert [reference() for reference in held] == [None] * 5
