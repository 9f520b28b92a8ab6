"""Apex's `apex.amp.frontend`: `initialize`, the opt_levels, and amp's state in checkpoints.

As in Apex, opt_levels are O0 to O3, and their 16-bit dtype is float16 by default. (`amp-patch run --opt-level LEVEL`
may replace the script's opt_level by any of amp_patch's.) The op list is `lists/apex.yaml`, which bans
`binary_cross_entropy`. Messages are printed on stdout.

Unlike in Apex, models may be on the CPU, and `initialize` may be called again. A later call with the same options adds
its models and optimizers, and starts the loss scales anew. A later call with other options undoes the earlier calls:
their models get their dtypes back.
"""

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import CheckpointError, ModelError, PolicyError, did_you_mean, refuse_unknown
from ...reporting import say
from ...script_settings import describe_replaced, in_force
from .._core import (
    ROUNDING,
    Policy,
    Session,
    api,
    as_models,
    as_optimizers,
    find_session,
    is_disabled,
    make_policy,
    open_session,
    parse_loss_scale,
)
from ._amp_state import _amp_state, maybe_print
from ._process_optimizer import attach_apex_names
from .handle import AmpHandle
from .lists import register_edits

OPTIONS = (
    "enabled",
    "opt_level",
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)


class Properties:
    """The options of a call of `initialize`. Each entry of the dict `options` is also an attribute."""

    options: dict[str, Any]

    def __init__(self) -> None:
        # Apex's values before `initialize` and while amp is disabled
        values = (False, None, None, False, None, None, 1.0)
        # not by an assignment, because `__setattr__` reads `options`, which does not exist yet
        self.__dict__["options"] = dict(zip(OPTIONS, values, strict=True))

    def __getattr__(self, name: str) -> Any:
        # `copy` reads attributes before the copy has `options`
        options = self.__dict__.get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.options:
            self.options[name] = value
        else:
            super().__setattr__(name, value)

    def take(self, policy: Policy) -> None:
        """Set the options to the properties of a policy, and `enabled` to True."""
        self.options.update({name: getattr(policy, name) for name in OPTIONS if name != "enabled"})
        self.enabled = True
        # a policy holds the settings of a dynamic scale, but scripts compare the option with "dynamic"
        if policy.loss_scale == parse_loss_scale("dynamic"):
            self.loss_scale = "dynamic"


@dataclass(frozen=True)
class Level:
    """One of Apex's opt_levels. Scripts look them up in `opt_levels`."""

    name: str


O0, O1, O2, O3 = Level("O0"), Level("O1"), Level("O2"), Level("O3")
opt_levels = {"O3": O3, "O2": O2, "O1": O1, "O0": O0}


