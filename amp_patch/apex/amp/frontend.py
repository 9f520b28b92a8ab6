"""`initialize`, the levels, and amp's own checkpoints: Apex's `apex.amp.frontend`.

Where scripts can see it, this is what Apex did: float16 on every device, the op list `apex` with its ban of
`binary_cross_entropy`, levels O0 to O3, lines on stdout. Right where Apex was not: models on the CPU and doubles are
taken; with `enabled=False` every function works (`state_dict()` is empty); `initialize` may be called again, for more
models under the same options, or under others, which take over and leave the earlier models float32; nothing is changed
when it fails; checkpoints resume exactly, because the model's state dict holds the masters.
"""

import collections
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...dtypes import parse_dtype
from ...errors import CheckpointError, ModelError, PolicyError, did_you_mean
from ...reporting import say
from ...script_settings import in_force
from .._core import (
    Policy,
    SessionView,
    api,
    as_models,
    as_optimizers,
    is_disabled,
    make_policy,
    parse_loss_scale,
)
from ._amp_state import _amp_state, maybe_print, warn_or_err
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
    """The options in force: attributes kept in the dict `options`, checked against the opt_level when they are set.

    `level_patches` is none of them: it says that the opt_level casts at functions, and so keeps the model float32.
    """

    options: dict[str, Any]
    level_patches: bool

    def __init__(self) -> None:
        values = (False, None, None, None, None, None, 1.0)
        self.__dict__["options"] = dict(zip(OPTIONS, values, strict=True))
        self.level_patches = False

    def _update_options_dict(self, new_options: Mapping[str, Any]) -> None:
        for name, value in dict(new_options).items():
            if name not in self.options:
                raise ValueError(f"{name!r} is no amp option ({', '.join(OPTIONS)})")
            self.options[name] = value

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.options:
            self.options[name] = _checked(name, value, self.level_patches)
        else:
            super().__setattr__(name, value)


def _checked(name: str, value: Any, patches: bool) -> Any:
    """Return the value of an option, parsed.

    A contradiction to the level is an error, or a warning under `hard_override`.
    """
    if name == "loss_scale":
        return _as_apex_has_it(parse_loss_scale(value))
    if name == "keep_batchnorm_fp32" and value in ("True", "False"):
        value = value == "True"
    if name == "keep_batchnorm_fp32" and value not in (None, True, False):
        raise PolicyError(f"keep_batchnorm_fp32={value!r} is neither True nor False, nor one of these in quotes")
    if name == "cast_model_type" and value not in (None, False):
        value = parse_dtype(value, name)
    if patches and name == "cast_model_type" and value not in (None, False, torch.float32):
        warn_or_err(
            f"cast_model_type={value}: this opt_level casts at functions and keeps the model float32; use O2 or O3."
        )
    elif patches and name in ("keep_batchnorm_fp32", "master_weights") and value is not None:
        warn_or_err(f"{name}={value}: this opt_level keeps all weights float32 anyway; leave it out.")
    elif not patches and name == "patch_torch_functions" and value:
        warn_or_err("patch_torch_functions=True: this opt_level casts the whole model; use O1 to cast at functions.")
    return value


def _as_apex_has_it(value: Any) -> Any:
    """Return "dynamic" for a dynamic loss scale that moves as Apex's did, and any other value itself."""
    return "dynamic" if value == parse_loss_scale("dynamic") else value


def _preset(level: str) -> Policy:
    return make_policy(level, {})


class _Level:
    level = ""

    @property
    def brief(self) -> str:
        """One line about the level."""
        return f"{self.level}:  {_preset(self.level).description}"

    def __call__(self, properties: Properties) -> Properties:
        """Set the options to the level's own."""
        _apply_level(properties, self.level)
        return properties


class O0(_Level):
    """Plain float32."""

    level = "O0"


class O1(_Level):
    """Casts at functions."""

    level = "O1"


class O2(_Level):
    """A float16 model with float32 masters."""

    level = "O2"


class O3(_Level):
    """float16 throughout."""

    level = "O3"


opt_levels: dict[str, _Level] = {"O3": O3(), "O2": O2(), "O1": O1(), "O0": O0()}


