"""`FlightRecorder`: a `Sampler` that the steps of a script's own loop drive, with its file."""

import atexit
import functools
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ... import events
from ...dtypes import LOW_DTYPES
from ...errors import ArgumentTypeError
from ...interrupts import UndoStack
from ...native import AS_IS, NativeSession
from ...reporting import find_rank, warn
from ...session import Session, as_models, as_optimizers, current
from ...step_counter import StepCounter
from ..flight_record import FlightKind, FlightRecord
from ..naming import find_prefixes
from ..recorder import describe_run
from ..recordings import Recording
from ..records import RunRecord
from ..rules import short
from .describe import summarize
from .sampler import Sampler

_WRITE_SECONDS = 600.0
"""The file is written this often, so that a process which is killed leaves most of its samples. Formatting it takes a
second for a model of 1,000 modules.
"""

OnSample = Callable[[int, Mapping[str, float]], object]


class FlightRecorder(events.Watcher):
    """Records the magnitudes of module outputs and weight gradients in some steps, and says which of them have grown.

    It changes no number of the training. In a step that is not sampled, it costs two Python calls. A sampled step has a
    forward hook on each module, and takes two kernel launches for each output and each gradient. The host does not wait
    for them. It works under `torch.autocast`, under `amp.initialize` and without mixed precision.

    Steps are counted at `optimizer.step()`; with several optimizers, at the one that steps first. Gradients are
    recorded without the loss scale of `amp.initialize` or a GradScaler. A loss that the script scales itself leaves its
    scale in them.

    Args:
        every: the number of steps from one sample to the next. The first step is sampled.
        keep: the number of samples to keep. Older ones are dropped.
        path: a file to write the samples to: when the recorder is closed, when the process ends, and every ten minutes.
            A further rank of a distributed run puts its number before the suffix, as in `flight.1.jsonl`.
        on_sample: called with the step and the numbers of each sample, by name, once they have reached the host:
            `amp_patch.integrations.trackers.log_samples` makes such a function.
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
        self._hooks: weakref.WeakKeyDictionary[Optimizer, tuple[RemovableHandle, ...]] = weakref.WeakKeyDictionary()
        self._scalers: list[Any] = []
        self._undo = UndoStack()
        self._counter = StepCounter()
        self._step = self._unsent = 0
        self._told: Optimizer | None = None  # its step has been reported by an event, so its hooks are ignored
        self._has_stepped = False
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

        Args:
            models, optimizers: one, or a list of them.
            scaler: the GradScaler of the loop. It records its scale, and counts the steps that it skips.
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
            self._open()
        for optimizer in new_optimizers:
            self._hooks.setdefault(optimizer, ())
        if scaler is not None and not any(scaler is known for known in self._scalers):
            self._scalers.append(scaler)
            self._undo.callback_on(scaler, _restore_step, vars(scaler).get("step"))
            vars(scaler)["step"] = _ScalerStep(self, scaler.step)
        self._follow(current.state.session)
        if is_first:
            self._sampler.begin_step(self._step)
        return self

    def observe(self, name: str, tensor: Tensor) -> None:
        """Record a tensor that no module returns, such as attention logits or the loss, under a name of your choice.

        Does nothing in a step that is not sampled.
        """
        self._sampler.observe(name, tensor)

    @property
    def records(self) -> list[FlightRecord]:
        """The samples of each module. Waits until they are on the host."""
        return self._sampler.records()

    @property
    def recording(self) -> Recording:
        """The samples, as files hold them. Waits until they are on the host."""
        return self._make_recording(self.records)

    def summary(self) -> str:
        """Return which magnitudes have grown, over which steps, and when float16 will end at this pace."""
        return summarize(self.records)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the samples to a file, one line of JSON for each module. The file is written whole, or not at all.

        `amp-patch explain --from` and `insight.Recording.read` read it. Raises OSError.
        """
        self.recording.to_jsonl(path)

    def close(self) -> None:
        """Remove all hooks, and write the file. The samples stay. Harmless twice.

        If the file cannot be written, a warning says so: a training should not end with an error for its log.
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

    # ---- events of a session -----------------------------------------------------------------------------------------

    def session_opened(self, session: Session) -> None:
        """Take masters, loss scales and steps from the session."""
        self._follow(session)

    def session_closing(self, session: Session) -> None:
        """Go on without the session."""
        self._run = describe_run(session)
        self._follow(None)
        self._told = None

    def step_begun(self, optimizer: Optimizer) -> None:
        """Look at gradients that are unscaled, also where the step will be skipped."""
        self._told = optimizer
        self._begin(optimizer)

    def step_ended(self, optimizer: Optimizer) -> None:
        """Count a step, taken or skipped."""
        self._told = None
        self._end(optimizer)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _begin_by_hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._told is None and not _has_closure(args, kwargs):
            self._begin(optimizer)

    def _end_by_hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._told is not None:
            return
        if _has_closure(args, kwargs):  # the closure has computed the gradients in the step
            self._begin(optimizer)
        self._end(optimizer)

    def step_by_scaler(self, original: Callable[..., Any], optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Call `GradScaler.step`, and count the step if that has skipped it: then no hook of the optimizer ran."""
        self._has_stepped = False
        result = original(optimizer, *args, **kwargs)
        if not self._has_stepped and optimizer in self._hooks:
            self._begin(optimizer)
            self._end(optimizer)
        return result

    def _begin(self, optimizer: Optimizer) -> None:
        if self._sampler.is_sampling and optimizer in self._hooks:
            self._sampler.look_at_gradients(optimizer)

    def _end(self, optimizer: Optimizer) -> None:
        self._has_stepped = True
        if optimizer not in self._hooks or not self._counter.note(optimizer):
            return
        if self._sampler.is_sampling:
            self._hand_on()
            self._sampler.end_step(self._step)
            self._unsent += 1
        self._step += 1
        self._sampler.begin_step(self._step)

    def _hand_on(self) -> None:
        """Send earlier samples to the tracker, and write the file if it is due, unless either would wait."""
        if not self._unsent or not self._sampler.has_arrived():
            return
        self._send()
        if self._path is not None and time.monotonic() > self._write_due:
            self._write_file()
            self._write_due = time.monotonic() + _WRITE_SECONDS

    def _send(self) -> None:
        """Give the samples that it has not had yet to `on_sample`. Waits until they are on the host."""
        if self._on_sample is not None and self._unsent:
            numbers: dict[int, dict[str, float]] = {}
            for record in self._sampler.records(self._unsent):
                name = f"{record.subject}/{record.name}".rstrip("/")
                for step, largest, zeros in zip(record.steps, record.largest, record.zeros, strict=True):
                    numbers.setdefault(step, {})[name] = largest
                    if record.subject is FlightKind.GRADIENT:
                        numbers[step][f"zeros/{name}"] = zeros
            for step in sorted(numbers):
                self._on_sample(step, numbers[step])
        self._unsent = 0

    # ---- attaching ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._undo.callback(self._forget)
        self._undo.callback(self._sampler.detach)
        self._undo.callback(events.watch(self))
        if self._path is not None:
            self._undo.callback(atexit.unregister, self.close)
            atexit.register(self.close)

    def _forget(self) -> None:
        """Keep no model alive once the recorder is closed."""
        self._run = self._describe()
        self._models, self._scalers = [], []
        self._remove_hooks(list(self._hooks))
        self._hooks.clear()

    def _follow(self, session: Session | None) -> None:
        """Take steps from the events of a session, and those of other optimizers from hooks.

        Optimizers of a session get no hook, because with one they could not skip a step on the device.
        """
        self._sampler.attach(lambda: self._models, session, self._scalers)
        bound: list[Optimizer] = []
        if session is not None and not isinstance(session, NativeSession):
            bound = [optimizer for optimizer in session.optimizers() if optimizer in self._hooks]
        self._remove_hooks(bound)
        for optimizer, handles in self._hooks.items():
            if not handles and not any(optimizer is known for known in bound):
                begin = optimizer.register_step_pre_hook(self._begin_by_hook)
                self._hooks[optimizer] = begin, optimizer.register_step_post_hook(self._end_by_hook)

    def _remove_hooks(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            for handle in self._hooks[optimizer]:
                handle.remove()
            self._hooks[optimizer] = ()

    # ---- the file ----------------------------------------------------------------------------------------------------

    def _write_file(self) -> None:
        # a forked process has the exit handlers of this one
        if self._path is None or os.getpid() != self._process_id:
            return
        try:
            self.write(self._path)
        except OSError as error:
            warn(f"the flight recorder could not write {self._path} ({error.strerror}): the last file stays")

    def _make_recording(self, records: Sequence[FlightRecord]) -> Recording:
        run = self._run if self._run is not None and not self._models else self._describe()
        return Recording(run, list(records))

    def _describe(self) -> RunRecord:
        """Return the record of the run: of the session in force, or without one."""
        session = current.state.session
        if session is not None:
            return describe_run(session)
        if self._run is not None:  # of a session that has closed
            return self._run
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


class _ScalerStep:
    """The `step` of a GradScaler while a recorder is attached."""

    def __init__(self, recorder: FlightRecorder, original: Callable[..., Any]) -> None:
        self._recorder = recorder
        self._original = original
        functools.update_wrapper(self, original)

    def __call__(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return self._recorder.step_by_scaler(self._original, optimizer, args, kwargs)


def _restore_step(scaler: Any, previous: Any) -> None:
    """Put back the `step` of a GradScaler, unless a script has replaced it since."""
    if not isinstance(vars(scaler).get("step"), _ScalerStep):
        return
    if previous is None:
        del scaler.step
    else:
        scaler.step = previous


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Return whether `step` was called with a closure. `args` begins with the optimizer."""
    return kwargs.get("closure") is not None or any(map(callable, args[1:]))


def name_for_rank(path: Path) -> Path:
    """Return the path of this rank. All ranks but the first put their number before the suffix."""
    rank = find_rank()
    return path.with_suffix(f".{rank}{path.suffix}") if rank else path
