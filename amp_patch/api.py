"""The public functions: Apex's names and signatures first, then what this package adds."""

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .casting import cast_tree
from .config import Policy, make_policy
from .errors import ArgumentTypeError, CheckpointError, ModelError, did_you_mean
from .functions import (
    float_function,
    get_original,
    half_function,
    is_patched,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .hardware import as_device_type
from .reporting import say, say_once, set_verbosity
from .session import Session, Stats, as_enabled, as_models, as_optimizers, choose_policy, find_gathered_dtype, hold
from .session import current as _current
from .training import UnscaledBlock

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = [
    "Stats",
    "disable_casts",
    "float_function",
    "get_original",
    "half_function",
    "initialize",
    "is_patched",
    "load_state_dict",
    "master_params",
    "promote_function",
    "refresh",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "reset",
    "scale",
    "scale_loss",
    "scope",
    "session",
    "state_dict",
    "stats",
    "unscale",
]


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool | str = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | str | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | Mapping[str, float | str] | None = None,
    cast_model_outputs: torch.dtype | str | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    patch_torch_functions_type: torch.dtype | str | None = None,
    compute: str | None = None,
    lists: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    presets: str | os.PathLike[str] | None = None,
    replace: bool = False,
    overflow_group: Any = None,
) -> Any:
    """Prepare models and optimizers for mixed precision at an optimization level.

    Call it after the models are on their device and the optimizers exist: before DistributedDataParallel, and after
    what shards parameters (`fully_shard`, tensor parallelism, FullyShardedDataParallel).

    Args:
        models: a torch.nn.Module or a sequence of them, float32 (any precision at O3). Changed in place.
        optimizers: None, a torch.optim.Optimizer, or a sequence of them. Changed in place.
        enabled: False (or the word, as a string) makes this and every other function of the package do nothing.
        opt_level: a level of the presets: "O0" to "O5", or one of your own.
        cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, patch_torch_functions_type:
            override one property of the level, as do the next two; `lists/presets.yaml` says what each means.
        loss_scale: a positive number, "dynamic", or a mapping of some of `init`, `growth_factor`, `backoff_factor`,
            `growth_interval` and `hysteresis`, which says how a dynamic one moves.
        compute: "auto", "native" or "float32".
        cast_model_outputs: dtype of the models' floating outputs; by default float32 where the model is cast, else as
            they come.
        num_losses: how many loss scalers there are; `scale_loss(..., loss_id=i)` picks one.
        verbosity: 0 keeps the package's messages off stdout; they still go to the logger "amp_patch". 1 shows them. 2
            tells of each overflow as a warning of that logger, with the step and the parameters, for which every step
            waits for the device.
        min_loss_scale, max_loss_scale: bounds of a dynamic loss scale.
        lists: op lists for O1 and O4: a shipped name, a path, or a sequence of them, of which later ones win.
        presets: path of a presets file to use instead of the shipped one; default: the variable AMP_PATCH_PRESETS.
        replace: close a session that is still in use instead of raising.
        overflow_group: the ranks that skip the same steps under a dynamic scale, as a process group or a DeviceMesh; in
            each step they reduce a few numbers. None: those that hold shards of the models, else (and if False) each
            rank decides for itself, which is right under DistributedDataParallel.

    Returns:
        `models` if `optimizers` is None, else `(models, optimizers)`: the same objects, in the shape they came in. The
        same call again, on what it returned, changes nothing.

    Raises:
        PolicyError, OpListError, ModelError, OptimizerError, ArgumentTypeError: something does not fit; nothing was
            changed.
        SessionError: models under another policy are still alive.
    """
    arguments = locals()  # those that override a property of the level
    returned = models if optimizers is None else (models, optimizers)
    is_enabled = as_enabled(enabled)
    set_verbosity(verbosity)
    if not is_enabled:
        _current.disable()
        for optimizer in _as_optimizers_of_any(optimizers):
            vars(optimizer)["step_was_skipped"] = False  # for loops that ask
        return returned
    models, returned = hold(models, returned, 0 if optimizers is not None else None)
    optimizers, returned = hold(optimizers, returned, 1 if optimizers is not None else None)
    model_list, optimizer_list = as_models(models), as_optimizers(optimizers)
    if not model_list:
        raise ModelError("initialize needs at least one model; use amp.session(opt_level=...) for code without one")
    if not isinstance(num_losses, int) or num_losses < 1:
        raise ArgumentTypeError(
            f"num_losses={num_losses!r} must be a whole number of at least 1: how many losses have a scale of their own"
        )
    policy = choose_policy(opt_level, arguments, presets)
    options: Any = {"num_losses": num_losses, "replace": replace, "overflow_group": overflow_group}
    before = _current.state.session
    opened = _current.initialize(policy, model_list, optimizer_list, **options)
    _announce(opened, is_known=opened is before)
    return returned


