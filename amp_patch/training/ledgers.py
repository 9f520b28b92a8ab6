"""`Ledgers`: the loss scale that the gradients of a session carry, and what backward passes have found in them.

Between backward passes `.grad` holds true, unscaled sums, so that accumulating, clipping and logging need no thought. A
backward pass of a scaled loss adds scaled gradients. Therefore a block first multiplies what is there by the same scale
(exact for powers of two), and at its end everything is divided by it. The sums stay right across scales and losses, and
DistributedDataParallel reduces complete sums.

Gradients are read from the groups of the optimizers each time, as GradScaler does. A pass may reach parameters of
optimizers that were not passed with the loss (a GAN's discriminator), and parameters of no optimizer: their gradients
are divided as well, only no overflow of theirs is judged.

| event | who is looked at | who is told of an overflow | which scales are updated |
|---|---|---|---|
| a block ends | the optimizers of the block, and of delayed ones before it | these optimizers, and the scaler | - |
| a delayed block ends | nobody | nobody | - |
| `step()` | what nobody has looked at; where gradients were zeroed, the sums again | - | of all scalers that told it |
| `zero_grad()` without a step | what nobody has looked at | the next step looks again | of all that told it |
| `step()` inside a block | its own optimizer | it, and the block | none, until the block ends |

Not looked at are the gradients of a delayed block, until a block ends that is not, or a step needs them; and those that
no parallel wrapper has reduced yet (`no_sync`), until a pass reduces them.
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


class _Change:
    """A block in which gradients are changed.

    Attributes:
        is_under_way: inside the block, and from then on where an interrupt or an error has cut it short.
    """

    def __init__(self) -> None:
        self.is_under_way = False

    def __enter__(self) -> None:
        self.is_under_way = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.is_under_way = kind is not None


class Ledgers:
    """The gradients of a session: all carry one scale, but for those that are not reduced yet.

    Args:
        has_masters: parameters may have masters.
        decisions: updates the scales.
        sharded: modules that `fully_shard` has taken.

    Attributes:
        all: the ledgers of the optimizers that are alive.
        of_models: the parameters of the models, be they of an optimizer or not.
        local: tells which gradients no pass has reduced yet.
    """

    def __init__(self, has_masters: bool, decisions: Decisions, sharded: Collection[Module]) -> None:
        self.all: list[Ledger] = []
        self.of_models: list[Tensor] = []
        self._has_masters = has_masters
        self.local = LocalGradients()
        self.decisions = decisions
        self._unsharded = UnshardedSums(sharded)
        self._scale: Tensor | None = None  # that the gradients carry; None: they are true sums
        self._scaler: LossScaler | None = None  # whose scale that was last
        self._waiting: list[Block] = []  # have ended, and not all of their gradients were looked at
        self._open: list[weakref.ref[Block]] = []  # outermost first
        self._change = _Change()
        self._stepping: int | None = None  # the thread that is in a step

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def open_blocks(self) -> list[Block]:
        """Return the blocks that run, outermost first."""
        blocks: list[Block] = []
        for reference in self._open:
            block = reference()
            if block is not None:
                blocks.append(block)
        return blocks

    def abandon_empty(self, block: Block) -> None:
        """Take in, before the scale of a block is read, that gradients were set to None one by one."""
        for ledger in block.ledgers:
            ledger.has_begun = True
            # not where ranks decide together: one may hold no shard, and the others would wait for it
            is_due = ledger.flags or ledger.unjudged is not None
            if is_due and not self.decisions.groups and ledger.groups.is_empty():
                self.abandon(ledger)
            ledger.awaits_step = True

    def begin(self, block: Block) -> None:
        """Make all gradients ready for the backward pass of a block.

        Raises SessionError inside a block of another scale or thread.
        """
        if self._open:
            for other in self.open_blocks():
                self._check_thread(other.thread, is_scaled=block.scale is not None or other.scale is not None)
                self._check_scale(block, other)
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

    def _check_scale(self, block: Block, other: Block) -> None:
        if block.scale is not other.scale:
            raise SessionError(
                "a scale_loss block inside one with another loss scale: the gradients of each would be divided by the"
                " scale of the other. Enter it after the first has ended, or use the same loss_id for both."
            )

    def end(self, block: Block, *, is_delayed: bool) -> None:
        """End a block: divide all gradients by its scale, and tell its optimizers and its scaler what was found.

        A delayed block leaves that to the next. Waits for nothing, but where the block has failed: that counts only if
        it overflowed.
        """
        for reference in tuple(self._open):
            if reference() is block:
                self._open.remove(reference)
        if self._change.is_under_way and block.has_failed:
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
        """Leave true sums behind, or no gradients where an interrupt left them half changed. Open blocks are over."""
        self._open.clear()
        if self._change.is_under_way:
            self._drop_all()
        else:
            self.make_true()

    def make_true(self) -> None:
        """Have no gradient carry a scale outside of blocks, so that parameters may come and go."""
        if not self._open:
            self._rescale_local(None)
            self.settle()

    # ---- steps and zeroing -------------------------------------------------------------------------------------------

    def prepare_step(self, ledger: Ledger) -> None:
        """Make true sums of the gradients of an optimizer, and have its ledger know what was found. Waits for nothing.

        Inside a block `resume` scales them again.
        """
        if self._change.is_under_way:
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
        with self._change:
            found_inf = self._look(ledger, self._scale, set(self.local.ids))
        for block in self._blocks_with(ledger):
            block.found_inf = either(block.found_inf, found_inf)
            is_first = ledger not in block.served
            ledger.note(block.scaler, block.found_inf if is_first else found_inf)

    def resume(self, ledger: Ledger) -> None:
        """End what `prepare_step` began. Inside a block, scale the gradients of the optimizer again for the rest of the
        backward pass.
        """
        self._stepping = None
        if self._open and self._scale is not None:
            plain, _ = ledger.groups.read()
            with self._change:
                rescale_(_take(plain, set(self.local.ids)), self._scale)

    def end_window(self, ledger: Ledger) -> None:
        """Take in that an optimizer has stepped, or skipped its step: the gradients that come are for the next one."""
        ledger.end_window()
        if self._open or self._waiting:
            for block in self._blocks_with(ledger):
                block.served.append(ledger)

    def abandon(self, ledger: Ledger) -> None:
        """Take in that the gradients of an optimizer are zeroed without a step.

        Whether they overflowed matters to the loss scale, and to a step on what the user puts in their place.
        """
        if self._waiting:
            self._finish_waiting(ledger)
        scalers = list(ledger.flags)
        unchecked = ledger.unchecked
        ledger.end_window()
        ledger.unchecked = unchecked
        ledger.look_again(scalers)
        self.decisions.judge_outside_of_steps(scalers)

    def _finish_waiting(self, ledger: Ledger) -> None:
        """Look at what delayed blocks have left in gradients that are about to be zeroed."""
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
                block.served.append(ledger)

    def fold_for_clipping(self) -> None:
        """Add 16-bit gradients to those of their masters, which a backward pass outside of `scale_loss` leaves where
        they are until the step. Warns inside a block, where they are yet to be unscaled.
        """
        if (self._open or self._waiting) and self._has_masters:
            warn(
                "gradients are clipped inside a scale_loss block, or after one with delay_unscale, before the masters"
                " have them: clip after the block, and before the step"
            )
        else:
            self.settle()

    # ---- scaling and unscaling ---------------------------------------------------------------------------------------

    @property
    def is_scaled(self) -> bool:
        """Whether gradients carry a loss scale now."""
        return self._scale is not None

    def settle(self) -> None:
        """Make true sums of all gradients but those that are not reduced yet, and judge the blocks that wait for it."""
        if self._change.is_under_way:
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
            judged = [self._make_up_for_lost()]
        if judged and scale is None:  # they were divided before
            scale = torch.ones_like(judged[0].scaler.scale)
        open_blocks = self.open_blocks() if self._open else []
        with self._change:
            found = self._unscale_all(scale, [*judged, *open_blocks])
            self._scale = None
            self._waiting = []
            if self.local.ids:
                self._waiting = [block for block in judged if self._has_local(block)]
        for block in open_blocks:
            for ledger in block.ledgers:
                if ledger in found:
                    block.found_inf = either(block.found_inf, found[ledger])
        for block in judged:
            self._judge(block, found)

    def _make_up_for_lost(self) -> Block:
        """Return a block in the place of one that is gone without having ended: whoever steps is to know of inf."""
        assert self._scaler is not None
        block = Block(self._scaler, self.all)
        block.scale = self._scale
        block.has_failed = True
        return block

    def _unscale_all(self, scale: Tensor | None, blocks: Sequence[Block]) -> dict[Ledger, Tensor]:
        """Divide everything by a scale, and return what was found in the gradients of the optimizers of some blocks."""
        seen = set(self.local.ids)
        found: dict[Ledger, Tensor] = {}
        for block in blocks:
            for ledger in block.ledgers:
                if ledger not in found and scale is not None:
                    found[ledger] = self._look(ledger, scale, seen)
        if scale is None:
            self._fold_all_unscaled()
            return found
        looked_at = seen - self.local.ids
        for ledger in self.all:
            if ledger not in found:
                self._fold_unjudged(ledger, scale, looked_at)
        others = _take(self._all_parameters(), seen)
        if others:
            unscale_(others, scale, None)
        return found

    def _fold_unjudged(self, ledger: Ledger, scale: Tensor, looked_at: set[int]) -> None:
        """Divide 16-bit gradients of an optimizer that no pass was for, and add them to those of their masters.

        Its step looks at what is there if somebody has put parameters of another one into its groups since it was
        bound: those that were looked at, by id.
        """
        plain, pairs = ledger.groups.read()
        if not looked_at.isdisjoint(map(id, plain)):
            ledger.look_again(self.decisions.scalers)
        reduced = self._reduced(pairs)
        if have_gradients(reduced):
            found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
            fold_(reduced, scale, found_inf)
            ledger.unjudged = either(ledger.unjudged, found_inf)

    def _fold_all_unscaled(self) -> None:
        for ledger in self.all:
            self._fold_unscaled(ledger)

    def _fold_unscaled(self, ledger: Ledger) -> None:
        """Add 16-bit gradients that carry no scale to those of their masters.

        A backward pass outside of any block may have left them: the step looks at them.
        """
        _, pairs = ledger.groups.read()
        if not have_gradients(pairs):
            return
        for one in (ledger, *ledger.partners):
            if one is ledger or have_gradients(one.groups.read()[1]):
                one.look_again(self.decisions.scalers)
                one.awaits_step = True
        with self._change:
            fold_(self._reduced(pairs), None, None)

    def _look(self, ledger: Ledger, scale: Tensor, seen: set[int]) -> Tensor:
        """Divide the gradients of an optimizer by a scale, but for those of parameters that were seen, by id. Return
        whether a pass has left inf or NaN there: 0-dim float32.

        Where there was one before, nobody can tell: it does not count again.
        """
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        plain, pairs = ledger.groups.read()
        unscale_(_take(plain, seen), scale, found_inf)
        before = ledger.overflow
        if before is not None:
            found_inf = found_inf * (1.0 - before.to(found_inf.device))
        if pairs:
            fold_(self._reduced(pairs), scale, found_inf)
        if ledger.unjudged is not None:
            found_inf = either(ledger.unjudged, found_inf)
            ledger.unjudged = None
        ledger.overflow = either(before, found_inf)
        return found_inf

    def _judge(self, block: Block, found: dict[Ledger, Tensor]) -> None:
        """Tell the optimizers and the scaler of a block what was found, once all of its gradients were looked at."""
        for ledger in block.ledgers:
            block.found_inf = either(block.found_inf, found[ledger])
        if block in self._waiting or block.found_inf is None:
            return
        if block.has_failed and not (block.scaler.is_dynamic and _is_set(block.found_inf)):
            return
        for ledger in block.ledgers:
            if ledger not in block.served:
                ledger.note(block.scaler, block.found_inf)
            elif not ledger.groups.is_empty():
                ledger.note(block.scaler, found[ledger])
        block.scaler.note(block.found_inf)
        if block.served and all(ledger in block.served for ledger in block.ledgers):
            self.decisions.judge_outside_of_steps([block.scaler])

    def _carry(self, scale: Tensor | None) -> None:
        """Have all gradients carry a scale."""
        if self.local.ids:
            self._rescale_local(scale)
        if self._scale is scale and (scale is not None or self._waiting or not self._has_masters):
            return
        self.settle()
        if scale is None:
            return
        with self._change:
            gradients = _take(self._all_parameters(), set(self.local.ids))
            if gradients:
                rescale_(gradients, scale)
            self._scale = scale

    def _all_parameters(self) -> list[Tensor]:
        """Return the parameters of the models, and those that optimizers step on, by way of masters or not; many of
        them twice.
        """
        parameters = list(self.of_models)
        for ledger in self.all:
            parameters += ledger.groups.model_parameters()
        return parameters

    def _has_local(self, block: Block) -> bool:
        return any(self.local.find(ledger.groups.model_parameters) for ledger in block.ledgers)

    def _reduced(self, pairs: list[Pair]) -> list[Pair]:
        if not self.local.ids:
            return pairs
        return [(parameter, master) for parameter, master in pairs if id(parameter) not in self.local.ids]

    def _blocks_with(self, ledger: Ledger) -> list[Block]:
        return [block for block in (*self._waiting, *self.open_blocks()) if ledger in block.ledgers]

    # ---- gradients that are not reduced ------------------------------------------------------------------------------

    def release_unreduced(self, ledger: Ledger) -> None:
        """Let a step take gradients that were never reduced: it is one of this rank alone.

        Raises OptimizerError where they are on the way to masters.
        """
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
        """Have gradients that are not reduced carry another scale. Nobody looks at them."""
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
        self._scale, self._waiting, self._change = None, [], _Change()
        warn("an interrupt left gradients half unscaled, so they were dropped: the next step does not use them")


def _take(parameters: Iterable[Tensor], seen: set[int]) -> list[Tensor]:
    """Return the gradients of parameters that were not seen, by id, and take them for seen."""
    gradients: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and id(parameter) not in seen:
            seen.add(id(parameter))
            gradients.append(gradient)
    return gradients


def _is_set(found_inf: Tensor) -> bool:
    """Tell whether a flag is set. Waits for the device, unless that has failed too."""
    with contextlib.suppress(RuntimeError):
        return bool(found_inf)
    return False
