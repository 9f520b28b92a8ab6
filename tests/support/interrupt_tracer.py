"""Interrupts at a chosen line of the package."""

import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_state import enable_torch_function

import amp_patch

PACKAGE = Path(amp_patch.__path__[0])
WINGS = ("training", "session", "casting", "patching")


class Interrupt:
    """Raises KeyboardInterrupt at the given event (a call or a line of some wings or files of the package), or counts
    them.
    """

    def __init__(self, at: int | None = None, places: tuple[str, ...] = WINGS) -> None:
        self.at, self.count = at, 0
        self._places = {PACKAGE / place for place in places}
        self._is_watched: dict[types.CodeType, bool] = {}

    def __call__(self, frame: types.FrameType, event: str, arg: object) -> "Interrupt | None":
        code = frame.f_code
        if code not in self._is_watched:
            file = Path(code.co_filename)
            self._is_watched[code] = file in self._places or file.parent in self._places
        if not self._is_watched[code]:
            return None
        if event in ("call", "line"):
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> "Interrupt":
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


def count_lines(action: Callable[[], Any], **options: Any) -> int:
    """At how many places `action` can be interrupted."""
    with Interrupt(**options) as counted:
        action()
    return counted.count


def choose(count: int, sample: int, seed: str) -> list[int]:
    """A sample of the places, by a seed."""
    return sorted(random.Random(seed).sample(range(1, count + 1), min(sample, count)))


def interrupted_at(position: int, action: Callable[[], Any], **options: Any) -> bool:
    """Run `action` with an interrupt at a place; return whether it came."""
    try:
        with Interrupt(position, **options):
            action()
    except KeyboardInterrupt:
        # A trace function may raise between the body of a `with` and its exit, where no signal is handled.
        enable_torch_function()
        return True
    return False
