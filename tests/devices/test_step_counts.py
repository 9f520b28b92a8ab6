"""The launches and waits of a step are those of the table in docs/launches.md and within the promised bounds.

`tools/generate_launches_page.py` counts the table.

Guards: training/unscaling, training/step_log, training/halves, docs/launches.md, tools/generate_launches_page.py.
"""

import contextlib

import pytest
import torch
from devices import IS_SIM, requires_sim, syncs
from torch import nn

import amp_patch as amp
from amp_patch.apex import optimizers as apex
from amp_patch.training import step_log

if IS_SIM:
    import generate_launches_page as launches
    import simdev

pytestmark = [requires_sim, pytest.mark.xdist_group("launches")]  # what is counted is kept for all of them

PINNED = "2.13"
FOREACH, FUSED = "foreach", "fused"
MOST = {  # launches of a step as a part of those of autocast with GradScaler, in the same dtype
    "gpt-64": {"O1": 0.87, "O2": 0.64, "O4": 0.87, "O5": 0.63},
    "resnet-8": {"O1": 0.91, "O2": 0.83, "O4": 0.91, "O5": 0.81},
    "mlp-64": {"O1": 0.87, "O2": 0.74, "O4": 0.86, "O5": 0.72},
}


@pytest.mark.skipif(not torch.__version__.startswith(PINNED), reason=f"the page is of torch {PINNED}")
def test_the_page_is_what_is_counted():
    """For GPT. If a change was meant to change the page: `python tools/generate_launches_page.py --write`."""
    lines = launches.PAGE.read_text().splitlines()
    for mode in launches.MODES:
        totals = [launches.count("gpt-64", mode, kind).total for kind in launches.OPTIMIZERS]
        assert any(line.startswith(f"| {mode} | {' | '.join(map(str, totals))} | ") for line in lines), mode
    for row in (*launches._phase_rows(), *launches._wait_rows()):
        assert f"| {' | '.join(map(str, row))} |" in lines


@pytest.mark.parametrize(("name", "kind"), [("gpt-64", FOREACH), *((name, FUSED) for name in MOST)])
def test_a_step_has_fewer_launches_than_autocast(name, kind):
    found = {level: launches.ratio(name, level, kind) for level in MOST[name]}
    assert all(found[level] <= most for level, most in MOST[name].items()), found


@pytest.mark.parametrize("name", ["gpt-64", "resnet-8"])
def test_split_masters_add_few_launches(name):
    split, whole = launches.count(name, "O5+split", FUSED), launches.count(name, "O5", FUSED)
    assert split.total <= 1.1 * whole.total
    assert split.waits == (0, 0, 0)


