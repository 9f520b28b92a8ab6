"""`Sheet`: measures the tensors of one sampled step on their device. This makes the host wait only on MPS.

A tensor usually takes two kernel launches: a reduction to its largest magnitude, and a copy of at most `VALUES` of its
values. With a scale, it usually takes three. A step takes six launches for all tensors together, and one copy to the
host.

A *near* value is one with a magnitude of at least `NEAR`: it is near the largest number of float16.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from ..flight_record import NEAR

VALUES = 512
"""The shares of zeros and near values are estimated from at most this many values of a tensor. If these are as good as
random, the standard error of a share is at most 2.21 %, as it is for a share of one half.
"""

UNSEEN = -1.0
"""The count of a row that was not measured."""

Columns = list[list[float]]
"""Four lists, each with a number for each row: counts of values, largest magnitudes, zeros, and near values."""

# torch's own overloads, which no list patches. With `out`, autocast does not cast their arguments.
_reduce = torch.ops.aten.linalg_vector_norm.out
_take_larger = torch.ops.aten.maximum.out
_add_up = torch.ops.aten.sum.IntList_out
_is_equal = torch.ops.aten.eq.Scalar
_is_at_least = torch.ops.aten.ge.Scalar
_divide = torch.ops.aten.div.out
_magnitude = torch.ops.aten.abs.default


@dataclass(frozen=True, slots=True)
class Page:
    """What was measured in one step on one device, on its way to the host.

    Attributes:
        counts: for each row that was measured, the number of values among which zeros and near values are counted.
        numbers: float32 on the host, of shape (3, rows): largest magnitudes, counts of zeros, counts of near values.
        event: reached once `numbers` has arrived; None if it is there already.
    """

    counts: dict[int, int]
    numbers: Tensor
    event: "torch.Event | None" = field(compare=False)

    def is_here(self) -> bool:
        """Return whether the numbers have arrived, so that `unfold` does not wait."""
        return self.event is None or bool(self.event.query())

    def unfold(self) -> Columns:
        """Return the counts by row, `UNSEEN` where nothing was measured, and the numbers. Waits for their copy, but not
        for work queued after it.
        """
        if self.event is not None:
            self.event.synchronize()
        numbers: list[list[float]] = self.numbers.tolist()
        counts = [UNSEEN] * len(numbers[0])
        for row, count in self.counts.items():
            counts[row] = count
        return [counts, *numbers]


class Sheet:
    """The rows of one device: one for each module output, gradient of a parameter, tensor that the script passes to
    `FlightRecorder.observe`, or loss scale that may be measured.
    """

    def __init__(self, device: torch.device, rows: int) -> None:
        self.rows = rows
        self._device = device
        # A tensor that is made in inference mode cannot be written outside of it. A script may be in this mode now.
        with torch.inference_mode(False):
            self._numbers = torch.empty(3, rows, dtype=torch.float32, device=device)
            self._values = torch.empty(rows, VALUES, dtype=torch.float32, device=device)
            self._spare = torch.empty((), dtype=torch.float32, device=device)
        self._counts: dict[int, int] = {}
        self._is_filled = False

    def begin(self) -> None:
        """Forget the last step."""
        self._counts = {}
        self._is_filled = False

    def measure(self, row: int, tensor: Tensor, scale: Tensor | None = None) -> None:
        """Measure a floating or complex tensor with at least one value. Its values are divided by `scale`.

        A row that is measured again in the step keeps the larger magnitude, and the values of the first tensor.
        """
        values = tensor.detach()
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        largest = self._numbers[0, row]
        is_first = row not in self._counts
        target = largest if is_first else self._spare
        if values.dtype is torch.float64:  # torch refuses to narrow it in the reduction
            target.copy_(torch.linalg.vector_norm(values, math.inf))
        else:
            _reduce(values, math.inf, None, False, dtype=torch.float32, out=target)
        if scale is not None:
            _divide(target, scale, out=target)
        if not is_first:
            _take_larger(largest, target, out=largest)
            return
        if not self._is_filled:
            # a tensor may have fewer values than its row; NaN is neither zero nor near
            self._values.fill_(math.nan)
            self._is_filled = True
        spread = _spread(values)
        count = self._counts[row] = spread.numel()
        if scale is None:
            self._values[row, :count].copy_(spread)
        else:
            _divide(spread, scale, out=self._values[row, :count])

    def note(self, row: int, number: Tensor | float) -> None:
        """Take a number as the largest magnitude of a row, which then has no values to count."""
        self._counts[row] = 0
        if isinstance(number, Tensor):
            self._numbers[0, row].copy_(number.detach().reshape(()), non_blocking=True)
        else:
            self._numbers[0, row].fill_(number)

    def finish(self) -> Page | None:
        """Count the zeros and the near values, and start the copy to the host. Return None if nothing was measured."""
        if not self._counts:
            return None
        if not self._is_filled:  # only `note` was called
            self._values.fill_(math.nan)
        for row, is_counted in enumerate(
            (_is_equal(self._values, 0), _is_at_least(_magnitude(self._values), NEAR)), start=1
        ):
            _add_up(is_counted, [1], False, dtype=torch.float32, out=self._numbers[row])
        # no event of MPS tells when a copy has arrived, so on MPS the host waits
        if self._device.type in ("cpu", "mps"):
            return Page(self._counts, self._numbers.to("cpu", copy=True), None)
        on_host = torch.empty(self._numbers.shape, dtype=torch.float32, device="cpu", pin_memory=True)
        on_host.copy_(self._numbers, non_blocking=True)
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return Page(self._counts, on_host, event)


def _spread(values: Tensor) -> Tensor:
    """Return `VALUES` values at equal distances, or all if there are fewer: a view of `values` if possible."""
    count = values.numel()
    flat = values.as_strided((count,), (1,)) if _is_dense(values) else values.reshape(-1)
    return flat[:: _find_distance(count)][:VALUES]


def _is_dense(values: Tensor) -> bool:
    """Return whether the values of a tensor lie side by side in memory, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(values.stride(), values.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


@lru_cache(maxsize=4096)
def _find_distance(count: int) -> int:
    """Return how far apart to take values from a tensor of `count` values, so that `VALUES` of them lie in the tensor.

    The distance has no common factor with `count`. With one, the values could all come from the same few channels.
    """
    distance = max(1, count // VALUES)
    while math.gcd(distance, count) > 1:
        distance -= 1
    return distance
