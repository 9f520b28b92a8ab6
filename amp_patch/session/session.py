"""`Session`: one policy in force, and everything that was changed for it."""

import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..casting import (
    SMALL_ON_CPU,
    Autocast,
    Float32Products,
    Mode,
    OpCasts,
    RegionCache,
    Registration,
    Switch,
    WeightCache,
)
from ..config import OpLists, Policy, load_oplists
from ..dtypes import dtype_name
from ..errors import ArgumentTypeError, LossIdError, PolicyError, SessionError
from ..interrupts import UndoStack
from ..patching import Patcher
from ..reporting import say, warn
from ..torch_private import without_overrides
from ..training import LossBlock, ScaleUpdates, get_step_was_skipped, loss_scaler
from .bindings import Bindings
from .installer import Installer
from .sharding import find_fsdp_modules, find_groups
from .stats import Stats


class Session:
    """One policy, the models and optimizers it was applied to, the scalers, and the patches.

    Args:
        num_losses: the number of loss scalers.
        registered: functions that the user registered, for example by `register_half_function`, with their rules.
        has_models: whether the session ends when its models are gone. If False, it lasts until it is closed.
        autocast: the torch.autocast regions in which ops cast. None: they cast everywhere.

    Attributes:
        bindings: the models and optimizers.
        undo: the callbacks that `close` runs. It is empty before `open` and after `close`.
        is_whole: True from the end of `open` to the beginning of `close`: everything is installed.
    """

    gives_way = False
    """Whether `initialize` replaces this session without an error. True for a session that the script did not open."""

    find_root: Callable[[nn.Module], nn.Module] | None = None
    """None if models are given to `open`. A session that binds a model when the script first calls it sets a function,
    which returns the model of a called module."""

    def __init__(
        self,
        policy: Policy,
        device_type: str,
        num_losses: int,
        *,
        registered: Sequence[Registration] = (),
        has_models: bool = True,
        autocast: Autocast | None = None,
    ) -> None:
        self.policy = policy
        self.device_type = device_type
        self.has_models = has_models
        self.process_id = os.getpid()
        self.oplists = _load_lists(policy)

        # casting
        self.switch = Switch(autocast)
        self._cache = _make_cache(policy, device_type, autocast)
        products = _make_products(policy, device_type, self._cache)
        self.casts = _make_casts(policy, device_type, self.switch, self._cache, products, autocast)

        # training
        self.scalers: list[loss_scaler.LossScaler] = []
        self.scale_updates = ScaleUpdates(self.scalers, device_type)
        self.make_scalers(num_losses)
        self._overflow_group: Any = None
        self._sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        rules = () if self.oplists is None else self.oplists.modules
        self.bindings = Bindings(
            policy, rules, self.switch, self._cache, self.scale_updates, self._sharded, type(self).find_root
        )
        self.gradients = self.bindings.gradients

        # nothing is changed before `open`
        self._installer = Installer(policy, self.casts, products, self.oplists, self._cache, registered, self.bindings)
        self.undo = UndoStack()
        self.is_whole = False

    # ---- opening and closing -----------------------------------------------------------------------------------------

    def open(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], overflow_group: Any = None) -> None:
        """Apply the policy. After an error, the caller has to call `close`, which undoes the changes so far."""
        # the values of cast tensors from before their cast, by id: masters are made from them
        float32_data: dict[int, Tensor] = {}
        # `close` runs these callbacks from the last to the first
        self.undo.callback(self.gradients.local.warn_of_stale)  # last, when the models are restored
        self.undo.callback(self.switch.turn_off)
        self.undo.callback(self.bindings.release)
        self.undo.callback(self.bindings.flush)
        self.bindings.bind(models, optimizers, float32_data)
        self._share_skips(overflow_group)
        self._installer.install(self.undo)
        self.is_whole = True
        float32_data.clear()

    def adopt(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], overflow_group: Any = None) -> None:
        """Apply the policy to more models and optimizers."""

        def finish(added: Sequence[nn.Module]) -> None:
            self._share_skips(overflow_group)
            self._installer.redirect(added, with_modules=False)

        self.bindings.bind_more(models, optimizers, finish)

    def patch_ops_again(self) -> None:
        """Install the patches of ops again, after they were undone."""
        self._installer.patch_ops_again()

    def remove_patches_of_ops(self) -> None:
        """Undo the patches of ops. The session stays open."""
        self._installer.remove_patches_of_ops()

    def observing_all(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager. Inside its block, ops are patched for watchers that observe all ops.

        In this class, it does nothing: a session patches the ops of its lists when it opens.
        """
        return contextlib.nullcontext()

    def _share_skips(self, overflow_group: Any) -> None:
        """Let ranks skip the same steps: the ranks of `overflow_group`, and those that hold shards of the models.

        `overflow_group`: see `initialize`. None: the group of the last call.
        """
        group = self._overflow_group if overflow_group is None else overflow_group
        self.scale_updates.share(find_groups(self.models(), self.trained_parameters(), group))
        self._overflow_group = group
        self._sharded.update(find_fsdp_modules(self.models()))

    def share_skips_with(self, group: Any) -> None:
        """Let the ranks of a process group skip the same steps, and copy the loss scales of its first rank to all.

        Does nothing if an `overflow_group` was passed before, even False, or if ranks skip together because they hold
        shards.
        """
        if self._overflow_group is None and not self.scale_updates.process_groups:
            self._share_skips(group)
            self.scale_updates.broadcast_scales(group, 0)

    def close(self) -> None:
        """Undo everything. A second call does nothing.

        After an interrupt or an error, this undoes the rest, and then raises the exception. If undoing
        the rest is interrupted, too, call `close` again.
        """
        self.is_whole = False
        with without_overrides():
            try:
                self.undo.close()
            except BaseException:
                self.undo.close()  # the stack still holds the callbacks that have not run
                raise

    def check_that_no_block_runs(self) -> None:
        """Raise SessionError inside a `scale_loss` block, where gradients are still scaled."""
        # a forked process inherits blocks that only its parent can leave
        if self.process_id == os.getpid() and self.gradients.open_blocks():
            raise SessionError("a scale_loss block is open: leave it before amp.reset() or another initialize")

    def without_casts(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager. Inside its block, patched ops of this thread cast nothing. The hooks of cast models
        still cast inputs and outputs.
        """
        return self.switch.region(Mode.OFF)

    # ---- contents ----------------------------------------------------------------------------------------------------

    @property
    def patcher(self) -> Patcher:
        """The patches of ops, and of functions that run, record or compile ops (`torch_patches.plan_with_ops`)."""
        return self._installer.patcher

    def models(self) -> list[nn.Module]:
        """Return the bound models that are still alive."""
        return self.bindings.models()

    def low_here(self) -> torch.dtype | None:
        """Return the 16-bit dtype of the opt_level, or None if it has none."""
        return self.policy.low_dtype

    def is_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether the last step of an optimizer was skipped. May wait for the device."""
        return get_step_was_skipped(optimizer)

    def overflow_flags(self, optimizer: Optimizer) -> tuple[list[Tensor], bool]:
        """Return the `found_inf` flags of an optimizer (0-dim, 1.0 after an overflow), and whether a set flag may skip
        its step.

        There are no flags if no gradients of the optimizer were checked since its last step, or if it is not bound.
        """
        binding = self.bindings.find_optimizer(optimizer)
        if binding is None:
            return [], False
        found_inf = binding.flags.found_inf
        return list(found_inf.values()), any(scaler.is_dynamic for scaler in found_inf)

    def optimizers(self) -> list[Optimizer]:
        """Return the bound optimizers that are still alive."""
        bound = [binding.optimizer for binding in self.bindings.optimizers()]
        return [optimizer for optimizer in bound if optimizer is not None]

    def trained_parameters(self) -> list[Tensor]:
        """Return the parameters that the optimizers update: masters, where there are some."""
        return [parameter for binding in self.bindings.optimizers() for parameter in binding.groups.parameters()]

    def find_master(self, parameter: Tensor) -> Tensor | None:
        """Return the float32 master of a 16-bit parameter, or None."""
        return self.bindings.masters.get(parameter)

    def names_of(self, tensors: Sequence[Tensor]) -> list[str]:
        """Return the qualified names of parameters, masters and buffers; other tensors are `parameter of shape ...`."""
        return self.bindings.names_of(tensors)

    def make_scalers(self, num_losses: int) -> None:
        """Make loss scalers until there are `num_losses`."""
        policy = self.policy
        while len(self.scalers) < num_losses:
            self.scalers.append(
                loss_scaler.LossScaler(
                    policy.loss_scale, min_loss_scale=policy.min_loss_scale, max_loss_scale=policy.max_loss_scale
                )
            )
            self.scalers[-1].is_shared = bool(self.scale_updates.process_groups)

    def restart_scalers(self) -> None:
        """Restart dynamic loss scales for another training. A scale that has not scaled a loss yet stays: it may have
        been loaded from a checkpoint.
        """
        used = [scaler for scaler in self.scalers if scaler.is_dynamic and not scaler.awaits_loss]
        for scaler in used:
            scaler.restart()
        if used:
            say("amp_patch: another optimizer, so the loss scale starts anew at %g", used[0].known_scale)

    def fits(self, policy: Policy, device_type: str) -> bool:
        """Return whether the session has this policy and device type, and its list files still have the same rules.

        Raises OpListError if a list file is missing or wrong by now.
        """
        if (self.policy, self.device_type) != (policy, device_type):
            return False
        return self.oplists is None or load_oplists(policy.lists).digest == self.oplists.digest

    def refresh(self) -> None:
        """Cast every cached weight again before its next use, and copy all masters to their parameters."""
        if self._cache is not None:
            self._cache.invalidate_all()
        self.bindings.masters.refresh()

    def drop_casts(self) -> None:
        """Cast every cached weight again before its next use."""
        if self._cache is not None:
            self._cache.invalidate_all()

    def sync(self) -> None:
        """Like `refresh`, but write only to parameters whose masters have changed. If an autograd graph has saved a
        parameter, a write to the parameter makes the backward pass of the graph fail.
        """
        if self._cache is not None:
            self._cache.invalidate_all()
        self.bindings.masters.sync()

    def stats(self, *, wait: bool = True) -> Stats:
        """Return the result of `amp.stats()`. Without `wait`, use the last numbers that the host knows."""
        low = float32 = steps = skipped = 0
        seen: set[int] = set()
        for model in self.models():
            for parameter in model.parameters():
                if id(parameter) in seen:  # tied weights count once
                    continue
                seen.add(id(parameter))
                if parameter.dtype in (torch.float16, torch.bfloat16):
                    low += parameter.numel()
                elif parameter.dtype is torch.float32:
                    float32 += parameter.numel()
        for binding in self.bindings.optimizers():
            counts = binding.step_log.count(wait=wait)
            steps += counts[0]
            skipped += counts[1]
        scales: list[float] = []
        for scaler in self.scalers:
            scales.append(scaler.loss_scale() if wait else scaler.known_scale)
        return Stats(
            opt_level=self.policy.opt_level,
            low_dtype=self.policy.low_dtype,
            names_patched=len(self.patcher),
            parameters_low=low,
            parameters_float32=float32,
            steps=steps,
            steps_skipped=skipped,
            loss_scales=tuple(scales),
        )

    # ---- scaling -----------------------------------------------------------------------------------------------------

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], loss_id: int, delay_unscale: bool
    ) -> contextlib.AbstractContextManager[Tensor]:
        """See `amp_patch.scale_loss`."""
        if not isinstance(loss, Tensor):
            advice = "pass the result of the loss function"
            if isinstance(loss, (list, tuple, dict)):
                advice = "add the losses up first"
            raise ArgumentTypeError(f"scale_loss takes the loss as a tensor, not {type(loss).__name__}: {advice}")
        if loss.is_complex():
            raise ArgumentTypeError(f"the loss is {dtype_name(loss.dtype)}: pass a real number, such as its .abs()")
        if not loss.is_floating_point():
            raise ArgumentTypeError(
                f"the loss is {dtype_name(loss.dtype)}, and only a floating one has gradients: pass it as it is before"
                " any .argmax(), comparison or .long()"
            )
        if loss.device.type != self.device_type:
            raise SessionError(
                f"the loss is on {loss.device.type}, but the models were on {self.device_type} when initialize was"
                " called: move the model to its device first, then call initialize, and pass the loss as it is there"
            )
        all_flags = []
        for optimizer in optimizers:
            all_flags.append(self.bindings.get_optimizer(optimizer).flags)
        scaler = self.scaler(loss_id)
        if self.policy.split_masters:
            self.bindings.masters.free_memory()
        return LossBlock(loss, scaler, all_flags, self.gradients, delay_unscale, self.switch, self._cache)

    def scaler(self, loss_id: int) -> loss_scaler.LossScaler:
        """Return a loss scaler by its number.

        Raises LossIdError if it is out of range, and ArgumentTypeError if it is no integer.
        """
        if not hasattr(loss_id, "__index__"):
            raise ArgumentTypeError(f"loss_id={loss_id!r} is not a whole number: pass 0 for the first loss scaler")
        if not 0 <= loss_id < len(self.scalers):
            raise LossIdError(
                f"loss_id {loss_id} is out of range for {len(self.scalers)} loss scalers: they are numbered from 0, and"
                " initialize(num_losses=...) says how many there are"
            )
        return self.scalers[loss_id]


def _make_cache(policy: Policy, device_type: str, autocast: Autocast | None) -> WeightCache | None:
    """Return the weight cache, or None at a level that patches no functions."""
    low = policy.low_dtype
    if low is None or not policy.patch_torch_functions:
        return None
    is_rounded = policy.computes_in_float32(device_type)
    if autocast is not None:
        return RegionCache(low, device_type, is_rounded=is_rounded)
    # on a CPU with bfloat16 instructions, first uses of a small weight take a plain cast: a look-up costs as much
    smallest = SMALL_ON_CPU if policy.get_max_attention_scores(device_type) else 0
    return WeightCache(low, device_type, is_rounded=is_rounded, smallest=smallest)


def _make_products(policy: Policy, device_type: str, cache: WeightCache | None) -> Float32Products | None:
    """Return the object that computes products in float32: all products, or only those of short attention.

    Returns None if no products are computed in float32.
    """
    low = policy.low_dtype
    if low is None:
        return None
    if policy.computes_in_float32(device_type):
        return Float32Products(low, device_type, cache)
    max_scores = policy.get_max_attention_scores(device_type)
    return Float32Products(low, device_type, None, max_scores) if max_scores else None


def _make_casts(
    policy: Policy,
    device_type: str,
    switch: Switch,
    cache: WeightCache | None,
    products: Float32Products | None,
    autocast: Autocast | None,
) -> OpCasts | None:
    """Return the object that makes the wrappers of ops, or None at a level that patches no functions."""
    low = policy.low_dtype
    if low is None or not policy.patch_torch_functions:
        return None
    return OpCasts(switch, low, device_type, cache, products, casts_inside=policy.casts_inside, autocast=autocast)


def _load_lists(policy: Policy) -> OpLists | None:
    """Return the op lists of a policy, or None if it has none.

    Raises PolicyError for lists that can have no effect, and OpListError for lists that cannot be loaded. Warns of
    lists under which no op runs in 16 bits, unless a file says `extends: null`.
    """
    if not policy.lists:
        return None
    oplists = load_oplists(policy.lists)
    if not policy.patch_torch_functions and not oplists.modules:
        raise PolicyError(
            f"lists={', '.join(policy.lists)}: {policy.opt_level} patches no functions, so only the `modules` of a list"
            " have an effect, and these lists have none; use O1 or O4"
        )
    may_run_low = bool(oplists.modules)
    for spelling in (*oplists.spellings, *oplists.deferred):
        may_run_low = may_run_low or spelling.entry.rule.runs_in == "low"
    if policy.patch_torch_functions and not oplists.is_whole and not may_run_low:
        names, low = ", ".join(policy.lists), dtype_name(policy.low_dtype)
        warn(
            f"lists={names}: no op runs in {low} by these, so almost nothing is cast. To change a few rules of the"
            f" default list, write `extends: {low}` in the file, or pass lists=[{low!r}, ...]. If this is what you"
            " want, write `extends: null`"
        )
    return oplists
