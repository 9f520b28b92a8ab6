"""The probes of a comparison. `CurveProbe` watches losses and times in a whole run; `LayerProbe` watches layers, ops,
memory and updates in its first steps.
"""

import contextlib
import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...casting import cast_tree, compiling
from ...session import Session, current
from ...torch_dispatch import leave_mode
from ..naming import name_modules
from ..quiet.watch import QuietWatch
from ..quiet_record import WEIGHTS, QuietRecord
from ..recorder import describe_run
from ..recordings import Record
from ..records import ComparedRecord, CurveRecord, GradientRecord, SampleRecord
from ..runs import Probe
from .exponents import count
from .memory import PeakMeter
from .op_errors import LowOps, OpErrors
from .summary import mean

SAMPLES = 512
"""The most values of a tensor that a sample has."""

UPDATES = 4
"""The number of steps in which `LayerProbe` follows the updates of 16-bit tensors."""


class CurveProbe(Probe):
    """Records the loss, the smallest loss scale and the time of each step, and counts batches.

    The loss of a step is the mean of the losses that went backward in it. The time of a step begins when the step
    before it has ended, so it includes all that the script does in between. On a CPU it is CPU time, which other load
    affects less. The probe waits for the device in each step.

    Args:
        steps: the number of steps to watch.
        is_noise: whether to move each weight by one unit in the last place, at first and after each step. The time that
            this takes does not count.
        is_frozen: whether to restore the first weights after each step, so that the run learns nothing.
        on_end: called after the last step.
    """

    def __init__(
        self,
        steps: int,
        is_noise: bool = False,
        is_frozen: bool = False,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(on_end)
        self._limit = steps
        self._is_noise = is_noise
        self._first_weights: _FirstWeights | None = None
        if is_frozen:
            self._first_weights = _FirstWeights()
        self._batch_counter = _BatchCounter()
        self._batches = 0
        self._pending: list[Tensor] = []  # the losses of the present step
        # a value for each step, except for `_skipped`, which has the numbers of skipped steps
        self._losses: list[float] = []
        self._scales: list[float] = []
        self._seconds: list[float] = []
        self._skipped: list[int] = []
        self._read_clock = time.perf_counter
        self._step_started = self._read_clock()

    def session_opened(self, session: Session) -> None:
        """Begin. Called again when a session gets more models."""
        # only at the first call, because each call would move the weights further
        if self._is_noise and self.run is None:
            _nudge(session, session.trained_parameters())
        self.run = describe_run(session)
        self._pending.clear()
        self._batch_counter.start()
        if session.device_type == "cpu":
            self._read_clock = time.process_time
        self._step_started = self._read_clock()

    def loss_scaled(self, loss: Tensor, scaled_loss: Tensor) -> None:
        """Keep the loss until the end of the step."""
        if self._count < self._limit:
            self._pending.append(loss.detach().clone())

    def step_begun(self, optimizer: Optimizer) -> None:
        """Keep the first weights, if they are put back after each step."""
        if self._first_weights is not None:
            self._first_weights.keep(optimizer)

    def step_ended(self, optimizer: Optimizer) -> None:
        """Put the weights back (`is_frozen`) or move them (`is_noise`). Record the step, if it counts; after the last,
        end.
        """
        if self._first_weights is not None:
            self._first_weights.put_back(optimizer)
        if self._is_noise:
            self._move_weights(optimizer)
        if not self._is_counted(optimizer):
            return
        self._count += 1
        if self._count > self._limit:
            return
        self._batches = self._batch_counter.end_step()
        session = current.require()
        self.run = describe_run(session)
        self._seconds.append(self._wait_and_read_clock() - self._step_started)
        losses = [loss.cpu().double().mean().item() for loss in self._pending]
        self._pending.clear()
        self._losses.append(_round(mean(losses)))
        self._scales.append(min(session.stats().loss_scales))
        if session.is_skipped(optimizer):
            self._skipped.append(self._count - 1)
        if self._count == self._limit:
            self.stop()
            self._on_end()
        self._step_started = self._read_clock()

    def _move_weights(self, optimizer: Optimizer) -> None:
        """Move the weights of an optimizer by one unit in the last place. The time that this takes does not count.

        The weights of other optimizers stay, because a backward pass may still need them: in a GAN, the generator goes
        backward after the discriminator has stepped.
        """
        begun = self._wait_and_read_clock()
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        _nudge(current.require(), weights, self._count + 1)
        self._step_started += self._wait_and_read_clock() - begun

    def _wait_and_read_clock(self) -> float:
        """Wait for the device, and return the time in seconds."""
        if current.require().device_type != "cpu":
            torch.accelerator.synchronize()
        return self._read_clock()

    def stop(self) -> None:
        """Stop watching. A second call does nothing."""
        self._pending.clear()
        self._batch_counter.stop()

    def _records(self) -> Iterable[Record]:
        ms = math.nan
        if self._seconds:
            # without the first steps, which allocate memory and compile kernels
            warm = self._seconds[max(1, len(self._seconds) // 10) :] or self._seconds
            ms = round(1e3 * statistics.median(warm), 4)
        is_frozen = self._first_weights is not None
        if self._first_weights is not None and not self._first_weights.has_any:
            return  # no weights were put back: steps with a closure do not report that they begin
        curves = tuple(self._losses), tuple(self._scales), tuple(self._skipped)
        yield CurveRecord("", 0, *curves, ms, self._is_noise, is_frozen, self._batches)


class _BatchCounter:
    """Counts batches: in each step, the calls of the module that is called first, with gradients enabled."""

    def __init__(self) -> None:
        self._number = 0
        self._model: weakref.ref[nn.Module] | None = None
        self._handle: RemovableHandle | None = None

    def start(self) -> None:
        """Count from now on. A second call adds no second hook, which would make torch.compile compile again."""
        if self._handle is None:
            self._handle = register_module_forward_pre_hook(self._count)

    def stop(self) -> None:
        """Stop counting. A second call does nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def end_step(self) -> int:
        """Return the number of batches so far. The next step may call another module first."""
        self._model = None
        return self._number

    def _count(self, module: nn.Module, args: Any) -> None:
        if compiling.is_dynamo_compiling() or not torch.is_grad_enabled():
            return
        if self._model is None:
            self._model = weakref.ref(module)
        if self._model() is module:
            self._number += 1


class _FirstWeights:
    """The weights of each optimizer before its first step. They are put back after each step."""

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    @property
    def has_any(self) -> bool:
        """Whether weights were kept."""
        return bool(self._kept)

    def keep(self, optimizer: Optimizer) -> None:
        """Keep the weights of an optimizer, at the first call for it."""
        if id(optimizer) not in self._kept:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            self._kept[id(optimizer)] = [(weight, weight.detach().clone()) for weight in weights]

    @torch.no_grad()
    def put_back(self, optimizer: Optimizer) -> None:
        """Put the weights of this optimizer back. A backward pass may still need the weights of other optimizers."""
        for weight, value in self._kept.get(id(optimizer), ()):
            weight.copy_(value)
        current.require().sync()


def _round(value: float) -> float:
    """Return a number rounded to nine digits, which are enough for float32."""
    return float(f"{value:.9g}")


def _nudge(session: Session, weights: Iterable[Tensor], seed: int = 0) -> None:
    """Move each element of floating weights by one unit in the last place of its dtype, up or down.

    The seed decides which elements go up. The random numbers of the run stay the same.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for tensor in weights:
            if tensor.is_floating_point():
                is_up = torch.randint(2, tensor.shape, generator=generator, dtype=torch.bool, device="cpu")
                infinity = torch.full_like(tensor, torch.inf)
                tensor.copy_(torch.nextafter(tensor, torch.where(is_up.to(tensor.device), infinity, -infinity)))
    session.sync()


class LayerProbe(Probe):
    """Samples layers in the first step of a run, and measures the memory of the second.

    In the first step, it also notes which ops have results in 16 bits. After the second step, it follows the updates of
    16-bit tensors for `UPDATES` steps. With `has_errors`, it does neither: in the first step, it measures the error
    that 16 bits would add to each op.

    A layer is a module that has weights of its own, or no submodules. Its samples are values of its input and output,
    in its first call with gradients enabled, and of the unscaled gradients of its weights. The gradients are also
    counted by magnitude.

    Args:
        loss_scale: the loss scale to start a dynamic scale with, since 2**16 may overflow; None for the session's own.
        has_errors: whether to measure the error that 16 bits would add to each op whose result is float32.
        on_end: called after the last step.
    """

    def __init__(
        self,
        loss_scale: float | None = None,
        has_errors: bool = False,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(on_end)
        self._loss_scale = loss_scale
        self._ops = OpErrors() if has_errors else LowOps()
        self._updates = None if has_errors else QuietWatch(current.require, lambda: "")
        self._used_scale: float | None = None
        self._names: dict[int, tuple[nn.Module, str]] = {}
        self._handles: list[RemovableHandle] = []
        self._meter: PeakMeter | None = None
        # samples, by the name of the layer
        self._inputs: dict[str, tuple[float, ...]] = {}
        self._outputs: dict[str, tuple[float, ...]] = {}
        self._gradients: dict[str, tuple[float, ...]] = {}
        self._weights: tuple[float, ...] = ()  # of all layers, one after the other
        self._counted: GradientRecord | None = None

    def session_opened(self, session: Session) -> None:
        """Begin. Called again when a session gets more models."""
        self.run = describe_run(session)
        if self._count:
            return
        self._names = name_layers(session)
        if not self._handles:
            self._handles = [
                register_module_forward_pre_hook(self._take_input),
                register_module_forward_hook(self._take_output),
            ]
        for scaler in session.scalers:
            if scaler.is_dynamic and self._loss_scale is not None:
                scaler.set_loss_scale(self._loss_scale)
        self._used_scale = session.scalers[0].loss_scale()
        self._ops.watch(session)

    def _take_input(self, module: nn.Module, args: Any) -> None:
        """Sample the input. As a global hook, this runs before the hooks of amp on modules, which may cast."""
        self._take(module, args, self._inputs)

    def _take_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self._take(module, output, self._outputs)

    def _take(self, module: nn.Module, value: Any, samples: dict[str, tuple[float, ...]]) -> None:
        """Sample the first floating tensor in the input or output of a layer, in its first call with grad enabled."""
        _, name = self._names.get(id(module), (module, None))
        if name is None or name in samples or not torch.is_grad_enabled() or not is_layer(module):
            return
        tensor = find_floating(value)
        if tensor is not None:
            skip_without_values = contextlib.suppress(RuntimeError, NotImplementedError)  # such as a meta tensor
            with current.without_casts(), self._ops.pause(), skip_without_values:
                samples[name] = _sample(tensor)

    def step_begun(self, optimizer: Optimizer) -> None:
        """Sample the gradients before the first step. While updates are followed, tell `UpdateWatch` of each step."""
        if self._count > 1 and self._updates is not None:
            self._updates.updates.begin_step(optimizer)
        if self._count or self._gradients:
            return
        with self._ops.pause():
            self._sample_gradients(current.require())

    def _sample_gradients(self, session: Session) -> None:
        """Sample and count the gradients of all layers, and sample their weights."""
        gradients: dict[int, Tensor] = {}
        weights: list[float] = []
        for module, name in sorted(self._names.values(), key=lambda named: named[1]):
            samples: list[float] = []
            for weight in module.parameters(recurse=False):
                # if the weight has a master, the master has the unscaled gradient
                master = session.find_master(weight)
                trained = weight if master is None else master
                weights.extend(_sample(trained, 8))
                if trained.grad is not None:
                    samples.extend(_sample_with_norm(trained.grad))
                    gradients[id(trained)] = trained.grad  # once, if modules share the weight
            if samples:
                self._gradients[name] = tuple(samples)
        self._weights = tuple(weights)
        if self._gradients:
            # without sparse gradients, which torch cannot flatten
            self._counted = count(grad for grad in gradients.values() if not grad.is_sparse)

    def step_ended(self, optimizer: Optimizer) -> None:
        """After the first step, begin to measure memory; after the second, begin to follow updates. After the last,
        end.
        """
        if self._count > 1 and self._updates is not None:
            self._updates.updates.end_step(optimizer)
        if not self._is_counted(optimizer):
            return
        self._count += 1
        if self._count == 1:
            self._unhook()
            self._ops.stop()
            self._meter = PeakMeter(current.require())
            self._meter.start()
        elif self._count == 2 and self._updates is not None:
            self._stop_meter()
            self._updates.__enter__()
        elif self._count == 2 or self._count == 2 + UPDATES:
            self.stop()
            self._on_end()

    def _unhook(self) -> None:
        """Sample no more layers."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._names = [], {}

    def stop(self) -> None:
        """Stop watching. A second call does nothing."""
        self._unhook()
        self._ops.stop()
        self._stop_meter()
        if self._updates is not None:
            leave_mode(self._updates)

    def _stop_meter(self) -> None:
        if self._meter is not None:
            self._meter.stop()

    def _records(self) -> Iterable[Record]:
        peak = None
        if self._meter is not None and self._count > 1:
            peak = self._meter.peak
        compared = ComparedRecord("", peak=peak, loss_scale=self._used_scale)
        lost = [] if self._updates is None else self._updates.updates.records()
        if lost:
            worst: QuietRecord = min(lost, key=lambda record: (record.role != WEIGHTS, record.kept or 0.0))
            lost_by = "line" if worst.tensor is None else "tensor"
            if worst.role == WEIGHTS:
                lost_by = "weights"
            elif worst.is_temporary:
                lost_by = "sum"
            name = worst.tensor or worst.site or ""
            compared = replace(compared, kept=worst.kept, kept_worst=name, lost_by=lost_by, update_error=worst.error)
        yield compared
        yield SampleRecord("", (), self._weights, ())  # the record without a name has samples of the weights
        for name in dict.fromkeys([*self._outputs, *self._gradients]):
            yield SampleRecord(
                name, *(samples.get(name, ()) for samples in (self._inputs, self._outputs, self._gradients))
            )
        if self._counted is not None:
            yield self._counted
        yield from self._ops.records()


def name_layers(session: Session) -> dict[int, tuple[nn.Module, str]]:
    """Return each module of the models with its qualified name, by the id of the module.

    A single model itself has no qualified name, so it is called after its class: "(Net)".
    """
    return {
        module_id: (module, name or f"({type(module).__name__})")
        for module_id, (module, name) in name_modules(session.models())
    }


def find_floating(value: Any) -> Tensor | None:
    """Return the first floating tensor in the input or output of a module; None without any."""
    tensors: list[Tensor] = []
    cast_tree(value, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return next((tensor for tensor in tensors if tensor.is_floating_point()), None)


def is_layer(module: nn.Module) -> bool:
    """Return whether a module has parameters of its own, or no submodules."""
    return next(module.parameters(recurse=False), None) is not None or next(module.children(), None) is None


def _sample_with_norm(gradient: Tensor) -> Iterator[float]:
    """Yield samples of a gradient, all times one factor, so that their norm estimates the norm of the gradient."""
    values = _sample(gradient)
    factor = math.sqrt(gradient.numel() / max(1, len(values)))
    return (value * factor for value in values)


@torch.no_grad()
def _sample(tensor: Tensor, number: int = SAMPLES) -> tuple[float, ...]:
    """Return at most `number` values of a tensor, spread evenly. Waits for the device."""
    values = tensor.detach()
    if values.is_sparse:
        values = values.to_dense()
    values = values.flatten()
    if values.numel() > number:
        values = values[torch.arange(number, device=values.device) * values.numel() // number]
    return tuple(map(_round, values.float().tolist()))
