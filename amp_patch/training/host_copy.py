"""`HostCopy`: numbers of a device on their way to the host, which waits for them only when it reads them."""

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy:
    """Copies of 0-dim tensors for the host. The copies begin when the object is made, and launch no kernel.

    On a CPU, nothing is copied, and `read` returns at once. On mps, nothing is copied either: `read` waits for all
    queued work, although `is_known` returns True.
    """

    def __init__(self, numbers: Sequence[Tensor]) -> None:
        self._numbers = list(numbers)
        self._event: torch.Event | None = None
        # on mps, no optimizer skips a step on the device, so the host must wait for the flag in any case
        if self._numbers and self._numbers[0].device.type not in ("cpu", "mps", "meta"):
            device = self._numbers[0].device
            on_host = torch.empty(len(self._numbers), dtype=torch.float32, device="cpu", pin_memory=True)
            for target, number in zip(on_host, self._numbers, strict=True):
                # one copy for each number launches no kernel; stacking them for a single copy would launch one
                target.copy_(number, non_blocking=True)
            self._numbers = list(on_host)
            self._event = torch.Event(device)
            self._event.record(torch.accelerator.current_stream(device))

    def is_known(self) -> bool:
        """Return whether the numbers have reached the host, so that `read` does not wait."""
        return self._event is None or bool(self._event.query())

    def read(self) -> list[float]:
        """Return the numbers. Waits for their copy, but not for work queued after it."""
        if self._event is not None:
            self._event.synchronize()
        return list(map(Tensor.item, self._numbers))
