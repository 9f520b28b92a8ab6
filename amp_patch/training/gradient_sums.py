"""`GradientSums`: all gradients of a session, the loss scale they are multiplied by, and the checks for overflow.

A *block* is a `scale_loss` block. Unlike with GradScaler, gradients are unscaled while no block is open (two exceptions
are below). So a script can clip, log and accumulate them between blocks.

* `begin` multiplies the gradients of parameters by the scale, so that `backward()` can add to them.
* `end` divides them by the scale, and checks the gradients of the block's optimizers. At levels with masters, `end`
  moves the gradients of 16-bit parameters to their masters. Then it reports the flag of the block to these optimizers
  and to the scaler of the block.

A backward pass may also reach parameters of other optimizers (the discriminator of a GAN) or of none. Their gradients
are divided, too, but not checked for the block.

Two kinds of gradients stay scaled at the end of a block, and are unscaled and checked later. Gradients of a block with
`delay_unscale` wait for a later event, such as a step. Gradients that a parallel wrapper has not reduced yet
(`no_sync`) wait for the backward pass that reduces them.

| event | gradients that are checked, unless the scale is 1 |
|---|---|
| a block ends | of its optimizers, and of delayed blocks before it |
| a block with `delay_unscale` ends | none |
| `step()` | of delayed blocks; `OverflowFlags.check_at_step` may check more |
| `zero_grad()` | of delayed blocks |
| `step()` inside a block | of its optimizer |
"""

import contextlib
import threading
import weakref
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Module

from ..errors import OptimizerError, SessionError
from ..interrupts import Change
from ..reporting import warn
from ..torch_private import is_engine_thread
from .loss_scaler import LossScaler
from .masters import Pair
from .overflow_flags import Block, OptState, OverflowFlags, check_
from .reduction import LocalGradients, UnshardedSums
from .scale_updates import ScaleUpdates
from .unscaling import change_scale_, drop_gradients, either, have_gradients, move_to_masters_, rescale_, unscale_


