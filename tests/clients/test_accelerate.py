"""An `Accelerator` with an opt_level trains, saves and resumes under Hugging Face's accelerate, unmodified.

Guards: integrations/accelerate.
"""

import pytest
import torch
from torch import nn

import amp_patch as amp

pytest.importorskip("accelerate", reason="needs accelerate: make test-clients")

from accelerate.state import AcceleratorState

from amp_patch.integrations.accelerate import Accelerator


@pytest.fixture(autouse=True)
def state_of_a_new_process():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


LEVELS = {"O1": {}, "O2": {"loss_scale": {"init": 2.0**8}}, "O4": {}, "O5": {}}


def make(level, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    accelerator = Accelerator(
        cpu=True, opt_level=level, gradient_accumulation_steps=2, amp_options={"verbosity": 0, **options}
    )
    return accelerator, *accelerator.prepare(net, optimizer, schedule)


def train(accelerator, net, optimizer, schedule, steps, spike=None):
    norms = []
    for step in steps:
        for micro in range(2):
            accelerator.gradient_state._set_sync_gradients(micro == 1)
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + micro))
            loss = net(inputs).float().square().mean() * (float("inf") if step == spike else 1.0)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return norms


def weights_of(net):
    return [value.clone() for value in net.state_dict().values()]


@pytest.mark.parametrize("level", LEVELS)
def test_it_trains_saves_and_resumes(level, tmp_path):
    accelerator, net, optimizer, schedule = make(level, **LEVELS[level])
    norms = train(accelerator, net, optimizer, schedule, range(2))
    accelerator.save_state(str(tmp_path))
    norms += train(accelerator, net, optimizer, schedule, range(2, 4))
    expected, state = weights_of(net), amp.state_dict()
    amp.reset()
    reference, plain, plain_optimizer, plain_schedule = make("O0")
    assert norms == pytest.approx(train(reference, plain, plain_optimizer, plain_schedule, range(4)), rel=0.05)
    amp.reset()
    accelerator, net, optimizer, schedule = make(level, **LEVELS[level])
    accelerator.load_state(str(tmp_path))
    train(accelerator, net, optimizer, schedule, range(2, 4))
    assert all(map(torch.equal, weights_of(net), expected)) and amp.state_dict() == state


def test_a_skip_is_told_and_the_schedule_waits():
    accelerator, net, optimizer, schedule = make("O2", loss_scale={"init": 2.0**8})
    train(accelerator, net, optimizer, schedule, range(1))
    before, rate = weights_of(net), schedule.get_last_lr()
    train(accelerator, net, optimizer, schedule, range(1, 2), spike=1)
    assert accelerator.optimizer_step_was_skipped and optimizer.step_was_skipped and schedule.get_last_lr() == rate
    assert torch.equal(weights_of(net)[0], before[0]) and amp.stats().loss_scales == (2.0**7,)
    train(accelerator, net, optimizer, schedule, range(2, 3))
    assert not accelerator.optimizer_step_was_skipped and schedule.get_last_lr() != rate


def test_precision_is_said_once():
    with pytest.raises(amp.ArgumentTypeError, match="mixed_precision"):
        Accelerator(cpu=True, mixed_precision="bf16")
