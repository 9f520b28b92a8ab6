"""The public functions of the package: Apex's functions, and functions that Apex lacks."""

import contextlib
import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .casting import cast_tree
from .config import DEFAULT_LEVEL, make_policy
from .errors import ArgumentTypeError, ModelError, refuse_unknown
from .events import tell
from .functions import (
    float_function,
    get_original,
    half_function,
    is_patched,
    match_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_match_function,
    register_promote_function,
)
from .hardware import as_device_type
from .reporting import say, say_once, set_verbosity
from .saving import load_state_dict, state_dict
from .session import Session, Stats, as_enabled, as_models, as_optimizers, choose_policy, find_gathered_dtype, read_once
from .session import current as _current
from .torch_private import without_overrides
from .training import UnscaledBlock, remove_step_was_skipped, set_step_was_skipped

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = [
    "Stats",
    "disable_casts",
    "float_function",
    "fsdp_policy",
    "get_original",
    "half_function",
    "initialize",
    "is_patched",
    "load_state_dict",
    "master_params",
    "match_function",
    "promote_function",
    "refresh",
    "register_float_function",
    "register_half_function",
    "register_match_function",
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


@refuse_unknown
def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool | str = True,
    opt_level: str = DEFAULT_LEVEL,
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
    split_masters: bool | None = None,
    optimizer_state_type: torch.dtype | str | None = None,
    lists: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    presets: str | os.PathLike[str] | None = None,
    replace: bool = False,
    overflow_group: Any = None,
) -> Any:
    """Prepare models and optimizers for mixed precision at an optimization level.

    Call it after the models are on their device and sharded (`fully_shard`, tensor parallelism,
    FullyShardedDataParallel), and the optimizers exist. Wrap models in DistributedDataParallel afterwards.

    Args:
        models: a torch.nn.Module or a sequence of them, in float32. Frozen weights may be in 16 bits at O1 and O4, and
            all weights at O3. Changed in place.
        optimizers: None, a torch.optim.Optimizer, or a sequence of them. Changed in place.
        enabled: False (or "False") turns amp off: nothing is cast, and `scale_loss` yields the loss itself.
        opt_level: a level of the presets: "O0" to "O5", or one of your own.
        cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights: each replaces the level's property
            of the same name. `lists/presets.yaml` explains the properties.
        patch_torch_functions_type, compute, split_masters, optimizer_state_type: replace properties in the same way.
        loss_scale: replaces the level's loss scale: a positive number, "dynamic", or a mapping of some of `init`,
            `growth_factor`, `backoff_factor`, `growth_interval` and `hysteresis` for a dynamic scale.
        cast_model_outputs: dtype of the models' floating outputs. Default: float32 if models are cast, else unchanged.
        num_losses: the number of loss scales; `scale_loss(..., loss_id=i)` selects one. As in Apex, if a later
            `initialize` passes another optimizer, dynamic scales that were used return to their first value.
        verbosity: 0 sends messages to the logger "amp_patch" only. 1 also shows them on stdout. 2 also logs each
            overflow as a warning with the step and the parameters; a step with a loss scale then waits for the device.
        min_loss_scale, max_loss_scale: bounds of a dynamic loss scale.
        lists: op lists in place of the level's: a shipped name, a path, or a sequence of them. Later ones win.
        presets: path of a presets file in place of the shipped one. Default: environment variable AMP_PATCH_PRESETS.
        replace: undo earlier calls whose models are still in use, instead of adding to them or raising an error.
        overflow_group: the process group or DeviceMesh whose ranks skip the same steps under a dynamic scale. They
            reduce a few numbers in each step. None: the ranks that hold shards of the models, if any. Without shards,
            or with False, each rank decides for itself, which is right under DistributedDataParallel.

    Returns:
        `models` if `optimizers` is None, else `(models, optimizers)`: the same objects, in the shape you passed them
            (an iterator becomes a list). Without `replace`, a second call with the same arguments changes nothing.

    Raises:
        PolicyError, OpListError, ModelError, OptimizerError, ArgumentTypeError: an argument is wrong. Models and
            optimizers were not changed, except that with `replace`, earlier calls may have been undone.
        SessionError: a `scale_loss` block is open, or models of a call with another policy are alive (with
            `enabled=False`: of any call), or a `session` block with another policy is open.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
        >>> model[0](torch.ones(2, 4)).dtype  # whitelisted: runs in bfloat16
        torch.bfloat16
        >>> model(torch.ones(2, 4)).dtype  # softmax is blacklisted: runs in float32
        torch.float32
    """
    arguments = locals()  # all arguments by name; `choose_policy` picks the properties of the level among them
    models, optimizers = read_once(models), read_once(optimizers)
    returned = models if optimizers is None else (models, optimizers)
    is_enabled = as_enabled(enabled)
    set_verbosity(verbosity)
    if not is_enabled:
        _current.disable()
        for optimizer in _find_valid_optimizers(optimizers):
            set_step_was_skipped(optimizer, False)  # for training loops that read the attribute
        return returned
    model_list, optimizer_list = as_models(models), as_optimizers(optimizers)
    if not model_list:
        advice = "pass it, or use amp.session(opt_level=...) for code without a model"
        raise ModelError(f"initialize needs at least one model: {advice}")
    if not isinstance(num_losses, int) or num_losses < 1:
        advice = "pass the number of losses, or leave it out"
        raise ArgumentTypeError(f"num_losses={num_losses!r} must be a whole number of at least 1: {advice}")
    policy = choose_policy(opt_level, arguments, presets)
    options: Any = {"num_losses": num_losses, "replace": replace, "overflow_group": overflow_group}
    earlier_session = _current.state.session
    with without_overrides():
        current_session = _current.initialize(policy, model_list, optimizer_list, **options)
    _announce(current_session, is_joined=current_session is earlier_session)
    return returned


