"""`Changes`: what amp_patch changes in a script's regions of `torch.autocast`.

A region is a block `with torch.autocast(...)`.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import torch

from .. import events
from ..casting import Autocast
from ..config import OpLists, Policy, levels, load_oplists, make_policy, shipped
from ..dtypes import dtype_name
from ..reporting import warn
from ..script_settings import UnsuitedLevelError
from ..torch_private import enable_region
from .session import AS_IS, NativeSession

_OTHER_LEVELS = (
    "{level} casts the model, and torch.autocast does not: use O1 or O4, or write, instead of torch.autocast and"
    ' GradScaler, `model, optimizer = amp.initialize(model, optimizer, opt_level="{level}")` and `with'
    " amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`; for Trainer, Lightning and Accelerate see"
    " amp_patch.integrations"
)


class Kind(Enum):
    """How the regions of a script are changed."""

    NOTHING = "regions run as without amp_patch"
    LISTS = "lists replace torch's rules for the ops that they name"
    LEVEL = "the lists and the dtype of a level replace those of torch.autocast"
    DISABLED = "autocast is disabled"


class Changes:
    """The changes to the regions of a script.

    Args:
        level, lists, compute: as `opt_level`, `lists` and `compute` of `amp_patch.native.install`.

    Attributes:
        policy: the policy of the level, or None without a level.
        has_module_rules: whether `lists` have rules for modules.

    Raises PolicyError or OpListError for a level or lists that do not exist or cannot be read.
    """

    def __init__(self, level: str | None, lists: Sequence[str], compute: str | None) -> None:
        self.level = level
        self.lists = tuple(lists)
        self.policy = None if level is None else make_policy(level, {})
        self.has_module_rules = bool(lists) and bool(load_oplists(["autocast-cpu", *lists]).modules)
        self._compute = compute

    @property
    def kind(self) -> Kind:
        """How the regions are changed."""
        if self.policy is not None:
            return Kind.DISABLED if self.policy.low_dtype is None else Kind.LEVEL
        return Kind.LISTS if self.lists else Kind.NOTHING

    @property
    def needs_region(self) -> bool:
        """Whether the changes consist of casts, which are made only in regions."""
        return self.kind in (Kind.LISTS, Kind.LEVEL)

    @property
    def level_dtype(self) -> torch.dtype | None:
        """The 16-bit dtype of the level; None without a level, and at a level that casts nothing."""
        return None if self.policy is None else self.policy.low_dtype

    def check_level(self) -> None:
        """Raise UnsuitedLevelError for a level that casts models, such as O2. torch.autocast casts no models."""
        if self.kind is Kind.LEVEL and self.policy is not None and not self.policy.patch_torch_functions:
            raise UnsuitedLevelError(_OTHER_LEVELS.format(level=self.level))

    def apply_to(self, device_type: str, session: NativeSession) -> bool:
        """Return whether `adapt` is to be called for regions on a type of device.

        Regions are disabled on all types of devices. Other changes apply only to the session's device type.
        """
        return self.kind is Kind.DISABLED or device_type == session.device_type

    def adapt(self, region: Any, session: NativeSession) -> None:
        """Change a region that is about to be entered: disable it, or give it the dtype of the level. Without a level,
        warn if the lists do not apply to its dtype.

        The caller restores the region afterwards.
        """
        if self.kind is Kind.DISABLED:
            enable_region(region, False)
        elif self.kind is Kind.LEVEL:
            region.fast_dtype = session.policy.low_dtype
        elif self.kind is Kind.LISTS and region.fast_dtype is not session.policy.low_dtype:
            warn(
                f"the lists apply to {dtype_name(session.policy.low_dtype)}, the dtype of the first region of"
                f" torch.autocast: regions in {dtype_name(region.fast_dtype)} keep torch's rules"
            )

    def make_session(self, device_type: str, low: torch.dtype | None) -> NativeSession:
        """Return a session for these changes, which the caller opens.

        Args:
            low: the dtype of the region that the script enters, or None outside of regions.
        """
        torch_lists = load_torch_lists(device_type)
        autocast: Autocast | None
        if self.policy is None or self.level is None:
            dtype = low or torch.get_autocast_dtype(device_type)
            policy = _make_policy_over_torch(torch_lists, dtype, self.lists)
            # without lists, the session only observes, in regions of any dtype
            autocast = Autocast(device_type, dtype if self.lists else None, torch_lists)
        elif self.kind is Kind.DISABLED:
            policy = replace(self.policy, description="torch.autocast is disabled")
            autocast = None  # `adapt` disables each region, so there is nothing to cast in
        else:
            lists = (*self.policy.lists, *self.lists)
            # no loss scale of the session, because the script's GradScaler scales the loss
            policy = make_policy(self.level, {"loss_scale": 1.0, "compute": self._compute, "lists": lists})
            policy = replace(policy, description=f"{self.level} in the regions of torch.autocast")
            autocast = Autocast(device_type, policy.low_dtype, torch_lists)
        observes_ops = any(watcher.observes_ops for watcher in events.watchers)
        observes_all = observes_ops or (bool(events.watchers) and self.kind is not Kind.NOTHING)
        return NativeSession(policy, device_type, autocast, observes_all=observes_all)


def load_torch_lists(device_type: str) -> OpLists | None:
    """Return the lists with torch.autocast's own rules on a type of device, or None if amp_patch ships none for it."""
    name = f"autocast-{device_type}"
    return load_oplists(name) if name in shipped.shipped_names() else None


def _make_policy_over_torch(torch_lists: OpLists | None, low: torch.dtype, lists: Sequence[str]) -> Policy:
    """Return the policy for `lists` on top of torch.autocast's own rules. `low`: the dtype of the region."""
    level = "autocast" if lists else AS_IS
    if torch_lists is None and not lists:  # there are no rules to apply
        return replace(make_policy(levels.find_plain_level().name, {}), opt_level=level)
    names = [*(() if torch_lists is None else torch_lists.names), *lists]
    # compute "native": matrix products run in the same kernels as under torch.autocast
    overrides = {"lists": names, "loss_scale": 1.0, "compute": "native"}
    policy = make_policy(levels.find_patching_level(dtype_name(low)).name, overrides)
    return replace(policy, opt_level=level, description=f"torch.autocast, with {', '.join(lists) or 'nothing'} over it")
