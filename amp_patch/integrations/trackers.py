"""Log amp's numbers to TensorBoard, Weights & Biases, or any function.

from amp_patch.integrations.trackers import Tracker

track = Tracker(SummaryWriter("runs"), every=50)
...
track(optimizer)  # after scale_loss, before optimizer.step()
...
track.flush()  # after the training: writes the last entry
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import api as amp
from ..dtypes import LOW_DTYPES
from ..errors import ArgumentTypeError

Log = Callable[[str, float, int], object]


class Tracker:
    """Logs `amp/loss_scale`, `amp/steps_skipped` and `amp/grad_norm`.

    The norm is over the unscaled gradients of the coming step; with a sharded model, over all shards together. An entry
    is written when the next one is due, or by `flush`. By then the device has usually computed the norm, so the host
    does not wait. With sparse gradients, it waits at each entry. The loss scale and the number of skipped steps have
    the values that the host knew at the time of the entry. With several loss scales, `amp/loss_scale_0`,
    `amp/loss_scale_1`, ... are logged in place of `amp/loss_scale`.

    An entry is written after its step, and Weights & Biases takes no entry for a step before its current one. So if the
    script itself has logged a later step there, the entry is added to that step, and `amp/step` has the entry's step.

    Args:
        target: a TensorBoard SummaryWriter (`add_scalar`), `wandb` or a run of it (`log`), or a function
            `log(tag, value, step)`.
        every: the number of steps from one entry to the next, at least 1.
    """

    def __init__(self, target: Any, every: int = 50) -> None:
        if not isinstance(every, int) or every < 1:
            raise ArgumentTypeError(
                f"every={every!r} must be a whole number of at least 1: pass the number of steps between two entries"
            )
        self._log = _as_log(target)
        self._every = every
        self._step = 0
        self._pending: tuple[int, dict[str, float | Tensor]] | None = None

    def __call__(self, optimizer: torch.optim.Optimizer, step: int | None = None) -> None:
        """Make an entry if the number of the coming step is a multiple of `every`.

        Call it in each step, after `scale_loss` and before `optimizer.step()`. `step` is the number of the step; by
        default, the calls are counted from 1.
        """
        self._step = self._step + 1 if step is None else step
        if self._step % self._every:
            return
        self.flush()
        stats = amp.stats(wait=False)
        values: dict[str, float | Tensor] = {"amp/steps_skipped": float(stats.steps_skipped)}
        for index, scale in enumerate(stats.loss_scales):
            values["amp/loss_scale" if len(stats.loss_scales) == 1 else f"amp/loss_scale_{index}"] = scale
        gradients = [parameter.grad for parameter in amp.master_params(optimizer) if parameter.grad is not None]
        if gradients:
            norms = [_norm_of(gradient) for gradient in gradients]
            stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
            values["amp/grad_norm"] = torch.linalg.vector_norm(stacked)
        self._pending = self._step, values

    def flush(self) -> None:
        """Write the pending entry, if there is one. May wait for the device."""
        if self._pending is not None:
            (step, values), self._pending = self._pending, None
            for tag, value in values.items():
                self._log(tag, float(value), step)


def _norm_of(gradient: Tensor) -> Tensor:
    """Return the L2 norm of a gradient, 0-dim float32. Waits for the device if the gradient is sparse."""
    if gradient.layout is torch.sparse_coo:
        gradient = gradient.coalesce().values()  # `vector_norm` takes no sparse tensor
    dtype = torch.float32 if gradient.dtype in LOW_DTYPES else None  # a norm in 16 bits may overflow
    norm = torch.linalg.vector_norm(gradient, dtype=dtype).float()
    # the norm of a DTensor is a DTensor, too: full_tensor() reduces it over the ranks
    full_norm: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return full_norm


def log_samples(target: Any) -> Callable[[int, Mapping[str, float]], None]:
    """Return a function for the argument `on_sample` of `insight.FlightRecorder`. It logs the samples to `target`.

    The tags are `flight/output/<module>`, `flight/gradient/<module>` and `flight/value/<name>` for the largest
    magnitudes, `flight/zeros/gradient/<module>` for the shares of zeros, and `flight/scale`. `target` is as in
    `Tracker`. A run of Weights & Biases gets all numbers of a sample in one call.
    """
    if hasattr(target, "log") and not hasattr(target, "add_scalar"):

        def log_all(step: int, numbers: Mapping[str, float]) -> None:
            _log_to_run(target, {f"flight/{name}": number for name, number in numbers.items()}, step)

        return log_all
    log = _as_log(target)

    def log_each(step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            log(f"flight/{name}", number, step)

    return log_each


def _log_to_run(target: Any, numbers: Mapping[str, float], step: int) -> None:
    """Log numbers to Weights & Biases: at their step, or at the current step if that is later."""
    run = getattr(target, "run", None) or target  # `wandb.run`, if the target is the module
    current = getattr(run, "step", 0)
    if isinstance(current, int) and current > step:
        target.log({**numbers, "amp/step": step}, commit=False)
    else:
        target.log(dict(numbers), step=step)


def _as_log(target: Any) -> Log:
    """Return a function that logs one number to any of the targets. Raises ArgumentTypeError for anything else."""
    if hasattr(target, "add_scalar"):
        return lambda tag, value, step: target.add_scalar(tag, value, step)
    if hasattr(target, "log"):
        return lambda tag, value, step: _log_to_run(target, {tag: value}, step)
    if callable(target):
        return target  # type: ignore[no-any-return]
    raise ArgumentTypeError(
        f"{type(target).__name__} is not a tracker: pass a SummaryWriter, a run of Weights & Biases, or a function"
        " log(tag, value, step)"
    )
