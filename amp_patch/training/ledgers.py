"""`Ledgers`: all gradients of a session, the loss scale they are multiplied by, and the checks for overflow.

With GradScaler you write

    scaler.scale(loss).backward()    # .grad += scale * gradient
    scaler.unscale_(optimizer)       # .grad /= scale, and found_inf is set if an element is inf or NaN
    scaler.step(optimizer)           # skipped if found_inf is set
    scaler.update()                  # the scale halves if found_inf was set, or grows after enough good steps

Here a `scale_loss` block does the first two lines, and `step()` the others. Unlike with GradScaler, `.grad` holds
unscaled sums whenever no block is open, so you can clip, log and accumulate at any time:

* `begin` multiplies the gradients so far by the scale (exact for powers of two), so that `backward()` adds to them.
* `end` divides all gradients by the scale and checks them. At levels with masters it moves the gradients of 16-bit
  parameters to their masters. An overflow sets a flag in the ledger of each optimizer of the block, and in the scaler.
* `step()` is skipped if a flag in the ledger of its optimizer belongs to a dynamic scaler. Either way it has these
  scalers update their scales, and clears the ledger.

Parameters are read from the groups of the optimizers each time, as GradScaler does. A backward pass may also reach
parameters of other optimizers (the discriminator of a GAN) or of none. Their gradients are divided, too, but do not
count as an overflow of the block.

Two kinds of gradients are checked later: those of a block with `delay_unscale`, at the end of the next block without
it, at a step or at `zero_grad`; and those that a parallel wrapper has not reduced yet (`no_sync`), after the backward
pass that reduces them.

| event | gradients that are checked | flags that are set | scales that are updated |
|---|---|---|---|
| a block ends | of its optimizers, and of delayed blocks before it | of these optimizers and the scaler | - |
| a block with `delay_unscale` ends | none | none | - |
| `step()` | any not checked yet; again, if any were zeroed | of its optimizer | of all scalers with a flag there |
| `zero_grad()` without a step | any not checked yet | the next step checks again | of all scalers with a flag there |
| `step()` inside a block | of its optimizer | of its optimizer and the block | none, until the block ends |
"""

import contextlib
import threading
import weakref
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Module

from ..errors import OptimizerError, SessionError
from ..reporting import warn
from ..torch_private import is_engine_thread
from .decisions import Decisions
from .ledger import Block, Ledger
from .loss_scaler import LossScaler
from .masters import Pair
from .reduction import LocalGradients, UnshardedSums
from .unscaling import change_scale_, either, fold_, have_gradients, rescale_, unscale_


