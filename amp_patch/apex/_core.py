"""The connection of the stand-in to the other wings.

Of the package, the other modules of the stand-in import only this module and the ground modules (`errors`, `dtypes`,
`torch_private`, ...). `api` in this module has the public functions of `amp_patch`.
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
from ..casting import Registration as Registration
from ..casting import cast_tree as cast_tree
from ..casting import compiling, op_patches
from ..config import Policy as Policy
from ..config import load_oplists, presets
from ..config import make_policy as make_policy
from ..session import Session as Session
from ..session import as_models as as_models
from ..session import as_optimizers as as_optimizers
from ..session import current, find_command_lists
from ..training import LossBlock, loss_scaler, unscaling

LossScaler = loss_scaler.LossScaler
open_session_without_models = current.open_without_model
parse_loss_scale = presets.parse_loss_scale
require_session = current.require
rescale_ = unscaling.rescale_


@functools.cache
def _read_list(name: str) -> list[tuple[str, str, str]]:
    """Return (owner, name, rule) for each op of a list."""
    session = current.state.session
    # without patches, because the list looks up torch's own functions
    with contextlib.nullcontext() if session is None else session.patcher.suspended():
        entries = dict.fromkeys(spelling.entry for spelling in load_oplists(name).spellings)
    rules: list[tuple[str, str, str]] = []
    for entry in entries:
        owner, _, own_name = entry.op.rpartition(".")
        rules.append((owner, own_name, entry.rule))
    return rules


def list_names(owner: str, rule: str) -> list[str]:
    """Return the names of the ops of an owner, such as "torch.Tensor", that have a rule in the list `apex`.

    In-place variants are left out.
    """
    names: list[str] = []
    for op_owner, name, op_rule in _read_list("apex"):
        if (op_owner, op_rule) == (owner, rule):
            names.append(name)
    return names


def replace_registered(before: Sequence[Registration], after: Sequence[Registration]) -> None:
    """Register the functions `after` for later sessions, instead of the functions `before`."""
    registered = current.state.registered
    registered[:] = [entry for entry in registered if not any(entry is replaced for replaced in before)]
    registered.extend(after)


def is_disabled() -> bool:
    """Return whether `initialize(enabled=False)` has made amp a no-op."""
    return current.state.is_disabled


# ---- sessions --------------------------------------------------------------------------------------------------------


def find_session() -> Session | None:
    """Return the session in force, or None."""
    return current.state.session


def find_living_session() -> Session | None:
    """Return the session in force, or None. Closes it first if its models are gone."""
    with current.state.lock:
        current.close_if_over()
        return current.state.session


def open_session(
    policy: Policy,
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    *,
    num_losses: int,
    replace: bool,
    accept_low: bool,
) -> Session:
    """Add models and optimizers to the session in force if it has this policy, else open a new session in its place.

    Returns the session. In a session that existed before, the loss scalers restart. The lists of a command
    (`amp-patch run --lists`) are added after the lists of the policy.

    Args:
        replace: whether to open a new session in any case.
        accept_low: whether models may have 16-bit parameters already.
    """
    lists = (*policy.lists, *find_command_lists(policy))
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
    # Apex made new loss scalers in each `initialize`
    if session is before:
        lowest, highest = policy.min_loss_scale, policy.max_loss_scale
        for scaler in session.scalers:
            fresh = LossScaler(policy.loss_scale, min_loss_scale=lowest, max_loss_scale=highest)
            # set the scale, too, because a static scaler takes none from a state dict
            scaler.set_loss_scale(fresh.known_scale)
            scaler.load_state_dict(fresh.state_dict())
    return session


def bind_optimizer(session: Session, optimizer: Optimizer, num_losses: int) -> int:
    """Bind an optimizer to a session, and make `num_losses` new loss scalers. Returns the index of the first."""
    first = len(session.scalers)
    session.make_scalers(first + num_losses)
    session.adopt([], [optimizer])
    return first


def remove_casts(session: Session) -> None:
    """Restore the original functions. Also close a session without models, because it changed nothing else."""
    session.switch.turn_off()
    session.patcher.undo()
    if not session.has_models:
        current.close(session)


def patch_again(session: Session) -> None:
    """Restore the casts that `remove_casts` removed, and patch functions that were registered since."""
    if not session.switch.is_on_here() and not len(session.patcher):
        session.patch_ops_again()
    for known in current.state.registered:
        if session.casts is not None and not session.patcher.is_patched(known.owner, known.name):
            patch = op_patches.plan_op(known.owner, known.name, known.rule, session.casts, like=known.like)
            session.patcher.install([patch])
            # code that was compiled earlier calls this function without casts
            compiling.forget_compiled_code()


# ---- losses and optimizers -------------------------------------------------------------------------------------------


class ManualPass:
    """A backward pass whose gradients the caller unscales. `update_scale` reports its overflow to the scaler.

    Args:
        scaler: the scaler of the loss.
        device: the device of its overflow flag.
    """

    def __init__(self, scaler: LossScaler, device: torch.device) -> None:
        # the scaler counts as used from now on, so binding another optimizer restarts its scale
        scaler.awaits_loss = False
        self._scaler = scaler
        self._found_inf = torch.zeros((), dtype=torch.float32, device=device)

    def unscale_in_place(self, gradients: Sequence[Tensor], scale: Tensor) -> None:
        """Divide gradients by `scale` (0-dim float32), and note inf and NaN in them. Does not wait for the device."""
        unscaling.unscale_(gradients, scale, self._found_inf)

    def has_overflow(self) -> bool:
        """Return whether a gradient unscaled so far contained inf or NaN. Waits for the device."""
        return bool(self._found_inf.item())

    def note_overflow(self, found_inf: Tensor | None = None) -> None:
        """Note an overflow that the caller detected, or, if `found_inf` (0-dim float32) is given, the value of that."""
        if found_inf is None:
            self._found_inf.fill_(1.0)
        else:
            self._found_inf.copy_(torch.maximum(self._found_inf, found_inf.to(self._found_inf.device)))

    def update_scale(self) -> bool:
        """End the pass: update the loss scale, and return whether to skip the step. A static scale never skips one.

        Overflows that were reported to the scaler since its last update count, too. If ranks share the scaler, all of
        them must call this equally often. Waits for the device if the scale is dynamic.
        """
        self._scaler.add_found_inf(self._found_inf)
        found_inf = self._scaler.found_inf
        assert found_inf is not None
        session = current.state.session
        # ranks may share a scaler of the session; any other scaler belongs to this process
        if session is not None and any(self._scaler is scaler for scaler in session.scalers):
            found_inf = session.scale_updates.update({self._scaler: found_inf})[self._scaler]
        else:
            self._scaler.update()
        # as in Apex
        return self._scaler.is_dynamic and bool(found_inf)


class OptimizerView:
    """The parts of a bound optimizer that the stand-in shows under Apex's names.

    Raises SessionError without a session, and OptimizerError for an optimizer that is not bound.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        session = current.require()
        self._binding = session.bindings.get_optimizer(optimizer)
        self._gradients = session.gradients
        self.device = torch.device(session.device_type)

    def attach(self, name: str, value: Any) -> None:
        """Set an attribute of the optimizer, until it is unbound."""
        self._binding.attach(name, value)

    def groups(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield each group as pairs: the model's parameter, and the tensor that the optimizer updates.

        The latter is the parameter's master, or the parameter itself if it has none.
        """
        optimizer = self._binding.optimizer
        if optimizer is not None:
            model_parameters = iter(self._binding.groups.model_parameters())
            for group in optimizer.param_groups:
                yield [(next(model_parameters), parameter) for parameter in group["params"]]

    def copy_masters_to_parameters(self) -> None:
        """Copy the masters to the model's parameters."""
        self._binding.copy_masters_to_parameters()

    @property
    def has_scaled_gradients(self) -> bool:
        """Whether gradients carry a loss scale."""
        return self._gradients.is_scaled

    def unscale(self) -> None:
        """Divide gradients by the loss scale that they carry."""
        self._gradients.unscale(self._binding.flags)

    def is_next_step_skipped(self) -> bool:
        """Return whether the next `step()` will be skipped. Waits for the device."""
        return self._binding.flags.will_skip()


class HandScaledPass:
    """A backward pass of a loss that the script itself multiplies by the scale of the first scaler.

    The script calls `begin`, runs the backward pass, and calls `end`.

    Args:
        optimizer: the optimizer of the loss, bound to a session.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._view = OptimizerView(optimizer)
        # the optimizer holds this object, so a plain reference would make a cycle
        self._optimizer = weakref.ref(optimizer)
        self._block: LossBlock | None = None

    def begin(self) -> None:
        """Enter a `scale_loss` block with a placeholder as its loss, because the script scales the true loss."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        placeholder = torch.ones((), device=self._view.device)
        block = current.require().scale_loss(placeholder, [optimizer], loss_id=0, delay_unscale=False)
        if isinstance(block, LossBlock):
            self._block = block
            block.__enter__()

    def end(self, manual: ManualPass) -> None:
        """Unscale the gradients, and report an overflow to the next step and to `manual`.

        If `begin` was not called, unscale all gradients, and report an overflow to the next step alone.
        """
        block, self._block = self._block, None
        if block is None:
            self._view.unscale()
            return
        block.__exit__(None, None, None)
        if block.found_inf is not None:
            manual.note_overflow(block.found_inf)