def _announce(session: Session, *, is_joined: bool) -> None:
    """Tell the user the properties of a new session, or in one line that the models have joined an earlier session."""
    policy = session.policy
    if is_joined:
        names = ", ".join(type(model).__name__ for model in session.models())
        say("amp_patch: opt_level %s as before, for %s", policy.opt_level, names)
        return
    say("amp_patch: opt_level %s, %s", policy.opt_level, policy.description or "no description")
    properties = dict(policy.describe())
    del properties["opt_level"]
    if session.oplists is not None:
        properties["names patched"] = str(len(session.patcher))
    say("  %s", ", ".join(f"{name}: {value}" for name, value in properties.items()))
    if session.oplists is not None and session.oplists.missing:
        say("  ops that this torch lacks: %s", ", ".join(entry.op for entry in session.oplists.missing))
    for sentence in policy.explain_compute(session.device_type):
        say_once(sentence)


def _find_valid_optimizers(optimizers: Any) -> Sequence[Any]:
    """Return the optimizers in an argument. If it is not valid, return (): with `enabled=False`, that is no error."""
    with contextlib.suppress(ArgumentTypeError):
        return as_optimizers(optimizers)
    return ()


def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> contextlib.AbstractContextManager[Tensor]:
    """Context manager: multiply the loss by the loss scale, and divide the gradients by it at the end of the block.

    After the block, `.grad` (of float32 masters, if there are any) holds unscaled sums: clip, log or accumulate them
    as usual. If a gradient of these optimizers is inf or NaN under a dynamic scale, their next `step()` is skipped, and
    the scale falls (to half, by default).

    Args:
        loss: a floating tensor on the models' device. It is 0-dim, unless you pass a gradient to `backward`.
        optimizers: the optimizers that own the parameters this loss reaches: one, or an iterable.
        loss_id: which loss scale to use.
        model: ignored, as in Apex.
        delay_unscale: leave the gradients scaled until a later block or the step. When scripts accumulate
            gradients, they may pass True for all but the last backward pass before a step.
        delay_overflow_check: ignored: the check runs on the device, and the host does not wait for it in this block.

    Yields:
        `loss.float()` times the scale; `loss.float()` if the scale is always 1; the loss itself if amp is disabled.

    After the first block, a block waits for the device only if an exception ends it. Under a dynamic scale, `step()`
    waits once. torch's fused Adam, AdamW, SGD and Adagrad can skip on the device instead, unless the script adds hooks
    to their steps. Messages about such skips come at a later step, or when you read `step_was_skipped` or `stats()`.

    Raises:
        SessionError: `initialize` was not called, or the models had another type of device then than the loss has now.
        OptimizerError: `initialize` does not know the optimizer.
        ArgumentTypeError: the loss is not a floating tensor, or `optimizers` is empty or holds something else.
        LossIdError: no such `loss_id`.

    Examples:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O4", loss_scale={"init": 8.0}, verbosity=0)
        >>> loss = model(torch.ones(2, 4)).square().mean()
        >>> with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...     (scaled_loss / loss).item()
        ...     scaled_loss.backward()
        8.0
        >>> optimizer.step()
        >>> optimizer.step_was_skipped
        False
    """
    if _current.state.is_disabled:
        return UnscaledBlock(loss)
    current = _current.require()
    optimizer_list = as_optimizers(optimizers)
    if not optimizer_list:
        raise ArgumentTypeError(
            "scale_loss needs the optimizers whose parameters the loss reaches: pass one, or a list of them, after it"
        )
    return current.scale_loss(loss, optimizer_list, loss_id, delay_unscale)


