"""What ran in which precision, and why. Not imported by `import amp_patch`."""

import importlib
from typing import TYPE_CHECKING, Any

from . import runs as runs

if TYPE_CHECKING:
    from .recorder import explain as explain
    from .recorder import recording as recording
    from .records import OpRecord as OpRecord
    from .records import Recording as Recording
    from .text import format_recording as format_recording
    from .tuning.result import TuneResult as TuneResult
    from .tuning.tuner import Tuner as Tuner
    from .tuning.tuner import tune as tune

_HOMES = {
    **dict.fromkeys(("explain", "recording"), "recorder"),
    **dict.fromkeys(("OpRecord", "Recording"), "records"),
    "format_recording": "text",
    "TuneResult": "tuning.result",
    **dict.fromkeys(("Tuner", "tune"), "tuning.tuner"),
}

__all__ = [
    "OpRecord",
    "Recording",
    "TuneResult",
    "Tuner",
    "explain",
    "format_recording",
    "recording",
    "runs",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Import what has the name when it is first asked for: a file is read, and printed, without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
