"""`FlightRecorder`: samples the steps of a script's own loop, and writes the samples to a file."""

import atexit
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...dtypes import LOW_DTYPES
from ...errors import ArgumentTypeError
from ...interrupts import UndoStack
from ...native import AS_IS
from ...reporting import find_rank, warn
from ...session import as_models, as_optimizers, current
from ..flight_record import FlightKind, FlightRecord
from ..naming import find_prefixes
from ..recorder import describe_run
from ..recordings import Recording
from ..records import RunRecord
from ..rules import short
from .describe import summarize
from .sampler import Sampler
from .steps import StepFollower

_WRITE_SECONDS = 600.0
"""An open recorder writes the file at intervals of at least this length, so that a killed process leaves most of its
samples. A write may cost seconds: formatting 256 samples of 1,000 layers with weights, each with an activation, took
3 s on an AMD EPYC.
"""

OnSample = Callable[[int, Mapping[str, float]], object]


class FlightRecorder:
    """Records the magnitudes of module outputs and weight gradients in some steps, and says which of them have grown.

    The recorder changes no number of the training. A step that is not sampled costs at most two hooks of the optimizer,
    and a function around `GradScaler.step`. A sampled step has a forward hook on each module, and takes about two
    kernel launches for each output and each gradient. The host does not wait for these kernels, except on MPS. The
    recorder works under `torch.autocast`, under `amp.initialize` and without mixed precision.

    Steps are counted at `optimizer.step()`; with several optimizers, at the one that steps first. Gradients are
    recorded without the loss scale of `amp.initialize` or a GradScaler. If the script scales the loss itself, they are
    recorded with that scale.

    Args:
        every: the number of steps from one sample to the next. The first step is sampled.
        keep: the number of samples to keep. Older ones are dropped.
        path: a file for the samples. It is written at intervals of at least ten minutes, and when the recorder or the
            process ends. In a distributed run, each rank but the first puts its number before the suffix, as in
            `flight.1.jsonl`.
        on_sample: called for each sample, once its numbers have reached the host, with the step and a dict of the
            numbers by name. `amp_patch.integrations.trackers.log_samples` makes such a function.
    """

    def __init__(
        self,
        every: int = 50,
        keep: int = 256,
        *,
        path: str | os.PathLike[str] | None = None,
        on_sample: OnSample | None = None,
    ) -> None:
        self._sampler = Sampler(every, keep)
        self._path = None if path is None else name_for_rank(Path(path))
        self._on_sample = on_sample
        self._models: list[nn.Module] = []
        self._steps = StepFollower(self._sampler, lambda: self._models, self._hand_on)
        self._undo = UndoStack()
        self._sent = -1  # the step of the last sample that was passed to `on_sample`
        self._run: RunRecord | None = None
        self._write_due = time.monotonic() + _WRITE_SECONDS
        self._process_id = os.getpid()

    # ---- use ---------------------------------------------------------------------------------------------------------

    def attach(
        self,
        models: nn.Module | Sequence[nn.Module],
        optimizers: Optimizer | Sequence[Optimizer],
        scaler: Any = None,
    ) -> "FlightRecorder":
        """Record models from now on, until `close`. Returns the recorder. May be called again for further models.

        Raises ArgumentTypeError if there is no model or no optimizer, or if `scaler` is no GradScaler.

        Args:
            models: a model, or a list of them.
            optimizers: an optimizer, or a list of them.
            scaler: the GradScaler of the loop. Its scale is recorded, and steps that it skips count, too.
        """
        new_models, new_optimizers = as_models(models), as_optimizers(optimizers)
        if not new_models or not new_optimizers:
            raise ArgumentTypeError("a flight recorder needs models and optimizers: attach(model, optimizer)")
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise ArgumentTypeError(
                f"scaler is {type(scaler).__name__}, not a GradScaler: leave it out for a script with amp.initialize"
            )
        is_first = not len(self._undo)
        self._models += [model for model in new_models if not any(model is known for known in self._models)]
        if is_first:
            self._run = None
            self._undo.callback(self._forget)
            self._undo.callback(self._sampler.detach)
            self._steps.open(self._undo)
            if self._path is not None:
                self._undo.callback(atexit.unregister, self.close)
                atexit.register(self.close)
        self._steps.add(new_optimizers, [] if scaler is None else [scaler], self._undo)
        if is_first:
            self._steps.begin()
        return self

    def observe(self, name: str, tensor: Tensor) -> None:
        """Record a tensor that no module returns, such as attention logits or the loss, under a name of your choice.

        Does nothing in a step that is not sampled.
        """
        self._sampler.observe(name, tensor)

    @property
    def records(self) -> list[FlightRecord]:
        """The samples: a record for the outputs of a module, for the gradients of its weights, for a name that was
        passed to `observe`, or for a loss scale. Waits until the samples are on the host.
        """
        return self._sampler.records()

    @property
    def recording(self) -> Recording:
        """The run and its samples as a `Recording`, which `write` stores. Waits until the samples are on the host."""
        return self._make_recording(self.records)

    def summary(self) -> str:
        """Return as text which magnitudes have grown, over which steps, and when they will overflow.

        They overflow above the largest number of the 16-bit dtype of the run; without such a dtype, of float32. Waits
        until the samples are on the host.
        """
        return summarize(self.records)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a line of JSON for the run, and one for each of `records`. The file is written whole, or not at all.

        `amp-patch explain --from` and `insight.Recording.read` read it. Raises OSError.
        """
        self.recording.to_jsonl(path)

    def close(self) -> None:
        """Remove all hooks, pass the last samples to `on_sample`, and write the file, if the recorder has a `path`.

        The samples stay in memory. A second call does nothing. If the file cannot be written, this is a warning and no
        exception, because a training should not fail for its log.
        """
        is_open = bool(len(self._undo))
        self._undo.close()
        if is_open:
            self._send()
            self._write_file()

    def __enter__(self) -> "FlightRecorder":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # ---- samples ---------------------------------------------------------------------------------------------------

    def _hand_on(self) -> None:
        """If there are samples that `on_sample` has not had, and they are on the host, pass them to it. Then write the
        file if that is due.
        """
        if self._sampler.last_step > self._sent and self._sampler.has_arrived():
            self._send()
            if self._path is not None and time.monotonic() > self._write_due:
                self._write_file()
                self._write_due = time.monotonic() + _WRITE_SECONDS

    def _send(self) -> None:
        """Call `on_sample` for the samples that were not passed to it yet. Waits until they are on the host."""
        if self._on_sample is not None:
            numbers: dict[int, dict[str, float]] = {}
            for record in self._sampler.records(after=self._sent):
                name = f"{record.subject}/{record.name}".rstrip("/")
                for step, largest, zeros in zip(record.steps, record.largest, record.zeros, strict=True):
                    numbers.setdefault(step, {})[name] = largest
                    if record.subject is FlightKind.GRADIENT:
                        numbers[step][f"zeros/{name}"] = zeros
            for step in sorted(numbers):
                self._on_sample(step, numbers[step])
        self._sent = self._sampler.last_step

    def _forget(self) -> None:
        """Describe the run, and drop the models, so that a closed recorder keeps none alive."""
        self._run = self._describe()
        self._models = []

    # ---- the file ----------------------------------------------------------------------------------------------------

    def _write_file(self) -> None:
        # a forked process inherits the exit handlers, and must not write the file
        if self._path is None or os.getpid() != self._process_id:
            return
        try:
            self.write(self._path)
        except OSError as error:
            warn(f"the flight recorder could not write {self._path} ({error.strerror}): an earlier file stays as it is")

    def _make_recording(self, records: Sequence[FlightRecord]) -> Recording:
        return Recording(self._describe() if self._run is None else self._run, list(records))

    def _describe(self) -> RunRecord:
        """Return the record of the run. It describes the session in force, or else the last session that closed.
        Without a session, it is made from the models and samples.
        """
        session = current.state.session
        if session is not None:
            return describe_run(session)
        if self._steps.run is not None:
            return self._steps.run
        weights = [weight for model in self._models for weight in model.parameters()]
        script_low = next((short(weight.dtype) for weight in weights if weight.dtype in LOW_DTYPES), "")
        return RunRecord(
            torch=torch.__version__,
            device=weights[0].device.type if weights else "",
            opt_level="autocast" if self._sampler.low and not script_low else AS_IS,
            low=self._sampler.low,
            lists=(),
            digest="",
            rank=find_rank() or 0,
            is_native=True,
            prefixes=find_prefixes(self._models),
            script_low=script_low,
        )


def name_for_rank(path: Path) -> Path:
    """Return the path of this rank. All ranks but the first put their number before the suffix."""
    rank = find_rank()
    return path.with_suffix(f".{rank}{path.suffix}") if rank else path
