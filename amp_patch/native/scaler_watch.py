"""`ScalerWatch`: notices when a script uses GradScaler, or the regions of autocast, wrongly.

It follows the scaled losses, backward passes, clipping and steps of the script, and changes no result. It warns once of
each kind of misuse, with the line of the script and the edit that repairs it. If torch refuses a call because of a
misuse, the exception gets this text as a note.
"""

import inspect
import numbers
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import events
from ..interrupts import UndoStack
from ..patching import Patch, Patcher
from ..reporting import find_rank, warn
from ..tables import count_of
from ..torch_dispatch import CLIP_BY_NORM, count_compiled
from ..torch_private import get_autocast_depth, get_backward_id
from .gradient_reads import GradientReads
from .misuse import Kind, Misuse
from .region_watch import RegionWatch
from .roots import find_line
from .scale_state import ScaleState
from .session import find_session, has_own_amp
from .unscaled_gradients import UnscaledGradients, Version, read_version
from .unscaled_losses import UnscaledLosses

_SCALER_FILE = inspect.getfile(torch.amp.GradScaler)
_PACKAGE = f"{__package__.partition('.')[0]}."
_CHECKS_SCALE = "_check_scale_growth_tracker"
"""The method of GradScaler that raises an error if no loss was scaled before."""

_LARGEST_NORM = 1000.0
"""A call of `clip_grad_norm_` with a `max_norm` of this or more does not count as clipping. The script may have
multiplied `max_norm` by the scale, or may only measure the norm.
"""


@dataclass(slots=True)
class _Clipping:
    """A call that clipped gradients: the ids of their parameters, and the line of the call."""

    parameter_ids: set[int]
    line: str


@dataclass(slots=True)
class _ScalerUse:
    """What a script has done with one GradScaler. A line is written as `train.py:12`. In a dict with an entry for each
    optimizer, the key is the optimizer's id.

    Attributes:
        backwards: how many times a scaled loss has gone backward.
        backwards_at_update: `backwards` at the last `update`.
        backwards_at_step: `backwards` at the last `scaler.step` of each optimizer.
        unscaled_at: the line of `unscale_` for each optimizer since the last `update`.
        stepped_at: the line of `scaler.step` for each optimizer since the last `update`.
        updated_at: the line of the last `update`.
        is_scale_read: whether the script may unscale gradients itself: since it last scaled a loss, it has read the
            scale, or has scaled a value without gradients.
        unscaled: the gradients that `unscale_` has unscaled since the last `update`.
        clippings: the calls since the last `update` that may have clipped scaled gradients.
    """

    backwards: int = 0
    backwards_at_update: int = 0
    backwards_at_step: dict[int, int] = field(default_factory=dict)
    unscaled_at: dict[int, str] = field(default_factory=dict)
    stepped_at: dict[int, str] = field(default_factory=dict)
    updated_at: str = ""
    is_scale_read: bool = False
    clippings: list[_Clipping] = field(default_factory=list)
    unscaled: UnscaledGradients = field(default_factory=UnscaledGradients)

    @property
    def has_scaled_gradients(self) -> bool:
        """Whether a scaled loss has gone backward since the last `update`."""
        return self.backwards > self.backwards_at_update

    def describe_calls(self, optimizer: Any) -> tuple[str, ...]:
        """Return the calls for an optimizer since the last `update`, each as `step() at train.py:9`."""
        unscaled, stepped = self.unscaled_at.get(id(optimizer)), self.stepped_at.get(id(optimizer))
        added = self.unscaled.find_added(optimizer) or None
        if unscaled == stepped:  # both in one line: usually, the step has unscaled the gradients itself
            unscaled = None
        calls = ("unscale_", unscaled), ("step", stepped), ("backward", added)
        return tuple(f"{name}() at {line}" for name, line in calls if line is not None)


