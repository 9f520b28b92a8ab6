"""`NativeSession`: a session over what a script does by itself, with `torch.autocast` and `torch.amp.GradScaler`."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..casting import Autocast, Mode, OpCasts, RulesAlone
from ..config import OpLists, Policy, levels, load_oplists, make_policy, shipped
from ..dtypes import dtype_name
from ..errors import SessionError
from ..session import Session, Stats, current
from ..torch_private import get_autocast_depth
from .roots import find_root

AS_IS = "as-is"
"""The level that a session shows which changes nothing; where lists are laid over those of torch.autocast: autocast."""


def own_lists(device_type: str) -> OpLists | None:
    """Return the list of what torch.autocast does on a type of device, None where there is none."""
    name = f"autocast-{device_type}"
    return load_oplists(name) if name in shipped.shipped_names() else None


def overlay_policy(own: OpLists | None, low: torch.dtype, lists: Sequence[str], level: str = "autocast") -> Policy:
    """Return the policy of a session that lays `lists` over `own`, the list of what torch.autocast itself does."""
    if own is None and not lists:
        return replace(make_policy(levels.find_plain_level().name, {}), opt_level=level)
    names = [*(() if own is None else own.names), *lists]
    given = {"lists": names, "loss_scale": 1.0, "compute": "native"}
    made = make_policy(levels.find_patching_level(dtype_name(low)).name, given)
    return replace(made, opt_level=level, description=f"torch.autocast, with {', '.join(lists) or 'nothing'} over it")


class NativeSession(Session):
    """Changes what its lists change in the regions of `torch.autocast`; at the level `AS_IS` nothing.

    Models and optimizers are those that it is told of. The loss scale is that of the script's GradScaler.
    """

    gives_way = True
    find_root = staticmethod(find_root)
    steps_before = 0
    """How many steps of the script had ended when this was opened."""
    needs_scaler = False
    """Whether a step that follows a region had no loss scale, which it would need in float16."""

    def __init__(self, policy: Policy, device_type: str, autocast: Autocast | None, *, with_all: bool) -> None:
        super().__init__(policy, device_type, 1, has_models=False, autocast=autocast)
        self._over = autocast
        self._roots: list[weakref.ref[nn.Module]] = []
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._stepped: list[weakref.ref[Optimizer]] = []
        self._skipped: set[int] = set()  # ids of optimizers
        self._taken = self._skips = 0
        self._seen_low: torch.dtype | None = None
        rules = () if self.oplists is None else self.oplists.modules
        if autocast is not None and self.casts is not None and (with_all or rules):
            alone = RulesAlone(self.switch)
            self.casts.by_torch = OpCasts(alone, self.casts.low, device_type, None, autocast=autocast)

    # ---- what it is told of ------------------------------------------------------------------------------------------

    def knows(self, module: nn.Module) -> bool:
        """Tell whether a module is part of a model that was added."""
        return module in self._known

    def add_root(self, model: nn.Module) -> None:
        """Take a module for a model."""
        self._roots = [reference for reference in self._roots if reference() is not None]
        if all(reference() is not model for reference in self._roots):
            self._roots.append(weakref.ref(model))
            if self.oplists is not None and self.oplists.modules:
                self.adopt([model], [])
        self._known.update(model.modules())

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Take note of an optimizer."""
        if all(reference() is not optimizer for reference in self._stepped):
            self._stepped.append(weakref.ref(optimizer))

    def note_step(self, optimizer: Optimizer, *, is_skipped: bool) -> None:
        """Take note of a step: by its end all models were called."""
        if not self._taken and not self._skips:
            self.bindings.tell_unused_rules()
        if self.bindings.regions is not None:
            self.bindings.regions.look_again()
        self._taken += not is_skipped
        self._skips += is_skipped
        (self._skipped.add if is_skipped else self._skipped.discard)(id(optimizer))

    def begin_region(self) -> None:
        """Take note that a block of torch.autocast begins, an island of plain torch or not."""
        self.switch.close_stale()
        if self.bindings.regions is not None and not get_autocast_depth():
            self.bindings.regions.look_again()

    def note_region(self, low: torch.dtype) -> None:
        """Take note of a region of autocast."""
        self._seen_low = self._seen_low or low

    def use_scaler(self, scaler: GradScaler) -> None:
        """Have the loss scale be that of a GradScaler, before those of others."""
        first = self.scalers[0]
        if isinstance(first, _ScriptsScaler) and first.scaler is scaler:
            return
        others = [one for one in self.scalers if isinstance(one, _ScriptsScaler) and one.scaler is not scaler]
        self.scalers[:] = [_ScriptsScaler(scaler), *others]  # type: ignore[list-item]

    def scale_loss(self, *given: Any) -> Any:
        """Refuse, because the script has called no `amp.initialize`. Raises SessionError."""
        raise SessionError(current.NOT_INITIALIZED)

    # ---- what it is asked for ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def without_casts(self) -> Iterator[None]:
        """Return a block in which no op of this thread is cast, by torch neither."""
        is_paused = self._over is not None and self._over.pause()
        try:
            with self.switch.region(Mode.OFF):
                yield
        finally:
            if is_paused and self._over is not None:
                self._over.resume()

    def models(self) -> list[nn.Module]:
        """Return the models that are still alive."""
        return [model for reference in self._roots if (model := reference()) is not None]

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that have taken a step and are still alive."""
        return [optimizer for reference in self._stepped if (optimizer := reference()) is not None]

    def low_here(self) -> torch.dtype | None:
        """Return the dtype that whitelisted ops have in this thread now."""
        return torch.get_autocast_dtype(self.device_type)

    @property
    def seen_low(self) -> torch.dtype | None:
        """The dtype of the first region of autocast, None before one."""
        return self._seen_low if self._over is not None else self.policy.low_dtype

    def is_skipped(self, optimizer: Optimizer) -> bool:
        """Tell whether the last step of an optimizer was skipped."""
        return id(optimizer) in self._skipped

    def names_of(self, tensors: Sequence[Tensor]) -> list[str]:
        """Return the qualified names of parameters; of others, their shapes in words."""
        names = {id(one): name for model in self.models() for name, one in model.named_parameters()}
        return [names.get(id(tensor), f"parameter of shape {tuple(tensor.shape)}") for tensor in tensors]

    def trained(self) -> list[Tensor]:
        """Return the parameters of the models."""
        return list({id(one): one for model in self.models() for one in model.parameters()}.values())

    def stats(self, *, wait: bool = True) -> Stats:
        """Return what `amp.stats()` returns."""
        found = super().stats(wait=wait)
        return replace(found, steps=self._taken, steps_skipped=self._skips)


class _ScriptsScaler:
    """A GradScaler of the script's, as a session shows its own scalers."""

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
        """Set the scale of an enabled one."""
        state: dict[str, Any] = self.scaler.state_dict()
        if state:
            self.scaler.load_state_dict({**state, "scale": scale})
