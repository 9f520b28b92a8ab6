"""`NativeSession`: the session of a script that uses `torch.autocast` and `torch.amp.GradScaler`, or no amp at all."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..casting import Autocast, Mode, ModuleRulesSwitch, OpCasts
from ..config import Policy
from ..dtypes import LOW_DTYPES
from ..errors import SessionError
from ..session import Session, Stats, current
from ..torch_private import get_autocast_depth
from .float32_script import find_asked_dtype
from .roots import find_root

AS_IS = "as-is"
"""The `opt_level` of a session that changes nothing. With lists on top of torch.autocast's, it is "autocast"."""


def find_session() -> "NativeSession | None":
    """Return the session in force if it is a NativeSession."""
    session = current.state.session
    return session if isinstance(session, NativeSession) else None


def has_own_amp() -> bool:
    """Return whether `amp.initialize` of the script decides: its session is in force, or it has disabled amp.

    If so, nothing in this subpackage does anything.
    """
    has_other_session = current.state.session is not None and find_session() is None
    return has_other_session or current.state.is_disabled


def find_low_weights(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of the first parameter of a model for which the script asked for 16 bits; None without one."""
    for parameter in model.parameters():
        dtype = find_asked_dtype(parameter)
        if dtype in LOW_DTYPES:
            return dtype
    return None


class NativeSession(Session):
    """Applies lists inside regions of `torch.autocast`. At the level `AS_IS` there are no lists, and it only observes.

    `Takeover` and `ScriptSteps` call its `note_` methods for models, optimizers and regions of the script. Its loss
    scale is the scale of the script's GradScaler.

    Args:
        autocast: the regions in which the lists act, or None if autocast is disabled.
        observes_all: also wrap ops that torch casts by itself, for watchers that observe every op.

    Attributes:
        steps_before: the number of steps that the script took before this session was opened.
        needs_scaler: whether a step after a region had no loss scale, and would need one in float16.
        seen_low: the dtype of the first region of autocast, or None before that region.
    """

    gives_way = True
    find_root = staticmethod(find_root)

    def __init__(self, policy: Policy, device_type: str, autocast: Autocast | None, *, observes_all: bool) -> None:
        super().__init__(policy, device_type, 1, has_models=False, autocast=autocast)
        self.steps_before = 0
        self.needs_scaler = False
        self._autocast = autocast
        self._models: list[weakref.ref[nn.Module]] = []
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # all parts of these models
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._skipped: set[int] = set()  # ids of the optimizers whose last step was skipped
        self._steps_taken = self._steps_skipped = 0
        self._seen_low: torch.dtype | None = None
        self._low_weights: torch.dtype | None = None
        has_rules = self.oplists is not None and bool(self.oplists.modules)
        # ops that torch casts by itself are wrapped only to be observed, or because of module rules
        if autocast is not None and self.casts is not None and (observes_all or has_rules):
            rules_switch = ModuleRulesSwitch(self.switch)
            self.casts.by_torch = OpCasts(rules_switch, self.casts.low, device_type, None, autocast=autocast)

    # ---- events in the script ----------------------------------------------------------------------------------------

    def note_model(self, model: nn.Module) -> None:
        """Record a model, and apply module rules to it. Call it again when the model has new parts."""
        self._models = [reference for reference in self._models if reference() is not None]
        if all(reference() is not model for reference in self._models):
            self._models.append(weakref.ref(model))
            self._low_weights = self._low_weights or find_low_weights(model)
            if self.oplists is not None and self.oplists.modules:
                self.adopt([model], [])
        self._modules.update(model.modules())

    def knows(self, module: nn.Module) -> bool:
        """Return whether a module is part of a noted model."""
        return module in self._modules

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Record an optimizer that takes a step."""
        if all(reference() is not optimizer for reference in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def note_step(self, optimizer: Optimizer, *, is_skipped: bool) -> None:
        """Count a step, taken or skipped."""
        if not self._steps_taken and not self._steps_skipped:
            # by the end of the first step, the script has called all its modules
            self.bindings.warn_of_unused_rules()
        if self.bindings.regions is not None:
            self.bindings.regions.mark_stale()
        if is_skipped:
            self._steps_skipped += 1
            self._skipped.add(id(optimizer))
        else:
            self._steps_taken += 1
            self._skipped.discard(id(optimizer))

    def begin_region(self) -> None:
        """Prepare for a block of torch.autocast, enabled or not."""
        self.switch.close_stale()
        if self.bindings.regions is not None and not get_autocast_depth():
            self.bindings.regions.mark_stale()

    def note_region(self, low: torch.dtype) -> None:
        """Remember the dtype of an enabled block of torch.autocast, if it is the first."""
        self._seen_low = self._seen_low or low

    def use_scaler(self, scaler: GradScaler) -> None:
        """Make a GradScaler the first loss scaler of the session. Earlier GradScalers follow it."""
        first = self.scalers[0]
        if isinstance(first, _ScriptScaler) and first.scaler is scaler:
            return
        earlier = [shown for shown in self.scalers if isinstance(shown, _ScriptScaler) and shown.scaler is not scaler]
        self.scalers[:] = [_ScriptScaler(scaler), *earlier]  # type: ignore[list-item]

    def scale_loss(self, *given: Any) -> Any:
        """Raise SessionError, because the script has not called `amp.initialize`."""
        raise SessionError(current.NOT_INITIALIZED)

    # ---- questions to a session --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def without_casts(self) -> Iterator[None]:
        """Return a block in which neither amp nor torch casts the ops of this thread."""
        paused_autocast = self._autocast if self._autocast is not None and self._autocast.pause() else None
        try:
            with self.switch.region(Mode.OFF):
                yield
        finally:
            if paused_autocast is not None:
                paused_autocast.resume()

    def models(self) -> list[nn.Module]:
        """Return the models that are still alive."""
        return [model for reference in self._models if (model := reference()) is not None]

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that have stepped and are still alive."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def low_here(self) -> torch.dtype | None:
        """Return the dtype of whitelisted ops in this thread now."""
        return torch.get_autocast_dtype(self.device_type)

    @property
    def seen_low(self) -> torch.dtype | None:
        """The dtype of the first region of autocast, or None before it. If autocast is disabled: the policy's dtype."""
        return self._seen_low if self._autocast is not None else self.policy.low_dtype

    @property
    def script_low(self) -> torch.dtype | None:
        """The 16-bit dtype in which a script without regions of autocast holds its weights; None if it does not."""
        return self._low_weights if self._seen_low is None else None

    def is_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether the last step of an optimizer was skipped."""
        return id(optimizer) in self._skipped

    def names_of(self, tensors: Sequence[Tensor]) -> list[str]:
        """Return the qualified names of parameters; `parameter of shape (...)` for other tensors."""
        names: dict[int, str] = {}
        for model in self.models():
            for name, parameter in model.named_parameters():
                names[id(parameter)] = name
        return [names.get(id(tensor), f"parameter of shape {tuple(tensor.shape)}") for tensor in tensors]

    def trained_parameters(self) -> list[Tensor]:
        """Return the parameters of the models, each once."""
        parameters: dict[int, Tensor] = {}
        for model in self.models():
            for parameter in model.parameters():
                parameters[id(parameter)] = parameter
        return list(parameters.values())

    def stats(self, *, wait: bool = True) -> Stats:
        """Return the result of `amp.stats()`, with the steps of the script."""
        return replace(super().stats(wait=wait), steps=self._steps_taken, steps_skipped=self._steps_skipped)


class _ScriptScaler:
    """A GradScaler of the script, with the attributes of LossScaler that a NativeSession and its watchers read."""

    is_identity = False
    min_loss_scale = None

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self.is_dynamic = scaler.is_enabled()

    @property
    def scale(self) -> float:
        """The scale. Waits for the device."""
        return self.loss_scale()

    known_scale = scale

    def loss_scale(self) -> float:
        """Return the scale. Waits for the device."""
        return float(self.scaler.get_scale())

    def set_loss_scale(self, scale: float) -> None:
        """Set the scale. A disabled GradScaler has no scale, and ignores this."""
        state: dict[str, Any] = self.scaler.state_dict()
        if state:
            self.scaler.load_state_dict({**state, "scale": scale})