@pytest.mark.parametrize("way", ["one loss", "four micro-batches", "two losses", "clipping"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_nothing_waits_for_a_device_that_is_behind(level, way):
    assert launches.count("gpt-64", level, FUSED, way).waits == (0, 0, 0)


@pytest.mark.parametrize("kind", ["plain", FOREACH])
def test_the_host_waits_once_to_know_whether_to_step(kind):
    for level, most in (("O1", 1), ("O2", 1), ("O4", 0), ("O5", 0)):
        assert launches.count("gpt-64", level, kind).waits <= (0, 0, most), level


def count_block(layers, level, is_second):
    """Launches of a `scale_loss` block, the backward pass in it aside."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", num_losses=2, verbosity=0)
    found = 0
    with simdev.lag(10**6):
        for loss_id in range(1 + is_second):
            loss = model(torch.ones(2, 4, device="sim")).float().sum()
            with contextlib.ExitStack() as stack:
                with simdev.count() as entered:
                    scaled_loss = stack.enter_context(amp.scale_loss(loss, optimizer, loss_id=loss_id))
                scaled_loss.backward()
                with simdev.count() as left:
                    stack.close()
            found = entered.launches + left.launches
    amp.reset()
    return found


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_second_loss_costs_the_same_for_any_number_of_parameters(level):
    few, many = count_block(1, level, is_second=True), count_block(20, level, is_second=True)
    assert few == many <= count_block(20, level, is_second=False) + 12


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_static_scale_waits_for_nothing_whatever_the_optimizer(level):
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    with simdev.lag(10**6):
        for number in range(3):
            loss = model(torch.ones(2, 4, device="sim")).float().sum()
            with simdev.no_sync() if number else contextlib.nullcontext():
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
                optimizer.zero_grad()


def put_together_by_hand(model, optimizers):
    """As for gradients of several tasks: what each block leaves is kept, zeroed, and summed up."""
    kept = []
    for factor in (1.0, 2.0):
        with amp.scale_loss(loss_of(model) * factor, optimizers) as scaled_loss:
            scaled_loss.backward()
        holders = [holder for optimizer in optimizers for holder in amp.master_params(optimizer)]
        kept.append([holder.grad.clone() for holder in holders])
        for optimizer in optimizers:
            optimizer.zero_grad()
    for holder, first, second in zip(holders, *kept, strict=True):
        holder.grad = first + second


def pass_for_another(model, optimizers):
    """The first block leaves gradients to an optimizer that it was not passed."""
    for optimizer in optimizers:
        with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
            scaled_loss.backward()


def loss_of(model):
    return sum(part(torch.ones(2, 4, device=part.weight.device)).float().sum() for part in model)


@pytest.mark.parametrize("make_gradients", [put_together_by_hand, pass_for_another])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_other_ways_to_gradients_wait_for_nothing_either(level, make_gradients):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).to("sim")
    optimizers = [torch.optim.AdamW(part.parameters(), fused=True) for part in model]
    amp.initialize(model, optimizers, opt_level=level, verbosity=0)
    with simdev.lag(10**6):
        for number in range(3):
            with simdev.no_sync() if number else contextlib.nullcontext():
                make_gradients(model, optimizers)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()


@pytest.fixture
def group():
    """A process group of two ranks, of which the other one always finds what this one does."""
    store = pytest.importorskip("torch.testing._internal.distributed.fake_pg").FakeStore()
    torch.distributed.init_process_group("sim:fake", store=store, rank=0, world_size=2)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_ranks_that_decide_together_wait_for_nothing_and_train_as_one_alone(level, group):
    """Their flags are on the device that torch calls current, which need not be the model's."""
    weights = []
    for together in (False, group):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(4, 4)]).to("sim:1")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        amp.initialize(model, optimizer, opt_level=level, overflow_group=together, verbosity=0)
        with simdev.lag(10**6):
            for number in range(4):
                factor = torch.tensor(float("inf") if number == 2 else 0.25, device="sim:1")
                with simdev.no_sync() if number else contextlib.nullcontext():
                    with amp.scale_loss(loss_of(model) * factor, optimizer) as scaled_loss:
                        scaled_loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
        assert amp.stats().loss_scales == (2.0**15,) and amp.stats().steps_skipped == 1
        weights.append(model[0].weight.detach().clone())
        amp.reset()
    assert torch.equal(*weights)


def test_one_step_in_a_hundred_waits_once_for_all_gradients_if_nothing_scales_them(monkeypatch):
    monkeypatch.setattr(step_log, "CHECK_EVERY", 2)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    waits = []
    for _ in range(4):
        with syncs() as found:
            pass_for_another(model, [optimizer])
            optimizer.step()
        waits.append(len(found))
    assert waits == [0, 1, 0, 1]


OF_THE_STAND_IN = {
    "adam": (apex.FusedAdam, {"max_grad_norm": 1.0}),
    "lamb": (apex.FusedLAMB, {}),
    "novograd": (apex.FusedNovoGrad, {}),
    "sgd": (apex.FusedSGD, {"lr": 0.1, "momentum": 0.9}),
}


@pytest.mark.parametrize("name", OF_THE_STAND_IN)
def test_the_optimizers_of_the_stand_in_wait_for_nothing(name):
    """But for those that cannot skip by a flag, where a dynamic scale may have them skip."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4)]).to("sim")
    make, options = OF_THE_STAND_IN[name]
    optimizer = make(model.parameters(), **options)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic" if name == "adam" else 128.0, verbosity=0)
    with simdev.lag(10**6):
        for number in range(3):
            with simdev.no_sync() if number else contextlib.nullcontext():
                pass_for_another(model, [optimizer])
                optimizer.step()
                optimizer.zero_grad()
