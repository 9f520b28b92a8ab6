"""`NativeSession`: the session of a script that uses `torch.autocast` and `torch.amp.GradScaler`, or no amp at all."""

import contextlib
import weakref
from collections import Counter, deque
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
from ..torch_dispatch import get_found_inf
from ..torch_private import get_autocast_depth
from ..training import HostCopy
from .float32_script import find_asked_dtype
from .roots import find_root

AS_IS = "as-is"
"""The `opt_level` of a session that changes nothing. A session that adds lists to torch.autocast's rules has
"autocast"."""

_STEPS_BEFORE_WARNING = 3
"""The step of an optimizer at which unused module rules are warned of. By then, a script has usually called all its
modules. The first step would be too early: in a GAN, the second model may be called after it.
"""


def find_session() -> "NativeSession | None":
    """Return the session in force if it is a NativeSession; else None."""
    session = current.state.session
    return session if isinstance(session, NativeSession) else None


def has_own_amp() -> bool:
    """Return whether the script uses amp itself: a session that it opened is in force, or it has disabled amp.

    Then this subpackage changes no region, except in a run in float32 (`in_float32` of `Takeover`).
    """
    has_other_session = current.state.session is not None and find_session() is None
    return has_other_session or current.state.is_disabled


def find_low_weights(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of the first parameter for which the script chose 16 bits, or None.

    Under `Float32Script`, such a parameter is float32, but it counts by the dtype that the script asked for.
    """
    for parameter in model.parameters():
        dtype = find_asked_dtype(parameter)
        if dtype in LOW_DTYPES:
            return dtype
    return None


class NativeSession(Session):
    """Applies lists inside regions of `torch.autocast`. With the opt_level `AS_IS`, it only observes.

    `Takeover` and `ScriptSteps` call its `note_` methods for models, optimizers and regions of the script. Once
    the script uses an enabled GradScaler, the session shows the scale of that scaler.

    Args:
        autocast: the regions in which the lists decide, or None if autocast is disabled.
        observes_all: also wrap ops that torch casts by itself, for watchers that observe every op.

    Attributes:
        steps_before: the number of steps that the script took without a session, before this one was opened.
        needs_scaler: whether the script took a step without a GradScaler after a bfloat16 region. If the region ran in
            float16, the script would need a GradScaler.
    """

    gives_way = True
    find_root = staticmethod(find_root)

    def __init__(self, policy: Policy, device_type: str, autocast: Autocast | None, *, observes_all: bool) -> None:
        super().__init__(policy, device_type, 1, has_models=False, autocast=autocast)
        self.steps_before = 0
        self.needs_scaler = False
        self._autocast = autocast
        self._models: list[weakref.ref[nn.Module]] = []
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # all modules of these models
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._skipped: set[int] = set()  # ids of the optimizers whose last step was skipped
        self._steps_taken = self._steps_skipped = 0
        self._steps_by_optimizer: Counter[int] = Counter()  # by id
        self._has_warned_of_rules = False
        # for each step that is not counted yet: the id of the optimizer, and whether the step was skipped
        self._uncounted: deque[tuple[int, bool | HostCopy]] = deque()
        self._seen_low: torch.dtype | None = None
        self._low_weights: torch.dtype | None = None
        has_rules = self.oplists is not None and bool(self.oplists.modules)
        # ops that torch casts by itself are wrapped only to be observed, or because of module rules
        if observes_all or has_rules:
            self._wrap_all()

    def _wrap_all(self) -> bool:
        """Arrange that the next patching of ops includes the ops that torch casts by itself.

        Return False if that was arranged already, or if the session patches no ops.
        """
        if self._autocast is None or self.casts is None or self.casts.by_torch is not None:
            return False
        rules_switch = ModuleRulesSwitch(self.switch)
        casts = OpCasts(rules_switch, self.casts.low, self.device_type, None, autocast=self._autocast)
        self.casts.by_torch = casts
        return True

    @contextlib.contextmanager
    def observing_all(self) -> Iterator[None]:
        """Context manager: inside the block, ops that torch casts by itself are wrapped, too.

        Only for a session without lists, which has no patches of ops outside of the block.
        """
        if not self._wrap_all():
            yield
            return
        try:
            self.patch_ops_again()
            yield
        finally:
            self.remove_patches_of_ops()
            assert self.casts is not None
            self.casts.by_torch = None

    # ---- events in the script ----------------------------------------------------------------------------------------

    def note_model(self, model: nn.Module) -> None:
        """Record a model, and apply module rules to it. Call it again when the model has new modules."""
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

    def has_noted(self, module: nn.Module) -> bool:
        """Return whether a module is part of a noted model, and there are no module rules."""
        return self.bindings.regions is None and module in self._modules

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Record an optimizer that takes a step."""
        if all(reference() is not optimizer for reference in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def note_step(self, optimizer: Optimizer, *, is_skipped: bool | Tensor) -> None:
        """Count a step, taken or skipped.

        `is_skipped` may be a `found_inf` on the device (0-dim; 0.0 means taken). Such a flag is read once it has
        reached the host.
        """
        self._steps_by_optimizer[id(optimizer)] += 1
        if self._steps_by_optimizer[id(optimizer)] == _STEPS_BEFORE_WARNING:
            self._warn_of_unused_rules()
        if self.bindings.regions is not None:
            self.bindings.regions.mark_stale()
        outcome = HostCopy([is_skipped]) if isinstance(is_skipped, Tensor) else is_skipped
        self._uncounted.append((id(optimizer), outcome))
        self._count_steps(wait=False)

    def _warn_of_unused_rules(self) -> None:
        if not self._has_warned_of_rules:
            self._has_warned_of_rules = True
            self.bindings.warn_of_unused_rules()

    def close(self) -> None:
        """Undo everything. If the script has taken a step, first warn of unused module rules, unless that was done."""
        try:
            if self._steps_by_optimizer:
                self._warn_of_unused_rules()
        finally:  # also if the script has made warnings errors
            super().close()

    def _count_steps(self, *, wait: bool) -> None:
        """Count steps in order, up to the first whose `found_inf` is not on the host yet. With `wait`, wait for these
        values, and count all steps.
        """
        while self._uncounted:
            key, outcome = self._uncounted[0]
            if isinstance(outcome, HostCopy):
                if not wait and not outcome.is_known():
                    return
                outcome = bool(outcome.read()[0])
            self._uncounted.popleft()
            if outcome:
                self._steps_skipped += 1
                self._skipped.add(key)
            else:
                self._steps_taken += 1
                self._skipped.discard(key)

    def begin_region(self) -> None:
        """Bring the state of module rules up to date before the script enters a block of torch.autocast, enabled or
        not.
        """
        self.switch.close_stale()
        if self.bindings.regions is not None and not get_autocast_depth():
            self.bindings.regions.mark_stale()

    def note_region(self, low: torch.dtype) -> None:
        """Remember the dtype of an enabled block of torch.autocast, if it is the first."""
        self._seen_low = self._seen_low or low

    def use_scaler(self, scaler: GradScaler) -> None:
        """Put a GradScaler of the script first among the scalers of the session.

        GradScalers that were used before come after it. The constant scaler that the session began with is dropped.
        """
        first = self.scalers[0]
        if isinstance(first, _ScriptScaler) and first.scaler is scaler:
            return
        earlier = [shown for shown in self.scalers if isinstance(shown, _ScriptScaler) and shown.scaler is not scaler]
        self.scalers[:] = [_ScriptScaler(scaler), *earlier]  # type: ignore[list-item]

    def scale_loss(self, *given: Any) -> Any:
        """Raise SessionError, because the script has not called `amp.initialize`."""
        raise SessionError(current.NOT_INITIALIZED)

    # ---- questions to a session --------------------------------------------------------------------------------------

    def without_casts(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager. Inside its block, neither amp nor torch casts on the session's type of device."""
        # nothing casts outside of regions, where most events of a step occur
        if not self.switch.is_on_here() and not torch.is_autocast_enabled(self.device_type):
            return contextlib.nullcontext()
        return self._pausing_casts()

    @contextlib.contextmanager
    def _pausing_casts(self) -> Iterator[None]:
        # torch.autocast is disabled, too: in a region whose dtype is not the lists' dtype, torch casts by itself
        is_enabled = torch.is_autocast_enabled(self.device_type)
        torch.set_autocast_enabled(self.device_type, False)
        try:
            with self.switch.region(Mode.OFF):
                yield
        finally:
            torch.set_autocast_enabled(self.device_type, is_enabled)

    def models(self) -> list[nn.Module]:
        """Return the models that are still alive."""
        return [model for reference in self._models if (model := reference()) is not None]

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that have stepped and are still alive."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def low_here(self) -> torch.dtype | None:
        """Return the dtype of torch.autocast in this thread, also outside of regions."""
        return torch.get_autocast_dtype(self.device_type)

    @property
    def seen_low(self) -> torch.dtype | None:
        """The dtype of the first region; None before it, and if the session disables autocast."""
        return None if self._autocast is None else self._seen_low

    @property
    def script_low(self) -> torch.dtype | None:
        """The dtype of 16-bit weights, if the script has some and has entered no region; else None."""
        return self._low_weights if self._seen_low is None else None

    def is_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether the last step of an optimizer was skipped. May wait for the device."""
        self._count_steps(wait=True)
        return id(optimizer) in self._skipped

    def overflow_flags(self, optimizer: Optimizer) -> tuple[list[Tensor], bool]:
        """Return the `found_inf` flags that a GradScaler has for an optimizer, and whether a set flag skips the step.

        A GradScaler has them from unscaling to its `update`. Otherwise, return an empty list and False.
        """
        for shown in self.scalers:
            if isinstance(shown, _ScriptScaler) and (flags := get_found_inf(shown.scaler, optimizer)):
                return flags, True
        return [], False

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
        self._count_steps(wait=wait)
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
        """The scale. May wait for the device."""
        return self.loss_scale()

    known_scale = scale

    def loss_scale(self) -> float:
        """Return the scale. May wait for the device."""
        return float(self.scaler.get_scale())

    def set_loss_scale(self, scale: float) -> None:
        """Set the scale. A disabled GradScaler has no scale, and ignores this."""
        state: dict[str, Any] = self.scaler.state_dict()
        if state:
            self.scaler.load_state_dict({**state, "scale": scale})