def scale(tensors: Any, loss_id: int = 0) -> Any:
    """Multiply a tensor, or any container of tensors, by a loss scale, for `torch.autograd.grad` outside `scale_loss`.

    The product is differentiable. It is float32, or complex for a complex tensor. If the scale is always 1, or amp is
    disabled, returns `tensors` itself. For a gradient penalty, scale the output, take gradients with
    `create_graph=True`, `unscale` them, and add the penalty to the loss that you pass to `scale_loss`. If the gradients
    overflow, that loss overflows too, so a dynamic scale falls. Raises ArgumentTypeError for a number or text,
    SessionError before `initialize`, and LossIdError for an unknown `loss_id`.

    Examples:
        >>> model = amp.initialize(torch.nn.Linear(4, 1), opt_level="O4", loss_scale=8.0, verbosity=0)
        >>> x = torch.ones(2, 4, requires_grad=True)
        >>> output = amp.scale(model(x).sum())
        >>> gradient = amp.unscale(torch.autograd.grad(output, x, create_graph=True)[0])
        >>> penalty = gradient.norm(dim=-1).sub(1).square().mean()
    """
    tell(contextlib.nullcontext(), "values_scaled")  # watchers of this event compute nothing, so casts may stay on
    return _with_scale(tensors, loss_id, lambda value, scale: (value if value.is_complex() else value.float()) * scale)


def unscale(gradients: Any, loss_id: int = 0) -> Any:
    """Divide gradients (a tensor, or any container of tensors; None stays None) by a loss scale.

    The result is differentiable, and has the dtype of the gradients. Raises the errors of `scale`.

    Examples:
        >>> model = amp.initialize(torch.nn.Linear(4, 1), opt_level="O4", loss_scale=8.0, verbosity=0)
        >>> amp.unscale([torch.ones(2), None])
        [tensor([0.1250, 0.1250]), None]
    """
    # `to`, because torch gives the quotient of a 0-dim gradient the dtype of the scale, float32
    return _with_scale(gradients, loss_id, lambda gradient, scale: (gradient / scale).to(gradient.dtype))


