"""`GradientSet`: the gradients of some parameters, the loss scale they carry, and the way from 16-bit gradients to
float32 masters.

Between backward passes `.grad` holds true, unscaled sums, so that accumulating, clipping and logging need no thought. A
backward pass of a scaled loss adds scaled gradients; therefore `begin` first multiplies what is there by the same scale
(exact for powers of two), and `unscale` divides the sum. The sums stay right across scales, losses and delayed passes,
and DistributedDataParallel reduces complete sums.

What lies there when a pass begins may hold an overflow of another pass. Where it comes from the same scaler and the
same optimizers wait for it, that makes no difference: the step is skipped and the scale falls once. Where it does not,
the earlier sum is set aside until the pass ends, so that the pass is judged on what it added.

Gradients are *held* while they must not be looked at, nor folded into masters: those of a delayed pass, and those that
are *local*, since no parallel wrapper has reduced them yet (`no_sync`). Neither the end of such a pass nor the
beginning of the next one touches them, but for a change of scale; they are unscaled at the end of the first pass that
is neither.
"""

from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import Tensor

from ..reporting import warn
from .adding import SumsAside, add_each, is_finite, to_float32
from .backward_pass import BackwardPass, PassState
from .masters import Pair
from .unscaling import rescale_, unscale_


class GradientSet:
    """The gradients of `parameters()` (read anew at each call) and of `pairs()`: (16-bit parameter, float32 master).

    A 16-bit parameter's gradient lives from the backward pass to its end: it is added to the master's gradient in
    float32 and dropped.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]], pairs: Callable[[], Collection[Pair]]) -> None:
        self._parameters = parameters
        self._pairs = pairs
        self._scale: Tensor | None = None  # the scale that the gradients carry, 0-dim; None: they are true sums
        self._passes: list[BackwardPass] = []  # whose gradients nobody has looked at
        self._window: list[BackwardPass] = []  # whose gradients are in the sums
        self._aside = SumsAside()
        self._is_torn = False  # in the middle of a change; an interrupt leaves it so
        self.is_in_block = False  # between begin and end
        self._block_scale: Tensor | None = None
        self.is_held = False
        self._held: list[Tensor] = []  # the parameters then: the optimizer may be gone before they are unscaled
        self.is_local = False  # not reduced over the ranks

    @property
    def is_scaled(self) -> bool:
        """Whether the gradients carry a loss scale now."""
        return self._scale is not None

    @property
    def is_idle(self) -> bool:
        """Whether a pass without a loss scale changes nothing here: no scale, no pass to judge, no masters."""
        return self._scale is None and not self._passes and not self._is_torn and not self._pairs()

    # ---- a pass ------------------------------------------------------------------------------------------------------

    def begin(self, scale: Tensor | None, backward_pass: BackwardPass | None = None) -> None:
        """Make the gradients ready for a backward pass of a loss multiplied by `scale` (0-dim; None: not scaled).

        `backward_pass` is judged on what it adds here; None is for a pass whose overflow here is nobody's matter.
        """
        self._prepare(scale, backward_pass)
        self.is_in_block, self._block_scale = True, scale

    def end(self) -> None:
        """Say that the pass is over. The gradients stay as they are: `unscale` makes true sums of them."""
        self.is_in_block, self._block_scale = False, None

    def join(self, backward_pass: BackwardPass) -> None:
        """Record in `backward_pass`, when the gradients are unscaled, whether any is inf or NaN."""
        if backward_pass not in self._passes:  # two optimizers of one pass may share this set
            self._passes.append(backward_pass)
            backward_pass.scaled_in.append(self)

    def drop_pass(self, backward_pass: BackwardPass) -> None:
        """Look at nothing for that pass any more."""
        self._passes = [one for one in self._passes if one is not backward_pass]
        self._window = [one for one in self._window if one is not backward_pass]

    def hold(self) -> None:
        """Keep the gradients as they are until a pass ends that does not hold them."""
        self.is_held = not self.is_idle
        self._held = list(self._parameters()) if self.is_scaled else []

    def withdraw_passes(self) -> None:
        """Have nobody look at the passes of gradients that are given up before they were reduced: what one rank alone
        has found may not change its loss scale.
        """
        for one in [one for one in self._passes if not one.is_open]:
            one.scaled_in = [other for other in one.scaled_in if other is not self]
            self.drop_pass(one)
            if not one.scaled_in:
                one.scaler.discard(one)

    def settle(self) -> None:
        """Have the gradients carry no scale outside of a pass, so that parameters may come and go."""
        if self.is_in_block:
            return
        if self.is_unreduced:
            self._change_scale(None)
        else:
            self.unscale()

    def take_over(self, others: Iterable["GradientSet"]) -> None:
        """Stand for other sets, whose gradients carry no scale, from now on."""
        for other in others:
            self._window += [one for one in other._window if one not in self._window]
            self.is_held, self.is_local = self.is_held or other.is_held, self.is_local or other.is_local
            self.is_in_block, self._block_scale = other.is_in_block, other._block_scale
            for one in other._passes:  # under way: there may be more to come
                one.scaled_in = [gradients for gradients in one.scaled_in if gradients is not other]
                self.join(one)
        self.resume()

    def are_any_of(self, parameter_ids: Collection[int]) -> bool:
        """Tell whether one of the parameters, 16-bit ones included, has one of these ids."""
        parameters = (*self._parameters(), *(parameter for parameter, _ in self._pairs()))
        return any(id(parameter) in parameter_ids for parameter in parameters)

    @property
    def has_masters(self) -> bool:
        """Whether a parameter has a master."""
        return bool(self._pairs())

    @property
    def is_unreduced(self) -> bool:
        """Whether gradients wait for a pass that reduces them over the ranks; until then nobody looks at them."""
        return self.is_held and self.is_local

    def resume(self) -> None:
        """Scale the gradients again for the rest of a pass under way, after they were unscaled in the middle of it."""
        if self.is_in_block:
            self._prepare(self._block_scale, None)

    def unscale(self) -> None:
        """Divide the gradients by the scale they carry, fold those of 16-bit parameters into their masters, and fill
        the `found_inf` of the passes.
        """
        if self.is_idle:
            return
        if self._is_torn:
            self._drop_everything()
            return
        scale, passes = self._scale, self._passes
        if scale is None and not passes and not self._has_low_gradients():
            self.is_held = False
            return
        self._is_torn = True
        found_inf = passes[0].found_inf if passes else None
        if len(passes) > 1:
            found_inf = torch.zeros_like(passes[0].found_inf)
        if scale is not None:
            unscale_(self._plain_gradients(), scale, found_inf)
        self._fold(scale, found_inf)
        self._aside.take_back()
        self._scale, self.is_held, self._held = None, False, []
        if found_inf is not None and len(passes) > 1:
            for one in passes:
                one.found_inf.copy_(torch.maximum(one.found_inf, found_inf.to(one.found_inf.device)))
        self._forget_passes()
        self._is_torn = False

    def _forget_passes(self) -> None:
        """Let go of the passes that were looked at; of those under way there may be more to come."""
        for one in self._passes:
            if not one.is_open:
                one.scaled_in = [other for other in one.scaled_in if other is not self]
        self._passes = [one for one in self._passes if one.is_open]

    def _prepare(self, scale: Tensor | None, backward_pass: BackwardPass | None) -> None:
        if self._is_torn:
            self._drop_everything()
        if self._scale is not scale or (scale is None and not self.is_held):
            if self.is_unreduced:
                self._change_scale(scale)
            else:
                self.unscale()
                self._is_torn = True
                self._scale_up(scale, backward_pass)
                self._is_torn = False
        if backward_pass is not None:
            self._window.append(backward_pass)

    def _scale_up(self, scale: Tensor | None, backward_pass: BackwardPass | None) -> None:
        if scale is not None:
            if backward_pass is not None and self._is_mixed_with(backward_pass):
                rescale_(self._aside.put(self._parameters()), scale)
            else:
                rescale_(self._plain_gradients(), scale)
        self._scale = scale

    def _is_mixed_with(self, backward_pass: BackwardPass) -> bool:
        """Tell whether the sums hold a pass that another scaler or other optimizers would answer for."""
        if backward_pass.is_delayed or self.is_local:
            return False  # what is held is held together
        awaited_by = {id(window) for window in backward_pass.awaited_by}
        return any(
            one.state is PassState.JUDGED
            or one.scaler is not backward_pass.scaler
            or {id(window) for window in one.awaited_by} != awaited_by
            for one in self._window
        )

    def _change_scale(self, scale: Tensor | None) -> None:
        """Have held gradients carry another scale; nobody looks at them."""
        if self._scale is scale:
            return
        one = torch.ones((), dtype=torch.float32)
        old, new = (one if given is None else given for given in (self._scale, scale))
        self._is_torn = True
        gradients = [*self._plain_gradients(), *(p.grad for p, _ in self._pairs() if p.grad is not None)]
        rescale_(gradients, new.to(old.device) / old)
        self._scale = scale
        self._is_torn = False

    # ---- zeroing -----------------------------------------------------------------------------------------------------

    def forget_window(self) -> None:
        """Say that the sums so far are stepped on or zeroed: what comes is a new window."""
        self._window = [one for one in self._window if one.is_open]
        self._aside.clear()
        if not self.is_in_block:
            self.is_held = self.is_local = False

    def is_empty(self) -> bool:
        """Tell whether no parameter and no master has a gradient."""
        if any(parameter.grad is not None for parameter in self._parameters()):
            return False
        return all(parameter.grad is None and master.grad is None for parameter, master in self._pairs())

    def _drop_everything(self) -> None:
        """Drop gradients that an interrupt left half changed: no step may use them."""
        for parameter in self._parameters():
            parameter.grad = None
        for parameter, master in self._pairs():
            parameter.grad = master.grad = None
        self._aside.clear()
        self._forget_passes()
        self._scale, self.is_held, self._is_torn = None, False, False
        warn("an interrupt left gradients half unscaled: they are dropped, and the next step goes without them")

    def find_nonfinite(self) -> list[Tensor]:
        """Return the parameters (or masters) whose gradients hold inf or NaN. Waits for the device once for each."""
        holders = [*self._parameters(), *(master for _, master in self._pairs())]
        return [holder for holder in holders if holder.grad is not None and not is_finite(holder.grad)]

    def _plain_gradients(self) -> list[Tensor]:
        parameters: Iterable[Tensor] = self._parameters()
        if self._held:
            parameters = {id(parameter): parameter for parameter in (*parameters, *self._held)}.values()
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def _has_low_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter, _ in self._pairs())

    # ---- masters -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _fold(self, scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Add each 16-bit parameter's gradient, divided by `scale`, to its master's gradient."""
        if scale is None:
            add_each(_take(self._pairs(), is_on_cpu=True))
        pairs = list(_take(self._pairs()))
        if not pairs:
            return
        full = to_float32([gradient for _, gradient in pairs], [master for master, _ in pairs])
        if scale is not None:
            unscale_(full, scale, found_inf)
        add_each((master, gradient) for (master, _), gradient in zip(pairs, full, strict=True))


def _take(pairs: Iterable[Pair], *, is_on_cpu: bool = False) -> Iterator[Pair]:
    """Take the gradients of 16-bit parameters (only those on a CPU) away and yield each with its master."""
    for parameter, master in pairs:
        gradient = parameter.grad
        if gradient is not None and (gradient.is_cpu or not is_on_cpu):
            parameter.grad = None
            yield master, gradient
