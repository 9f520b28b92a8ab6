"""The port of the stand-in: all that it uses of the core, in functions named by what it needs.

The other modules of this package import from here and from the ground (`errors`, `dtypes`, `reporting`). What lies
inside sessions, bindings and loss scalers is touched in this file alone.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import api as api
from ..casting import Registration, compiling
from ..casting import cast_tree as cast_tree
from ..config import Policy as Policy
from ..config import load_oplists, presets
from ..config import make_policy as make_policy
from ..patching import Patch
from ..session import Session, current, find_lists_to_lay_over
from ..session import as_models as as_models
from ..session import as_optimizers as as_optimizers
from ..training import LossBlock, loss_scaler, unscaling

LossScaler = loss_scaler.LossScaler
parse_loss_scale = presets.parse_loss_scale
rescale_ = unscaling.rescale_


@functools.cache
def _read_list(name: str) -> list[tuple[str, str, str]]:
    """Return (owner, name, rule) for each op of a list."""
    session = current.state.session
    # names are looked up as torch has them
    with contextlib.nullcontext() if session is None else session.patcher.suspended():
        entries = dict.fromkeys(spelling.entry for spelling in load_oplists(name).spellings)
    found: list[tuple[str, str, str]] = []
    for entry in entries:
        owner, _, own_name = entry.op.rpartition(".")
        found.append((owner, own_name, entry.rule))
    return found


def list_names(owner: str, rule: str) -> list[str]:
    """Return the names that the list `apex` has for an owner, such as `torch.Tensor`, and a rule; no in-place twins."""
    return [name for its_owner, name, its_rule in _read_list("apex") if (its_owner, its_rule) == (owner, rule)]


def replace_registered(before: Sequence[Registration], after: Sequence[Registration]) -> None:
    """Register the functions `after` (owner, name, rule) for sessions to come, in the place of those of `before`."""
    registered = current.state.registered
    registered[:] = [entry for entry in registered if not any(entry is other for other in before)]
    registered.extend(after)


def is_disabled() -> bool:
    """Tell whether `initialize(enabled=False)` has made amp a no-op."""
    return current.state.is_disabled


class SessionView:
    """What the stand-in sees of a session: its casts, its loss scalers, and which optimizers it knows."""

    def __init__(self, session: Session) -> None:
        self._session = session

    # ---- finding and opening -----------------------------------------------------------------------------------------

    @classmethod
    def find(cls) -> "SessionView | None":
        """Return a view of the session in force, or None."""
        return None if current.state.session is None else cls(current.state.session)

    @classmethod
    def find_living(cls) -> "SessionView | None":
        """Return a view of the session in force, or None; one whose models are gone is closed."""
        with current.state.lock:
            current.close_if_over()
            return cls.find()

    @classmethod
    def require(cls) -> "SessionView":
        """Return a view of the session in force; raises SessionError without one."""
        return cls(current.require())

    @classmethod
    def open(
        cls,
        policy: Policy,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        *,
        num_losses: int,
        replace: bool,
        accept_low: bool,
    ) -> "SessionView":
        """Open a session in the place of the open one, or bring models and optimizers under that if its policy is the
        same: its loss scalers begin anew. The lists that a command lays over come after those of the policy.

        `replace` closes the open one in any case; `accept_low` takes models that hold 16-bit parameters already.
        """
        lists = (*policy.lists, *find_lists_to_lay_over(policy))
        before = current.state.session
        session = current.initialize(
            dataclasses.replace(policy, lists=lists),
            models,
            optimizers,
            num_losses=num_losses,
            replace=replace,
            replace_other=True,
            accept_low=accept_low,
        )
        if session is before:
            for scaler in session.scalers:
                _restart(scaler, policy)
        return cls(session)

    @classmethod
    def open_without_models(cls, policy: Policy, device_type: str) -> "SessionView":
        """Open a session that lasts until it is closed. Raises SessionError if one is in force."""
        return cls(current.open_without_model(policy, device_type))

    @property
    def is_in_force(self) -> bool:
        """Whether this session is the one in force."""
        return current.state.session is self._session

    @property
    def device_type(self) -> str:
        """The type of the devices that the models are on."""
        return self._session.device_type

    @property
    def has_models(self) -> bool:
        """Whether it was opened for models."""
        return self._session.has_models

    # ---- casts -------------------------------------------------------------------------------------------------------

    @property
    def patches_functions(self) -> bool:
        """Whether its level casts at functions."""
        return self._session.casts is not None

    @property
    def casts_here(self) -> bool:
        """Whether functions called here and now cast their arguments."""
        return self._session.switch.is_on_here()

    def turn_casts(self, is_on: bool) -> None:
        """Turn the casts of functions on or off."""
        if is_on:
            self._session.switch.turn_on()
        else:
            self._session.switch.turn_off()

    def remove_casts(self) -> None:
        """Put the original functions back, and close a session that has no models: nothing else is left of it."""
        self.turn_casts(False)
        self._session.patcher.undo()
        if not self.has_models:
            current.close(self._session)

    def restore_casts(self) -> None:
        """Put the casts back in that `remove_casts` took out of a session with models."""
        if not self.casts_here and not len(self._session.patcher):
            self._session.patch_ops_again()

    def patch_registered(self) -> None:
        """Patch the registered functions that are not patched yet."""
        casts, patcher = self._session.casts, self._session.patcher
        if casts is None:
            return
        for owner, name, rule in current.state.registered:
            if not patcher.is_patched(owner, name):
                patcher.install([Patch(owner, name, functools.partial(casts.wrap, rule))])
                compiling.forget_compiled_code()

    # ---- optimizers and losses ---------------------------------------------------------------------------------------

    @property
    def scalers(self) -> list[LossScaler]:
        """The loss scalers, by `loss_id`."""
        return self._session.scalers

    @property
    def has_masters(self) -> bool:
        """Whether its level keeps masters."""
        return bool(self._session.policy.master_weights)

    def is_plain(self, loss_id: int) -> bool:
        """Tell whether losses of this scaler are not scaled and there are no masters."""
        return self._session.scaler(loss_id).is_identity and not self.has_masters

    def find_master(self, parameter: Tensor) -> Tensor | None:
        """Return the float32 master of a 16-bit parameter, or None."""
        return self._session.find_master(parameter)

    def decide_with(self, group: Any) -> None:
        """Have the ranks of a process group skip the same steps, unless they do already."""
        self._session.decide_with(group)

    def knows(self, optimizer: Optimizer) -> bool:
        """Tell whether the session has changed this optimizer."""
        return self._session.bindings.find_optimizer(optimizer) is not None

    def add_optimizer(self, optimizer: Optimizer, num_losses: int) -> int:
        """Bring an optimizer with `num_losses` loss scalers of its own under the session; return the first's number."""
        first = len(self.scalers)
        self._session.add_scalers(first + num_losses)
        self._session.adopt([], [optimizer])
        return first

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], loss_id: int, *, delay_unscale: bool
    ) -> contextlib.AbstractContextManager[Tensor]:
        """Return `amp_patch.scale_loss` of these optimizers, of which there may be none."""
        return self._session.scale_loss(loss, optimizers, loss_id, delay_unscale)


