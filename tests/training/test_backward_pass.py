"""A backward pass answers for the overflow that it added and for its own block, and an interrupt in the middle of it
can be made good.

Guards: training/overflow_flags, training/gradient_sums, training/scale_loss, interrupts.
"""

import math
import os
import sys
import warnings

import pytest
import torch
from devices import requires_cpu
from interrupt_tracer import choose, count_lines, interrupted_at
from torch import nn
from torch_state import find_changes
from training import backward

import amp_patch as amp

DYNAMIC = {"loss_scale": "dynamic", "max_loss_scale": 1024.0, "verbosity": 0}  # float16 gradients stay finite


def loss_of(model, factor=1.0):
    """A loss whose gradient is `factor` in each weight."""
    return model.weight.float().sum() * factor


# ---- an overflow is judged on what its own pass added ----------------------------------------------------------------


def two_optimizers(level):
    torch.manual_seed(0)
    models = [nn.Linear(2, 2, bias=False) for _ in range(3)]
    optimizers = [
        torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=1.0),
        torch.optim.SGD(models[2].parameters(), lr=1.0),
    ]
    amp.initialize(models, optimizers, opt_level=level, num_losses=2, **DYNAMIC)
    return models, optimizers


def step_all(optimizers):
    """Step, and return which steps were skipped."""
    for optimizer in optimizers:
        optimizer.step()
    return [optimizer.step_was_skipped for optimizer in optimizers]


def loss_scales():
    return [entry["loss_scale"] for entry in amp.state_dict().values()]


@pytest.mark.parametrize(
    ("level", "bad", "loss_ids", "scales"),
    [("O0", math.inf, (0, 1), [512.0, 1024.0]), ("O2", math.nan, (0, 0), [512.0, 1024.0])],
    ids=["two scalers", "one scaler"],
)
def test_an_overflow_skips_only_the_optimizers_that_were_passed_with_its_loss(level, bad, loss_ids, scales):
    (m0, m1, m2), (first, second) = two_optimizers(level)
    before = [master.clone() for optimizer in (first, second) for master in amp.master_params(optimizer)]
    backward(loss_of(m0, bad) + loss_of(m1), first, loss_id=loss_ids[0])
    backward(loss_of(m1) + loss_of(m2), [first, second], loss_id=loss_ids[1])
    assert step_all((first, second)) == [True, False]
    after = [master for optimizer in (first, second) for master in amp.master_params(optimizer)]
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert torch.equal(after[2], before[2] - 1.0)
    assert loss_scales() == scales


def test_an_overflow_over_an_overflow_does_not_count():
    """In a sum that is infinite already, the later one cannot be told: the step that takes the sum is skipped."""
    (m0, _, m2), (first, second) = two_optimizers("O1")
    backward(loss_of(m0, math.inf), first, loss_id=0)
    backward(loss_of(m0, math.inf) + loss_of(m2), [first, second], loss_id=1)
    assert step_all((first, second)) == [True, False]
    assert torch.isfinite(m2.weight).all()
    assert loss_scales() == [512.0, 1024.0]


