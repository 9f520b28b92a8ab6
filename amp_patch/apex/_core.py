"""Everything that `amp_patch.apex`, the stand-in for Apex, takes from amp_patch's subpackages.

The other modules of `amp_patch.apex` import from here, and from amp_patch's top-level modules (`errors`, `dtypes`,
`torch_private`, ...). `api` has the public functions of `amp_patch`, such as `api.scale_loss`.
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
from ..saving import ROUNDING as ROUNDING
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
def _read_apex_list() -> list[tuple[str, str, str]]:
    """Return owner, name and rule of the entries of `lists/apex.yaml` for ops that this torch has.

    An item is ("torch.Tensor", "matmul", "whitelist"), for example.
    """
    session = current.state.session
    # loading a list looks ops up in torch, and must find torch's own functions, so take the session's patches off
    with contextlib.nullcontext() if session is None else session.patcher.suspended():
        entries = dict.fromkeys(spelling.entry for spelling in load_oplists("apex").spellings)
    rows: list[tuple[str, str, str]] = []
    for entry in entries:
        owner, _, name = entry.op.rpartition(".")
        rows.append((owner, name, entry.rule))
    return rows


def list_names(owner: str, rule: str) -> list[str]:
    """Return the names that the op list `lists/apex.yaml` has for an owner and a rule.

    For example, `list_names("torch.Tensor", "whitelist")` contains "matmul".
    """
    names: list[str] = []
    for op_owner, name, op_rule in _read_apex_list():
        if (op_owner, op_rule) == (owner, rule):
            names.append(name)
    return names


def replace_registered(removed: Sequence[Registration], added: Sequence[Registration]) -> None:
    """Change the functions that are registered for later sessions: take out `removed`, and append `added`."""
    registered = current.state.registered
    # by identity: the script may have registered an equal function itself, and that one stays
    registered[:] = [kept for kept in registered if not any(kept is entry for entry in removed)]
    registered.extend(added)


def is_disabled() -> bool:
    """Return whether amp is disabled, as by `initialize(enabled=False)`."""
    return current.state.is_disabled


# ---- sessions --------------------------------------------------------------------------------------------------------


def find_session() -> Session | None:
    """Return the session in force, or None."""
    return current.state.session


def find_living_session() -> Session | None:
    """Close the session in force if it is over, for example because its models were freed.

    Returns the session that is still in force, or None.
    """
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
    """Add models and optimizers to the session in force if it has the same policy, device type and op lists.

    Otherwise open a new session in its place. Returns the session. If it existed before, its loss scalers start anew.
    The lists of a command, such as `amp-patch run --lists`, are added after the lists of the policy.

    Args:
        replace: open a new session in any case.
        accept_low: accept models that have 16-bit parameters already.
    """
    lists = (*policy.lists, *find_command_lists(policy))
    earlier_session = current.state.session
    session = current.initialize(
        dataclasses.replace(policy, lists=lists),
        models,
        optimizers,
        num_losses=num_losses,
        replace=replace,
        replace_other=True,
        accept_low=accept_low,
    )
    if session is earlier_session:
        lowest, highest = policy.min_loss_scale, policy.max_loss_scale
        for scaler in session.scalers:
            # copy the start state into the scaler, and keep the object: `scale_loss` blocks and Apex's scalers hold it
            start = LossScaler(policy.loss_scale, min_loss_scale=lowest, max_loss_scale=highest)
            scaler.set_loss_scale(start.known_scale)
            # this resets the counters; a static scaler takes no scale from it, hence the line above
            scaler.load_state_dict(start.state_dict())
    return session


def bind_optimizer(session: Session, optimizer: Optimizer, num_losses: int) -> int:
    """Bind an optimizer to a session, and make `num_losses` new loss scalers.

    Returns the index of the first of these scalers, which is the `loss_id` for `session.scale_loss`.
    """
    first_loss_id = len(session.scalers)
    session.make_scalers(first_loss_id + num_losses)
    session.adopt([], [optimizer])
    return first_loss_id


def remove_casts(session: Session) -> None:
    """Restore torch's own functions. If the session has no models, such as one that `init` opened, close it."""
    session.switch.turn_off()
    session.patcher.undo()
    if not session.has_models:
        current.close(session)