class GradientSums:
    """The gradients of a session, and the loss scale that they are multiplied by.

    Args:
        has_masters: whether parameters may have masters.
        scale_updates: updates the loss scales.
        sharded: the modules that `fully_shard` was applied to.

    Attributes:
        all_flags: the overflow flags of the bound optimizers.
        model_parameters: the parameters of the models, with or without an optimizer.
        local: knows which gradients are not reduced yet, and their scale.
    """

    def __init__(self, has_masters: bool, scale_updates: ScaleUpdates, sharded: Collection[Module]) -> None:
        self.all_flags: list[OverflowFlags] = []
        self.model_parameters: list[Tensor] = []
        self._has_masters = has_masters
        self.local = LocalGradients()
        self.scale_updates = scale_updates
        self._unsharded = UnshardedSums(sharded)
        self._scale: Tensor | None = None  # the scale that gradients are multiplied by; None if they are unscaled
        self._scaler: LossScaler | None = None  # the scaler of the last block
        self._waiting: list[Block] = []  # blocks that have ended, with gradients that are not checked yet
        self._open: list[weakref.ref[Block]] = []  # outermost first
        self._change = Change()  # entered while gradients are scaled or unscaled; knows if an error has cut that short
        self._stepping: int | None = None  # the id of the thread that runs a step; None outside of steps

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def open_blocks(self) -> list[Block]:
        """Return the open blocks, outermost first."""
        return [block for reference in self._open if (block := reference()) is not None]

    def await_step(self, block: Block) -> None:
        """Record that the optimizers of a block will have gradients to step on.

        If a script has set all gradients of an optimizer to None by hand, that counts as a `zero_grad`, and may update
        the scale. So call this before the block reads its scale.
        """
        for flags in block.affected:
            flags.was_passed = True
            # not where ranks decide together, because a rank without shards never has gradients
            if flags.found_inf and not self.scale_updates.process_groups and not flags.groups.has_gradients():
                self.mark_zeroed(flags)
            if flags.state is OptState.READY:
                flags.state = OptState.PENDING

    def begin(self, block: Block) -> None:
        """Multiply the gradients of parameters by the scale of a block. Gradients of masters stay unscaled.

        Raises SessionError inside a block with another scale. If there are masters or scales, raises it also while
        another thread is in a block or a step.
        """
        if self._open:
            for outer in self.open_blocks():
                self._check_thread(outer.thread, is_scaled=block.scale is not None or outer.scale is not None)
                if block.scale is not outer.scale:
                    raise SessionError(
                        "a scale_loss block inside one with another loss scale: the gradients of each would be divided"
                        " by the scale of the other. Enter it after the first has ended, or use the same loss_id for"
                        " both."
                    )
        if self._stepping is not None:
            self._check_thread(self._stepping, is_scaled=block.scale is not None)
        self._rescale_to(block.scale)
        self._unsharded.rescale_to(block.scale)
        self._scaler = block.scaler
        self._open.append(weakref.ref(block, self._open.remove))  # a block that is freed never ends, and is removed

    def _check_thread(self, thread: int, *, is_scaled: bool) -> None:
        if thread != threading.get_ident() and (is_scaled or self._has_masters):
            raise SessionError(
                "a scale_loss block or a step of another thread is under way, and both would scale the same gradients."
                " Put a threading.Lock around each block and the step() after it, or train each model in its own"
                " process."
            )

    def end(self, block: Block, *, is_delayed: bool) -> None:
        """End a block: divide all gradients by its scale, and report its flag to its optimizers and its scaler.

        A delayed block leaves that to a later event. Does not wait for the device, unless a block has failed under a
        dynamic scale.
        """
        for reference in tuple(self._open):
            if reference() is block:
                self._open.remove(reference)
        if self._change.is_half_done and block.has_failed:
            return  # the next block or step raises the error
        self.local.end_pass(self._scale)
        # at a scale of 1 and without masters (O0, O4), there is nothing to divide or move
        is_idle = self._scale is None and not self._has_masters and not self._waiting
        if block.scale is None and is_idle:
            return
        self._waiting.append(block)
        if not is_delayed:
            self.unscale_all()
            if self._open:
                self._rescale_to(block.scale)  # for the rest of the outer block, which has the same scale

    def close(self) -> None:
        """Unscale all gradients, or drop them if an error left them half unscaled. Open blocks count as ended."""
        self._open.clear()
        if self._change.is_half_done:
            self._drop_all()
        else:
            self.flush()

    def flush(self) -> None:
        """Unscale all gradients, also unreduced ones. Inside a block, do nothing."""
        if not self._open:
            self._rescale_local(None)
            self.unscale_all()

    # ---- steps and zeroing -------------------------------------------------------------------------------------------

    def unscale(self, flags: OverflowFlags) -> None:
        """Unscale and check the gradients of an optimizer now. Inside a block, scale them again at once."""
        self.begin_step(flags)
        self.end_step(flags)

    def begin_step(self, flags: OverflowFlags) -> None:
        """Unscale gradients before a step, and check them (see `unscale_all`). Inside a block: only the optimizer's."""
        if self._change.is_half_done:
            self._raise_half_unscaled()
        open_blocks = self.open_blocks() if self._open else []
        # gradient hooks may step in a thread of the autograd engine, while the thread of the block waits for the hook
        if open_blocks and not is_engine_thread():
            for block in open_blocks:
                self._check_thread(block.thread, is_scaled=block.scale is not None)
        self._stepping = threading.get_ident()
        if open_blocks:
            self._unscale_inside(flags)
        elif self._scale is not None or self._waiting or self._has_masters:
            self.unscale_all()

    def end_step(self, flags: OverflowFlags) -> None:
        """End a step. Inside a block, scale gradients of parameters without a master again, for the next backward."""
        self._stepping = None
        if self._open and self._scale is not None:
            plain, _ = flags.groups.read()
            with self._change:
                rescale_(_collect_gradients(plain, set(self.local.ids)), self._scale)

    def reset_flags(self, flags: OverflowFlags) -> None:
        """Forget the flags of an optimizer that has taken or skipped a step. Later gradients are for its next step."""
        flags.clear()
        if self._open or self._waiting:
            for block in self._blocks_with(flags):
                block.stepped.append(flags)

    def _unscale_inside(self, flags: OverflowFlags) -> None:
        """Unscale and check the gradients of one optimizer inside a block. Gradients of others stay scaled."""
        if self._scale is None:
            self._move_unscaled([flags])
            return
        with self._change:
            found_inf = self._unscale_and_check(flags, self._scale, set(self.local.ids))
        for block in self._blocks_with(flags):
            block.found_inf = either(block.found_inf, found_inf)
            # a second step in the same block must not skip for an overflow in the gradients of the first
            flags.add_found_inf(block.scaler, found_inf if block.is_spent(flags) else block.found_inf)

    def mark_zeroed(self, flags: OverflowFlags) -> None:
        """Record that the gradients of an optimizer are zeroed.

        An overflow in them still counts for the loss scale. If a block has checked them, the next step checks again.
        """
        if self._waiting:
            self._check_waiting(flags)
        scalers = list(flags.found_inf)
        flags.was_zeroed = flags.was_zeroed or bool(scalers)
        flags.found_inf = {}
        if flags.state is not OptState.READY:
            is_inside = bool(self._open) and any(flags in block.affected for block in self.open_blocks())
            flags.state = OptState.PENDING if is_inside else OptState.READY  # inside a block, more gradients follow
        self.scale_updates.update_without_step(scalers)
        self.scale_updates.warn_of_falling_scales()

    def _check_waiting(self, flags: OverflowFlags) -> None:
        """Check the gradients of an optimizer that blocks have left unchecked, before they are zeroed."""
        local_ids = self.local.find_ids(flags.groups.model_parameters)
        if local_ids:  # unreduced gradients are not checked, because an overflow of this rank alone must not count
            self.local.ids -= local_ids
            for block in self._waiting:
                block.affected = [affected for affected in block.affected if affected is not flags]
            self._waiting = [block for block in self._waiting if block.affected]
        elif self._open:
            self.unscale(flags)
        else:
            self.unscale_all()

    def prepare_clipping(self, parameters: Sequence[Tensor]) -> None:
        """Move gradients of 16-bit parameters to their masters, before gradients of `parameters` are clipped.

        Inside a block or after a delayed one, only warn if such a gradient is still scaled, or not in its master yet.
        """
        if not (self._open or self._waiting):
            if self._has_masters:
                self.unscale_all()
            return
        pairs: list[Pair] = []
        for flags in self.all_flags:
            pairs += flags.groups.pairs()
        if self._scale is not None:
            pairs += [(parameter, parameter) for parameter in self._all_parameters()]  # also parameters without masters
        clipped_ids = set(map(id, parameters))
        for parameter, master in pairs:
            if parameter.grad is not None and not clipped_ids.isdisjoint((id(parameter), id(master))):
                state = "not in the masters yet" if self._scale is None else "still multiplied by the loss scale"
                warn(
                    "gradients are clipped inside a scale_loss block, or after one with delay_unscale or no_sync(),"
                    f" where they are {state}: clip after the block (of several, the last), and before the step"
                )
                return

    # ---- scaling and unscaling ---------------------------------------------------------------------------------------

    @property
    def is_scaled(self) -> bool:
        """Whether gradients are multiplied by a loss scale now."""
        return self._scale is not None

    def unscale_all(self) -> None:
        """Unscale all gradients that are reduced. Inside a block, the caller must scale them again.

        If they were scaled, check the gradients of the optimizers of waiting and open blocks, and report the flags of
        waiting blocks. Raises SessionError if an error has left gradients half unscaled.
        """
        if self._change.is_half_done:
            self._raise_half_unscaled()
        scale = self._scale
        ended: list[Block] = []
        for block in self._waiting:
            if block.scale is not None:
                ended.append(block)
        if scale is not None and not ended and not self._open:
            ended = [self._replace_lost_block()]
        if scale is None and ended:  # they waited for a reduction, and all reduced gradients are unscaled already
            scale = torch.ones_like(ended[0].scaler.scale)
        if scale is None:
            self._waiting = []
            if self._has_masters:
                self._move_unscaled(self.all_flags)
            return
        open_blocks = self.open_blocks() if self._open else []
        with self._change:
            found_infs = self._unscale_and_check_all(scale, [*ended, *open_blocks])
            self._scale = None
            self._waiting = []
            if self.local.ids:
                self._waiting = [block for block in ended if self._has_local_gradients(block)]
        for block in open_blocks:
            for flags in block.affected:
                block.found_inf = either(block.found_inf, found_infs[flags])
        for block in ended:
            self._report(block, found_infs)

    def _replace_lost_block(self) -> Block:
        """Return a block for all optimizers, in place of a block that never ended."""
        assert self._scaler is not None
        block = Block(self._scaler, self.all_flags)
        block.scale = self._scale
        block.has_failed = True
        return block

    def _has_local_gradients(self, block: Block) -> bool:
        """Return whether a block has to wait until gradients of its optimizers are reduced."""
        return any(self.local.find_ids(flags.groups.model_parameters) for flags in block.affected)

    def _unscale_and_check_all(self, scale: Tensor, blocks: Sequence[Block]) -> dict[OverflowFlags, Tensor]:
        """Divide all reduced gradients by a scale. Return the found_inf flag of each optimizer of `blocks`."""
        seen = set(self.local.ids)
        found_infs: dict[OverflowFlags, Tensor] = {}
        for block in blocks:
            for flags in block.affected:
                if flags not in found_infs:
                    found_infs[flags] = self._unscale_and_check(flags, scale, seen)
        checked = seen - self.local.ids
        for flags in self.all_flags:
            if flags not in found_infs:
                self._unscale_unchecked(flags, scale, checked)
        unowned = _collect_gradients(self._all_parameters(), seen)  # the gradients that no optimizer of `blocks` has
        if unowned:
            unscale_(unowned, scale, None)
        return found_infs

    def _unscale_and_check(self, flags: OverflowFlags, scale: Tensor, seen: set[int]) -> Tensor:
        """Divide the gradients of an optimizer by a scale. Return a 0-dim float32 flag: 1.0 for a new overflow in them.

        `seen` has the ids of parameters to leave out. Parameters without a master that have a gradient are added to it.
        """
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        plain, pairs = flags.groups.read()
        unscale_(_collect_gradients(plain, seen), scale, found_inf)
        if flags.state is OptState.UNCHECKED:  # the sums in the masters were not checked when they were made
            check_([master for _, master in pairs], found_inf)
            flags.state = OptState.PENDING
        if flags.found_inf:
            found_inf = flags.mask(found_inf)
        if pairs:  # the gradients of this pass are not part of the sums yet, so an overflow in them is new
            move_to_masters_(self._reduced(pairs), scale, found_inf)
        return found_inf

    def _unscale_unchecked(self, flags: OverflowFlags, scale: Tensor, checked: set[int]) -> None:
        """Move 16-bit gradients to masters for an optimizer that no waiting or open block has.

        Mark it as UNCHECKED if it has 16-bit gradients, or if one of its parameters is in `checked`: the ids of the
        parameters that were just checked for other optimizers.
        """
        plain, pairs = flags.groups.read()
        reduced = self._reduced(pairs)
        if have_gradients(reduced):
            _mark_unchecked(flags)
            move_to_masters_(reduced, scale, None)
        elif not checked.isdisjoint(map(id, plain)):
            _mark_unchecked(flags)

    def _move_unscaled(self, all_flags: Iterable[OverflowFlags]) -> None:
        """Move unscaled gradients of 16-bit parameters to their masters, and mark their optimizers as UNCHECKED."""
        for flags in all_flags:
            _, pairs = flags.groups.read()
            if have_gradients(pairs):
                _mark_unchecked(flags)
                with self._change:
                    move_to_masters_(self._reduced(pairs), None, None)

    def _report(self, block: Block, found_infs: dict[OverflowFlags, Tensor]) -> None:
        """Add new flags to the flag of a block. If all gradients of the block are checked now, report its flag."""
        for flags in block.affected:
            block.found_inf = either(block.found_inf, found_infs[flags])
        if block in self._waiting or block.found_inf is None:
            return
        if block.has_failed and not _is_overflow(block):
            return
        is_step_expected = False
        for flags in block.affected:
            if flags.state is not OptState.READY:
                is_step_expected = True
            if not block.is_spent(flags):
                flags.add_found_inf(block.scaler, block.found_inf)
            elif flags.groups.has_gradients():  # gradients came after the step, and only their flag counts
                flags.add_found_inf(block.scaler, found_infs[flags])
        block.scaler.add_found_inf(block.found_inf)
        if block.affected and not is_step_expected:  # otherwise, the next step updates the scale
            self.scale_updates.update_without_step([block.scaler])

    def _rescale_to(self, scale: Tensor | None) -> None:
        """Change the scale by which all gradients are multiplied to `scale`. None means 1."""
        if self.local.ids:
            self._rescale_local(scale)
        # at a scale of 1, there may be gradients to move to masters, unless delayed blocks leave that for later
        if self._scale is scale and (scale is not None or self._waiting or not self._has_masters):
            return
        if self._scale is not None or self._waiting or self._has_masters or self._change.is_half_done:
            self.unscale_all()
        if scale is None:
            return
        with self._change:
            gradients = _collect_gradients(self._all_parameters(), set(self.local.ids))
            if gradients:  # a usual loop has none here, because it zeroes gradients after each step
                rescale_(gradients, scale)
            self._scale = scale

    def _all_parameters(self) -> list[Tensor]:
        """Return the parameters of the models and of the optimizers, many of them twice. Masters are left out."""
        parameters = list(self.model_parameters)
        for flags in self.all_flags:
            parameters += flags.groups.model_parameters()
        return parameters

    def _reduced(self, pairs: list[Pair]) -> list[Pair]:
        """Return the pairs whose gradients are reduced."""
        if not self.local.ids:
            return pairs
        return [(parameter, master) for parameter, master in pairs if id(parameter) not in self.local.ids]

    def _blocks_with(self, flags: OverflowFlags) -> list[Block]:
        return [block for block in (*self._waiting, *self.open_blocks()) if flags in block.affected]

    # ---- gradients that are not reduced ------------------------------------------------------------------------------

    def release_unreduced(self, flags: OverflowFlags) -> None:
        """Before a step, give unreduced gradients the scale of reduced ones, or with masters, raise OptimizerError."""
        if not self.local.ids:
            return
        local_ids = self.local.find_ids(flags.groups.model_parameters)
        if not local_ids:
            return
        plain, pairs = flags.groups.read()
        if pairs:
            raise OptimizerError(
                "step() with gradients that were never reduced over the ranks: the last backward pass ran under"
                " no_sync(). Run the last micro-batch outside of no_sync()."
            )
        gradients = [parameter.grad for parameter in plain if id(parameter) in local_ids]
        change_scale_(gradients, self.local.scale, self._scale)
        self.local.ids -= local_ids

    def _rescale_local(self, scale: Tensor | None) -> None:
        """Change the scale of gradients that are not reduced yet. Does not check them."""
        unique = {id(parameter): parameter for parameter in self._all_parameters() if id(parameter) in self.local.ids}
        change_scale_([parameter.grad for parameter in unique.values()], self.local.scale, scale)
        self.local.scale = scale

    # ---- interrupts --------------------------------------------------------------------------------------------------

    def _raise_half_unscaled(self) -> None:
        raise SessionError(
            "an interrupt or an error has left gradients half unscaled: call amp.reset(), which drops them, and"
            " initialize again"
        )

    def _drop_all(self) -> None:
        """Drop all gradients, which are half unscaled."""
        holders = self._all_parameters()
        for flags in self.all_flags:
            holders += flags.groups.parameters()
        drop_gradients(holders)
        self._scale, self._waiting = None, []
        self._change.is_half_done = False
        warn("an interrupt or an error has left gradients half unscaled, so they were dropped")


def _mark_unchecked(flags: OverflowFlags) -> None:
    """Record that an optimizer has unchecked gradients.

    Also mark the optimizers that share a parameter with it (`partners`), if they have gradients to move to masters.
    """
    for partner in flags.partners:
        if have_gradients(partner.groups.read()[1]):
            partner.state = OptState.UNCHECKED
    flags.state = OptState.UNCHECKED


def _is_overflow(block: Block) -> bool:
    """Return whether a failed block has overflowed under a dynamic scale. Waits for the device."""
    if block.found_inf is None or not block.scaler.is_dynamic:
        return False
    with contextlib.suppress(RuntimeError):  # the device may have failed, too
        return bool(block.found_inf)
    return False


def _collect_gradients(parameters: Iterable[Tensor], seen: set[int]) -> list[Tensor]:
    """Return the gradients of parameters whose ids are not in `seen`, and add the ids of these parameters to `seen`."""
    gradients: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and id(parameter) not in seen:
            seen.add(id(parameter))
            gradients.append(gradient)
    return gradients