def _restart(scaler: LossScaler, policy: Policy) -> None:
    """Have a loss scaler start as one of a new session does."""
    fresh = LossScaler(policy.loss_scale, min_loss_scale=policy.min_loss_scale, max_loss_scale=policy.max_loss_scale)
    scaler.set_loss_scale(fresh.known_scale)
    scaler.load_state_dict(fresh.state_dict())


class ManualPass:
    """A backward pass whose gradients the caller unscales. No update of the scaler counts it before `update_scale`.

    Args:
        scaler: the scaler of the loss.
        device: where its overflow flag is kept.
    """

    def __init__(self, scaler: LossScaler, device: torch.device) -> None:
        scaler.awaits_loss = False
        self._scaler = scaler
        self._found_inf = torch.zeros((), dtype=torch.float32, device=device)

    def unscale_in_place(self, gradients: Sequence[Tensor], scale: Tensor) -> None:
        """Divide gradients by `scale` (0-dim float32), and note whether any holds inf or NaN. Waits for nothing."""
        unscaling.unscale_(gradients, scale, self._found_inf)

    def has_overflow(self) -> bool:
        """Tell whether a gradient unscaled so far held inf or NaN. Waits for the device."""
        return bool(self._found_inf.item())

    def note_overflow(self, found_inf: Tensor | None = None) -> None:
        """Take in that the caller has found an overflow, or what a flag says (0-dim float32)."""
        if found_inf is None:
            self._found_inf.fill_(1.0)
        else:
            self._found_inf.copy_(torch.maximum(self._found_inf, found_inf.to(self._found_inf.device)))

    def update_scale(self) -> bool:
        """End the pass: update the loss scale, and return whether the step is to be skipped, for this pass or for
        others that no update has counted.

        Ranks that decide together call this as often as each other. Waits for the device if the scale is dynamic.
        """
        self._scaler.note(self._found_inf)
        found_inf = self._scaler.found_inf
        assert found_inf is not None
        session = current.state.session
        if session is not None and any(self._scaler is one for one in session.scalers):
            found_inf = session.decisions.judge({self._scaler: found_inf})[self._scaler]
        else:
            self._scaler.update()
        return self._scaler.is_dynamic and bool(found_inf)


