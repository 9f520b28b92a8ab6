"""One page of HTML of a recording: no other file, no network, no library. Nothing here imports torch."""

from .page import make_report as make_report
from .page import write_report as write_report
