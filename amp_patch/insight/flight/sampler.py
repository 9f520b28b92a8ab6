"""`Sampler`: measures the magnitudes of module outputs and gradients in one of every `every` steps of a training.

It changes no value. In a step that is not sampled, it has no hook on any module.
"""

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...casting import compiling
from ...session import Session
from ...torch_dispatch import get_current_node, get_scale_on_device, without_dispatch, without_functions
from ...torch_private import get_local_tensor, get_sparse_values
from ..flight_record import FlightKind, FlightRecord
from ..naming import name_modules
from ..owned_hook import OwnedHook
from ..rules import short
from ..runs import check_count
from ..short_dtypes import LARGEST
from ..tensors import floating_in
from .sheet import UNSEEN, Columns, Page, Sheet

_SPARE_ROWS = 64
"""Rows for values that a script passes to `observe` for the first time in a step that has begun already."""


class _OutputHook(OwnedHook):
    """Forward hook of a module."""

    def __init__(self, sampler: "Sampler | None" = None, row: int = 0) -> None:
        super().__init__(sampler)
        self._row = row

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if compiling.is_traced():  # traced code would keep what the hook does
            return
        sampler = self.owner()
        if sampler is not None:
            sampler.look_at_output(self._row, module, output)


@dataclass(slots=True)
class _Row:
    """What a row of the sheets measures.

    `owner` is the module, held weakly; for a gradient, the module that has the parameter. (`torch.utils.swap_tensors`
    refuses a parameter to which a weak reference exists.) None for a value or a loss scale.
    """

    subject: FlightKind
    name: str
    owner: "weakref.ref[Any] | None" = None
    dtype: str = ""


class _Sample(NamedTuple):
    """A sampled step, with the measurements of each device."""

    step: int
    pages: tuple[Page, ...]