def _announce(opened: Session, *, is_known: bool) -> None:
    """Tell of a session that was opened, or in a line of one that was there before and has these models now."""
    policy = opened.policy
    if is_known:
        names = ", ".join(type(model).__name__ for model in opened.models())
        say("amp_patch: opt_level %s as before, for %s", policy.opt_level, names)
        return
    say("amp_patch: opt_level %s, %s", policy.opt_level, policy.description or "no description")
    properties = dict(policy.describe())
    del properties["opt_level"]
    if opened.oplists is not None:
        properties["names patched"] = str(len(opened.patcher))
    say("  %s", ", ".join(f"{name}: {value}" for name, value in properties.items()))
    if opened.oplists is not None and opened.oplists.missing:
        say("  ops that this torch lacks: %s", ", ".join(entry.op for entry in opened.oplists.missing))
    _announce_compute(policy, opened.device_type)


def _announce_compute(policy: Policy, device_type: str) -> None:
    """Tell, once in a process, of products that are not computed by instructions made for them."""
    for sentence in policy.explain_compute(device_type):
        say_once(sentence)


def _as_optimizers_of_any(optimizers: Any) -> Sequence[Any]:
    """Return the optimizers of an argument that may be anything: amp is disabled."""
    with contextlib.suppress(ArgumentTypeError):
        return as_optimizers(None if isinstance(optimizers, Iterator) else optimizers)
    return ()


def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> contextlib.AbstractContextManager[Tensor]:
    """Context manager that gives the loss times the loss scale; when it exits, gradients are divided by it again.

    After the exit `.grad` (of the masters, where there are masters) holds true sums: clip, log or accumulate them as
    they are. If one is inf or NaN under a dynamic scale, the next `step()` of each optimizer passed here is skipped
    once, and the scale halves.

    Args:
        loss: a floating tensor on the models' device, usually 0-dim.
        optimizers: the optimizers that own the parameters this loss reaches: one, or an iterable.
        loss_id: which loss scaler to use.
        model: ignored, as in Apex.
        delay_unscale: hold the gradients: leave them scaled, and 16-bit ones out of the masters. Use it for all but the
            last backward pass of an accumulation window.
        delay_overflow_check: ignored; a check costs nothing here until the step reads it.

    Yields:
        `loss.float()` times the scale; the loss itself, if it is float32 and the scale is 1.

    Waits for the device: never. Under a dynamic scale `step()` waits for one flag, except torch's fused Adam, AdamW,
    SGD and Adagrad, which are handed the flag on the device; what users are told of their steps then comes one step
    later, or when `step_was_skipped` or `stats()` is read.

    Raises:
        SessionError: before `initialize`, or if the models have changed device. OptimizerError: an optimizer that
        `initialize` has not seen. ArgumentTypeError: the loss is no floating tensor. LossIdError: no such `loss_id`.
    """
    if _current.state.is_disabled:
        return UnscaledBlock(loss)
    current = _current.require()
    optimizer_list = as_optimizers(optimizers)
    if not optimizer_list:
        raise ArgumentTypeError(
            "scale_loss needs the optimizers whose parameters the loss reaches: pass one, or a list of them, after the"
            " loss"
        )
    return current.scale_loss(loss, optimizer_list, loss_id, delay_unscale)


def scale(tensors: Any, loss_id: int = 0) -> Any:
    """Return a tensor, or any container of tensors, multiplied by a loss scale: for `torch.autograd.grad` outside
    `scale_loss`.

    The product is float32 and differentiable. For a gradient penalty, scale the loss, take gradients with
    `create_graph=True`, `unscale` them, and add the penalty to the loss that goes through `scale_loss`: an overflow on
    the way makes that loss overflow, so the scale recovers. Raises ArgumentTypeError for a number.
    """
    return _with_scale(tensors, loss_id, lambda tensor, scale: tensor.float() * scale)


def unscale(gradients: Any, loss_id: int = 0) -> Any:
    """Return gradients (a tensor, or any container of tensors; None stays None) divided by a loss scale.

    Differentiable; the dtype is kept.
    """
    return _with_scale(gradients, loss_id, lambda gradient, scale: gradient / scale)


