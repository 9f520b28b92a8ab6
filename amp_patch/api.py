"""The public functions: Apex's names and signatures first, then what this package adds."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .casting import cast_tree
from .config import Policy
from .dtypes import dtype_name
from .errors import ArgumentTypeError, CheckpointError, ModelError
from .reporting import say, set_verbosity
from .session import Session, Stats, as_enabled, as_models, as_optimizers, choose_policy, hold
from .session import current as _current
from .user_functions import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)

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
        verbosity: 0 keeps the package's messages off stdout; they still go to the logger "amp_patch".
        min_loss_scale, max_loss_scale: bounds of a dynamic loss scale.
        lists: op lists for O1 and O4: a shipped name, a path, or a sequence of them, of which later ones win.
        presets: path of a presets file to use instead of the shipped one; default: the variable AMP_PATCH_PRESETS.
        replace: close a session that is still in use instead of raising.
        overflow_group: the ranks that skip the same steps under a dynamic scale, as a process group or a DeviceMesh; in
            each step they reduce a few numbers. None: those that hold shards of the models, else (and if False) each
            rank decides for itself, which is right under DistributedDataParallel.

    Returns:
        `models` if `optimizers` is None, else `(models, optimizers)`: the same objects, in the shape they came in.

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
        with contextlib.suppress(ArgumentTypeError):
            for optimizer in as_optimizers(None if isinstance(optimizers, Iterator) else optimizers):
                vars(optimizer)["step_was_skipped"] = False  # for loops that ask
        return returned
    models, returned = hold(models, returned, 0 if optimizers is not None else None)
    optimizers, returned = hold(optimizers, returned, 1 if optimizers is not None else None)
    model_list, optimizer_list = as_models(models), as_optimizers(optimizers)
    if not model_list:
        raise ModelError("initialize needs at least one model; use amp.session(opt_level=...) for code without one")
    if not isinstance(num_losses, int) or num_losses < 1:
        raise ArgumentTypeError(f"num_losses={num_losses!r} must be a whole number of at least 1")
    policy = choose_policy(opt_level, arguments, presets)
    options: Any = {"num_losses": num_losses, "replace": replace, "overflow_group": overflow_group}
    opened = _current.initialize(policy, model_list, optimizer_list, **options)
    _announce(policy, opened)
    return returned


def _announce(policy: Policy, opened: Session) -> None:
    say("amp_patch: opt_level %s, %s", policy.opt_level, policy.description or "no description")
    for line in (*policy.describe(), *policy.explain_compute(opened.device_type)):
        say("%s", line)
    if opened.oplists is not None:
        absent = [entry.op for entry in opened.oplists.missing]
        if absent:
            say("Listed ops that this torch does not have: %s", ", ".join(absent))
        say("%d names patched, low dtype %s", len(opened.patcher), dtype_name(policy.low_dtype))


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
        `initialize` has not seen. ArgumentTypeError: the loss is no tensor. IndexError: no such `loss_id`.
    """
    if _current.state.is_disabled:
        return contextlib.nullcontext(loss)
    current = _current.require()
    optimizer_list = as_optimizers(optimizers)
    if not optimizer_list:
        raise ArgumentTypeError("scale_loss needs the optimizers whose parameters the loss reaches")
    return current.scale_loss(loss, optimizer_list, loss_id, delay_unscale)


def scale(tensors: Any, loss_id: int = 0) -> Any:
    """Return a tensor, or any container of tensors, multiplied by a loss scale: for `torch.autograd.grad` outside
    `scale_loss`.

    The product is float32 and differentiable. For a gradient penalty, scale the loss, take gradients with
    `create_graph=True`, `unscale` them, and add the penalty to the loss that goes through `scale_loss`: an overflow on
    the way makes that loss overflow, so the scale recovers.
    """
    return _with_scale(tensors, loss_id, lambda tensor, scale: tensor.float() * scale)


def unscale(gradients: Any, loss_id: int = 0) -> Any:
    """Return gradients (a tensor, or any container of tensors; None stays None) divided by a loss scale.

    Differentiable; the dtype is kept.
    """
    return _with_scale(gradients, loss_id, lambda gradient, scale: gradient / scale)


def _with_scale(tensors: Any, loss_id: int, apply: Callable[[Tensor, Tensor], Tensor]) -> Any:
    scaler = None if _current.state.is_disabled else _current.require().scaler(loss_id)
    if scaler is None or scaler.is_identity:
        return tensors
    return cast_tree(tensors, lambda tensor: apply(tensor, scaler.scale_on(tensor.device)))


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Yield what the optimizer steps on: float32 masters where there are masters, the model's parameters elsewhere.

    Clip the gradients of these.
    """
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return `{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}`, one entry for each scaler; empty when
    disabled.

    Plain Python, so torch.load reads it with weights_only=True. Waits for the device.
    """
    result = {} if destination is None else destination
    if not _current.state.is_disabled:
        for index, scaler in enumerate(_current.require().scalers):
            result[f"loss_scaler{index}"] = scaler.state_dict()
    return result


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load what `state_dict` (or Apex's) returned.

    Raises CheckpointError, before anything is loaded, if it does not fit the scalers.
    """
    if _current.state.is_disabled:
        return
    scalers = _current.require().scalers
    expected = [f"loss_scaler{index}" for index in range(len(scalers))]
    if sorted(state_dict) != sorted(expected):
        raise CheckpointError(
            f"the saved amp state holds {', '.join(map(str, state_dict)) or 'nothing'}, but this session has"
            f" {len(scalers)} loss scalers ({', '.join(expected)}): pass the same num_losses to initialize"
        )
    before = [scaler.state_dict() for scaler in scalers]
    try:
        for name, scaler in zip(expected, scalers, strict=True):
            scaler.load_state_dict(state_dict[name])
    except (KeyError, TypeError, ValueError) as error:
        for scaler, saved in zip(scalers, before, strict=True):
            scaler.load_state_dict(saved)
        raise CheckpointError(f"the saved amp state cannot be read: {error}") from error


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

    Raises SessionError if a session is in force already, and PolicyError at a level that casts models and patches
    nothing.
    """
    set_verbosity(verbosity)
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu" if torch.accelerator.is_available() else "cpu"
    device_type = torch.device(device).type
    overrides = {"lists": lists, "patch_torch_functions_type": patch_torch_functions_type, "compute": compute}
    policy = choose_policy(opt_level, overrides, presets, has_models=False)
    for line in policy.explain_compute(device_type):
        say("%s", line)
    with _current.without_model(policy, device_type):
        yield


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


def is_patched(owner: Any, name: str) -> bool:
    """Tell whether `owner.name`, such as `(torch, "matmul")`, is patched now."""
    opened = _current.state.session
    return opened is not None and opened.patcher.is_patched(owner, name)


def get_original(owner: Any, name: str) -> Any:
    """Return `owner.name` as it is without patches."""
    opened = _current.state.session
    original = None if opened is None else opened.patcher.get_original(owner, name)
    return getattr(owner, name) if original is None else original


def stats(*, wait: bool = True) -> Stats:
    """Return the level, counts and loss scales of the session in force; zeros and None without one.

    Waits for the device, unless `wait` is False: steps and scales are then those that the host knows of by now.
    """
    opened = _current.state.session
    if opened is None:
        return Stats(None, None, 0, 0, 0, 0, 0, ())
    return opened.stats(wait=wait)
