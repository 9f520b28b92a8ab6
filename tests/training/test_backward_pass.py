"""What a backward pass answers for: the overflow that it added, its own block, and an interrupt in the middle of it."""

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

import amp_patch as amp


def make(level, seed=0, models=1, **options):
    torch.manual_seed(seed)
    nets = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)) for _ in range(models)]
    options = {"loss_scale": "dynamic", "max_loss_scale": 1024.0, **options}  # float16 gradients stay finite
    return nets, options


def plain(index, bad=None):
    """A loss that reaches one weight of a model, with a gradient of `bad` where it is given."""
    return index.weight.float().sum() * (1.0 if bad is None else bad)


# ---- an overflow is judged on what its own pass added ----------------------------------------------------------------


def two_optimizers(level, num_losses=1, **options):
    torch.manual_seed(0)
    models = [nn.Linear(2, 2, bias=False) for _ in range(3)]
    optimizers = [
        torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=1.0),
        torch.optim.SGD(models[2].parameters(), lr=1.0),
    ]
    options = {"loss_scale": "dynamic", "max_loss_scale": 1024.0, "num_losses": num_losses, **options}
    amp.initialize(models, optimizers, opt_level=level, verbosity=0, **options)
    return models, optimizers


@pytest.mark.parametrize("loss_ids", [(0, 0), (0, 1)], ids=["one scaler", "two scalers"])
@pytest.mark.parametrize(("level", "bad"), [("O0", math.inf), ("O2", math.nan)])
def test_an_overflow_skips_only_the_optimizers_that_were_passed_with_its_loss(level, loss_ids, bad):
    (m0, m1, m2), (first, second) = two_optimizers(level, num_losses=2)
    before = [master.clone() for optimizer in (first, second) for master in amp.master_params(optimizer)]
    with amp.scale_loss(plain(m0, bad) + plain(m1), first, loss_id=loss_ids[0]) as scaled:
        scaled.backward()
    with amp.scale_loss(plain(m1) + plain(m2), [first, second], loss_id=loss_ids[1]) as scaled:
        scaled.backward()
    first.step()
    second.step()
    assert (first.step_was_skipped, second.step_was_skipped) == (True, False)
    after = [master for optimizer in (first, second) for master in amp.master_params(optimizer)]
    assert [torch.equal(one, other) for one, other in zip(before, after, strict=True)] == [True, True, False]
    assert torch.equal(after[2], before[2] - 1.0)
    expected = [512.0, 1024.0] if loss_ids == (0, 1) else [512.0]
    assert [entry["loss_scale"] for entry in amp.state_dict().values()][: len(expected)] == expected


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_of_the_later_loss_skips_both(level):
    (m0, m1, m2), (first, second) = two_optimizers(level)
    with amp.scale_loss(plain(m0), first) as scaled:
        scaled.backward()
    with amp.scale_loss(plain(m1, math.inf) + plain(m2), [first, second]) as scaled:
        scaled.backward()
    first.step()
    second.step()
    assert first.step_was_skipped and second.step_was_skipped


def test_an_overflow_over_an_overflow_does_not_count():
    """In a sum that is infinite already, the later one cannot be told: the step that takes the sum is skipped."""
    (m0, _, m2), (first, second) = two_optimizers("O1", num_losses=2)
    with amp.scale_loss(plain(m0, math.inf), first, loss_id=0) as scaled:
        scaled.backward()
    with amp.scale_loss(plain(m0, math.inf) + plain(m2), [first, second], loss_id=1) as scaled:
        scaled.backward()
    first.step()
    second.step()
    assert first.step_was_skipped and not second.step_was_skipped
    assert torch.isfinite(m2.weight).all()
    assert [entry["loss_scale"] for entry in amp.state_dict().values()] == [512.0, 1024.0]


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_an_overflow_before_an_inner_block_of_another_optimizer_counts(level):
    (m0, _, m2), (first, second) = two_optimizers(level)
    with amp.scale_loss(plain(m0, math.inf), first) as scaled:
        scaled.backward()
        with amp.scale_loss(plain(m2), second) as inner:
            inner.backward()
    first.step()
    second.step()
    assert (first.step_was_skipped, second.step_was_skipped) == (True, False)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 512.0


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_an_overflow_left_by_a_pass_for_another_optimizer_counts_for_the_next_pass(level):
    (m0, _, m2), (first, second) = two_optimizers(level)
    with amp.scale_loss(plain(m0) + plain(m2, math.inf), first) as scaled:
        scaled.backward()
    first.step()
    with amp.scale_loss(plain(m2), second) as scaled:
        scaled.backward()
    second.step()
    assert (first.step_was_skipped, second.step_was_skipped) == (False, True)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_an_overflow_left_by_a_pass_for_another_optimizer_ends_when_it_is_zeroed(level):
    (m0, _, m2), (first, second) = two_optimizers(level)
    with amp.scale_loss(plain(m0) + plain(m2, math.inf), first) as scaled:
        scaled.backward()
    second.zero_grad()
    with amp.scale_loss(plain(m2), second) as scaled:
        scaled.backward()
    second.step()
    assert not second.step_was_skipped


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
        with amp.scale_loss(table(torch.tensor([row])).sum(), passed) as scaled:
            scaled.backward()
        held.append(table.weight.grad)
    expected = torch.zeros(5, 3)
    expected[1], expected[2] = 2.0, 1.0
    found = table.weight.grad.to_dense() if sparse else table.weight.grad
    assert torch.equal(found, expected)
    assert sparse or all(gradient is held[0] for gradient in held)  # who holds a gradient sees it change