def _apply_level(properties: Properties, level: str) -> None:
    preset = _preset(level)
    properties.level_patches = preset.patch_torch_functions
    properties._update_options_dict(
        {"enabled": True, **{name: _as_apex_has_it(getattr(preset, name)) for name in OPTIONS if name != "enabled"}}
    )


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

    The docstring of this module says where it follows Apex.

    Args: as Apex's. `models` and `optimizers` may be single ones or sequences; `optimizers` may be None, or hold LARC
        wrappers. A `verbosity` of 2 is no more than 1: casts are not printed.

    Returns:
        `models` if `optimizers` is None, else `(models, optimizers)`: the same objects, in the shape they came in.

    Raises:
        PolicyError, ModelError, OptimizerError, ArgumentTypeError: something does not fit; nothing was changed. All are
        RuntimeErrors. SessionError: a `scale_loss` block is open.
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
    properties = _choose(opt_level, given)
    bounds = {
        "cast_model_outputs": cast_model_outputs,
        "min_loss_scale": min_loss_scale,
        "max_loss_scale": max_loss_scale,
    }
    model_list, optimizer_list = as_models(models), as_optimizers(optimizers)
    session = _open(_make_policy(properties, bounds), model_list, optimizer_list, num_losses)
    _amp_state.opt_properties = properties
    _amp_state.min_loss_scale, _amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    if session.patches_functions:
        _amp_state.handle = AmpHandle(session, verbose=verbosity == 2)
    return returned


def _choose(opt_level: str, given: Mapping[str, Any]) -> Properties:
    """Return the level's options with the script's other arguments applied, and print them.

    The level is the script's, or the one laid over it.
    """
    if in_force.settings.opt_level is None and opt_level not in opt_levels:
        raise PolicyError(
            f"opt_level {opt_level!r} is none of Apex's ({', '.join(sorted(opt_levels))})."
            f"{did_you_mean(opt_level, opt_levels)} For others run the script by `amp-patch run --opt-level`."
        )
    level, overrides, told = in_force.settings.lay_over(opt_level, given)
    if told:
        maybe_print(told, rank0=True)
    properties = Properties()
    _apply_level(properties, level)
    _print_options(
        f"amp: opt_level {level}, {_preset(level).description or 'no description'}\nIts own options are:", properties
    )
    for name, value in overrides.items():
        setattr(properties, name, value)
    _print_options(f"The script sets {', '.join(overrides) or 'nothing else'}, so the options are:", properties)
    return properties


def _print_options(heading: str, properties: Properties) -> None:
    for line in heading.splitlines():
        say("%s", line)
    for name, value in properties.options.items():
        say("%-22s : %s", name, value)


def _make_policy(properties: Properties, bounds: Mapping[str, Any]) -> Policy:
    """Return the policy of these options.

    Built here rather than from overrides, since `hard_override` lets options contradict their level.
    """
    policy = make_policy(properties.opt_level, bounds)
    is_patching = bool(properties.patch_torch_functions)
    return replace(
        policy,
        cast_model_type=properties.cast_model_type or None,
        patch_torch_functions=is_patching,
        patch_torch_functions_type=(policy.patch_torch_functions_type or torch.float16) if is_patching else None,
        keep_batchnorm_fp32=None if properties.level_patches else properties.keep_batchnorm_fp32,
        master_weights=None if properties.level_patches else properties.master_weights,
        loss_scale=parse_loss_scale(properties.loss_scale),
        lists=("apex",) if is_patching else (),
        casts_inside=False,
    )


def _open(policy: Policy, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], num_losses: int) -> SessionView:
    if not models:
        raise ModelError("initialize needs at least one model")
    register_edits()
    handle = getattr(_amp_state, "handle", None)
    session = SessionView.open(
        policy,
        models,
        optimizers,
        num_losses=num_losses,
        replace=isinstance(handle, AmpHandle) and handle.has_ended(),  # the script has put the functions back
        accept_low=_amp_state.allow_incoming_model_not_fp32,
    )
    for optimizer in optimizers:
        attach_apex_names(optimizer)
    for line in policy.explain_compute(session.device_type):
        say("%s", line)
    return session


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return `{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}`; empty if amp is disabled."""
    return api.state_dict(collections.OrderedDict() if destination is None else destination)


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load what `state_dict` returned, in the order of its entries, as far as there are scalers.

    A difference in number is printed. Does nothing if amp is disabled. Raises CheckpointError (a RuntimeError), before
    anything is loaded, for entries that are no scaler's.
    """
    if is_disabled():
        return
    if not isinstance(state_dict, Mapping):
        api.load_state_dict(state_dict)  # says what to pass
    foreign = [str(name) for name in state_dict if "loss_scaler" not in str(name)]
    if foreign:
        raise CheckpointError(
            f"{', '.join(foreign)}: not an entry of amp.state_dict(), whose names are loss_scaler0, loss_scaler1, ..."
        )
    state = api.state_dict()
    if len(state_dict) != len(state):
        print(
            f"Warning: the saved amp state has {len(state_dict)} loss scalers, and there are {len(state)} now: loading"
            " as many as both have."
        )
    state.update(zip(list(state), state_dict.values(), strict=False))
    api.load_state_dict(state)
