"""`GradientWatch`: finds gradients that are zero in float16 although they are not zero in float32."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..folding import OpCall
from ..ops import Op, compute_in_float32
from ..quiet_record import QuietCause
from ..written import Written
from .findings import Findings, Place, place_of

SMALLEST_NORMAL = 2.0**-14
"""The smallest float16 number with full precision. Only results whose largest value is smaller are looked at."""

LOST = 0.5
"""An op loses its gradients if more than this share of the elements that are not zero in float32 is zero in float16."""

ZERO = 0.25
"""Lost gradients are reported if at least this share of the gradient elements of a step is zero."""


class GradientWatch:
    """Looks at the ops of backward passes, and at the gradients of each step.

    Args:
        findings: receives what is found.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._lost_at: Place | None = None  # the first op since the last check that lost its gradients

    def look(self, op: Op, call: OpCall, outputs: Sequence[Tensor], made: Sequence[Written]) -> None:
        """Look at the float16 results of an op of a backward pass. After an op that has lost its gradients, look at no
        other until `check_step` is called.
        """
        if self._lost_at is not None:
            return
        for number, (tensor, written) in enumerate(zip(outputs, made, strict=True)):
            if tensor.dtype is not torch.float16 or not written.largest < SMALLEST_NORMAL:
                continue
            results = compute_in_float32(op)
            if number >= len(results) or results[number].shape != tensor.shape:
                continue
            held = results[number] != 0
            count = int(held.count_nonzero())
            lost = int((held & (tensor == 0)).count_nonzero())
            if count and lost > LOST * count:
                self._lost_at = place_of(call)
                return

    def check_step(self, parameters: Sequence[Tensor], name: Callable[[list[Tensor]], list[str]]) -> None:
        """Report the gradients of an optimizer that is about to step, if many are zero and an op lost its gradients.

        Args:
            parameters: the parameters of the optimizer.
            name: returns the names of parameters.
        """
        place, self._lost_at = self._lost_at, None
        if place is None:
            return
        given = [weight for weight in parameters if weight.grad is not None and not weight.grad.is_sparse]
        zeros = [int((weight.grad == 0).count_nonzero()) for weight in given]  # type: ignore[union-attr]
        total = sum(weight.numel() for weight in given)
        if not total or sum(zeros) < ZERO * total:
            return
        shares = [zero / max(weight.numel(), 1) for weight, zero in zip(given, zeros, strict=True)]
        worst = given[max(range(len(given)), key=shares.__getitem__)]
        self._findings.add(
            QuietCause.ZERO_GRADIENTS, place, torch.float16, kept=1 - sum(zeros) / total, tensor=name([worst])[0]
        )
