"""`Takeover`: applies op lists or an opt_level to the regions of `torch.autocast` in a script.

A region is a block `with torch.autocast(...)`. `Takeover` opens its session (`NativeSession`) when the script enters a
region, because the dtype and the device type of the region decide which ops are patched. With `everywhere`, and for
watchers (`watch`), it may open the session outside of regions: when the script makes an optimizer, calls a model or
runs a backward pass. If the script calls `amp.initialize`, the session of that call replaces the takeover's.
"""

import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .. import events
from ..casting import compiling
from ..interrupts import UndoStack
from ..patching import Patch, Patcher
from ..reporting import log_warning, say
from ..script_settings import HasRegionsError
from ..session import current
from ..torch_private import enable_region, get_backward_id, is_region_enabled
from .changes import Changes, Kind
from .float32_script import Float32Script
from .outer_hooks import outer_hooks
from .roots import calls_under_way, find_line, find_root
from .scaler_watch import ScalerWatch
from .script_steps import ScriptSteps
from .session import NativeSession, find_low_weights, find_session, has_own_amp
from .step_checks import StepChecks
from .whole_script import HAS_REGIONS, WholeScript


class Takeover:
    """The handle that `install` returns. `remove()`, or leaving it as a `with` block, undoes the installation.

    Args:
        opt_level: "O0" disables torch.autocast; "O1" and "O4" replace its lists and dtype; None keeps both.
        lists: op lists that override the lists of the level, or torch's own. Later lists win.
        compute: as for `amp.initialize`. Needs `opt_level`.
        everywhere: run each thread in one region, from its first call of a model. For scripts without regions.
        needs_region: open no session before the script uses mixed precision (a region, or a model with 16-bit weights),
            even if the session would only observe.
        in_float32: give the script float32 wherever it asks for a 16-bit dtype. See `Float32Script`.
        refuses_regions: raise HasRegionsError when the script enters a region, as with `everywhere`. For a run in
            float32 to which a run with `everywhere` is compared.
        on_plain_step: called with a line of text at the first step without mixed precision, if the changes need a
            region, or with `needs_region`.

    Attributes:
        tell: called with a line of text when a session is opened that changes something, such as "amp_patch: on cuda,
            O1 in the regions of torch.autocast: 310 names patched".
    """

    def __init__(
        self,
        opt_level: str | None = None,
        lists: Sequence[str] = (),
        compute: str | None = None,
        *,
        everywhere: bool = False,
        needs_region: bool = False,
        in_float32: bool = False,
        refuses_regions: bool = False,
        on_plain_step: Callable[[str], None] = log_warning,
    ) -> None:
        self._changes = Changes(opt_level, lists, compute)
        self._everywhere = everywhere
        self._in_float32 = in_float32
        self._refuses_regions = refuses_regions
        self._is_watching = False
        self._checks = StepChecks(
            needs_region=needs_region or self._changes.needs_region,
            is_everywhere=everywhere,
            on_plain_step=on_plain_step,
        )
        self._whole_script = WholeScript(
            self._changes.level_dtype or torch.bfloat16, self._require_session, has_own_amp
        )
        self._steps = ScriptSteps(self._changes, self._checks, self._whole_script, unscales_first=needs_region)
        self._scaler_watch = ScalerWatch(lambda: self._whole_script.is_entered)
        self._undo = UndoStack()
        self.tell: Callable[[str], None] = lambda line: say("%s", line)

    # ---- installing and removing -------------------------------------------------------------------------------------

    def start(self, undo: Callable[[], None]) -> None:
        """Install everything. `remove` calls `undo` last."""
        self._undo.callback(undo)
        self._undo.callback(self._close_session)
        patcher = Patcher()
        self._undo.callback(patcher.undo)
        if self._in_float32:
            self._undo.callback(Float32Script().start())
        patcher.install([Patch(torch.autocast, "__enter__", self._adapt_region)])
        self._steps.install(self._undo)
        self._scaler_watch.install(self._undo)
        if self._everywhere:
            self._whole_script.install(self._undo)
        if self._everywhere or self._changes.has_module_rules:
            self._undo.callback(register_module_forward_pre_hook(self._note_call).remove)

    def watch(self) -> Callable[[], None]:
        """Also open sessions outside of regions, and report to `events.watchers` losses that no GradScaler scales.

        Call the result to stop.
        """
        undo = UndoStack()
        undo.callback(setattr, self, "_is_watching", False)
        self._close_session()  # the next session is made for watchers (`observes_all`)
        self._is_watching = True
        self._steps.watch_losses(undo, self._require_session_at_loss)
        undo.callback(outer_hooks.add(register_module_forward_pre_hook(self._note_call), self._note_call))
        return undo.close

    def remove(self) -> None:
        """Undo everything."""
        self._close_session()  # first, because the session has replaced functions after the takeover did
        self._undo.close()

    def check_end(self) -> None:
        """Raise NoRegionError if the changes need mixed precision, and the script has trained without any. Call it when
        the script has ended.
        """
        self._checks.check_end()

    def __enter__(self) -> "Takeover":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def _close_session(self) -> None:
        self._whole_script.close()
        self._scaler_watch.end_reads()  # before `reset`, because these patches may be newer than the session's
        if find_session() is not None:
            current.reset()

    # ---- the session -------------------------------------------------------------------------------------------------

    def _require_session(self, device_type: str, low: torch.dtype | None) -> NativeSession | None:
        """Return the session in force. Open one if there is none.

        Args:
            device_type: the device type of the region, or of the model.
            low: the dtype of the region, or None outside of regions.

        Returns None if there is none and none may be opened: because the script uses amp itself, because Dynamo traces
        this call, or because `low` is None and `_acts_without_region` returns False.
        """
        session = find_session()
        if session is not None or has_own_amp():
            return session
        if low is None and not self._acts_without_region():
            return None
        if compiling.is_at_work():  # Dynamo traces this call, and no session can be opened now
            self._checks.note_compiled_region()
            return None
        with current.state.lock:  # another thread may be opening a session
            return find_session() or self._open_session(device_type, low)

    def _require_session_at_loss(self, device_type: str) -> NativeSession | None:
        """Return the session in force at a backward pass. Open one if there is none and one may be opened, else return
        None. A script without modules has called no model that would have opened one.
        """
        if device_type == "meta" or self._checks.is_waiting or compiling.is_traced():
            return find_session()
        return self._require_session(device_type, None)

    def _acts_without_region(self) -> bool:
        """Return whether a session may be opened outside of regions."""
        if self._changes.kind is Kind.NOTHING:
            return self._is_watching
        return self._changes.kind is not Kind.LISTS

    def _open_session(self, device_type: str, low: torch.dtype | None) -> NativeSession:
        session = self._changes.make_session(device_type, low)
        session.steps_before = self._checks.take_steps_before_session()
        current.open_session(session)
        self._steps.show_scaler(session)
        if self._changes.kind is not Kind.NOTHING:
            self.tell(
                f"amp_patch: on {device_type}, {session.policy.description}: {len(session.patcher)} names patched"
            )
        return session

    # ---- regions -----------------------------------------------------------------------------------------------------

    def _adapt_region(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `torch.autocast.__enter__` that opens the session if there is none, and changes the region."""

        def enter(region: Any) -> Any:
            session = find_session()
            if session is not None:
                session.begin_region()
            if not is_region_enabled(region):
                return original(region)
            if has_own_amp():
                return self._enter_beside_amp(original, region)
            # Inside a backward pass, it is usually torch.utils.checkpoint that enters the region, not the script.
            has_own_region = self._whole_script.is_entered or self._refuses_regions
            if has_own_region and get_backward_id() == -1:
                raise HasRegionsError(HAS_REGIONS)
            self._changes.check_level()
            dtype = region.fast_dtype
            self._scaler_watch.note_region(dtype)
            self._checks.note_region(dtype)
            if session is None:
                session = self._require_session(region.device, dtype)
                if session is not None:
                    self._join_calls(session)
            if session is None or not self._changes.apply_to(region.device, session):
                return original(region)
            try:
                self._changes.adapt(region, session)
                session.note_region(region.fast_dtype)
                return original(region)
            finally:  # restore the region, because the script may enter it again, or read its attributes
                region.fast_dtype = dtype
                enable_region(region, True)

        return enter

    def _enter_beside_amp(self, original: Callable[..., Any], region: Any) -> Any:
        """Enter a region of a script with its own amp. In a run in float32, disable the region."""
        if not self._in_float32:
            return original(region)
        enable_region(region, False)
        try:
            return original(region)
        finally:
            enable_region(region, True)

    def _join_calls(self, session: NativeSession) -> None:
        """Apply module rules to calls that are under way, because the first region may begin inside a `forward`."""
        if session.bindings.regions is None:
            return
        for module, frame in calls_under_way():
            session.bindings.regions.join_call(module, frame)

    # ---- models ------------------------------------------------------------------------------------------------------

    def _note_call(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Forward pre-hook of all modules: find the model of a module, and apply module rules."""
        if compiling.is_dynamo_compiling():
            return None
        session = find_session()
        # Return early in nearly all calls, because this runs for each module of a model in each step.
        if session is not None and not self._everywhere and session.has_noted(module):
            return None
        self._whole_script.enable_after_step()  # a step that raised an error has called no post-hook
        if compiling.is_traced() or has_own_amp():
            return None
        session = find_session()
        model = None
        needs_entering = self._everywhere and not self._whole_script.is_entered
        if session is None or needs_entering or not session.knows(module):
            root = find_root(module)
            if next(root.parameters(), None) is not None:  # a root without parameters, such as a criterion, is no model
                model = root
                session = self._require_session_for(model)
        if session is None:
            return None
        changed_args = None
        if session.bindings.regions is not None:  # also for criteria, because module rules may name them
            # The caller is `Module._call_impl`: the rule's region lasts as long as that frame.
            changed_args = session.bindings.regions.begin_call(module, args, sys._getframe(1))
        if model is not None:
            session.note_model(model)
            events.tell(session.without_casts(), "session_opened", session)
        return changed_args

    def _require_session_for(self, model: nn.Module) -> NativeSession | None:
        """Return the session for this call of a model. Open one if there is none and it is needed, else return None.

        With `everywhere`, first enter the region of this thread.
        """
        device_type = next(model.parameters()).device.type
        self._checks.called_at = self._checks.called_at or find_line()
        if self._everywhere:
            self._whole_script.enter(device_type)
        only_watches = self._is_watching and not self._changes.needs_region
        if self._checks.is_waiting and only_watches and find_low_weights(model) is not None:
            self._checks.note_mixed_precision()  # 16-bit weights without a region
        session = find_session()
        if session is not None or device_type == "meta" or self._checks.is_waiting:
            return session
        is_in_region = torch.is_autocast_enabled(device_type)
        return self._require_session(device_type, torch.get_autocast_dtype(device_type) if is_in_region else None)
