"""While a known model runs under an armed run, torch calls its modules as if there were no hook; no call goes unseen.

Guards: insight/arming/root_hooks, insight/owned_hook, native/outer_hooks.
"""

import copy
import io
import threading

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_hooks

from amp_patch import insight

_TABLES = ("_global_forward_pre_hooks", "_global_forward_hooks")


def count_hooks():
    return [len(getattr(torch_hooks, table)) for table in _TABLES]


class Model(nn.Module):
    """Counts the global hooks around its last call. May call itself, fail, be interrupted, or overflow."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.mode, self.hooks = "", []

    def forward(self, values, depth=0):
        self.hooks = count_hooks()
        if self.mode == "recursive" and depth < 2:
            values = self(values, depth + 1)
        if self.mode == "fails":
            raise ValueError("a batch that does not fit")
        if self.mode == "interrupted":
            raise KeyboardInterrupt
        factor = 1e30 if self.mode == "bad" else 1.0
        return (self.layer(values) * factor).square()

    def run(self, mode):
        self.mode = mode
        return self(torch.ones(2, 3))


class Trainer:
    def __init__(self):
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, mode=""):
        loss = self.model.run(mode).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def check_that_the_bad_step_was_found(recording):
    trouble, fault, *_ = recording.records
    assert not trouble.obstacle and not trouble.differences and fault.phase == "forward"


def arm():
    return insight.armed(then="skip", record=0)


def test_inside_of_a_known_model_there_are_no_more_hooks_than_without_an_armed_run():
    before, trainer = count_hooks(), Trainer()
    with arm() as recording:
        for _ in range(3):
            trainer.step()
        assert trainer.model.hooks == before
        assert not trainer.model._forward_hooks_always_called
        assert count_hooks() != before
        trainer.step("bad")
    check_that_the_bad_step_was_found(recording)
    assert count_hooks() == before
    assert not trainer.model._forward_hooks and not trainer.model._forward_pre_hooks


def test_a_model_that_calls_itself_is_one_call():
    trainer = Trainer()
    with arm() as recording:
        for _ in range(3):
            trainer.step("recursive")
        trainer.step("bad")
    check_that_the_bad_step_was_found(recording)


def test_between_recorded_steps_a_model_has_no_hooks():
    trainer = Trainer()
    with insight.armed(record=1):
        for _ in range(3):
            trainer.step()
            torch.jit.script(trainer.model.layer)  # refuses hooks that are no functions
            assert not trainer.model._forward_hooks


@pytest.mark.parametrize(("mode", "error"), [("fails", ValueError), ("interrupted", KeyboardInterrupt)])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_call_that_ends_early_hides_no_later_call(mode, error, steps):
    trainer = Trainer()
    with arm() as recording:
        for _ in range(steps):
            trainer.step()
        try:
            trainer.model.run(mode)
        except error:
            # an emergency copy and checkpoint of the whole model
            copied = copy.deepcopy(trainer.model)
            torch.save(trainer.model, file := io.BytesIO())
            assert b"amp_patch" not in file.getvalue()  # it loads where the package is not installed
            copied.run("")
        for _ in range(3):
            trainer.step()
        trainer.step("bad")
    check_that_the_bad_step_was_found(recording)
    assert not trainer.model._forward_hooks and not trainer.model._forward_pre_hooks


def test_a_second_model_and_a_model_of_another_thread_are_seen():
    first, second = Trainer(), Trainer()
    with arm() as recording:
        for _ in range(3):
            first.step()
            second.step()
        thread = threading.Thread(target=second.step)
        thread.start()
        thread.join()
        first.step()
        second.step("bad")
    check_that_the_bad_step_was_found(recording)
