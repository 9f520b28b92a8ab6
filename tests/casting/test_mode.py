"""`Switch`: regions nest, survive exceptions, belong to their thread, and a forked child casts nothing."""

import _thread
import contextlib
import os
import queue
import signal
import threading

import pytest
import torch

from amp_patch.casting import compiling
from amp_patch.casting.mode import Mode, Switch
from amp_patch.torch_private import IDLE_KEYS


@pytest.fixture
def switch() -> Switch:
    result = Switch()
    result.turn_on()
    return result


def ask_in_thread(switch: Switch) -> bool:
    """What `is_on_here` says in a Python thread of its own."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(switch.is_on_here()))
    thread.start()
    thread.join(timeout=30)
    return answers[0]


def ask_in_foreign_thread(switch: Switch) -> bool:
    """What `is_on_here` says in a thread that Python's threading did not start, such as one of the autograd engine."""
    answers: queue.Queue[bool] = queue.Queue()
    _thread.start_new_thread(lambda: answers.put(switch.is_on_here()), ())
    return answers.get(timeout=30)


# ---- regions ---------------------------------------------------------------------------------------------------------


def test_nested_regions_go_back_one_by_one(switch: Switch) -> None:
    modes = [Mode.OFF, Mode.BY_LISTS, Mode.LOW, Mode.OFF, Mode.FLOAT32]
    seen = []
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(switch.region(mode))
            seen.append(switch.mode_here())
            stack.callback(lambda: seen.append(switch.mode_here()))
    assert seen == [*modes, *reversed(modes)]
    assert switch.mode_here() is Mode.BY_LISTS and switch.regions == 0


def test_a_region_used_as_a_decorator_may_be_entered_again_while_it_is_open(switch: Switch) -> None:
    seen: list[bool] = []

    @switch.region(Mode.OFF)
    def visit(depth: int) -> None:
        seen.append(switch.is_on_here())
        if depth:
            visit(depth - 1)
        seen.append(switch.is_on_here())

    visit(2)
    visit(0)
    assert seen == [False] * 8
    assert switch.is_on_here()
    assert switch.regions == 0


def test_turning_off_inside_a_region_holds_after_it(switch: Switch) -> None:
    with switch.region(Mode.BY_LISTS):
        switch.turn_off()
        assert not switch.is_on_here()
    assert not switch.is_on_here()


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_a_region_belongs_to_the_thread_that_opened_it(switch: Switch) -> None:
    with switch.region(Mode.OFF):
        assert ask_in_thread(switch)
        assert not switch.is_on_here()


def test_a_foreign_thread_follows_the_region_that_was_opened_last(switch: Switch) -> None:
    with switch.region(Mode.OFF):
        assert not ask_in_foreign_thread(switch)
        with switch.region(Mode.BY_LISTS):
            assert ask_in_foreign_thread(switch)
    assert ask_in_foreign_thread(switch)


# ---- fork ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_casts_nothing_and_may_open_regions_though_the_lock_was_held(switch: Switch) -> None:
    with switch.region(Mode.BY_LISTS), switch._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a child that waits for a lock for ever is killed, and the test fails
            try:
                with switch.region(Mode.BY_LISTS):
                    os._exit(switch.on or switch.is_on_here())
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert switch.is_on_here() and switch.regions == 0


def test_regions_may_be_left_in_any_order(switch: Switch) -> None:
    first, second = switch.region(Mode.OFF), switch.region(Mode.LOW)
    first.open()
    second.open()
    first.close()
    assert switch.mode_here() is Mode.LOW
    second.close()
    assert switch.mode_here() is Mode.BY_LISTS


# ---- what torch.compile sees -----------------------------------------------------------------------------------------


def get_sign() -> tuple[object, ...]:
    """What Dynamo guards by: the autocast state of a device that nobody uses, or dispatch keys."""
    if compiling._IDLE_DEVICE is None:
        return tuple(map(torch._C._dispatch_tls_is_dispatch_key_included, IDLE_KEYS))
    return torch.is_autocast_enabled("ipu"), torch.get_autocast_dtype("ipu")


def test_each_mode_shows_in_the_autocast_state_of_the_thread_and_leaves_no_trace(switch: Switch) -> None:
    before, seen = get_sign(), []
    with pytest.raises(KeyError), switch.region(Mode.OFF):
        seen.append(get_sign())
        for mode in (Mode.LOW, Mode.FLOAT32, Mode.BY_LISTS):
            with switch.region(mode):
                seen.append(get_sign())
        assert get_sign() == seen[0]
        raise KeyError
    assert get_sign() == before == seen[3] and not before[0]
    assert len(set(seen)) == 4