# ---- the block -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_reset_inside_a_block_is_refused_and_changes_nothing(level):
    (model,), options = make(level)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    patched = amp.stats().names_patched
    with amp.scale_loss(model(torch.ones(3, 4)).float().sum(), optimizer) as scaled:
        with pytest.raises(amp.SessionError, match="leave it before"):
            amp.reset()
        with pytest.raises(amp.SessionError, match="leave it before"):
            amp.initialize(model, optimizer, opt_level="O0", replace=True, verbosity=0)
        scaled.backward()
    assert amp.stats().names_patched == patched
    largest = max(float(p.grad.abs().max()) for p in amp.master_params(optimizer) if p.grad is not None)
    assert largest < 1000
    optimizer.step()
    amp.reset()
    assert find_changes() == []


def test_reset_in_a_backward_hook_is_refused():
    (model,), options = make("O1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, **options)
    handle = model[0].weight.register_hook(lambda gradient: amp.reset())
    block = amp.scale_loss(model(torch.ones(3, 4)).float().sum(), optimizer)
    with pytest.raises(amp.SessionError, match="leave it before"), block as scaled:
        scaled.backward()
    handle.remove()
    amp.reset()
    assert find_changes() == []


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
        options = {"loss_scale": self.loss_scale, "max_loss_scale": 1024.0}  # float16 gradients stay finite
        amp.initialize(self.model, self.optimizer, opt_level=self.level, verbosity=0, **options)

    def iterate(self, micro_batches=2):
        for index in range(micro_batches):
            loss = self.model(self.inputs).float().sum()
            with amp.scale_loss(loss, self.optimizer, delay_unscale=index + 1 < micro_batches) as scaled:
                scaled.backward()
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
        with amp.scale_loss(self.model(self.inputs).float().sum(), self.optimizer) as scaled:
            scaled.backward()
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


# ---- sums, scales and other models in between ------------------------------------------------------------------------


def one_weight(level="O0", models=1, **options):
    models = [nn.Linear(1, 1, bias=False) for _ in range(models)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    options = {"loss_scale": "dynamic", "num_losses": 2, **options}
    amp.initialize(models, optimizers, opt_level=level, verbosity=0, **options)
    return models, optimizers


def backward(model, factor, optimizers, loss_id=0, **options):
    with amp.scale_loss(model.weight.float().sum() * factor, optimizers, loss_id=loss_id, **options) as scaled:
        scaled.backward()


@pytest.mark.parametrize("how", ["none", "zero_"])
def test_sums_zeroed_by_hand_inside_a_block_stay_zeroed(how):
    (model,), (optimizer,) = one_weight()
    backward(model, 1.0, optimizer, loss_id=0)
    with amp.scale_loss(model.weight.sum() * 2.0, optimizer, loss_id=1) as scaled:
        if how == "none":
            model.weight.grad = None
        else:
            model.weight.grad.zero_()
        scaled.backward()
    assert model.weight.grad.item() == 2.0


def test_one_overflow_halves_the_scale_once_whoever_steps_in_between():
    (first, second), (one, two) = one_weight(models=2)
    backward(first, 1e36, one)
    backward(second, 1.0, two)
    two.step()
    two.zero_grad()
    backward(first, 1.0, one)
    one.step()
    assert one.step_was_skipped and amp.stats().loss_scales[0] == 32768.0


def test_a_delayed_16_bit_gradient_does_not_underflow_under_a_smaller_scale():
    (model,), (optimizer,) = one_weight("O2", cast_model_type=torch.float16)
    amp.load_state_dict(
        {
            "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0},
            "loss_scaler1": {"loss_scale": 1.0, "unskipped": 0},
        }
    )
    backward(model, 2.0**-26, optimizer, loss_id=0, delay_unscale=True)
    backward(model, 0.0, optimizer, loss_id=1)
    assert next(amp.master_params(optimizer)).grad.item() == 2.0**-26


def test_models_are_not_brought_under_a_session_inside_a_block():
    (model,), (optimizer,) = one_weight()
    other = nn.Linear(1, 1, bias=False)
    with amp.scale_loss(model.weight.sum(), optimizer) as scaled:
        with pytest.raises(amp.SessionError, match="leave it before"):
            other_optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
            options = {"loss_scale": "dynamic", "num_losses": 2}
            amp.initialize(other, other_optimizer, opt_level="O0", verbosity=0, **options)
        scaled.backward()
    assert model.weight.grad.item() == 1.0


@requires_cpu("the simulated device has no sparse tensors")
def test_sparse_sums_keep_their_dtype():
    table = nn.Embedding(3, 1, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    options = {"loss_scale": "dynamic", "num_losses": 2, "cast_model_type": torch.bfloat16}
    amp.initialize(table, optimizer, opt_level="O3", verbosity=0, **options)
    for loss_id, factor in ((0, math.inf), (1, 1.0)):
        with amp.scale_loss(table(torch.tensor([1])).sum() * factor, optimizer, loss_id=loss_id) as scaled:
            scaled.backward()
    assert table.weight.grad.dtype is torch.bfloat16
    optimizer.step()
    assert optimizer.step_was_skipped
    assert amp.stats().loss_scales == (32768.0, 65536.0)


# ---- shared parameters, and blocks that never end --------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_each_optimizer_of_a_shared_parameter_steps(level):
    torch.manual_seed(0)
    model = nn.Linear(2, 2, bias=False)
    before = model.weight.detach().clone()
    first, second = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.5, 0.25))
    amp.initialize(model, [first, second], opt_level=level, loss_scale=128.0, verbosity=0)
    for _ in range(2):
        first.zero_grad()
        second.zero_grad()
        with amp.scale_loss(model(torch.ones(2, 2)).float().sum(), [first, second]) as scaled:
            scaled.backward()
        first.step()
        second.step()
    (weight,) = amp.master_params(first)
    torch.testing.assert_close(weight.detach(), before - 3.0)  # a gradient of 2 at 0.75, twice


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_second_overflow_in_a_shared_parameter_skips_again(level):
    """The first optimizer accumulates: in its sums the second overflow is none that counts. The other's are zeroed."""
    own, shared = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    first = torch.optim.SGD([own.weight, shared.weight], lr=0.5)
    second = torch.optim.SGD([shared.weight], lr=0.5)
    amp.initialize([own, shared], [first, second], opt_level=level, loss_scale="dynamic", verbosity=0)
    for _ in range(3):
        second.zero_grad()
        loss = (own.weight.float().sum() + shared.weight.float().sum()) * math.inf
        with amp.scale_loss(loss, [first, second]) as scaled:
            scaled.backward()
        second.step()
        assert second.step_was_skipped
    assert torch.isfinite(shared.weight).all()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_shared_gradient_ends_with_the_last_step_on_it(level):
    """As those of other masters do: the next pass is not added to an overflow whose steps were skipped."""
    model = nn.Linear(2, 2, bias=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for _ in range(2)]
    amp.initialize(model, optimizers, opt_level=level, loss_scale="dynamic", max_loss_scale=1024.0, verbosity=0)
    for factor, is_skip in ((math.inf, True), (1.0, False), (1.0, False)):
        with amp.scale_loss(model(torch.ones(1, 2)).float().sum() * factor, optimizers) as scaled:
            scaled.backward()
        for optimizer in optimizers:
            optimizer.step()
            assert optimizer.step_was_skipped is is_skip
        assert torch.isfinite(model.weight).all()
        assert all(master.grad is None for master in amp.master_params(optimizers[0]))


def test_an_overflow_in_a_block_that_never_ends_skips_the_step():
    (model,), options = make("O1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, **options)
    block = amp.scale_loss(model(torch.ones(3, 4)).float().sum() * math.inf, optimizer)
    block.__enter__().backward()
    del block
    optimizer.step()
    assert optimizer.step_was_skipped
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 512.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_put_together_by_hand_are_looked_at(level):
    """Gradient surgery: each task's gradients are kept and zeroed, their sum is stepped on."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", max_loss_scale=1024.0, verbosity=0)
    for factors, is_skip in (((math.inf, 1.0), True), ((1.0, 1.0), False), ((1.0, math.nan), True)):
        kept = []
        for factor in factors:
            optimizer.zero_grad()
            with amp.scale_loss(model(torch.ones(1, 2)).float().sum() * factor, optimizer) as scaled:
                scaled.backward()
            kept.append([master.grad.clone() for master in amp.master_params(optimizer)])
        for master, *gradients in zip(amp.master_params(optimizer), *kept, strict=True):
            master.grad = sum(gradients)
        optimizer.step()
        assert optimizer.step_was_skipped is is_skip
    assert torch.isfinite(torch.cat([p.flatten() for p in model.parameters()])).all()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 256.0
