"""Reads and restores the state on which a call of a model depends, so that the call can be repeated.

This state is the settings of the thread, the generators of random numbers, and the attributes and buffers of modules.
"""

import contextlib
import random
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...casting import Mode
from ...session import Session
from ...torch_private import BatchNormBase, get_own_buffers, get_version

_SCANNED_CALLS = 3
"""In this many first calls of a model, all its modules are compared with their states before the call, to find those
that a forward pass changes.
"""


class Surroundings(NamedTuple):
    """The settings of a thread that decide how an op runs.

    Attributes:
        has_grad, is_inference: whether autograd records ops, and whether inference mode is on.
        low: the dtype of torch.autocast; None if it is disabled.
        region: the mode of the innermost region (see `casting.mode.Region`) of the session; None outside of regions.
    """

    has_grad: bool
    is_inference: bool
    low: torch.dtype | None
    region: Mode | None


def read_surroundings(session: Session) -> Surroundings:
    """Return the settings of this thread."""
    device_type = session.device_type
    is_enabled = torch.is_autocast_enabled(device_type)
    return Surroundings(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype(device_type) if is_enabled else None,
        session.switch.region_here(),
    )


@contextlib.contextmanager
def restored(surroundings: Surroundings, session: Session) -> Iterator[None]:
    """Context manager: in the block, this thread has the settings in `surroundings`."""
    with contextlib.ExitStack() as undo:
        undo.enter_context(_autocast_as(session.device_type, surroundings.low))
        undo.enter_context(session.switch.outside_regions())
        if surroundings.region is not None:
            undo.enter_context(session.switch.region(surroundings.region, pauses_autocast=False))
        if surroundings.is_inference:
            undo.enter_context(torch.inference_mode())
        undo.enter_context(torch.set_grad_enabled(surroundings.has_grad))
        yield


@contextlib.contextmanager
def _autocast_as(device_type: str, low: torch.dtype | None) -> Iterator[None]:
    """Context manager: enable autocast with the dtype `low`, or disable it if `low` is None.

    It does not use `torch.autocast`, which `native` may have patched.
    """
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.autocast_increment_nesting()
    try:
        torch.set_autocast_enabled(device_type, low is not None)
        if low is not None:
            torch.set_autocast_dtype(device_type, low)
        yield
    finally:
        # as in torch.autocast: an optimizer step would leave old values in the cached casts of weights
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


class RandomState:
    """The states of the generators of random numbers.

    Args:
        device_type: the type of the device whose generator is read as well as the CPU's. Nothing waits for the device.
        has_python: read the generators of Python, and of numpy if it is imported, too. This takes about 60 us, too long
            for each step.
    """

    def __init__(self, device_type: str, *, has_python: bool) -> None:
        self._on_cpu = torch.get_rng_state()
        self._on_device: Tensor | None = None
        self._device_type = device_type
        if device_type != "cpu":
            with contextlib.suppress(AttributeError, RuntimeError):  # a device without generators
                self._on_device = torch.get_device_module(device_type).get_rng_state()
        numpy = sys.modules.get("numpy.random")
        self._of_python = random.getstate() if has_python else None
        self._of_numpy: Any = numpy.get_state() if has_python and numpy is not None else None

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self._on_cpu)
        if self._on_device is not None:
            torch.get_device_module(self._device_type).set_rng_state(self._on_device)
        if self._of_python is not None:
            random.setstate(self._of_python)
        if self._of_numpy is not None:
            sys.modules["numpy.random"].set_state(self._of_numpy)


class ModuleState:
    """The attributes and buffers of a module.

    Args:
        copies: copy the values of the buffers. Otherwise only the tensors themselves are kept, with their versions.
    """

    def __init__(self, module: nn.Module, *, copies: bool) -> None:
        self.module = module
        self._attributes = dict(vars(module))
        self._buffers = dict(get_own_buffers(module))
        # a buffer that is written in place stays the same tensor, and only its version changes
        self._versions = [None if buffer is None else read_version(buffer) for buffer in self._buffers.values()]
        self._values: dict[str, Tensor] = {}
        if copies:
            self._values = {name: _copy(buffer) for name, buffer in self._buffers.items() if buffer is not None}

    def is_changed(self) -> bool:
        """Return whether an attribute is another object now, or a buffer was changed or replaced.

        A change inside of an attribute, such as of a list, is not seen.
        """
        attributes, buffers = vars(self.module), get_own_buffers(self.module)
        if attributes.keys() != self._attributes.keys() or buffers.keys() != self._buffers.keys():
            return True
        if any(value is not self._attributes[name] for name, value in attributes.items()):
            return True
        for (name, buffer), version in zip(self._buffers.items(), self._versions, strict=True):
            if buffers[name] is not buffer or (buffer is not None and read_version(buffer) != version):
                return True
        return False

    def restore(self) -> None:
        """Give the module the attributes and buffers that it had. With `copies`, the buffers have their old values."""
        attributes = vars(self.module)
        # the dictionary itself stays: the module looks up its attributes in it
        attributes.clear()
        attributes.update(self._attributes)
        buffers = get_own_buffers(self.module)
        buffers.clear()
        buffers.update(self._buffers)
        # copy again, because a call may change the buffers, and this state may be restored several times
        buffers.update({name: _copy(value) for name, value in self._values.items()})

    def set_scratch_buffers(self) -> None:
        """Replace the buffers by copies, so that a call does not change the buffers themselves.

        The statistics of a batch norm may hold NaN or inf from the step that is repeated. The copies have zeros in
        these places. The output in training does not depend on the statistics.
        """
        copies = {name: _copy(buffer) for name, buffer in self._buffers.items() if buffer is not None}
        if _is_batch_norm(self.module):
            copies = {name: values.nan_to_num(0.0, 0.0, 0.0) for name, values in copies.items()}
        get_own_buffers(self.module).update(copies)


def read_version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; -1 for an inference tensor, for which torch keeps no count."""
    return -1 if tensor.is_inference() else get_version(tensor)


def _copy(buffer: Tensor) -> Tensor:
    return buffer.detach().clone()


class StatefulModules:
    """Finds the modules of a model whose attributes or buffers a forward pass changes, and reads their state.

    The first calls of the model compare all its modules. Later calls read only those that were seen to change. A batch
    norm in training is left out: its output does not depend on its buffers.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._stateful: list[weakref.ref[nn.Module]] = []

    def read(self, model: nn.Module) -> list[ModuleState]:
        """Return the states, before a call of the model, of the modules that the call may change."""
        if self._calls < _SCANNED_CALLS:
            modules = [module for module in model.modules() if not _is_batch_norm(module)]
            return [ModuleState(module, copies=True) for module in modules]
        stateful = [module for reference in self._stateful if (module := reference()) is not None]
        return [ModuleState(module, copies=True) for module in stateful]

    def compare(self, states: Sequence[ModuleState]) -> list[ModuleState]:
        """Note which modules a call has changed, and return their states from before it.

        After the first calls, return all `states`.
        """
        if self._calls >= _SCANNED_CALLS:
            return list(states)
        self._calls += 1
        changed = [state for state in states if state.is_changed()]
        for state in changed:
            if all(reference() is not state.module for reference in self._stateful):
                self._stateful.append(weakref.ref(state.module))
        return changed


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, BatchNormBase) and module.training and type(module).__module__.startswith("torch.")