def patch_again(session: Session) -> None:
    """Patch the ops again if `remove_casts` restored torch's own functions.

    Also patch functions that were registered since the session opened.
    """
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
    """A backward pass after which the caller unscales the gradients, in place of a `scale_loss` block.

    The caller unscales with `unscale_in_place`, which notes inf and NaN, and then calls `update_scale`.

    Args:
        scaler: the scaler of the loss.
        device: the device of the flag in which the pass notes an overflow.
    """

    def __init__(self, scaler: LossScaler, device: torch.device) -> None:
        # The script scales the loss without the scaler's help. The next step must not warn that no loss was scaled.
        scaler.awaits_loss = False
        self._scaler = scaler
        self._found_inf = torch.zeros((), dtype=torch.float32, device=device)

    def unscale_in_place(self, gradients: Sequence[Tensor], scale: Tensor) -> None:
        """Divide gradients by `scale` (0-dim float32) in place, and note inf and NaN. Does not wait for the device."""
        unscaling.unscale_(gradients, scale, self._found_inf)

    def has_overflow(self) -> bool:
        """Return whether the pass has noted an overflow. Waits for the device."""
        return bool(self._found_inf.item())

    def note_overflow(self, found_inf: Tensor | None = None) -> None:
        """Note an overflow that the caller has detected itself.

        `found_inf` (0-dim float32) is 1.0 if there was one, else 0.0; without this argument, there was one.
        """
        if found_inf is None:
            self._found_inf.fill_(1.0)
        else:
            self._found_inf.copy_(torch.maximum(self._found_inf, found_inf.to(self._found_inf.device)))

    def update_scale(self) -> bool:
        """End the pass: update the loss scale, and return whether to skip the step. Under a static scale, return False.

        If the scaler was told of overflows in other passes since its last update, they count too. If ranks share the
        scaler, all of them must call this equally often. Waits for the device if the scale is dynamic.
        """
        self._scaler.add_found_inf(self._found_inf)
        found_inf = self._scaler.found_inf  # of this pass and of other passes since the last update
        assert found_inf is not None
        session = current.state.session
        is_of_session = session is not None and any(self._scaler is scaler for scaler in session.scalers)
        if session is not None and is_of_session:
            # the ranks may share this scaler, so they update it together
            found_inf = session.scale_updates.update({self._scaler: found_inf})[self._scaler]
        else:
            self._scaler.update()
        # Apex did not skip a step under a static scale
        return self._scaler.is_dynamic and bool(found_inf)


class OptimizerView:
    """What the session knows about one optimizer, for the attributes that Apex set on optimizers.

    `OptimizerView(optimizer)` raises SessionError without a session, and OptimizerError for an optimizer that was not
    passed to `initialize`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        session = current.require()
        self._binding = session.bindings.get_optimizer(optimizer)
        self._gradients = session.gradients
        self.device = torch.device(session.device_type)

    def attach(self, name: str, value: Any) -> None:
        """Set an attribute of the optimizer. It is removed when the session ends."""
        self._binding.attach(name, value)

    def groups(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield a list of pairs for each parameter group: (the model's parameter, its float32 master).

        If a parameter has no master, the pair holds it twice. The optimizer updates the second tensor of a pair. Yields
        nothing if the optimizer was freed.
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
        """Whether gradients in the session are multiplied by a loss scale now."""
        return self._gradients.is_scaled

    def unscale(self) -> None:
        """Unscale and check gradients now, as the next `step()` would do first."""
        self._gradients.unscale(self._binding.flags)

    def is_next_step_skipped(self) -> bool:
        """Return whether the next `step()` will be skipped. May wait for the device."""
        return self._binding.flags.will_skip()


class HandScaledPass:
    """A backward pass of a loss that the script multiplies by the loss scale itself, without a `scale_loss` block.

    The script calls `begin`, runs the backward pass, and calls `end`. It must multiply the loss by the scale of the
    session's first scaler (loss_id 0).

    Args:
        optimizer: the optimizer of the loss, which was passed to `initialize`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._view = OptimizerView(optimizer)
        # the optimizer holds this object, so a plain reference would make a cycle
        self._optimizer = weakref.ref(optimizer)
        self._block: LossBlock | None = None

    def begin(self) -> None:
        """Enter a `scale_loss` block with a placeholder as its loss. `end` leaves the block.

        Does nothing if the optimizer was freed. Raises SessionError without a session.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        placeholder = torch.ones((), device=self._view.device)
        block = current.require().scale_loss(placeholder, [optimizer], loss_id=0, delay_unscale=False)
        if isinstance(block, LossBlock):
            self._block = block
            block.__enter__()

    def end(self, manual: ManualPass) -> None:
        """Unscale the gradients, and note an overflow in `manual`.

        Under a dynamic scale, an overflow also makes the optimizer skip its next step. If `begin` opened no block,
        unscale as the next step would, and note nothing in `manual`.
        """
        block, self._block = self._block, None
        if block is None:
            self._view.unscale()
            return
        block.__exit__(None, None, None)
        if block.found_inf is not None:
            manual.note_overflow(block.found_inf)
