"""Records which op ran in which precision, finds values that do not fit their dtype, and compares runs.

`import amp_patch` does not import this package.
"""

__role__ = ""  # the role of this code in reports; `insight/sites.py` lists the roles

import importlib
from typing import TYPE_CHECKING, Any

from . import notebook as notebook
from . import runs as runs

if TYPE_CHECKING:
    from . import agreement as agreement
    from . import checking as checking
    from . import comparing as comparing
    from . import remedies as remedies
    from . import report as report
    from .arming.probe import armed as armed
    from .causes import find_remedy as find_remedy
    from .comparing import compare as compare
    from .fault_record import FaultRecord as FaultRecord
    from .fault_text import describe_further as describe_further
    from .fault_text import describe_search as describe_search
    from .fault_text import format_fault as format_fault
    from .fault_text import note_float32 as note_float32
    from .flight.flight_recorder import FlightRecorder as FlightRecorder
    from .flight_record import FlightRecord as FlightRecord
    from .misuse_record import MisuseRecord as MisuseRecord
    from .misuse_record import format_misuses as format_misuses
    from .module_casts import note_casts as note_casts
    from .quiet_record import QuietRecord as QuietRecord
    from .quiet_text import find_level as find_level
    from .quiet_text import find_quiet_remedy as find_quiet_remedy
    from .quiet_text import format_quiet as format_quiet
    from .raised_record import RaisedRecord as RaisedRecord
    from .raised_text import find_base as find_base
    from .raised_text import format_raised as format_raised
    from .recorder import explain as explain
    from .recorder import recording as recording
    from .recordings import Recording as Recording
    from .text import format_recording as format_recording
    from .tracer import trace as trace
    from .trouble_record import TroubleRecord as TroubleRecord
    from .tuning.options import TuneOptions as TuneOptions
    from .tuning.result import TuneResult as TuneResult
    from .tuning.tuner import Tuner as Tuner
    from .tuning.tuner import tune as tune

_HOMES = {
    "FaultRecord": "fault_record",
    "FlightRecord": "flight_record",
    "FlightRecorder": "flight.flight_recorder",
    "MisuseRecord": "misuse_record",
    "QuietRecord": "quiet_record",
    "RaisedRecord": "raised_record",
    "Recording": "recordings",
    "TroubleRecord": "trouble_record",
    "TuneOptions": "tuning.options",
    "TuneResult": "tuning.result",
    "Tuner": "tuning.tuner",
    "armed": "arming.probe",
    "compare": "comparing",
    "describe_further": "fault_text",
    "describe_search": "fault_text",
    "explain": "recorder",
    "find_base": "raised_text",
    "find_level": "quiet_text",
    "find_quiet_remedy": "quiet_text",
    "find_remedy": "causes",
    "format_fault": "fault_text",
    "format_misuses": "misuse_record",
    "format_quiet": "quiet_text",
    "format_raised": "raised_text",
    "format_recording": "text",
    "note_casts": "module_casts",
    "note_float32": "fault_text",
    "recording": "recorder",
    "trace": "tracer",
    "tune": "tuning.tuner",
}
"""The module that defines each public name."""

_MODULES = ("agreement", "checking", "comparing", "remedies", "report")

__all__ = ["runs", *_MODULES, *_HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that recordings can be read and printed without torch."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
