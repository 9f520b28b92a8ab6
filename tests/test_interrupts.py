"""The undo stack runs each callback once, last in first out, despite errors and interrupts; and running calls are
recognized.

Guards: interrupts.
"""

import sys
import types
from collections.abc import Iterator

import pytest

from amp_patch.interrupts import UndoStack, is_running


def test_callbacks_run_once_each_last_in_first_out() -> None:
    seen: list[int] = []
    undo = UndoStack()
    for number in (4, 7, 1):
        undo.callback(seen.append, number)
    undo.close()
    undo.close()
    assert seen == [1, 7, 4] and len(undo) == 0


def test_an_error_keeps_no_other_callback_from_running() -> None:
    seen: list[str] = []
    undo = UndoStack()
    undo.callback(seen.append, "first")
    undo.callback(int, "no number")
    undo.callback([].pop)
    with pytest.raises(IndexError):
        undo.close()
    assert seen == ["first"] and not undo


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_callback_that_is_cut_short_runs_again(error: type[BaseException]) -> None:
    seen: list[str] = []
    errors = [error()]

    def cut_short() -> None:
        seen.append("begun")
        if errors:
            raise errors.pop()
        seen.append("ended")

    undo = UndoStack()
    undo.callback(seen.append, "below")
    undo.callback(cut_short)
    undo.callback(seen.append, "above")
    with pytest.raises(error):
        undo.close()
    assert len(undo) == 2
    undo.close()
    assert seen == ["above", "begun", "begun", "ended", "below"]


def test_a_call_is_running_until_it_ends_or_is_left() -> None:
    def own_frame() -> types.FrameType:
        frame = sys._getframe()
        assert is_running(frame) and (lambda: is_running(frame))()
        return frame

    def suspended() -> Iterator[types.FrameType]:
        yield sys._getframe()

    assert is_running(sys._getframe())
    assert not is_running(own_frame())
    generator = suspended()
    assert not is_running(next(generator))
