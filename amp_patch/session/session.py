"""`Session`: one policy in force, and everything that was changed for it; `Stats`: what it is and has done."""

import contextlib
import html
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, slots=True)
class Stats:
    """What a session is and has done.

    Counts of parameters are numbers of elements of the bound models; `steps` and `steps_skipped` add up all optimizers;
    `loss_scales` holds the scale of each scaler, in order. A notebook shows it as a table.
    """

    opt_level: str | None
    low_dtype: torch.dtype | None
    names_patched: int
    parameters_low: int
    parameters_float32: int
    steps: int
    steps_skipped: int
    loss_scales: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON has them: `json.dumps(amp.stats().to_dict())`. The dtype is its name."""
        low = None if self.low_dtype is None else dtype_name(self.low_dtype)
        return {**asdict(self), "low_dtype": low, "loss_scales": list(self.loss_scales)}

    def _repr_html_(self) -> str:
        if self.opt_level is None:
            return "<p>amp_patch: no level is in force</p>"
        cells = {
            "opt_level": self.opt_level,
            "low dtype": dtype_name(self.low_dtype),
            "names patched": f"{self.names_patched:,}",
            "parameters in 16 bits": f"{self.parameters_low:,}",
            "parameters in float32": f"{self.parameters_float32:,}",
            "steps taken": f"{self.steps:,}",
            "steps skipped": f"{self.steps_skipped:,}",
            "loss scale": ", ".join(f"{scale:.12g}" for scale in self.loss_scales),
        }
        rows = "".join(f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in cells.items())
        return f"<table>{rows}</table>"


class Session:
    """One policy, the models and optimizers it was applied to, the scalers, and the patches.

    Attributes:
        bindings: the models and optimizers.
        undo: what `close` runs; empty once all is undone.
    """

    gives_way = False
    """Whether it is closed for another: nobody has asked for it by `initialize` or the like."""

    find_root: Callable[[nn.Module], nn.Module] | None = None
    """For a session that meets its models as the script calls them: returns the model of a module that is called."""

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
        self.has_models = has_models  # without models it lasts until it is closed, not until they are gone
        self.process_id = os.getpid()
        self.scalers: list[loss_scaler.LossScaler] = []
        self.scale_updates = ScaleUpdates(self.scalers, device_type)
        self.switch = Switch(autocast)
        self.oplists = _load_lists(policy)
        self.casts: OpCasts | None = None
        self._cache: WeightCache | None = None
        products: Float32Products | None = None
        low = policy.low_dtype
        if low is not None:
            in_float32 = policy.computes_in_float32(device_type)
            longest_attention = policy.get_longest_attention(device_type)
            if policy.patch_torch_functions:
                if autocast is None:
                    smallest = SMALL_ON_CPU if longest_attention else 0
                    self._cache = WeightCache(low, device_type, is_rounded=in_float32, smallest=smallest)
                else:
                    self._cache = RegionCache(low, device_type, is_rounded=in_float32)
            if in_float32:
                products = Float32Products(low, device_type, self._cache)
            elif longest_attention:
                products = Float32Products(low, device_type, None, longest_attention)
            if policy.patch_torch_functions:
                inside = policy.casts_inside
                self.casts = OpCasts(
                    self.switch, low, device_type, self._cache, products, casts_inside=inside, autocast=autocast
                )
        rules = () if self.oplists is None else self.oplists.modules
        self._sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.bindings = Bindings(
            policy, rules, self.switch, self._cache, self.scale_updates, self._sharded, type(self).find_root
        )
        self.gradients = self.bindings.gradients
        self._installer = Installer(policy, self.casts, products, self.oplists, self._cache, registered, self.bindings)
        self._overflow_group: Any = None
        self.undo = UndoStack()
        self.is_whole = False  # from the end of `open` to the beginning of `close`
        self.add_scalers(num_losses)

    # ---- opening and closing -----------------------------------------------------------------------------------------

    def open(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], overflow_group: Any = None) -> None:
        """Apply the policy. After an error, `close` undoes what was changed so far."""
        float32_data: dict[int, Tensor] = {}
        self.undo.callback(self.gradients.local.warn_of_stale)  # when the models are as they were
        self.undo.callback(self.switch.turn_off)
        self.undo.callback(self.bindings.release)
        self.undo.callback(self.bindings.flush)
        self.bindings.bind(models, optimizers, float32_data)
        self._decide_together(overflow_group)
        self._installer.install(self.undo)
        self.is_whole = True
        float32_data.clear()

    def adopt(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], overflow_group: Any = None) -> None:
        """Bring more models and optimizers under the policy."""

        def finish(added: Sequence[nn.Module]) -> None:
            self._decide_together(overflow_group)
            self._installer.redirect(added, with_modules=False)

        self.bindings.bind_more(models, optimizers, finish)

    def patch_ops_again(self) -> None:
        """Put the patches of ops back in after `patcher.undo()`."""
        self._installer.patch_ops_again()

    def _decide_together(self, overflow_group: Any) -> None:
        given = self._overflow_group if overflow_group is None else overflow_group
        self.scale_updates.share(find_groups(self.models(), self.trained(), given))
        self._overflow_group = given
        self._sharded.update(find_fsdp_modules(self.models()))

    def decide_with(self, group: Any) -> None:
        """Decide together with the ranks of a process group, unless the caller or the shards have said otherwise.

        The scales are those of its first rank from then on.
        """
        if self._overflow_group is None and not self.scale_updates.groups:
            self._decide_together(group)
            self.scale_updates.give_scales(group, 0)

    def close(self) -> None:
        """Undo everything. Harmless twice.

        Interrupted once, it finishes before it raises the interrupt; interrupted again, it is to be called again.
        """
        self.is_whole = False
        with without_overrides():
            try:
                self.undo.close()
            except BaseException:
                self.undo.close()
                raise

    def check_that_no_block_runs(self) -> None:
        """Raise SessionError inside a `scale_loss` block: what its backward pass adds would stay scaled."""
        if self.process_id == os.getpid() and self.gradients.open_blocks():
            raise SessionError("a scale_loss block is open: leave it before amp.reset() or another initialize")

    def without_casts(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which no op of this thread is cast."""
        return self.switch.region(Mode.OFF)

    # ---- what it holds -----------------------------------------------------------------------------------------------

    @property
    def patcher(self) -> Patcher:
        """The patches of ops."""
        return self._installer.patcher

    def models(self) -> list[nn.Module]:
        """Return the bound models that are still alive."""
        return self.bindings.models()

    def low_here(self) -> torch.dtype | None:
        """Return the dtype that whitelisted ops have in this thread now."""
        return self.policy.low_dtype

    def is_skipped(self, optimizer: Optimizer) -> bool:
        """Tell whether the last step of an optimizer was skipped. May wait for the device."""
        return get_step_was_skipped(optimizer)

    def optimizers(self) -> list[Optimizer]:
        """Return the bound optimizers that are still alive."""
        found: list[Optimizer] = []
        for binding in self.bindings.optimizers():
            optimizer = binding.optimizer
            if optimizer is not None:
                found.append(optimizer)
        return found

    def trained(self) -> list[Tensor]:
        """Return what the optimizers step on."""
        found: list[Tensor] = []
        for binding in self.bindings.optimizers():
            found += binding.groups.parameters()
        return found

    def find_master(self, parameter: Tensor) -> Tensor | None:
        """Return the float32 master of a 16-bit parameter, or None."""
        return self.bindings.masters.get(parameter)

    def names_of(self, tensors: Sequence[Tensor]) -> list[str]:
        """Return the qualified names of parameters or masters; of others, their shapes in words."""
        return self.bindings.names_of(tensors)

    def add_scalers(self, num_losses: int) -> None:
        """Have at least `num_losses` scalers."""
        policy = self.policy
        while len(self.scalers) < num_losses:
            self.scalers.append(
                loss_scaler.LossScaler(
                    policy.loss_scale, min_loss_scale=policy.min_loss_scale, max_loss_scale=policy.max_loss_scale
                )
            )
            self.scalers[-1].is_shared = bool(self.scale_updates.groups)

    def restart_scalers(self) -> None:
        """Begin dynamic loss scales anew that have scaled a loss, for another training. Loaded ones stay."""
        used = [scaler for scaler in self.scalers if scaler.is_dynamic and not scaler.awaits_loss]
        for scaler in used:
            scaler.restart()
        if used:
            say("amp_patch: another optimizer, so the loss scale starts anew at %g", used[0].known_scale)

    def fits(self, policy: Policy, device_type: str) -> bool:
        """Tell whether the policy is this session's, with the op lists that its files hold now, and the device type."""
        if (self.policy, self.device_type) != (policy, device_type):
            return False
        return self.oplists is None or load_oplists(policy.lists).digest == self.oplists.digest

    def refresh(self) -> None:
        """Recast every cached weight before its next use, and copy masters to their parameters."""
        if self._cache is not None:
            self._cache.invalidate_all()
        self.bindings.masters.refresh()

    def sync(self) -> None:
        """Like `refresh`, but only for what was written to: a live graph may have saved other parameters."""
        if self._cache is not None:
            self._cache.invalidate_all()
        self.bindings.masters.sync()

    def stats(self, *, wait: bool = True) -> Stats:
        """Return what `amp.stats()` returns."""
        low = full = taken = skipped = 0
        seen: set[int] = set()
        for model in self.models():
            for parameter in model.parameters():
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                if parameter.dtype in (torch.float16, torch.bfloat16):
                    low += parameter.numel()
                elif parameter.dtype is torch.float32:
                    full += parameter.numel()
        for binding in self.bindings.optimizers():
            counts = binding.step_log.count(wait=wait)
            taken += counts[0]
            skipped += counts[1]
        scales: list[float] = []
        for scaler in self.scalers:
            scales.append(scaler.loss_scale() if wait else scaler.known_scale)
        return Stats(
            opt_level=self.policy.opt_level,
            low_dtype=self.policy.low_dtype,
            names_patched=len(self.patcher),
            parameters_low=low,
            parameters_float32=full,
            steps=taken,
            steps_skipped=skipped,
            loss_scales=tuple(scales),
        )

    # ---- scaling -----------------------------------------------------------------------------------------------------

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], loss_id: int, delay_unscale: bool
    ) -> contextlib.AbstractContextManager[Tensor]:
        """See `amp_patch.scale_loss`."""
        if not isinstance(loss, Tensor):
            advice = "pass what the loss function returns"
            if isinstance(loss, (list, tuple, dict)):
                advice = "add the losses up first"
            raise ArgumentTypeError(f"scale_loss takes the loss as a tensor, not {type(loss).__name__}: {advice}")
        if not loss.is_floating_point():
            raise ArgumentTypeError(
                f"the loss is {dtype_name(loss.dtype)}, and only a floating one has gradients: pass it as it is before"
                " any .argmax(), comparison or .long()"
            )
        if loss.device.type != self.device_type:
            raise SessionError(
                f"the loss is on {loss.device.type}, but the models were on {self.device_type} when initialize was"
                " called: move the model to its device first, then call initialize"
            )
        all_flags = []
        for optimizer in optimizers:
            all_flags.append(self.bindings.get_optimizer(optimizer).flags)
        scaler = self.scaler(loss_id)
        return LossBlock(loss, scaler, all_flags, self.gradients, delay_unscale, self.switch, self._cache)

    def scaler(self, loss_id: int) -> loss_scaler.LossScaler:
        """Return a loss scaler by its number; raises LossIdError if there is none."""
        if not hasattr(loss_id, "__index__"):
            raise ArgumentTypeError(f"loss_id={loss_id!r} is not a whole number: pass 0 for the first loss scaler")
        if not 0 <= loss_id < len(self.scalers):
            raise LossIdError(
                f"loss_id {loss_id} is out of range for {len(self.scalers)} loss scalers: they are numbered from 0, and"
                " initialize(num_losses=...) says how many there are"
            )
        return self.scalers[loss_id]


def _load_lists(policy: Policy) -> OpLists | None:
    """Return the op lists of a policy; raises PolicyError where they can have no effect."""
    if not policy.lists:
        return None
    oplists = load_oplists(policy.lists)
    if not policy.patch_torch_functions and not oplists.modules:
        raise PolicyError(
            f"lists={', '.join(policy.lists)}: {policy.opt_level} patches no functions, so only the `modules` of a list"
            " have an effect, and there are none in these; use O1 or O4"
        )
    casts_some = bool(oplists.modules)
    for spelling in (*oplists.spellings, *oplists.deferred):
        casts_some = casts_some or spelling.entry.rule.runs_in == "low"
    if policy.patch_torch_functions and not oplists.is_whole and not casts_some:
        names, low = ", ".join(policy.lists), dtype_name(policy.low_dtype)
        warn(
            f"lists={names}: no op runs in {low} by these, so almost nothing is cast. To change a few rules of the"
            f" default list, write `extends: {low}` in the file, or pass lists=[{low!r}, ...]. If this is what you"
            " want, write `extends: null`"
        )
    return oplists