def _with_scale(tensors: Any, loss_id: int, apply: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Replace each tensor by `apply(tensor, scale)`. If the scale is always 1, or amp is disabled, change nothing."""
    if isinstance(tensors, (numbers.Number, str, bytes)):
        raise ArgumentTypeError(
            f"{tensors!r} is not a tensor or a container of tensors: pass the loss itself or gradients, no .item()"
        )
    scaler = None if _current.state.is_disabled else _current.require_own().scaler(loss_id)
    if scaler is None or scaler.is_identity:
        return tensors
    return cast_tree(tensors, lambda tensor: apply(tensor, scaler.scale_on(tensor.device)))


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Yield the parameters that the optimizer updates: at levels with masters, masters in place of 16-bit parameters.

    Use it to clip gradients. Raises ArgumentTypeError if `optimizer` is not an optimizer.

    Examples:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
        >>> with amp.scale_loss(model(torch.ones(2, 4)).square().mean(), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm=1.0)
        >>> {parameter.dtype for parameter in amp.master_params(optimizer)}
        {torch.float32}
    """
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list):
        expected = "one optimizer at a time" if isinstance(optimizer, (list, tuple)) else "the optimizer"
        raise ArgumentTypeError(
            f"master_params takes {expected}, not"
            f" {type(optimizer).__name__}: write `for p in amp.master_params(optimizer)`"
        )
    return (parameter for group in groups for parameter in group["params"])


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Context manager and decorator: run the body without casts, in this thread.

    It has no effect at levels that patch no functions.

    Examples:
        >>> model = amp.initialize(torch.nn.Linear(4, 1), opt_level="O4", verbosity=0)
        >>> with amp.disable_casts():
        ...     model(torch.ones(2, 4)).dtype
        torch.float32
    """
    with _current.without_casts():
        yield


@refuse_unknown
@contextlib.contextmanager
def session(
    opt_level: str = DEFAULT_LEVEL,
    *,
    device: torch.device | str | None = None,
    lists: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    presets: str | os.PathLike[str] | None = None,
    patch_torch_functions_type: torch.dtype | str | None = None,
    compute: str | None = None,
    verbosity: int = 0,
) -> Iterator[None]:
    """Context manager: cast the arguments of torch's functions by the op lists of a level, for code without a model.

    Args:
        opt_level: a level that patches functions, such as "O1" or "O4". "O0" casts nothing.
        device: the device whose tensors are cast. Default: the accelerator if there is one, else the CPU.
        lists, presets, patch_torch_functions_type, compute, verbosity: as for `initialize`.

    Raises SessionError inside another such block or while an initialized model is alive, PolicyError at a level that
    casts models, ArgumentValueError for an unknown device, and the errors of `initialize` for its arguments.

    Examples:
        >>> with amp.session(opt_level="O4", device="cpu"):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    set_verbosity(verbosity)
    device_type = as_device_type(device)
    overrides = {"lists": lists, "patch_torch_functions_type": patch_torch_functions_type, "compute": compute}
    policy = choose_policy(opt_level, overrides, presets, has_models=False)
    for sentence in policy.explain_compute(device_type):
        say_once(sentence)
    with _current.without_model(policy, device_type):
        yield


@contextlib.contextmanager
def scope(models: Any, optimizers: Any = None, **options: Any) -> Iterator[Any]:
    """Context manager: call `initialize`, and undo it at the end of the block, even after an exception.

    After the block, torch and the optimizers are as before, and weights keep their trained values, as after `reset`.
    Optimizer states are converted to the dtypes of the weights. You can use several scopes one after the other, also on
    the same objects, but you cannot nest them.

    Args:
        models, optimizers, options: as for `initialize`, except `replace`.

    Yields:
        the result of `initialize`.

    Raises SessionError in a `session` block or while an initialized model is alive, and the errors of `initialize`.

    Examples:
        >>> model = torch.nn.Linear(2, 2)
        >>> with amp.scope(model, opt_level="O2", verbosity=0):
        ...     model.weight.dtype
        torch.float16
        >>> model.weight.dtype
        torch.float32
    """
    if "replace" in options:
        raise ArgumentTypeError("scope takes no `replace`: to close another session, call amp.reset() first")
    models, optimizers = read_once(models), read_once(optimizers)
    _current.check_that_none_is_in_use()
    was_disabled = _current.state.is_disabled
    returned = initialize(models, optimizers, **options)
    opened_session = _current.state.session
    try:
        yield returned
    finally:
        _current.end_scope(opened_session, was_disabled=was_disabled)
        # with enabled=False there is no session, but `initialize` has given the optimizers an attribute
        if opened_session is None and not was_disabled:
            for optimizer in _find_valid_optimizers(optimizers):
                remove_step_was_skipped(optimizer)


