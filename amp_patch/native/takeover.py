"""`install` lays lists over the regions of `torch.autocast`; `watch` tells recordings of what runs, in them or without.

Both wait for the script. A session is opened where it first enters autocast or, to be watched, calls a model. It gives
way to one of `amp.initialize`.
"""

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import events
from ..casting import Autocast, compiling
from ..config import load_oplists, make_policy
from ..dtypes import dtype_name
from ..errors import PolicyError, SessionError
from ..interrupts import UndoStack
from ..patching import Patch, Patcher
from ..reporting import say, say_loudly, warn
from ..script_settings import UnsuitedLevelError
from ..session import current
from ..torch_private import enable_region, get_backward_id, is_region_enabled, reads_found_inf
from .roots import calls_under_way, find_line, find_root
from .session import AS_IS, NativeSession, overlay_policy, own_lists
from .step_checks import StepChecks
from .whole_script import HAS_REGIONS, WholeScript

ADVICE = 'model, optimizer = amp.initialize(model, optimizer, opt_level="{level}")'


class Takeover:
    """The handle that `install` returns. `remove()`, or leaving it as a `with` block, undoes the installation.

    Args:
        opt_level: "O0" disables autocast; "O1" and "O4" replace its lists and dtype; None keeps both.
        lists: op lists on top of these; later ones win.
        compute: as for `amp.initialize`, with a level.
        everywhere: for a script without regions: this thread is one region from the first call of a model on.
        needs_region: wait for the first region, even if nothing would be changed.
        on_plain_step: called with a line of text if the script steps before the region that is waited for.
    """

    def __init__(
        self,
        opt_level: str | None = None,
        lists: Sequence[str] = (),
        compute: str | None = None,
        *,
        everywhere: bool = False,
        needs_region: bool = False,
        on_plain_step: Callable[[str], None] = say_loudly,
    ) -> None:
        self._level = opt_level
        self._policy = None if opt_level is None else make_policy(opt_level, {})
        self._lists = tuple(lists)
        self._has_module_rules = bool(lists) and bool(load_oplists(["autocast-cpu", *lists]).modules)
        self._compute = compute
        self._everywhere = everywhere
        self._needs_region = needs_region
        self._disables = self._policy is not None and self._policy.low_dtype is None  # regions run in float32
        is_changing = self.changes and not self._disables
        self._checks = StepChecks(
            needs_region=needs_region or is_changing, is_everywhere=everywhere, on_plain_step=on_plain_step
        )
        self._scaler: weakref.ref[Any] | None = None
        level_dtype = None if self._policy is None else self._policy.low_dtype
        self._whole_script = WholeScript(level_dtype or torch.bfloat16, self._ensure, self._is_of_amp)
        self._is_watching = False
        self._is_scaling = False  # a GradScaler is stepping
        self._told: set[int] = set()  # ids of the optimizers that stepped meanwhile
        self._scaled: int | None = None  # id of the loss that a GradScaler gave last
        self._undo = UndoStack()
        self.tell: Callable[[str], None] = lambda line: say("%s", line)  # what was laid over what, in a line

    @property
    def changes(self) -> bool:
        """Whether anything is to run otherwise."""
        return self._level is not None or bool(self._lists)

    # ---- in and out --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Put everything in."""
        self._undo.callback(self._close)
        patcher = Patcher()
        self._undo.callback(patcher.undo)
        patcher.install(
            [
                Patch(torch.autocast, "__enter__", self._enter),
                Patch(torch.amp.GradScaler, "__init__", self._make_scaler),
                Patch(torch.amp.GradScaler, "scale", self._scale),
                Patch(torch.amp.GradScaler, "step", self._step),
            ]
        )
        self._add(register_optimizer_step_pre_hook(self._begin_step))
        self._add(register_optimizer_step_post_hook(self._end_step))
        if self._everywhere:
            self._whole_script.install(self._undo)
        if self._has_module_rules or self._everywhere:
            self._add(register_module_forward_pre_hook(self._note_module))

    def watch(self) -> Callable[[], None]:
        """Tell those who watch of losses and models too, until what is returned is called."""
        undo, patcher = UndoStack(), Patcher()
        undo.callback(setattr, self, "_is_watching", False)
        self._close()  # the next session is made for being watched
        self._is_watching = True
        undo.callback(patcher.undo)
        patcher.install([Patch(torch.autograd, "backward", self._backward)])
        handle = register_module_forward_pre_hook(self._note_module)
        undo.callback(handle.remove)
        return undo.close

    def remove(self) -> None:
        """Undo everything."""
        self._close()  # the session patches what this does, later
        self._undo.close()

    def check_end(self) -> None:
        """Raise NoRegionError at the end of a script that has trained, and entered no region to be changed."""
        self._checks.check_end()

    def __enter__(self) -> "Takeover":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def _add(self, handle: Any) -> None:
        self._undo.callback(handle.remove)

    def _close(self) -> None:
        self._whole_script.close()
        if isinstance(current.state.session, NativeSession):
            current.reset()

    # ---- the session -------------------------------------------------------------------------------------------------

    def session(self) -> NativeSession | None:
        """Return the session if it is of this kind."""
        session = current.state.session
        return session if isinstance(session, NativeSession) else None

    def _ensure(self, device_type: str, low: torch.dtype | None) -> NativeSession | None:
        """Return the session in force, opened if there is none; None where one of `amp.initialize` is in force, or
        there is nothing to open one for. `low`: that of the region of autocast that this thread is in.
        """
        if current.state.session is not None or current.state.is_disabled:
            return self.session()
        if self._level is None and low is None and (self._lists or not self._is_watching):
            return None
        if compiling.is_at_work():
            self._checks.note_compiled_region()  # no session can be opened there
            return None
        with current.state.lock:  # another thread may be opening one
            return self.session() or self._open(device_type, low)

    def _open(self, device_type: str, low: torch.dtype | None) -> NativeSession:
        opened = self._make(device_type, low)
        opened.steps_before = self._checks.take_count()
        current.open_session(opened)
        scaler = None if self._scaler is None else self._scaler()
        if scaler is not None and scaler.is_enabled():
            opened.use_scaler(scaler)
        if self.changes:
            self.tell(f"amp_patch: on {device_type}, {opened.policy.description}: {len(opened.patcher)} names patched")
        return opened

    def _make(self, device_type: str, low: torch.dtype | None) -> NativeSession:
        is_watched = bool(events.watchers)
        if self._policy is not None and self._disables:
            policy = replace(self._policy, description="torch.autocast is disabled")
            return NativeSession(policy, device_type, None, with_all=is_watched)
        own = own_lists(device_type)
        if self._policy is None or self._level is None:
            chosen = low or torch.get_autocast_dtype(device_type)
            level = {} if self._lists else {"level": AS_IS}
            policy = overlay_policy(own, chosen, self._lists, **level)
            autocast = Autocast(device_type, chosen if self._lists else None, own)
            return NativeSession(policy, device_type, autocast, with_all=is_watched)
        lists = (*self._policy.lists, *self._lists)
        policy = make_policy(self._level, {"loss_scale": 1.0, "compute": self._compute, "lists": lists})
        policy = replace(policy, description=f"{self._level} in the regions of torch.autocast")
        autocast = Autocast(device_type, policy.low_dtype, own)
        return NativeSession(policy, device_type, autocast, with_all=is_watched)

    # ---- regions of autocast -----------------------------------------------------------------------------------------

    def _enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(region: Any) -> Any:
            before = self.session()
            if before is not None:
                before.begin_region()
            if not is_region_enabled(region) or self._is_of_amp():
                return original(region)
            self._check_region()
            dtype = region.fast_dtype
            self._checks.note_region(dtype)
            is_first = self.session() is None
            session = self._ensure(region.device, dtype)
            if is_first and session is not None:
                self._join_calls(session)
            if session is None or session.device_type != region.device:
                return original(region)
            try:
                if self._disables:
                    enable_region(region, False)
                elif self._level is not None:
                    region.fast_dtype = session.policy.low_dtype
                elif self._lists and dtype is not session.policy.low_dtype:
                    warn(
                        f"the lists apply to {dtype_name(session.policy.low_dtype)}, the dtype of the first region of"
                        f" torch.autocast: regions in {dtype_name(dtype)} keep torch's rules"
                    )
                session.note_region(region.fast_dtype)
                return original(region)
            finally:
                region.fast_dtype = dtype
                enable_region(region, True)

        return enter

    def _is_of_amp(self) -> bool:
        """Tell whether the script has an amp of its own in force, which decides."""
        has_other = current.state.session is not None and self.session() is None
        return has_other or current.state.is_disabled

    def _check_region(self) -> None:
        """Raise PolicyError for a region in which the level cannot be."""
        if self._whole_script.is_entered and get_backward_id() == -1:  # a checkpoint enters its own in a backward pass
            raise PolicyError(HAS_REGIONS)
        policy = self._policy
        if policy is not None and not self._disables and not policy.patch_torch_functions:
            raise UnsuitedLevelError(
                f"{self._level} casts the model, and torch.autocast does not: use O1 or O4, or write, instead of"
                f" torch.autocast and GradScaler, `{ADVICE.format(level=self._level)}` and `with amp.scale_loss(loss,"
                " optimizer) as scaled: scaled.backward()`; for Trainer, Lightning and Accelerate see"
                " amp_patch.integrations"
            )

    # ---- what is told ------------------------------------------------------------------------------------------------

    def _note_module(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """A module is called: perhaps a model that nobody has seen yet."""
        self._whole_script.come_back()  # the last step raised an error
        if compiling.is_traced() or self._is_of_amp():
            return None
        session = self.session()
        root = None
        is_outside = self._everywhere and not self._whole_script.is_entered  # in this thread
        if session is None or is_outside or not session.knows(module):
            root = find_root(module)
            if next(root.parameters(), None) is None:
                root = None  # such as a criterion: no model, but rules may be for it
            else:
                session = self._open_for(root)
        if session is None:
            return None
        given = None
        if session.bindings.regions is not None:
            given = session.bindings.regions.begin_call(module, args, sys._getframe(1))
        if root is not None:
            session.add_root(root)
            events.tell(session.without_casts(), "session_opened", session)
        return given

    def _open_for(self, root: nn.Module) -> NativeSession | None:
        """Return the session in force; open one for a model that is called, where there is something to do for it."""
        session = self.session()
        device_type = next(root.parameters()).device.type
        self._checks.called_at = self._checks.called_at or find_line()
        if self._everywhere:
            self._whole_script.enter(device_type)
            session = self.session()
        if session is None and device_type != "meta" and not self._checks.is_waiting:
            is_in_region = torch.is_autocast_enabled(device_type)
            session = self._ensure(device_type, torch.get_autocast_dtype(device_type) if is_in_region else None)
        return session

    def _join_calls(self, session: NativeSession) -> None:
        """Have the rules act in the modules that are being called: one of them enters the first region."""
        if session.bindings.regions is None:
            return
        for module, frame in calls_under_way():
            session.bindings.regions.join_call(module, frame)

    def _make_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def make(scaler: Any, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            self._scaler = weakref.ref(scaler)

        return make

    def _scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            session = self.session()
            if session is not None and scaler.is_enabled():
                session.use_scaler(scaler)
                if isinstance(outputs, Tensor):
                    self._scaled = id(result)
                    events.tell(session.without_casts(), "loss_scaled", outputs, result)
            return result

        return scale

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            session = self.session()
            loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
            if session is not None and isinstance(loss, Tensor) and get_backward_id() == -1:  # not of a checkpoint
                if id(loss) != self._scaled:
                    events.tell(session.without_casts(), "loss_scaled", loss, loss)
                self._scaled = None
            return original(tensors, *args, **kwargs)

        return backward

    def _step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before, self._is_scaling = self._is_scaling, scaler.is_enabled()
            self._told.clear()
            if self._needs_region and scaler.is_enabled() and reads_found_inf(optimizer):
                with contextlib.suppress(RuntimeError):  # the script has unscaled
                    scaler.unscale_(optimizer)  # else the kernel would, and gradients be compared with their scale
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                self._is_scaling = before
            session = self.session()
            if not self._told and not self._is_of_amp():
                self._checks.end_step(optimizer, is_open=session is not None)
            if session is not None and scaler.is_enabled() and not self._told:
                session.use_scaler(scaler)
                self._tell_begin(session, optimizer)
                self._tell_end(session, optimizer, is_skipped=True)
            return result

        return step

    def _begin_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_of_amp():
            self._checks.note_amp()
            return
        if _has_closure(args, kwargs):  # the forward pass is still to come
            return
        self._check_step()
        self._whole_script.leave_for_step()
        session = self.session()
        if session is not None:
            self._tell_begin(session, optimizer)

    def _check_step(self) -> None:
        session = self.session()
        low = None if session is None or self._level is None else session.policy.low_dtype
        self._checks.check(self._level, low, is_changing=self.changes, is_scaling=self._is_scaling)
        if session is not None and self._checks.needs_scaler(is_scaling=self._is_scaling):
            session.needs_scaler = True

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._whole_script.come_back()
        if self._is_of_amp():
            return
        if _has_closure(args, kwargs):
            self._check_step()
        self._told.add(id(optimizer))
        session = self.session()
        self._checks.end_step(optimizer, is_open=session is not None)
        if session is not None:
            found_inf = getattr(optimizer, "found_inf", None)  # set for fused steps that skip on the device
            self._tell_end(session, optimizer, is_skipped=isinstance(found_inf, Tensor) and bool(found_inf))

    def _tell_begin(self, session: NativeSession, optimizer: Optimizer) -> None:
        session.add_optimizer(optimizer)
        events.tell(session.without_casts(), "step_begun", optimizer)

    def _tell_end(self, session: NativeSession, optimizer: Optimizer, *, is_skipped: bool) -> None:
        session.add_optimizer(optimizer)
        session.note_step(optimizer, is_skipped=is_skipped)
        events.tell(session.without_casts(), "step_ended", optimizer)


_TWICE = "amp_patch.native is installed already: call amp_patch.native.remove() first"


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Tell whether a step is to call a function that runs forward and backward."""
    return kwargs.get("closure") is not None or any(map(callable, args[1:]))


class _Installed:
    """Holds the takeover of the process."""

    def __init__(self) -> None:
        self.takeover: Takeover | None = None
        self.is_by_install = False  # and not by a command or a recording, which end it themselves


_installed = _Installed()


def install(
    opt_level: str | None = None,
    *,
    lists: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    compute: str | None = None,
    everywhere: bool = False,
) -> Takeover:
    """Apply op lists inside regions of `torch.autocast`, from the next region that is entered.

    Args:
        opt_level: "O1" or "O4" runs regions with the lists and the dtype of that level, and "O0" disables them. None
            keeps the dtype of each region, and torch's rules for ops that `lists` do not name.
        lists: a shipped name, a path, or a sequence of them. Later ones win.
        compute: "auto", "native" or "float32", with a level.
        everywhere: for a script without regions: run this thread in one bfloat16 region.

    Returns a handle whose `remove()` undoes everything. It also works as a `with` block. A later call replaces what
    this one has installed.

    Raises:
        PolicyError, OpListError: an argument is wrong, or `everywhere` is combined with float16, because nothing would
            scale the loss.
        SessionError: `amp-patch` runs the script with lists of its own, or a recording is in progress.
    """
    names = [lists] if isinstance(lists, (str, os.PathLike)) else list(lists)
    spelled = [os.fspath(one) for one in names]
    takeover = Takeover(opt_level, spelled, compute, everywhere=everywhere)  # raises for lists that cannot be read
    policy = None if opt_level is None else make_policy(opt_level, {"compute": compute})
    casts_some = bool(spelled) if policy is None else policy.low_dtype is not None
    if everywhere and not casts_some:
        raise PolicyError("everywhere=True needs a level that casts, O4, or lists")
    if everywhere and policy is not None and policy.low_dtype is torch.float16:
        raise PolicyError(
            f"{opt_level} is float16, whose gradients need a loss scale, and a script without amp scales no loss:"
            " use O4, which is bfloat16"
        )
    remove()
    check_not_installed()
    _start(takeover)
    _installed.is_by_install = True
    return takeover


def remove() -> None:
    """Undo `install`, also if its handle is lost. Harmless if nothing is installed."""
    if _installed.takeover is not None and _installed.is_by_install:
        _installed.takeover.remove()


def check_not_installed() -> None:
    """Raise SessionError while a takeover is in."""
    if _installed.takeover is not None:
        raise SessionError(_TWICE)


def _start(takeover: Takeover) -> None:
    takeover._undo.callback(setattr, _installed, "takeover", None)
    _installed.takeover, _installed.is_by_install = takeover, False
    try:
        takeover.start()
    except BaseException:
        takeover.remove()
        raise


def start(takeover: Takeover, *, is_watched: bool) -> Callable[[], None]:
    """Put a takeover in, for a run that is told what to change; returns what takes it out.

    Raises SessionError if there is one.
    """
    check_not_installed()
    undo = UndoStack()
    undo.callback(takeover.remove)
    _start(takeover)
    if is_watched:
        undo.callback(takeover.watch())
    return undo.close


def watch() -> Callable[[], None]:
    """Have watchers told of what runs without `amp.initialize`, until what is returned is called."""
    takeover = _installed.takeover
    return start(Takeover(), is_watched=True) if takeover is None else takeover.watch()
