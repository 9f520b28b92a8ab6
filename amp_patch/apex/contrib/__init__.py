"""`apex.contrib`: the two parts of it that have a counterpart in torch or here, imported when they are asked for."""

from typing import Any

from .. import _finder

_PARTS = ("clip_grad", "optimizers")


def __getattr__(name: str) -> Any:
    return _finder.get_part(__name__, _PARTS, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PARTS})