class Sampler:
    """Samples one step in `every`, and keeps the last `keep` samples on the host.

    Its user calls `begin_step`, `look_at_gradients` before the step of each optimizer, and `end_step`. A sampled step
    usually takes two kernel launches for each output of a module and each gradient, six for the step, one for each loss
    scale, and two for each further call of a module. To sample a step, the host does not wait for the device, except on
    MPS.

    Not sampled are, for example, modules inside of compiled code, calls in eval mode while gradients are disabled, and
    what a checkpoint computes again.
    """

    def __init__(self, every: int = 50, keep: int = 256) -> None:
        check_count(every, "every")
        check_count(keep, "keep", 2)
        self._every = every
        self._get_models: Callable[[], Iterable[nn.Module]] = list
        self._session: Session | None = None
        self._scalers: Sequence[Any] = ()
        self._rows: list[_Row] = []
        self._numbers_of_rows: dict[tuple[FlightKind, object], int] = {}  # see `_find_row`
        self._rows_of_gradients: dict[int, int] = {}  # by the id of the parameter, in the present step
        self._sheets: dict[torch.device, Sheet] = {}
        self._samples: deque[_Sample] = deque(maxlen=keep)
        self._handles: list[RemovableHandle] = []
        self._is_sampling = self._is_paused = self._has_scale = False
        self._last_output: Callable[[], Tensor | None] = lambda: None
        self._low = ""

    @property
    def is_sampling(self) -> bool:
        """Whether this step is sampled."""
        return self._is_sampling

    @property
    def low(self) -> str:
        """The short name of the 16-bit dtype that was seen last; "" without one."""
        return self._low

    def attach(
        self,
        get_models: Callable[[], Iterable[nn.Module]],
        session: Session | None = None,
        scalers: Sequence[Any] = (),
    ) -> None:
        """Sample models from the next step on.

        Args:
            get_models: returns the models. It is called when a sampled step begins, so it may return more models later.
            session: has the float32 masters of parameters, and the loss scalers.
            scalers: GradScalers of the script, in place of the session's.
        """
        self._get_models, self._session, self._scalers = get_models, session, scalers

    def detach(self) -> None:
        """Remove all hooks, and sample no further step. The samples stay. A second call does nothing."""
        self._remove_hooks()
        self._is_sampling = False
        self._get_models, self._session, self._scalers = list, None, ()

    def pause(self) -> None:
        """Measure nothing until `go_on`."""
        self._is_paused = True

    def go_on(self) -> None:
        """End a pause."""
        self._is_paused = False

    # ---- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Begin a step: if it is sampled, put a hook on each module."""
        if step % self._every:
            return
        self._remove_hooks()
        self._is_sampling, self._has_scale = True, False
        for module, row in self._list_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # refuses hooks
                self._handles.append(module.register_forward_hook(_OutputHook(self, row)))
        rows = len(self._rows) + _SPARE_ROWS
        for device, sheet in self._sheets.items():
            if sheet.rows < len(self._rows):
                self._sheets[device] = Sheet(device, rows)
            self._sheets[device].begin()

    def look_at_output(self, row: int, module: nn.Module, output: Any) -> None:
        """Measure the output of a module. Leave out a tensor that was measured just before: a container may return the
        output of its last module.
        """
        if not self._is_watching() or not (module.training or torch.is_grad_enabled()):
            return
        if get_current_node() is not None:  # a checkpoint calls the module again
            return
        for tensor in floating_in([output]):
            if self._last_output() is tensor:
                continue
            self._last_output = weakref.ref(tensor)
            self._measure(row, tensor)

    def observe(self, name: str, tensor: Tensor) -> None:
        """Measure a tensor that is no output of a module. Does nothing in a step that is not sampled."""
        if not self._is_watching():
            return
        row = self._find_row(FlightKind.VALUE, name, name)
        for value in floating_in([tensor]):
            self._measure(row, value)

    def look_at_gradients(self, optimizer: Optimizer) -> None:
        """Measure the gradients that an optimizer is about to use, and the loss scale."""
        if not self._is_watching():
            return
        with torch.no_grad():
            self._note_scales()
            scale = getattr(optimizer, "grad_scale", None)  # GradScaler leaves it to a fused optimizer to unscale
            if not isinstance(scale, Tensor):
                scale = None
            masters = self._find_masters()
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    row = self._rows_of_gradients.get(masters.get(id(parameter), id(parameter)))
                    if row is not None and parameter.grad is not None:
                        for values in _values_of(parameter.grad):
                            self._measure(row, values, scale)

    def end_step(self, step: int) -> None:
        """End a step. If it was sampled, begin to copy its numbers to the host."""
        if not self._is_sampling:
            return
        self._remove_hooks()
        self._is_sampling = False
        with without_functions(), without_dispatch():
            pages = [sheet.finish() for sheet in self._sheets.values()]
        measured = tuple(page for page in pages if page is not None)
        if measured:
            self._samples.append(_Sample(step, measured))

    # ---- what was sampled --------------------------------------------------------------------------------------------

    def has_arrived(self) -> bool:
        """Return whether all samples are on the host, so that `records` need not wait."""
        return all(page.is_here() for page in self._samples[-1].pages) if self._samples else True

    @property
    def last_step(self) -> int:
        """The step of the last sample; -1 if there is none."""
        return self._samples[-1].step if self._samples else -1

    def records(self, after: int = -1) -> list[FlightRecord]:
        """Return the samples: a record for each subject and name that has any. Waits until they are on the host.

        `after`: use only the samples of steps after this one.
        """
        samples = [sample for sample in self._samples if sample.step > after]
        columns = [(sample.step, _merge([page.unfold() for page in sample.pages])) for sample in samples]
        rows: dict[tuple[FlightKind, str], list[int]] = {}
        for number, row in enumerate(self._rows):
            rows.setdefault((row.subject, row.name), []).append(number)
        records = [self._make_record(subject, name, numbers, columns) for (subject, name), numbers in rows.items()]
        return [record for record in records if record.steps]

    def _make_record(
        self, subject: FlightKind, name: str, rows: Sequence[int], columns: Sequence[tuple[int, Columns]]
    ) -> FlightRecord:
        """Return the samples of some rows, such as the parameters of a module, as one record."""
        points = []
        for step, (counts, *numbers) in columns:
            seen = [row for row in rows if row < len(counts) and counts[row] != UNSEEN]
            if seen:
                values = max(1.0, sum(counts[row] for row in seen))
                largest, zeros, near = ([column[row] for row in seen] for column in numbers)
                points.append((step, _find_largest(largest), sum(zeros) / values, sum(near) / values))
        return FlightRecord(
            subject,
            name,
            self._rows[rows[-1]].dtype,
            tuple(point[0] for point in points),
            tuple(point[1] if subject is FlightKind.SCALE else _shorten(point[1]) for point in points),
            tuple(_shorten(point[2]) for point in points),
            tuple(_shorten(point[3]) for point in points),
            self._low,
        )

    # ---- rows --------------------------------------------------------------------------------------------------------

    def _is_watching(self) -> bool:
        return self._is_sampling and not self._is_paused and not _is_capturing()

    def _list_modules(self) -> list[tuple[nn.Module, int]]:
        """Return the modules of all models with their rows, and give each parameter a row."""
        modules = list(dict(name_modules(list(self._get_models()))).values())
        listed = [(module, self._find_row(FlightKind.OUTPUT, id(module), name, module)) for module, name in modules]
        self._rows_of_gradients.clear()
        for module, name in modules:
            for own_name, parameter in module.named_parameters(recurse=False):
                row = self._find_row(FlightKind.GRADIENT, (id(module), own_name), name, module)
                self._rows_of_gradients.setdefault(id(parameter), row)
        return listed

    def _find_row(self, subject: FlightKind, key: object, name: str, owner: object = None) -> int:
        """Return the number of a row, which is new if there is none yet.

        `key` tells the rows of a subject apart: the id of a module, that id with the name of a parameter, or a name.
        """
        number = self._numbers_of_rows.get((subject, key))
        if number is not None:
            row = self._rows[number]
            if row.owner is None or row.owner() is owner:
                return number
        # new, or the id of an object that has been freed
        number = self._numbers_of_rows[subject, key] = len(self._rows)
        self._rows.append(_Row(subject, name, None if owner is None else weakref.ref(owner)))
        return number

    def _measure(self, row: int, tensor: Tensor, scale: Tensor | None = None) -> None:
        sheet = self._find_sheet(tensor.device)
        if row >= sheet.rows:  # no spare row is left; the next sampled step has larger sheets
            return
        dtype = self._rows[row].dtype = short(tensor.dtype)
        if dtype in LARGEST:
            self._low = dtype
        with without_functions(), without_dispatch():
            sheet.measure(row, tensor, scale)

    def _find_sheet(self, device: torch.device) -> Sheet:
        sheet = self._sheets.get(device)
        if sheet is None:
            sheet = self._sheets[device] = Sheet(device, len(self._rows) + _SPARE_ROWS)
            sheet.begin()
        return sheet

    def _note_scales(self) -> None:
        """Note the loss scales, once in a step, before they are updated."""
        if self._has_scale:
            return
        self._has_scale = True
        scalers = list(self._scalers)
        if self._session is not None and not scalers:
            scalers = list(self._session.scalers)
        for number, scaler in enumerate(scalers):
            scale = _read_scale(scaler)
            if scale is not None:
                name = str(number) if number else ""
                device = scale.device if isinstance(scale, Tensor) else torch.device("cpu")
                row, sheet = self._find_row(FlightKind.SCALE, name, name), self._find_sheet(device)
                if row < sheet.rows:
                    with without_functions(), without_dispatch():
                        sheet.note(row, scale)

    def _find_masters(self) -> dict[int, int]:
        """Return, by the id of each float32 master, the id of its parameter."""
        masters: dict[int, int] = {}
        if self._session is not None:
            for model in self._session.models():
                for parameter in model.parameters():
                    master = self._session.find_master(parameter)
                    if master is not None:
                        masters[id(master)] = id(parameter)
        return masters

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()