class ScalerWatch:
    """Follows the GradScalers of a script.

    Args:
        whole_script_is_entered: returns whether a region that amp_patch has put around the whole script is open.
    """

    def __init__(self, whole_script_is_entered: Callable[[], bool]) -> None:
        self._whole_script_is_entered = whole_script_is_entered
        self._uses: weakref.WeakKeyDictionary[Any, _ScalerUse] = weakref.WeakKeyDictionary()
        self._told: set[Kind] = set()
        self._scaled_backwards = 0  # how many times scaled losses have gone backward
        self._unscaled_backwards = 0  # backward passes without a scaled loss, since a scaler first scaled a loss
        self._unscaled_backward_at = ""  # the line of the last backward pass without a scaled loss
        # For each optimizer, by id: `_unscaled_backwards` at its last step.
        self._unscaled_backwards_at_step: dict[int, int] = {}
        self._running_scaler_steps = 0  # calls of `step` of enabled scalers that are under way
        self._has_optimizer_stepped = False  # whether an optimizer has stepped since `scaler.step` was called
        # Suspects: optimizers that took a step without a scaler after a scaled loss went backward. The loss may be of
        # another model. So for each suspect, one parameter is kept, to see whether scaled losses change its gradient.
        self._suspects: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Tensor]] = weakref.WeakKeyDictionary()
        self._suspected_at = ""  # the line of the first step of a suspect
        # Suspects whose gradient a scaled loss has changed since. Their next step without a scaler is reported.
        self._have_scaled_gradients: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._regions = 0  # the number of outermost enabled regions so far
        self._region_at = ""  # the line of the last of them
        self._region_of_step: dict[int, int] = {}  # for each optimizer, by id: `_regions` at its last step in a region
        self._reads = GradientReads()
        self._losses = UnscaledLosses()
        self._region_watch = RegionWatch(self._tell)
        self._scale_state = ScaleState(self._tell)

    def install(self, undo: UndoStack) -> None:
        """Install the patches and the hooks, until `undo` is closed."""
        patcher = Patcher()
        undo.callback(patcher.undo)
        undo.callback(register_optimizer_step_pre_hook(self._check_own_step).remove)
        undo.callback(register_optimizer_step_post_hook(self._note_own_step).remove)
        scaler = torch.amp.GradScaler
        patches = [
            Patch(scaler, "scale", self._follow_loss),
            Patch(scaler, "unscale_", self._note_unscale),
            Patch(scaler, "step", self._check_scaler_step),
            Patch(scaler, "update", self._note_update),
            Patch(scaler, "get_scale", self._note_reading),
            Patch(torch.autograd, "backward", self._count_backward),
        ]
        if hasattr(*CLIP_BY_NORM):
            patches.append(Patch(*CLIP_BY_NORM, self._note_clipping))
        patcher.install([*patches, *self._scale_state.patches()])
        undo.callback(self._reads.end)

    # ---- losses ------------------------------------------------------------------------------------------------------

    def _follow_loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `GradScaler.scale` that counts the backward passes of the losses that it returns."""

        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            if not scaler.is_enabled() or has_own_amp():
                return result
            self._reads.end()
            use = self._uses.setdefault(scaler, _ScalerUse())
            use.is_scale_read = False
            losses = [result] if isinstance(result, Tensor) else result
            for loss in losses if isinstance(losses, (list, tuple)) else ():
                if isinstance(loss, Tensor) and loss.requires_grad:
                    loss.register_hook(lambda _: self._note_scaled_backward(use))
                else:
                    use.is_scale_read = True  # the result for a value without gradients shows the scale
            return result

        return scale

    def _note_scaled_backward(self, use: _ScalerUse) -> None:
        use.backwards += 1
        self._scaled_backwards += 1

    def _count_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `torch.autograd.backward` that notes whether losses are scaled, and whose gradients they change."""

        def backward(*args: Any, **kwargs: Any) -> Any:
            # a call inside a backward pass is not the script's, for example one by torch.utils.checkpoint
            if get_backward_id() != -1 or has_own_amp():
                return original(*args, **kwargs)
            self._region_watch.note_backward(args[0] if args else kwargs.get("tensors"))
            if not self._uses:
                self._unscaled_backward_at = find_line()
                return original(*args, **kwargs)
            self._reads.end()
            scaled_before = self._scaled_backwards
            versions_before = self._read_gradients()
            unscaled_before = [(use, use.unscaled.read_versions()) for use in self._uses.values()]
            self._losses.begin_backward(*args, **kwargs)
            result = original(*args, **kwargs)
            self._losses.end_backward(is_scaled=self._scaled_backwards > scaled_before)
            if self._scaled_backwards == scaled_before:
                self._unscaled_backwards += 1
                self._unscaled_backward_at = find_line()
            else:
                for use, before in unscaled_before:
                    use.unscaled.note_backward(before)
                versions = self._read_gradients()
                self._have_scaled_gradients.update(key for key in versions if versions_before.get(key) != versions[key])
                if not {Kind.READ, Kind.CLIPPED} <= self._told:
                    self._reads.begin(self._scaled_backwards)
            return result

        return backward

    def _read_gradients(self) -> dict[Optimizer, Version]:
        """Return the version of one gradient of each suspect. Adding to the gradient changes its version."""
        return {optimizer: read_version(reference()) for optimizer, reference in self._suspects.items()}

    def end_reads(self) -> None:
        """Undo the patches of `GradientReads`."""
        self._reads.end()

    # ---- between the backward pass and the step ----------------------------------------------------------------------

    def _note_reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `GradScaler.get_scale` that notes calls from outside of this package."""

        def get_scale(scaler: Any) -> Any:
            if sys._getframe(1).f_globals.get("__name__", "").startswith(_PACKAGE):  # a call from this package
                return original(scaler)
            use = self._uses.get(scaler)
            if use is not None:
                use.is_scale_read = True
            self._scale_state.note_reading()
            return original(scaler)

        return get_scale

    def _note_clipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of `CLIP_BY_NORM`. It notes whose gradients are clipped, if these may be scaled."""

        def clip(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
            uses = [use for use in self._uses.values() if use.has_scaled_gradients and not use.is_scale_read]
            is_clipping = isinstance(max_norm, numbers.Real) and max_norm < _LARGEST_NORM
            if uses and is_clipping:
                # `parameters` may be an iterator, which can be read only once.
                parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
                ids = {id(parameter) for parameter in parameters if parameter.grad is not None}
                for use in uses:
                    use.clippings.append(_Clipping(ids, find_line()))
            return original(parameters, max_norm, *args, **kwargs)

        return clip

    def _note_unscale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def unscale_(scaler: Any, optimizer: Any) -> Any:
            self._reads.end()
            try:
                result = original(scaler, optimizer)
            except Exception as error:
                self._explain(error, scaler, optimizer, "unscale_")
                raise
            use = self._uses.get(scaler)
            if use is not None:
                # clipping after this call is right, so only the calls until now are checked
                self._check_clipping(scaler, use, optimizer)
                self._check_loss(scaler, use, optimizer)
                use.unscaled_at[id(optimizer)] = find_line()
                use.unscaled.note_unscale(optimizer)
            return result

        return unscale_

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _check_scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            use = self._uses.get(scaler)
            self._reads.end()
            if use is not None:
                self._check_gradients(scaler, use, optimizer)
            is_scaling = scaler.is_enabled()
            if is_scaling and not has_own_amp():
                self._region_watch.check_scaled_step()
            self._has_optimizer_stepped = False
            backwards_before = 0 if use is None else use.backwards
            self._running_scaler_steps += is_scaling  # with a disabled GradScaler, this is a step without a scaler
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            except Exception as error:
                self._explain(error, scaler, optimizer, "closure" if "closure" in kwargs else "step")
                raise
            finally:
                self._running_scaler_steps -= is_scaling
            self._unscaled_backwards_at_step[id(optimizer)] = self._unscaled_backwards
            if use is not None:
                # `step` has run a closure with a backward pass. torch refuses a closure as a keyword argument only.
                if use.backwards > backwards_before:
                    self._tell(Misuse(Kind.CLOSURE, find_line()))
                use.backwards_at_step[id(optimizer)] = use.backwards
                use.stepped_at[id(optimizer)] = find_line()
                self._losses.note_step(optimizer)
                self._scale_state.note_scaled_step(optimizer, is_skipped=not self._has_optimizer_stepped)
            return result

        return step

    def _check_gradients(self, scaler: Any, use: _ScalerUse, optimizer: Any) -> None:
        """Check the gradients of an optimizer before `scaler.step` uses them."""
        key = id(optimizer)
        added_at = use.unscaled.find_added(optimizer)
        if added_at and key not in use.stepped_at:
            self._tell(Misuse(Kind.ADDED_SCALED, added_at, f"unscale_ at {use.unscaled_at.get(key)}"))
        if key in use.unscaled_at or use.is_scale_read:
            return
        self._check_clipping(scaler, use, optimizer)
        self._check_loss(scaler, use, optimizer)
        if use.has_scaled_gradients or not _has_gradients(optimizer):
            return
        has_unscaled = self._unscaled_backwards > self._unscaled_backwards_at_step.get(key, 0)
        has_scaled = use.backwards > use.backwards_at_step.get(key, 0)
        if has_unscaled and not has_scaled:
            self._tell(Misuse(Kind.UNSCALED_LOSS, self._unscaled_backward_at))
        elif has_scaled and not has_unscaled:
            self._tell(Misuse(Kind.EARLY_UPDATE, use.updated_at))

    def _check_loss(self, scaler: Any, use: _ScalerUse, optimizer: Any) -> None:
        """Report the misuse if the gradients of an optimizer seem to come only from losses that nothing has scaled."""
        if not use.is_scale_read and (line := self._losses.find_unscaled(scaler, optimizer)):
            self._tell(Misuse(Kind.UNSCALED_LOSS, line))

    def _check_clipping(self, scaler: Any, use: _ScalerUse, optimizer: Any) -> None:
        """Report the misuse if the script has measured or clipped gradients of an optimizer while they were scaled."""
        reading = None if use.is_scale_read else self._reads.find(_parameters_of(optimizer))
        if reading and scaler.get_scale() > 1:
            self._tell(Misuse(*reading))
        if not use.clippings or Kind.CLIPPED in self._told:
            return
        ids = {id(parameter) for parameter in _parameters_of(optimizer)}
        for clipping in use.clippings:
            if not ids.isdisjoint(clipping.parameter_ids) and scaler.get_scale() > 1:
                self._tell(Misuse(Kind.CLIPPED, clipping.line))
                return

    def _note_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                result = original(scaler, *args, **kwargs)
            except Exception as error:
                if not (args or kwargs):  # torch refuses a wrong `new_scale`, whatever the calls before
                    self._explain(error, scaler, None, "update")
                raise
            use = self._uses.get(scaler)
            if use is not None:
                use.backwards_at_update = use.backwards
                use.updated_at = find_line()
                use.unscaled_at.clear()
                use.unscaled.clear()
                use.stepped_at.clear()
                use.clippings.clear()
                self._reads.clear()
            return result

        return update

    def _check_own_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Hook before each step of an optimizer: check the regions, and whether the gradients are scaled."""
        if has_own_amp():
            return
        self._check_region(optimizer)
        if self._running_scaler_steps:
            return
        self._region_watch.check_own_step(has_scalers=bool(self._uses))
        if not self._is_on_scaled_gradients(optimizer):
            return
        if optimizer in self._have_scaled_gradients:
            self._tell(Misuse(Kind.SCALED_STEP, find_line()))
        with_gradient = next((weight for weight in _parameters_of(optimizer) if weight.grad is not None), None)
        if with_gradient is not None:
            self._suspected_at = self._suspected_at or find_line()
            self._suspects[optimizer] = weakref.ref(with_gradient)

    def _is_on_scaled_gradients(self, optimizer: Optimizer) -> bool:
        """Return whether the gradients of an optimizer seem to be scaled.

        They do if a scaled loss has gone backward since the last `update`, no unscaled one has since the last step of
        the optimizer, and nothing shows that the script has unscaled its gradients.
        """
        if self._unscaled_backwards > self._unscaled_backwards_at_step.get(id(optimizer), 0):
            return False
        uses = [use for use in self._uses.values() if use.has_scaled_gradients]
        return bool(uses) and not any(use.is_scale_read or id(optimizer) in use.unscaled_at for use in uses)

    def _note_own_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Hook after each step of an optimizer."""
        self._has_optimizer_stepped = True
        if self._uses:
            self._unscaled_backwards_at_step[id(optimizer)] = self._unscaled_backwards

    # ---- regions -----------------------------------------------------------------------------------------------------

    def note_region(self, dtype: torch.dtype) -> None:
        """Record that an enabled region begins, with the dtype that the script gives it."""
        self._region_watch.note_region(dtype)
        self._reads.end()
        if not get_autocast_depth():
            self._regions += 1
            self._region_at = find_line()

    def _check_region(self, optimizer: Optimizer) -> None:
        """Report the misuse if an optimizer takes two steps in one region in which torch caches casts of weights."""
        if not get_autocast_depth() or self._whole_script_is_entered() or not torch.is_autocast_cache_enabled():
            return
        parameter = next(_parameters_of(optimizer), None)
        # Compiled code casts weights at each call, without torch's cache.
        if parameter is None or not torch.is_autocast_enabled(parameter.device.type) or count_compiled():
            return
        if parameter.dtype is torch.float32 and self._region_of_step.get(id(optimizer)) == self._regions:
            self._tell(Misuse(Kind.LOOP_IN_REGION, self._region_at))
        self._region_of_step[id(optimizer)] = self._regions

    # ---- telling -----------------------------------------------------------------------------------------------------

    def _explain(self, error: Exception, scaler: Any, optimizer: Any, call: str) -> None:
        """Add a note to an exception of GradScaler, if a misuse explains it, and tell the watchers of `events`.

        `call`: "unscale_", "step", "update", or "closure" for `scaler.step(optimizer, closure=...)`.
        """
        raised_in = _find_function_of_scaler(error)
        if has_own_amp() or not raised_in:
            return
        if raised_in == _CHECKS_SCALE:
            misuse: Misuse | None = Misuse(Kind.NOTHING_SCALED, find_line())
            if self._unscaled_backward_at:
                misuse = Misuse(Kind.UNSCALED_LOSS, self._unscaled_backward_at)
        else:
            misuse = self._find_reason(self._uses.get(scaler) or _ScalerUse(), optimizer, call)
        if misuse is None or misuse.note in getattr(error, "__notes__", ()):
            return
        error.add_note(misuse.note)
        events.tell(nullcontext(), "refused", misuse, error)

    def _find_reason(self, use: _ScalerUse, optimizer: Any, call: str) -> Misuse | None:
        """Return the misuse that explains an error of GradScaler; None if the calls so far show none."""
        if call == "update":
            if self._suspects:
                return Misuse(Kind.SCALED_STEP, self._suspected_at)
            return Misuse(Kind.UPDATE_WITHOUT_STEP, find_line())
        if call == "closure":
            return Misuse(Kind.CLOSURE, find_line())
        key, earlier = id(optimizer), use.describe_calls(optimizer)
        if key in use.stepped_at:
            return Misuse(Kind.MISSING_UPDATE, use.stepped_at[key], earlier=earlier)
        if call == "unscale_" and key in use.unscaled_at:
            return Misuse(Kind.UNSCALED_TWICE, find_line(), f"first at {use.unscaled_at[key]}", earlier)
        parameters = list(_parameters_of(optimizer))
        low = [weight for weight in parameters if weight.grad is not None and weight.grad.dtype is torch.float16]
        if low:
            detail = f"{len(low)} of {count_of(len(parameters), 'parameter')}"
            return Misuse(Kind.LOW_WEIGHTS, find_line(), detail)
        if not _has_gradients(optimizer):
            return Misuse(Kind.NO_GRADIENTS, find_line(), self._describe_missing(use, parameters))
        return None

    def _describe_missing(self, use: _ScalerUse, parameters: list[Tensor]) -> str:
        """Return why the parameters of an optimizer have no gradients, such as "all 12 are frozen: requires_grad is
        False"; "" if that is not known.
        """
        if not any(parameter.requires_grad for parameter in parameters):
            return f"all {len(parameters)} are frozen: requires_grad is False"
        if not use.has_scaled_gradients:
            return "no scaled loss has gone backward since the last update"
        session = find_session()
        models = [] if session is None else session.models()
        used = {id(parameter) for model in models for parameter in model.parameters()}
        if used and not any(id(parameter) in used for parameter in parameters):
            return "the models that the script calls have none of them"
        return ""

    def _tell(self, misuse: Misuse) -> None:
        """Warn of a misuse on rank 0, and report it to the watchers of `events`. Do so once for each kind."""
        if misuse.kind in self._told:
            return
        self._told.add(misuse.kind)
        if not find_rank():
            warn(str(misuse))
        events.tell(nullcontext(), "misused", misuse)


def _parameters_of(optimizer: Any) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _has_gradients(optimizer: Any) -> bool:
    return any(parameter.grad is not None for parameter in _parameters_of(optimizer))


def _find_function_of_scaler(error: Exception) -> str:
    """Return the name of the function in GradScaler's file that raised an exception; "" if other code raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code.co_filename != _SCALER_FILE:
        return ""
    return trace.tb_frame.f_code.co_name