def _with_scale(tensors: Any, loss_id: int, apply: Callable[[Tensor, Tensor], Tensor]) -> Any:
    if isinstance(tensors, (int, float, str)):
        raise ArgumentTypeError(
            f"{tensors!r} is no tensor, nor a container of tensors: pass the loss itself, and not its .item()"
        )
    scaler = None if _current.state.is_disabled else _current.require().scaler(loss_id)
    if scaler is None or scaler.is_identity:
        return tensors
    return cast_tree(tensors, lambda tensor: apply(tensor, scaler.scale_on(tensor.device)))


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Yield what the optimizer steps on: float32 masters where there are masters, the model's parameters elsewhere.

    Clip the gradients of these. Raises ArgumentTypeError for what is no optimizer.
    """
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list):
        several = isinstance(optimizer, (list, tuple))
        raise ArgumentTypeError(
            f"master_params takes {'one optimizer at a time' if several else 'the optimizer'}, not"
            f" {type(optimizer).__name__}: `for p in amp.master_params(optimizer)`"
        )
    return (parameter for group in groups for parameter in group["params"])


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Context manager and decorator: run the body as plain torch, in this thread.

    Does nothing at levels that patch nothing.
    """
    with _current.without_casts():
        yield


@contextlib.contextmanager
def session(
    opt_level: str = "O1",
    *,
    device: torch.device | str | None = None,
    lists: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    presets: str | os.PathLike[str] | None = None,
    patch_torch_functions_type: torch.dtype | str | None = None,
    compute: str | None = None,
    verbosity: int = 0,
) -> Iterator[None]:
    """Context manager: the casts of a level for code without a model to initialize.

    Args:
        opt_level: a level that patches functions, such as "O1" or "O4".
        device: whose tensors are cast; default: the accelerator if there is one, else the CPU.
        lists, presets, patch_torch_functions_type, compute, verbosity: as for `initialize`.

    Raises SessionError if a session is in force already, PolicyError at a level that casts models and patches nothing,
    and ArgumentValueError for a device that torch does not know.
    """
    set_verbosity(verbosity)
    device_type = as_device_type(device)
    overrides = {"lists": lists, "patch_torch_functions_type": patch_torch_functions_type, "compute": compute}
    policy = choose_policy(opt_level, overrides, presets, has_models=False)
    _announce_compute(policy, device_type)
    with _current.without_model(policy, device_type):
        yield


@contextlib.contextmanager
def scope(models: Any, optimizers: Any = None, **options: Any) -> Iterator[Any]:
    """Context manager: `initialize` for the length of the block, which ends as `reset` does, also by an exception.

    After the block torch is as it was found, and so are the methods and groups of the optimizers. Weights that were
    cast are float32 again, with the values of their masters where there are masters, and optimizer states go with them;
    without masters they have the dtype that they had. What was trained stays trained. Blocks may follow one another, on
    the same objects too; they do not nest.

    Args:
        models, optimizers, options: of `initialize`; not `replace`, which would close what is not the block's.

    Yields:
        what `initialize` returns.

    Raises SessionError if a session is in force already, ArgumentTypeError for an unknown option, and what `initialize`
    raises.
    """
    known = [name for name in inspect.signature(initialize).parameters if name not in ("models", "optimizers")]
    for name in options:
        if name == "replace":
            raise ArgumentTypeError(
                "scope takes no `replace`, since it closes no other session: call amp.reset() first"
            )
        if name not in known:
            hint = did_you_mean(name, known)
            raise ArgumentTypeError(f"scope takes no argument {name!r}: it takes those of initialize.{hint}")
    _current.refuse_second()
    was_disabled = _current.state.is_disabled
    returned = initialize(models, optimizers, **options)
    opened = _current.state.session
    try:
        yield returned
    finally:
        _current.end_scope(opened, was_disabled=was_disabled)
        if opened is None and not was_disabled:
            for optimizer in _as_optimizers_of_any(optimizers):
                vars(optimizer).pop("step_was_skipped", None)


def reset() -> None:
    """Undo everything that `initialize` did: torch's functions, the models (float32 again, with the trained weights)
    and the optimizers.
    """
    _current.reset()