@pytest.mark.parametrize("is_zeroed", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_left_by_a_pass_for_another_optimizer_counts_for_the_next_pass_unless_it_is_zeroed(
    level, is_zeroed
):
    (m0, _, m2), (first, second) = two_optimizers(level)
    backward(loss_of(m0) + loss_of(m2, math.inf), first)
    first.step()
    if is_zeroed:
        second.zero_grad()
    backward(loss_of(m2), second)
    second.step()
    assert (first.step_was_skipped, second.step_was_skipped) == (False, not is_zeroed)


@pytest.mark.parametrize("factors", [(math.inf, 1.0), (1.0, math.inf)], ids=["first", "last"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_left_by_any_of_several_passes_for_another_optimizer_counts(level, factors):
    (m0, _, m2), (first, second) = two_optimizers(level)
    for factor in factors:
        backward(loss_of(m0) + loss_of(m2, factor), first)
    first.step()
    backward(loss_of(m2), second)
    second.step()
    assert torch.isfinite(m2.weight).all()
    assert (first.step_was_skipped, second.step_was_skipped) == (False, True)


@pytest.mark.parametrize(
    "sparse", [False, pytest.param(True, marks=requires_cpu("the simulated device has no sparse tensors"))]
)
def test_sums_of_losses_for_different_optimizers_are_sums(sparse):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Embedding(5, 3, sparse=sparse), nn.Linear(3, 1)])
    first = torch.optim.SGD(model.parameters(), lr=1.0)
    second = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the second optimizer has no parameter of the model
        amp.initialize(model, [first, second], opt_level="O1", loss_scale=64.0, verbosity=0)
    table = model[0]
    held = []
    for passed, row in (([first], 1), ([first, second], 2), ([first], 1)):
        backward(table(torch.tensor([row])).sum(), passed)
        held.append(table.weight.grad)
    expected = torch.zeros(5, 3)
    expected[1], expected[2] = 2.0, 1.0
    found = table.weight.grad.to_dense() if sparse else table.weight.grad
    assert torch.equal(found, expected)
    assert sparse or all(gradient is held[0] for gradient in held)  # who holds a gradient sees it change


# ---- the block -------------------------------------------------------------------------------------------------------


def test_nothing_is_reset_or_initialized_inside_a_block():
    model, other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O5", **DYNAMIC)
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        for call in (
            amp.reset,
            lambda: amp.initialize(model, optimizer, opt_level="O0", replace=True, verbosity=0),
            lambda: amp.initialize(other, torch.optim.SGD(other.parameters(), lr=0.1), opt_level="O5", **DYNAMIC),
        ):
            with pytest.raises(amp.SessionError, match="leave it before"):
                call()
        scaled.backward()
    assert [master.grad.item() for master in amp.master_params(optimizer)] == [1.0]
    assert other.weight.dtype is torch.float32


def test_an_overflow_in_a_block_that_never_ends_skips_the_step():
    model = nn.Linear(3, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", **DYNAMIC)
    block = amp.scale_loss(loss_of(model, math.inf), optimizer)
    block.__enter__().backward()
    del block
    optimizer.step()
    assert optimizer.step_was_skipped and loss_scales() == [512.0]


# ---- an interrupt at any line ----------------------------------------------------------------------------------------

INTERRUPTS = int(os.environ.get("AMP_PATCH_INTERRUPTS", "50"))  # at each level


class Run:
    """A model under a level, the same in float64 by hand, and one iteration of training."""

    def __init__(self, level, loss_scale):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25)
        self.level, self.loss_scale = level, loss_scale
        self.inputs = torch.tensor([[1.0, 2.0, 4.0], [0.5, 1.0, -1.0]])
        self.initialize()

    def initialize(self):
        options = {**DYNAMIC, "loss_scale": self.loss_scale}
        amp.initialize(self.model, self.optimizer, opt_level=self.level, **options)

    def iterate(self, micro_batches=2):
        for index in range(micro_batches):
            loss = self.model(self.inputs).float().sum()
            backward(loss, self.optimizer, delay_unscale=index + 1 < micro_batches)
        self.optimizer.step()

    def sums(self):
        """The gradients of one micro-batch: the sum is linear, so they are the same at all weights."""
        return [self.inputs.sum(0).expand(2, 3), torch.full((2,), 2.0)]

    def check_reset(self):
        """After an interrupt: `reset` leaves nothing behind, and gradients, where there are any, are true sums."""
        amp.reset()
        assert find_changes() == []
        assert "step" not in vars(self.optimizer)
        assert all(parameter.dtype is torch.float32 for parameter in self.model.parameters())
        assert list(self.model.parameters()) == self.optimizer.param_groups[0]["params"]
        for parameter, one in zip(self.model.parameters(), self.sums(), strict=True):
            if parameter.grad is not None:
                multiple = parameter.grad / one
                assert bool((multiple == multiple.flatten()[0].round()).all()), multiple
                assert 0 <= multiple.flatten()[0] <= 2

    def check_next_iteration(self):
        """The next session trains."""
        self.initialize()
        self.optimizer.zero_grad()
        masters = list(amp.master_params(self.optimizer))
        before = [master.detach().clone() for master in masters]
        backward(self.model(self.inputs).float().sum(), self.optimizer)
        self.optimizer.step()
        assert self.optimizer.step_was_skipped is False
        for master, old, gradient in zip(masters, before, self.sums(), strict=True):
            assert torch.equal(master, old - 0.25 * gradient)
        for parameter, master in zip(self.model.parameters(), masters, strict=True):
            assert torch.equal(parameter.detach(), master.detach().to(parameter.dtype))
        session = sys.modules["amp_patch.session.current"].state.session
        assert session.switch.regions == 0 and session.switch._local.regions == []


SWEEP = [("O1", "dynamic"), ("O2", "dynamic"), ("O4", 1.0), ("O5", 1.0), ("O5", 256.0)]


@pytest.mark.parametrize(("level", "loss_scale"), SWEEP)
def test_reset_makes_an_interrupt_at_any_line_of_a_block_or_a_step_good(level, loss_scale):
    run = Run(level, loss_scale)
    run.iterate()
    places = count_lines(run.iterate)
    assert places > 100
    caught = 0
    for position in choose(places, INTERRUPTS, seed=f"{level} {loss_scale}"):
        run.optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gradients that were dropped
            caught += interrupted_at(position, run.iterate)
            run.check_reset()
            run.check_next_iteration()
    assert caught >= 0.9 * min(places, INTERRUPTS)  # some are raised where the interpreter ignores what is raised
    amp.reset()
    assert find_changes() == []


# ---- 16-bit, sparse and shared gradients, and sums made by hand ------------------------------------------------------


def test_a_delayed_16_bit_gradient_does_not_underflow_under_a_smaller_scale():
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O2", num_losses=2, loss_scale="dynamic", verbosity=0)
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": (65536.0, 1.0)[i], "unskipped": 0} for i in range(2)})
    backward(loss_of(model, 2.0**-26), optimizer, loss_id=0, delay_unscale=True)
    backward(loss_of(model, 0.0), optimizer, loss_id=1)
    assert next(amp.master_params(optimizer)).grad.item() == 2.0**-26


@requires_cpu("the simulated device has no sparse tensors")
def test_sparse_sums_keep_their_dtype():
    table = nn.Embedding(3, 1, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    options = {**DYNAMIC, "num_losses": 2, "cast_model_type": torch.bfloat16}
    amp.initialize(table, optimizer, opt_level="O3", **options)
    for loss_id, factor in ((0, math.inf), (1, 1.0)):
        backward(table(torch.tensor([1])).sum() * factor, optimizer, loss_id=loss_id)
    assert table.weight.grad.dtype is torch.bfloat16
    optimizer.step()
    assert optimizer.step_was_skipped and loss_scales() == [512.0, 1024.0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_second_overflow_in_a_shared_parameter_skips_again(level):
    """The first optimizer accumulates: in its sums the second overflow is none that counts. The other's are zeroed."""
    own, shared = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    first = torch.optim.SGD([own.weight, shared.weight], lr=0.5)
    second = torch.optim.SGD([shared.weight], lr=0.5)
    amp.initialize([own, shared], [first, second], opt_level=level, loss_scale="dynamic", verbosity=0)
    for _ in range(3):
        second.zero_grad()
        backward(loss_of(own, math.inf) + loss_of(shared, math.inf), [first, second])
        second.step()
        assert second.step_was_skipped
    assert torch.isfinite(shared.weight).all()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_counts_for_every_optimizer_that_shares_a_parameter(level):
    own, shared = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    first = torch.optim.SGD([own.weight, shared.weight], lr=0.5)
    second = torch.optim.SGD([shared.weight], lr=0.5)
    amp.initialize([own, shared], [first, second], opt_level=level, **DYNAMIC)
    backward(loss_of(own) + loss_of(shared, math.inf), first)
    assert step_all((second, first)) == [True, True]
    assert torch.isfinite(shared.weight).all()


def test_a_shared_gradient_ends_with_the_last_step_on_it():
    """As those of other masters do: the next pass is not added to an overflow whose steps were skipped."""
    model = nn.Linear(2, 2, bias=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for _ in range(2)]
    amp.initialize(model, optimizers, opt_level="O2", **DYNAMIC)
    for factor, is_skip in ((math.inf, True), (1.0, False), (1.0, False)):
        backward(loss_of(model, factor), optimizers)
        for optimizer in optimizers:
            optimizer.step()
            assert optimizer.step_was_skipped is is_skip
        assert torch.isfinite(model.weight).all()
        assert all(master.grad is None for master in amp.master_params(optimizers[0]))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_put_together_by_hand_are_looked_at(level):
    """Gradient surgery: each task's gradients are kept and zeroed, their sum is stepped on."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, **DYNAMIC)
    for factors, is_skip in (((math.inf, 1.0), True), ((1.0, 1.0), False), ((1.0, math.nan), True)):
        kept = []
        for factor in factors:
            optimizer.zero_grad()
            backward(loss_of(model, factor), optimizer)
            kept.append([master.grad.clone() for master in amp.master_params(optimizer)])
        for master, *gradients in zip(amp.master_params(optimizer), *kept, strict=True):
            master.grad = sum(gradients)
        optimizer.step()
        assert optimizer.step_was_skipped is is_skip
    assert torch.isfinite(model.weight).all() and loss_scales() == [256.0]
