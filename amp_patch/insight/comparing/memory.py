"""`PeakMeter`: the bytes in use at the peak of what runs between `start` and `stop`."""

import itertools
import os
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...session import Session


class PeakMeter:
    """On CUDA the allocator tells. On a CPU it is what torch's profiler sees between ops, less what they need inside,
    on top of the weights, masters and optimizer states that there are at the start, and of gradients that stay.
    Other devices: None.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._profile: Any = None
        self._before = 0
        self._gradients: list[weakref.ref[Tensor]] = []
        self.peak: int | None = None

    def start(self) -> None:
        """Begin to measure."""
        if self._session.device_type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        elif self._session.device_type == "cpu":
            state, gradients = _state_of(self._session)
            self._before = count_bytes(state)
            self._gradients = [weakref.ref(gradient) for gradient in gradients]  # zero_grad may drop them
            del state, gradients
            self._profile = make_profile()
            self._profile.__enter__()

    def stop(self) -> None:
        """Measure no more, and fill `peak`. Harmless twice."""
        if self._session.device_type == "cuda":
            self.peak = self.peak or torch.cuda.max_memory_allocated()
        elif self._profile is not None:
            profile, self._profile = self._profile, None
            profile.__exit__(None, None, None)
            kept = [gradient for reference in self._gradients if (gradient := reference()) is not None]
            self.peak = self._before + count_bytes(kept) + find_rise(profile)


def make_profile() -> Any:
    """Return torch's profiler of memory, which is a context manager."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it says on stderr when it starts and when it stops
    return torch.autograd.profiler.profile(profile_memory=True, use_kineto=False)


def find_rise(profile: Any) -> int:
    """Return by how many bytes the memory in use on the CPU rose at most, in a profile that has ended."""
    in_use = itertools.accumulate(event.self_cpu_memory_usage for event in profile.function_events or ())
    return max(0, max(in_use, default=0))


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _state_of(session: Session) -> tuple[list[Tensor], list[Tensor]]:
    """Return weights, masters, buffers and optimizer states, and gradients."""
    state = [weight for model in session.models() for weight in (*model.parameters(), *model.buffers())]
    for binding in session.bindings():
        optimizer = binding.optimizer
        if optimizer is not None:
            state += [weight for group in optimizer.param_groups for weight in group["params"]]
            state += [one for each in optimizer.state.values() for one in each.values() if isinstance(one, Tensor)]
    gradients = {id(weight.grad): weight.grad for weight in state if weight.is_leaf and weight.grad is not None}
    return state, list(gradients.values())