_open_blocks: "weakref.WeakKeyDictionary[Optimizer, LossBlock]" = weakref.WeakKeyDictionary()
"""Passes of losses that the caller multiplies, by optimizer."""


class OptimizerView:
    """What the stand-in sees of an optimizer that a session has changed.

    Raises SessionError without a session, and OptimizerError for an optimizer that it does not know.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        session = current.require()
        self._binding = session.bindings.get_optimizer(optimizer)
        self._ledgers = session.ledgers
        self.device = torch.device(session.device_type)

    def attach(self, name: str, value: Any) -> None:
        """Set an attribute of the optimizer, until the session lets go of it."""
        self._binding.attach(name, value)

    def groups(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield each group as pairs: the model's parameter, and the one that the optimizer steps on."""
        optimizer = self._binding.optimizer
        if optimizer is not None:
            model_parameters = iter(self._binding.groups.model_parameters())
            for group in optimizer.param_groups:
                yield [(next(model_parameters), parameter) for parameter in group["params"]]

    def push_masters(self) -> None:
        """Copy the masters to the model's parameters."""
        self._binding.push_masters()

    @property
    def has_scaled_gradients(self) -> bool:
        """Whether gradients carry a loss scale."""
        return self._ledgers.is_scaled

    def unscale(self) -> None:
        """Divide gradients by the loss scale that they carry."""
        self._ledgers.prepare_step(self._binding.ledger)
        self._ledgers.resume(self._binding.ledger)

    def begin_pass(self) -> None:
        """Make gradients ready for a backward pass of a loss that is multiplied by the scale of the first scaler."""
        optimizer = self._binding.optimizer
        if optimizer is None:
            return
        any_loss = torch.ones((), device=self.device)
        block = current.require().scale_loss(any_loss, [optimizer], loss_id=0, delay_unscale=False)
        if isinstance(block, LossBlock):
            _open_blocks[optimizer] = block
            block.__enter__()

    def end_pass(self, manual: ManualPass) -> None:
        """Unscale the gradients of that pass, and have `manual` and the next step know of an overflow."""
        optimizer = self._binding.optimizer
        block = None if optimizer is None else _open_blocks.pop(optimizer, None)
        if block is None:
            self.unscale()
            return
        block.__exit__(None, None, None)
        if block.found_inf is not None:
            manual.note_overflow(block.found_inf)

    def is_next_step_skipped(self) -> bool:
        """Tell whether `step()` will be skipped. Waits for the device."""
        return self._binding.ledger.is_overflow()
