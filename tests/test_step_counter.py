"""The steps of a training are those of the optimizer that steps first, and those of another once that has gone.

Guards: step_counter.
"""

from amp_patch.step_counter import StepCounter


class Optimizer:
    """An object that can be held by a weak reference."""


def test_two_optimizers_that_take_turns_take_one_step_together():
    counter, first, second = StepCounter(), Optimizer(), Optimizer()
    assert [counter.note(optimizer) for optimizer in (first, second, first, second)] == [True, False, True, False]


def test_an_optimizer_that_steps_twice_by_itself_begins_another_training():
    counter, first, second = StepCounter(), Optimizer(), Optimizer()
    assert [counter.note(optimizer) for optimizer in (first, second, second, first, second)] == [
        *(True, False, True),
        *(False, True),
    ]


def test_after_the_counted_optimizer_is_gone_or_forgotten_the_next_one_counts():
    counter, first, second = StepCounter(), Optimizer(), Optimizer()
    counter.note(first)
    del first
    assert counter.note(second)
    counter.forget()
    assert counter.note(Optimizer())