@refuse_unknown
def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Set models and optimizers up for an opt_level, in place. See `amp_patch.initialize`.

    The arguments are Apex's. `models` and `optimizers` may be single objects or sequences. `optimizers` may be None, or
    contain LARC wrappers. A `verbosity` of 2 has the effect of 1: casts are not printed.

    Returns:
        `models` if `optimizers` is None, else `(models, optimizers)`: the objects that were passed.

    Raises:
        PolicyError, ModelError, OptimizerError, ArgumentTypeError: an argument is wrong. No model or optimizer was
            changed, but earlier calls with other options may have been undone. All are RuntimeErrors.
        SessionError: a `scale_loss` block is open, or `enabled` is False while an earlier `initialize` or `init` is in
            force.
    """
    returned = models if optimizers is None else (models, optimizers)
    if not enabled:
        _amp_state.opt_properties = Properties()
        api.initialize(models, optimizers, enabled=False, verbosity=0)
        _amp_state.verbosity = verbosity
        return returned
    _amp_state.verbosity = verbosity
    given = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    # not among Apex's options, so `opt_properties` does not show them
    not_options = {
        "cast_model_outputs": cast_model_outputs,
        "min_loss_scale": min_loss_scale,
        "max_loss_scale": max_loss_scale,
    }
    policy, properties = _choose_policy(opt_level, given, not_options)
    model_list, optimizer_list = as_models(models), as_optimizers(optimizers)
    session = _open_session(policy, model_list, optimizer_list, num_losses)
    _amp_state.opt_properties = properties
    _amp_state.min_loss_scale, _amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    # as in Apex, only opt_levels that patch functions have a handle
    if session.casts is not None:
        _amp_state.handle = AmpHandle(session)
    return returned


def _choose_policy(
    opt_level: str, given: Mapping[str, Any], not_options: Mapping[str, Any]
) -> tuple[Policy, Properties]:
    """Return the policy for the arguments of `initialize`, and its options as `Properties`. Print the options.

    An opt_level of `amp-patch run` or `amp_patch.apex.install` replaces the script's. Raises PolicyError if an argument
    is wrong.

    Args:
        given: the arguments of `initialize` that are Apex's options; None for an option that the script leaves open.
        not_options: other arguments that override properties of the policy.
    """
    if in_force.settings.opt_level is None and opt_level not in opt_levels:
        raise PolicyError(
            f"opt_level {opt_level!r} is not one of Apex's ({', '.join(sorted(opt_levels))}): pass one of them, or"
            f" choose any level by `amp-patch run --opt-level LEVEL SCRIPT`.{did_you_mean(opt_level, opt_levels)}"
        )
    level, overrides, dropped = in_force.settings.override(opt_level, given)
    policy = make_policy(level, {**overrides, **not_options})
    if level != opt_level:
        maybe_print(describe_replaced(level, opt_level, dropped), rank0=True)
    properties = Properties()
    properties.take(policy)
    # the policy has None for `cast_model_type=False`, but Apex showed False
    if overrides.get("cast_model_type") is False:
        properties.cast_model_type = False
    say("amp: opt_level %s, %s", policy.opt_level, policy.description or "no description")
    options = {name: value for name, value in properties.options.items() if name not in ("enabled", "opt_level")}
    say("  %s", ", ".join(f"{name}: {value}" for name, value in options.items()))
    if overrides:
        say("  set by the script: %s", ", ".join(overrides))
    lists = ("apex",) if policy.patch_torch_functions else ()
    # casts_inside=False: as in Apex, the arguments of a registered function are cast, and ops in its body follow the
    # lists
    return replace(policy, lists=lists, casts_inside=False), properties


def _open_session(
    policy: Policy, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], num_losses: int
) -> Session:
    """Open or extend the session, register the script's edits of op lists, and give optimizers Apex's attributes."""
    if not models:
        raise ModelError("initialize needs at least one model")
    register_edits()
    handle = getattr(_amp_state, "handle", None)
    # after `handle._deactivate()`, functions are torch's own again, so a new session has to patch them
    has_ended = isinstance(handle, AmpHandle) and handle.has_ended()
    earlier_session = find_session()
    # do not add the models to a session that `init` opened: it would not end when they are freed
    is_without_models = earlier_session is not None and not earlier_session.has_models
    session = open_session(
        policy,
        models,
        optimizers,
        num_losses=num_losses,
        replace=has_ended or is_without_models,
        accept_low=_amp_state.allow_incoming_model_not_fp32,
    )
    for optimizer in optimizers:
        attach_apex_names(optimizer)
    for line in policy.explain_compute(session.device_type):
        say("%s", line)
    return session


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return `{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}`, without entries if amp is disabled.

    If `destination` is given, add the entries to that dict, and return it. Raises SessionError before `initialize`.
    """
    return api.state_dict(collections.OrderedDict() if destination is None else destination)


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load the result of `state_dict`. The n-th entry with "loss_scaler" in its name goes into the n-th loss scaler.

    If there are more such entries than scalers, or fewer, load the entries that have a scaler, and print a warning. Do
    nothing if amp is disabled. Raises CheckpointError (a RuntimeError) for an entry that `state_dict` never makes, and
    the errors of `amp_patch.load_state_dict`. If it raises, nothing is loaded.
    """
    if is_disabled():
        return
    if not isinstance(state_dict, Mapping):
        api.load_state_dict(state_dict)  # raises the error
    scales = [name for name in state_dict if "loss_scaler" in str(name)]
    foreign = [str(name) for name in state_dict if name not in scales and name != ROUNDING]
    if foreign:
        raise CheckpointError(
            f"{', '.join(foreign)}: not an entry of amp.state_dict(), whose names are loss_scaler0, loss_scaler1, ..."
        )
    state = api.state_dict()
    present = [name for name in state if name != ROUNDING]
    if len(scales) != len(present):
        print(
            f"Warning: the saved amp state has {len(scales)} loss scalers, and there are {len(present)} now: loading"
            " as many as both have."
        )
    # by position: Apex did not read the number in a name either
    state.update(zip(present, (state_dict[name] for name in scales), strict=False))
    if ROUNDING in state_dict:
        state[ROUNDING] = state_dict[ROUNDING]
    api.load_state_dict(state)