class Ledgers:
    """The gradients of a session. All are multiplied by the same scale, except those that are not reduced yet.

    Args:
        has_masters: whether parameters may have masters.
        decisions: updates the scales.
        sharded: the modules that `fully_shard` was applied to.

    Attributes:
        all: the ledgers of the live optimizers.
        of_models: the parameters of the models, with or without an optimizer.
        local: knows which gradients no backward pass has reduced yet.
    """

    def __init__(self, has_masters: bool, decisions: Decisions, sharded: Collection[Module]) -> None:
        self.all: list[Ledger] = []
        self.of_models: list[Tensor] = []
        self._has_masters = has_masters
        self.local = LocalGradients()
        self.decisions = decisions
        self._unsharded = UnshardedSums(sharded)
        self._scale: Tensor | None = None  # that gradients are multiplied by; None: they are unscaled
        self._scaler: LossScaler | None = None  # whose scale that was last
        self._waiting: list[Block] = []  # have ended, with gradients that are not checked yet
        self._open: list[weakref.ref[Block]] = []  # outermost first
        self._is_half_changed = False  # while gradients are changed, and for good if an exception ends that
        self._stepping: int | None = None  # the thread that runs a step

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def open_blocks(self) -> list[Block]:
        """Return the open blocks, outermost first."""
        blocks: list[Block] = []
        for reference in self._open:
            block = reference()
            if block is not None:
                blocks.append(block)
        return blocks

    def abandon_empty(self, block: Block) -> None:
        """Treat gradients that were all set to None by hand as `zero_grad`, before the scale of a block is read."""
        for ledger in block.ledgers:
            ledger.has_begun = True
            # not where ranks decide together: one may hold no shard, and the others would wait for it
            is_due = ledger.flags or ledger.overflow_of_others is not None
            if is_due and not self.decisions.groups and ledger.groups.is_empty():
                self.abandon(ledger)
            ledger.awaits_step = True

    def begin(self, block: Block) -> None:
        """Multiply all gradients by the scale of a block. Raises SessionError inside one of another scale or thread."""
        if self._open:
            for other in self.open_blocks():
                self._check_thread(other.thread, is_scaled=block.scale is not None or other.scale is not None)
                if block.scale is not other.scale:
                    raise SessionError(
                        "a scale_loss block inside one with another loss scale: the gradients of each would be divided"
                        " by the scale of the other. Enter it after the first has ended, or use the same loss_id for"
                        " both."
                    )
        if self._stepping is not None:
            self._check_thread(self._stepping, is_scaled=block.scale is not None)
        self._carry(block.scale)
        self._unsharded.carry(block.scale)
        self._scaler = block.scaler
        self._open.append(weakref.ref(block, self._open.remove))  # one that is gone will never end

    def _check_thread(self, thread: int, *, is_scaled: bool) -> None:
        if thread != threading.get_ident() and (is_scaled or self._has_masters):
            raise SessionError(
                "a scale_loss block or a step of another thread is under way, and both would scale the same gradients."
                " Put a threading.Lock around each block and the step() after it, or train each model in its own"
                " process."
            )

    def end(self, block: Block, *, is_delayed: bool) -> None:
        """End a block: divide all gradients by its scale, and set the flags of its optimizers and its scaler.

        A delayed block leaves that to the next one. Waits for nothing, except after an exception: such a block counts
        only if it overflowed.
        """
        for reference in tuple(self._open):
            if reference() is block:
                self._open.remove(reference)
        if self._is_half_changed and block.has_failed:
            return  # what comes next says so
        self.local.end_pass(self._scale)
        is_idle = self._scale is None and not self._has_masters and not self._waiting
        if block.scale is None and is_idle:
            return
        self._waiting.append(block)
        if not is_delayed:
            self.settle()
            if self._open:
                self._carry(block.scale)  # that of the block around it

    def close(self) -> None:
        """Leave unscaled gradients behind, or none where an interrupt left them half changed. Open blocks are over."""
        self._open.clear()
        if self._is_half_changed:
            self._drop_all()
        else:
            self.make_true()

    def make_true(self) -> None:
        """Unscale all gradients unless a block is open, so that parameters can be added or removed."""
        if not self._open:
            self._rescale_local(None)
            self.settle()

    # ---- steps and zeroing -------------------------------------------------------------------------------------------

    def prepare_step(self, ledger: Ledger) -> None:
        """Unscale and check the gradients of an optimizer before its step, until `resume`. Waits for nothing."""
        if self._is_half_changed:
            self._refuse()
        open_blocks = self.open_blocks() if self._open else []
        if open_blocks and not is_engine_thread():  # where hooks run, which may step: the block's own thread waits
            for block in open_blocks:
                self._check_thread(block.thread, is_scaled=block.scale is not None)
        self._stepping = threading.get_ident()
        if not open_blocks:
            if self._scale is not None or self._waiting or self._has_masters:
                self.settle()
            return
        if self._scale is None:
            self._fold_unscaled(ledger)
            return
        self._is_half_changed = True
        found_inf = self._unscale_and_check(ledger, self._scale, set(self.local.ids))
        self._is_half_changed = False
        for block in self._blocks_with(ledger):
            block.found_inf = either(block.found_inf, found_inf)
            is_first = ledger not in block.stepped_early
            ledger.note(block.scaler, block.found_inf if is_first else found_inf)

    def resume(self, ledger: Ledger) -> None:
        """End what `prepare_step` began: inside a block, scale the gradients again for what is left of it."""
        self._stepping = None
        if self._open and self._scale is not None:
            plain, _ = ledger.groups.read()
            self._is_half_changed = True
            rescale_(_take(plain, set(self.local.ids)), self._scale)
            self._is_half_changed = False

    def end_window(self, ledger: Ledger) -> None:
        """Record that an optimizer has stepped or skipped a step: later gradients are for the next one."""
        ledger.end_window()
        if self._open or self._waiting:
            for block in self._blocks_with(ledger):
                block.stepped_early.append(ledger)

    def abandon(self, ledger: Ledger) -> None:
        """Record that the gradients of an optimizer are zeroed without a step.

        An overflow in them still lowers the loss scale. The next step checks the gradients that it finds by then.
        """
        if self._waiting:
            self._finish_waiting(ledger)
        scalers = list(ledger.flags)
        to_recheck = ledger.to_recheck
        ledger.end_window()
        ledger.to_recheck = to_recheck
        ledger.recheck_at_step(scalers)
        self.decisions.judge_outside_of_steps(scalers)
        self.decisions.look_at_scales()

    def _finish_waiting(self, ledger: Ledger) -> None:
        """Check gradients of delayed blocks that are about to be zeroed."""
        local = self.local.find(ledger.groups.model_parameters)
        if local:  # what one rank alone has found may not change its loss scale
            self.local.ids -= local
            for block in self._waiting:
                block.ledgers = [other for other in block.ledgers if other is not ledger]
            self._waiting = [block for block in self._waiting if block.ledgers]
        elif not self._open:
            self.settle()
        else:
            self.prepare_step(ledger)
            self.resume(ledger)
            for block in self._waiting:
                block.stepped_early.append(ledger)

    def prepare_clipping(self, parameters: Sequence[Tensor]) -> None:
        """Move gradients of 16-bit parameters to their masters, which a backward pass outside of `scale_loss` leaves to
        the step. Warns inside a block, where gradients are still scaled.
        """
        if not (self._open or self._waiting):
            if self._has_masters:
                self.settle()
            return
        pairs: list[Pair] = []
        for ledger in self.all:
            pairs += ledger.groups.pairs()
        if self._scale is not None:
            pairs += [(parameter, parameter) for parameter in self._all_parameters()]
        given = set(map(id, parameters))
        for parameter, stepped in pairs:
            if parameter.grad is not None and not given.isdisjoint((id(parameter), id(stepped))):
                state = "not in the masters yet" if self._scale is None else "still multiplied by the loss scale"
                warn(
                    "gradients are clipped inside a scale_loss block, or after one with delay_unscale, where they are"
                    f" {state}: clip after the block, and before the step"
                )
                return

    # ---- scaling and unscaling ---------------------------------------------------------------------------------------

    @property
    def is_scaled(self) -> bool:
        """Whether gradients are multiplied by a loss scale now."""
        return self._scale is not None

    def settle(self) -> None:
        """Unscale and check all gradients, except those not reduced yet, and set the flags of waiting blocks."""
        if self._is_half_changed:
            self._refuse()
        if self._scale is None and not self._waiting:
            if self._has_masters:
                self._fold_all_unscaled()
            return
        scale = self._scale
        judged: list[Block] = []
        for block in self._waiting:
            if block.scale is not None:
                judged.append(block)
        if scale is not None and not judged and not self._open:
            judged = [self._replace_lost_block()]
        if judged and scale is None:  # they were divided before
            scale = torch.ones_like(judged[0].scaler.scale)
        open_blocks = self.open_blocks() if self._open else []
        self._is_half_changed = True
        found = self._unscale_all(scale, [*judged, *open_blocks])
        self._scale = None
        self._waiting = []
        if self.local.ids:
            for block in judged:
                if any(self.local.find(ledger.groups.model_parameters) for ledger in block.ledgers):
                    self._waiting.append(block)
        self._is_half_changed = False
        for block in open_blocks:
            for ledger in block.ledgers:
                if ledger in found:
                    block.found_inf = either(block.found_inf, found[ledger])
        for block in judged:
            self._judge(block, found)

    def _replace_lost_block(self) -> Block:
        """Return a block for all optimizers in place of one that was garbage-collected before it ended."""
        assert self._scaler is not None
        block = Block(self._scaler, self.all)
        block.scale = self._scale
        block.has_failed = True
        return block

    def _unscale_all(self, scale: Tensor | None, blocks: Sequence[Block]) -> dict[Ledger, Tensor]:
        """Divide all gradients by a scale, and return a found_inf for each optimizer of the given blocks."""
        seen = set(self.local.ids)
        found: dict[Ledger, Tensor] = {}
        for block in blocks:
            for ledger in block.ledgers:
                if ledger not in found and scale is not None:
                    found[ledger] = self._unscale_and_check(ledger, scale, seen)
        if scale is None:
            self._fold_all_unscaled()
            return found
        checked = seen - self.local.ids
        for ledger in self.all:
            if ledger not in found:
                self._fold_of_others(ledger, scale, checked)
        others = _take(self._all_parameters(), seen)
        if others:
            unscale_(others, scale, None)
        return found

    def _fold_of_others(self, ledger: Ledger, scale: Tensor, checked: set[int]) -> None:
        """Unscale the gradients of an optimizer that none of the blocks was for, and move them to their masters.

        If its groups now hold parameters that were checked for another optimizer (`checked`, by id), its step checks
        them again.
        """
        plain, pairs = ledger.groups.read()
        if not checked.isdisjoint(map(id, plain)):
            ledger.recheck_at_step(self.decisions.scalers)
        reduced = self._reduced(pairs)
        if have_gradients(reduced):
            found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
            fold_(reduced, scale, found_inf)
            ledger.overflow_of_others = either(ledger.overflow_of_others, found_inf)

    def _fold_all_unscaled(self) -> None:
        for ledger in self.all:
            self._fold_unscaled(ledger)

    def _fold_unscaled(self, ledger: Ledger) -> None:
        """Move unscaled gradients of 16-bit parameters to their masters. They may be of no block: the step checks."""
        _, pairs = ledger.groups.read()
        if not have_gradients(pairs):
            return
        for affected in (ledger, *ledger.partners):
            if affected is ledger or have_gradients(affected.groups.read()[1]):
                affected.recheck_at_step(self.decisions.scalers)
                affected.awaits_step = True
        self._is_half_changed = True
        fold_(self._reduced(pairs), None, None)
        self._is_half_changed = False

    def _unscale_and_check(self, ledger: Ledger, scale: Tensor, seen: set[int]) -> Tensor:
        """Divide the gradients of an optimizer by a scale, except those of parameters in `seen`, by id. Return a new
        overflow in them as found_inf: 0-dim float32.

        In sums that held inf or NaN before, a second overflow cannot be detected and does not count.
        """
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        plain, pairs = ledger.groups.read()
        unscale_(_take(plain, seen), scale, found_inf)
        before = ledger.overflow
        if before is not None:
            found_inf = found_inf * (1.0 - before.to(found_inf.device))
        if pairs:
            fold_(self._reduced(pairs), scale, found_inf)
        if ledger.overflow_of_others is not None:
            found_inf = either(ledger.overflow_of_others, found_inf)
            ledger.overflow_of_others = None
        ledger.overflow = either(before, found_inf)
        return found_inf

    def _judge(self, block: Block, found: dict[Ledger, Tensor]) -> None:
        """Set the flags of the optimizers and the scaler of a block, once all of its gradients are checked."""
        for ledger in block.ledgers:
            block.found_inf = either(block.found_inf, found[ledger])
        if block in self._waiting or block.found_inf is None:
            return
        if block.has_failed:  # counts only if it overflowed; a device may have failed with it
            is_overflow = False
            with contextlib.suppress(RuntimeError):
                is_overflow = block.scaler.is_dynamic and bool(block.found_inf)
            if not is_overflow:
                return
        for ledger in block.ledgers:
            if ledger not in block.stepped_early:
                ledger.note(block.scaler, block.found_inf)
            elif not ledger.groups.is_empty():
                ledger.note(block.scaler, found[ledger])
        block.scaler.note(block.found_inf)
        if block.stepped_early and all(ledger in block.stepped_early for ledger in block.ledgers):
            self.decisions.judge_outside_of_steps([block.scaler])

    def _carry(self, scale: Tensor | None) -> None:
        """Multiply unscaled gradients, or those of another scale, so that all have this one. None means 1."""
        if self.local.ids:
            self._rescale_local(scale)
        if self._scale is scale and (scale is not None or self._waiting or not self._has_masters):
            return
        self.settle()
        if scale is None:
            return
        self._is_half_changed = True
        gradients = _take(self._all_parameters(), set(self.local.ids))
        if gradients:
            rescale_(gradients, scale)
        self._scale = scale
        self._is_half_changed = False

    def _all_parameters(self) -> list[Tensor]:
        """Return the parameters of the models and of the optimizers, not their masters; many of them twice."""
        parameters = list(self.of_models)
        for ledger in self.all:
            parameters += ledger.groups.model_parameters()
        return parameters

    def _reduced(self, pairs: list[Pair]) -> list[Pair]:
        if not self.local.ids:
            return pairs
        return [(parameter, master) for parameter, master in pairs if id(parameter) not in self.local.ids]

    def _blocks_with(self, ledger: Ledger) -> list[Block]:
        return [block for block in (*self._waiting, *self.open_blocks()) if ledger in block.ledgers]

    # ---- gradients that are not reduced ------------------------------------------------------------------------------

    def release_unreduced(self, ledger: Ledger) -> None:
        """Let a step of this rank alone use gradients that were never reduced. Raises OptimizerError with masters."""
        if not self.local.ids:
            return
        local = self.local.find(ledger.groups.model_parameters)
        if not local:
            return
        plain, pairs = ledger.groups.read()
        if pairs:
            raise OptimizerError(
                "step() with gradients that were never reduced over the ranks: every backward pass since the last step"
                " ran under no_sync(). Run the last micro-batch outside of no_sync()."
            )
        gradients = [parameter.grad for parameter in plain if id(parameter) in local]
        change_scale_(gradients, self.local.scale, self._scale)
        self.local.ids -= local

    def _rescale_local(self, scale: Tensor | None) -> None:
        """Change the scale of gradients that are not reduced yet. They are not checked."""
        unique = {id(parameter): parameter for parameter in self._all_parameters() if id(parameter) in self.local.ids}
        change_scale_([parameter.grad for parameter in unique.values()], self.local.scale, scale)
        self.local.scale = scale

    # ---- interrupts --------------------------------------------------------------------------------------------------

    def _refuse(self) -> None:
        raise SessionError(
            "an interrupt or an error has left gradients half unscaled: call amp.reset(), which drops them, and"
            " initialize again"
        )

    def _drop_all(self) -> None:
        """Drop gradients that an interrupt left half changed: no step may use them."""
        holders = self._all_parameters()
        for ledger in self.all:
            holders += ledger.groups.parameters()
        for holder in holders:
            holder.grad = None
        self._scale, self._waiting, self._is_half_changed = None, [], False
        warn("an interrupt left gradients half unscaled, so they were dropped: the next step does not use them")


def _take(parameters: Iterable[Tensor], seen: set[int]) -> list[Tensor]:
    """Return the gradients of parameters that are not in `seen`, by id, and add these parameters to it."""
    gradients: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and id(parameter) not in seen:
            seen.add(id(parameter))
            gradients.append(gradient)
    return gradients