def reset() -> None:
    """Undo `initialize`: restore torch's functions and the optimizers. Weights keep their trained values.

    Weights that `initialize` cast take the float32 values of their masters. Without masters, they return to their
    earlier dtype. Raises SessionError inside a `scale_loss` block.

    Examples:
        >>> original = torch.matmul
        >>> model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O4", verbosity=0)
        >>> amp.reset()
        >>> torch.matmul is original
        True
    """
    _current.reset()


def refresh() -> None:
    """Copy masters to parameters, and recast every cached weight before its next use.

    Call it after an edit of weights that torch does not track, such as `weight.data.mul_(2)`. At levels with masters,
    edit the masters instead: `refresh` may overwrite such edits of the weights.

    Examples:
        >>> model = amp.initialize(torch.nn.Linear(4, 1), opt_level="O4", verbosity=0)
        >>> _ = model.weight.data.zero_()  # an edit that torch does not track
        >>> amp.refresh()
    """
    if _current.state.session is not None:
        _current.state.session.refresh()


def stats(*, wait: bool = True) -> Stats:
    """Return the level, counts and loss scales of the session, or zeros and None without a session.

    Waits for the device. With `wait=False` it does not wait, and returns the latest counts that the host knows.

    Examples:
        >>> model = amp.initialize(torch.nn.Linear(4, 1), opt_level="O5", verbosity=0)
        >>> amp.stats().parameters_low, amp.stats().steps
        (5, 0)
    """
    current_session = _current.state.session
    if current_session is None:
        return Stats(None, None, 0, 0, 0, 0, 0, ())
    return current_session.stats(wait=wait)


def fsdp_policy(
    opt_level: str, module: torch.nn.Module | None = None, *, reduce_dtype: torch.dtype | None = None
) -> "MixedPrecisionPolicy":
    """Return the `mp_policy` to pass to `torch.distributed.fsdp.fully_shard` for a level.

    At O2 and O5, the float32 shards are the masters. Parameters are gathered and used in the level's 16-bit dtype, and
    gradients are reduced in it, as under DistributedDataParallel. At the other levels, FSDP casts nothing.

    Args:
        opt_level: a level of the shipped presets, or of the file that AMP_PATCH_PRESETS names.
        module: the module that is sharded. It matters for a batch normalization layer that is sharded by itself: such a
            layer stays float32 at O2 and O5.
        reduce_dtype: the dtype in which gradients are summed over the ranks, at O2 and O5. None: the 16-bit dtype.
            float32 is more exact and doubles the traffic.

    Raises PolicyError for an unknown level, and ArgumentTypeError if `module` or `reduce_dtype` has the wrong type.

    Examples:
        >>> amp.fsdp_policy("O5").param_dtype
        torch.bfloat16
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if reduce_dtype is not None and not isinstance(reduce_dtype, torch.dtype):
        raise ArgumentTypeError(
            f"reduce_dtype={reduce_dtype!r} is not a torch.dtype: pass torch.float32, or leave it out"
        )
    if module is not None and not isinstance(module, torch.nn.Module):
        raise ArgumentTypeError(
            f"module must be the torch.nn.Module that is sharded, not {type(module).__name__}: pass it, or leave it out"
        )
    low = find_gathered_dtype(make_policy(opt_level, {}), module)
    if low is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce_dtype or low)