def refresh() -> None:
    """Have cached low-precision weights made anew before their next use.

    Needed only after edits torch cannot see, such as `p.data.mul_(2)`.
    """
    if _current.state.session is not None:
        _current.state.session.refresh()


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return `{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}`, one entry for each scaler; empty when
    disabled.

    Plain Python, so torch.load reads it with weights_only=True. Waits for the device. Raises ArgumentTypeError for a
    `destination` that is no dictionary.
    """
    if destination is not None and not isinstance(destination, MutableMapping):
        raise ArgumentTypeError(
            f"destination must be a dictionary to add entries to, not {type(destination).__name__}: leave it out for a"
            " new one"
        )
    result = {} if destination is None else destination
    if not _current.state.is_disabled:
        for index, scaler in enumerate(_current.require().scalers):
            result[f"loss_scaler{index}"] = scaler.state_dict()
    return result


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load what `state_dict` (or Apex's) returned.

    Raises before anything is loaded: ArgumentTypeError for what is no mapping, CheckpointError if it does not fit the
    scalers.
    """
    if _current.state.is_disabled:
        return
    scalers = _current.require().scalers
    if not isinstance(state_dict, Mapping):
        raise ArgumentTypeError(
            f"load_state_dict takes what amp.state_dict() returned, not {type(state_dict).__name__}: save it beside the"
            " model's, as {'amp': amp.state_dict()}, and pass torch.load(path)['amp']"
        )
    expected = [f"loss_scaler{index}" for index in range(len(scalers))]
    if set(state_dict) != set(expected):
        raise CheckpointError(
            f"the saved amp state holds {', '.join(map(str, state_dict)) or 'nothing'}, but this session has"
            f" {len(scalers)} loss scalers ({', '.join(expected)}): {_advise(state_dict)}"
        )
    before = [scaler.state_dict() for scaler in scalers]
    try:
        for name, scaler in zip(expected, scalers, strict=True):
            scaler.load_state_dict(_check_entry(name, state_dict[name]))
    except (TypeError, ValueError) as error:
        for scaler, saved in zip(scalers, before, strict=True):
            scaler.load_state_dict(saved)
        raise CheckpointError(
            f"the saved amp state cannot be read: {error}; each entry is as {{'loss_scale': 65536.0, 'unskipped': 0}}"
        ) from error


def _advise(state_dict: Mapping[str, Any]) -> str:
    for name, value in state_dict.items():
        if isinstance(value, Mapping) and any(str(key).startswith("loss_scaler") for key in value):
            return f"pass the entry {name!r} of this checkpoint"
    if any(str(key).startswith("loss_scaler") for key in state_dict):
        return "pass the same num_losses to initialize"
    return "pass what amp.state_dict() returned"


def _check_entry(name: str, entry: Any) -> dict[str, Any]:
    """Return the entry of a scaler; raises ValueError for what is none."""
    missing = [key for key in ("loss_scale", "unskipped") if not isinstance(entry, Mapping) or key not in entry]
    if missing:
        raise ValueError(f"{name} is {entry!r}, without {' and '.join(missing)}")
    return dict(entry)


def stats(*, wait: bool = True) -> Stats:
    """Return the level, counts and loss scales of the session in force; zeros and None without one.

    Waits for the device, unless `wait` is False: steps and scales are then those that the host knows of by now.
    """
    opened = _current.state.session
    if opened is None:
        return Stats(None, None, 0, 0, 0, 0, 0, ())
    return opened.stats(wait=wait)


def fsdp_policy(
    opt_level: str, module: torch.nn.Module | None = None, *, reduce_dtype: torch.dtype | None = None
) -> "MixedPrecisionPolicy":
    """Return the `mp_policy` with which `torch.distributed.fsdp.fully_shard` is to shard a module for a level.

    At levels with masters (O2, O5) the float32 shards are the masters: parameters are gathered, used and reduced in the
    low dtype, as DistributedDataParallel does at these levels. At the others nothing is cast by FSDP.

    Args:
        opt_level: a level of the shipped presets.
        module: what is sharded: a batch normalization layer stays in float32 where the level keeps them so, and so has
            to be sharded by itself. None: any other module.
        reduce_dtype: in which gradients are summed over the ranks; None: in the low dtype. float32 costs twice the
            traffic, and rounds sums less.

    Raises PolicyError for a level that there is not, and ArgumentTypeError for what is no module or dtype.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if reduce_dtype is not None and not isinstance(reduce_dtype, torch.dtype):
        raise ArgumentTypeError(f"reduce_dtype={reduce_dtype!r} is no torch.dtype: pass torch.float32, or leave it out")
    if module is not None and not isinstance(module, torch.nn.Module):
        raise ArgumentTypeError(
            f"module must be the torch.nn.Module that is sharded, not {type(module).__name__}: pass it, or leave it out"
        )
    low = find_gathered_dtype(make_policy(opt_level, {}), module)
    if low is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce_dtype or low)
