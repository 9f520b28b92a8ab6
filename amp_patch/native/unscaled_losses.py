"""`UnscaledLosses`: notices optimizers whose gradients all come from losses that no GradScaler has scaled.

`scaler.step` would divide these gradients by the scale.
"""

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..torch_dispatch import read_factors
from .roots import find_line
from .unscaled_gradients import Version, read_version

_LOOKED_AT = 16
"""About how many nodes of the losses' graph are searched for a factor, the last op first. A script that scales by hand
usually multiplies the loss itself, or a value one or two ops before it.
"""

_POWERS = {"MulBackward0": 1.0, "DivBackward0": -1.0}
"""Nodes with a factor, each with a power: a division by x multiplies by x to the power -1."""


@dataclass(slots=True)
class _Watched:
    """One parameter of an optimizer, and the backward passes that changed its gradient since the last step.

    Attributes:
        parameter: a parameter that had a gradient at the last `scaler.step` of the optimizer.
        gradient_id: the id of the gradient after the last backward pass or step.
        passed_at: the line of the first backward pass that changed the gradient and seems unscaled; "" if there was
            none.
        factors: the magnitudes of the numbers by which the losses of all passes that changed the gradient were
            multiplied. Empty until a loss has seemed unscaled.
        is_explained: whether the gradient may be scaled, and is not reported: a scaler has scaled a loss, or the script
            has passed gradients to `backward` or has assigned the gradient.
    """

    parameter: Tensor
    gradient_id: int
    passed_at: str = ""
    factors: tuple[float, ...] = ()
    is_explained: bool = False


class UnscaledLosses:
    """The optimizers that a GradScaler has stepped. Watches one gradient of each."""

    def __init__(self) -> None:
        self._watched: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()
        # about the backward pass that is under way
        self._versions: dict[Any, Version] = {}  # of the watched gradients before it
        self._factors: tuple[float, ...] = ()  # of its losses
        self._has_own_gradients = False  # whether the script passes the gradients of its losses
        # Whether a loss has seemed unscaled in this run. The graphs of later losses are searched for factors.
        self._is_suspected = False

    def note_step(self, optimizer: Any) -> None:
        """Note that a GradScaler has taken or skipped a step of an optimizer."""
        parameters: Iterator[Tensor] = (
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None
        )
        parameter = next(parameters, None)
        if parameter is None:
            self._watched.pop(optimizer, None)
        else:
            self._watched[optimizer] = _Watched(parameter, id(parameter.grad))

    def begin_backward(self, losses: Any = None, gradients: Any = None, *_: Any, **named: Any) -> None:
        """Note that a backward pass begins. Takes the arguments of `torch.autograd.backward`."""
        if not self._watched:
            return
        self._versions = self._read_versions()
        self._factors = _find_factors(named.get("tensors", losses)) if self._is_suspected else ()
        own_gradients = named.get("grad_tensors", gradients)
        listed = own_gradients if isinstance(own_gradients, (list, tuple)) else [own_gradients]
        self._has_own_gradients = any(gradient is not None for gradient in listed)

    def end_backward(self, *, is_scaled: bool) -> None:
        """Note that the backward pass has ended. `is_scaled`: whether a scaler has scaled one of its losses."""
        for optimizer, version in self._read_versions().items():
            before = self._versions.get(optimizer)
            if version is None or version == before:
                continue
            watched = self._watched[optimizer]
            if before is None:  # the pass has made a new gradient, so passes before zero_grad() do not matter any more
                watched.passed_at, watched.factors, watched.is_explained = "", (), False
            elif before[0] != watched.gradient_id:
                watched.is_explained = True
            watched.gradient_id = version[0]
            # The script may have scaled the gradients that it passes to `backward`.
            watched.is_explained |= is_scaled or self._has_own_gradients
            if not watched.is_explained:
                watched.passed_at = watched.passed_at or find_line()
            watched.factors += self._factors
        self._versions = {}  # it holds the optimizers

    def _read_versions(self) -> dict[Any, Version]:
        return {optimizer: read_version(watched.parameter) for optimizer, watched in self._watched.items()}

    def find_unscaled(self, scaler: Any, optimizer: Any) -> str:
        """Return the line of the first unscaled backward pass, if a GradScaler is about to unscale gradients that only
        unscaled losses have made. Else return "".

        The first such gradients of the run also give "", because the graphs of losses are searched for factors only
        after them. For later ones, reads the scale, which waits for the device. Returns "" if the scale is at most 1,
        or if the script seems to have multiplied the losses by it.
        """
        watched = self._watched.get(optimizer)
        if watched is None or not watched.passed_at or watched.is_explained:
            return ""
        gradient = watched.parameter.grad
        if gradient is None or id(gradient) != watched.gradient_id:
            return ""
        if not self._is_suspected:
            self._is_suspected = True
            # no report for these gradients, although `scaler.step` calls this function again, from `unscale_`
            watched.is_explained = True
            return ""
        scale = scaler.get_scale()
        if scale <= 1 or any(math.isclose(factor, scale) for factor in watched.factors):
            return ""
        return watched.passed_at


def _find_factors(losses: Any) -> tuple[float, ...]:
    """Return the magnitudes of the numbers by which the last ops of losses have multiplied. Does not wait for the
    device.
    """
    nodes = [getattr(loss, "grad_fn", None) for loss in (losses if isinstance(losses, (list, tuple)) else [losses])]
    factors: list[float] = []
    for node in nodes:  # `nodes` grows
        power = 0.0 if node is None else _POWERS.get(node.name(), 0.0)
        factors += [number**power for number in read_factors(node) if number] if power else []
        if node is not None and len(nodes) < _LOOKED_AT:
            nodes += [following for following, _ in node.next_functions]
    return tuple(factors)
