"""`Check`: records the losses and gradients of a few steps, to compare them with the steps of another run."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...session import Session, current
from ..recorder import describe_run
from ..recordings import Record
from ..records import CheckedStepRecord, SketchRecord
from ..runs import Probe
from .sketches import sketch


class Check(Probe):
    """Records the losses and gradients of `steps` steps of each optimizer.

    After each step, the optimizer's weights from before its first step are restored. So the steps of two runs can be
    compared one by one: an error in one step does not change the weights of the next. An optimizer that steps with a
    closure is noticed only at the end of its first step, so its later steps start from the weights after that step.

    Args:
        steps: the number of steps.
        loss_scale: the initial loss scale of dynamic scalers; None: the script's own.
        on_end: called after the last step, or when an optimizer begins one step more than `steps`.
    """

    def __init__(
        self, steps: int = 2, loss_scale: float | None = None, *, on_end: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(on_end)
        self._steps = steps
        self._loss_scale = loss_scale
        self._scale = 1.0
        self._optimizers: list[int] = []  # ids, in the order of their first steps
        self._taken: list[int] = []  # the number of steps of each optimizer
        self._begun: set[int] = set()  # numbers of the optimizers whose step has begun and not ended
        self._losses: list[Tensor] = []  # since the last step
        self._weights: dict[int, list[tuple[Tensor, Tensor]]] = {}  # of each optimizer: its weights, and their copies
        self._recorded: list[Record] = []

    def _records(self) -> list[Record]:
        return list(self._recorded)

    def session_opened(self, session: Session) -> None:
        """Set the loss scale."""
        self.run = describe_run(session)
        for scaler in session.scalers:
            if self._loss_scale is not None and scaler.is_dynamic:
                scaler.set_loss_scale(self._loss_scale)

    def loss_scaled(self, loss: Tensor, scaled_loss: Tensor) -> None:
        """Keep the value of a loss."""
        self._losses.append(loss.detach().float().mean())

    def step_begun(self, optimizer: Optimizer) -> None:
        """Record the gradients, or end the run if this optimizer has taken all its steps."""
        number = self._number(optimizer)
        self._begun.add(number)
        if self._taken[number] >= self._steps:
            self._on_end()
            return
        session, tensors = current.require(), _parameters(optimizer)
        self._scale = float(session.scalers[0].scale)
        counts: Counter[str] = Counter()
        for tensor, name in zip(tensors, session.names_of(tensors), strict=True):
            counts[name] += 1
            # parameters outside of the models are named by their shapes, which may be equal
            if counts[name] > 1:
                name = f"{name} ({counts[name]})"
            if tensor.grad is not None:
                self._recorded.append(SketchRecord(self._taken[number], number, name, *sketch(tensor.grad)))

    def step_ended(self, optimizer: Optimizer) -> None:
        """Record a step, and restore the weights."""
        number, session = self._number(optimizer), current.require()
        if number not in self._begun:  # a step with a closure reports only its end
            self.step_begun(optimizer)
        self._begun.discard(number)
        skipped = session.is_skipped(optimizer)
        is_dynamic = any(scaler.is_dynamic for scaler in session.scalers)
        losses = tuple(float(loss) for loss in self._losses)
        self._recorded.append(CheckedStepRecord(self._taken[number], number, losses, skipped, self._scale, is_dynamic))
        self._losses.clear()
        self._taken[number] += 1
        self._count += int(self._is_counted(optimizer))
        with torch.no_grad():
            for tensor, before in self._weights[number]:
                tensor.copy_(before)
        session.sync()
        if len(self._taken) >= len(session.optimizers()) and min(self._taken) >= self._steps:
            self._on_end()

    def stop(self) -> None:
        """Drop the copies of weights. Harmless twice."""
        self._weights.clear()
        self._losses.clear()

    def _number(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer, in the order of first steps. The first call for it copies its weights."""
        if id(optimizer) not in self._optimizers:
            self._optimizers.append(id(optimizer))
            self._taken.append(0)
            number = len(self._taken) - 1
            self._weights[number] = [(weight, weight.detach().clone()) for weight in _parameters(optimizer)]
        return self._optimizers.index(id(optimizer))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]
