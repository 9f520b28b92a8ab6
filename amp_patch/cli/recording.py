"""In the process of a script that a command records: waits for a session, then records steps of it into a file.

Imported as Python starts, so it imports no torch before the script does.
"""

import atexit
import os
from pathlib import Path
from typing import Any

from .. import events


class _Waiting:
    """Makes a recorder when the first session is opened, and writes its file when the last step has been recorded, or
    the process ends before. The script ends with that step, by SystemExit.
    """

    def __init__(self, folder: str, first: int, last: int) -> None:
        self._folder = Path(folder)
        self._window = first, last
        self._recorder: Any = None

    def session_opened(self, session: Any) -> None:
        """Hand over to a recorder, which is told of all sessions from then on."""
        if self._recorder is None:
            from ..insight import Recorder

            self._recorder = Recorder(*self._window, self._end)
            atexit.register(self._write)
        self._recorder.session_opened(session)

    def session_closing(self, session: Any) -> None:
        """Hand on."""
        if self._recorder is not None:
            self._recorder.session_closing(session)

    def step_ended(self, optimizer: Any) -> None:
        """Hand on."""
        self._recorder.step_ended(optimizer)

    def _end(self) -> None:
        self._write()
        raise SystemExit(0)

    def _write(self) -> None:
        atexit.unregister(self._write)
        self._recorder.stop()
        recording = self._recorder.recording
        recording.to_jsonl(self._folder / f"{recording.run.rank}-{os.getpid()}-{self._recorder.steps}.jsonl")


def record(folder: str, first: int, last: int) -> None:
    """Record steps `first` up to and without `last` of this process into a file in `folder`."""
    events.watch(_Waiting(folder, first, last))