def _values_of(gradient: Tensor) -> Iterator[Tensor]:
    """Yield the values of a gradient that are on this rank; of a sparse COO gradient, those that are stored."""
    local = get_local_tensor(gradient)
    values = gradient if local is None else local
    yield from floating_in([get_sparse_values(values) if values.layout is torch.sparse_coo else values])


def _read_scale(scaler: Any) -> Tensor | float | None:
    """Return the scale of a GradScaler, or of a loss scaler of a session; None for a scaler that does not scale."""
    if getattr(scaler, "is_identity", False):
        return None
    scaler = getattr(scaler, "scaler", scaler)  # a session wraps the GradScaler of a script
    if isinstance(scaler, torch.amp.GradScaler):
        return get_scale_on_device(scaler) if scaler.is_enabled() else None
    scale: Tensor | float = scaler.scale
    return scale


def _is_capturing() -> bool:
    """Return whether a CUDA graph is being captured. It would repeat the launches of a sample in each replay."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _merge(pages: Sequence[Columns]) -> Columns:
    """Return the columns of a step, merged over its devices. A row may have been measured on several devices."""
    merged, *others = pages
    for columns in others:
        for row, count in enumerate(columns[0]):
            if count == UNSEEN:
                continue
            for column in merged:
                column.extend([UNSEEN if column is merged[0] else 0.0] * (row + 1 - len(column)))
            is_first = merged[0][row] == UNSEEN
            merged[0][row] = count if is_first else merged[0][row] + count
            merged[1][row] = columns[1][row] if is_first else _find_largest([merged[1][row], columns[1][row]])
            for column, added in zip(merged[2:], columns[2:], strict=True):
                column[row] = added[row] if is_first else column[row] + added[row]
    return merged


def _find_largest(numbers: Sequence[float]) -> float:
    """Return the largest number; NaN if one is."""
    return math.nan if any(number != number for number in numbers) else max(numbers)


def _shorten(number: float) -> float:
    """Return a number with five digits."""
    return float(f"{number:.5g}") if number else 0.0
