"""Reads and checks the arguments of the public functions, before anything is changed."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..config import Policy, load_oplists, make_policy
from ..config import presets as _presets
from ..dtypes import LOW_DTYPES, dtype_name
from ..errors import ArgumentTypeError, ModelError
from ..reporting import say
from ..script_settings import describe_replaced, in_force
from ..training import ids_beside_opaque
from .sharding import find_sharding_problem, is_instance_of

WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
"""Parallel wrappers, which `initialize` refuses: users wrap the models that it returns."""


def as_enabled(enabled: Any) -> bool:
    """Return the third argument of `initialize` as a bool.

    Raises ArgumentTypeError for text other than "true" and "false" in any case, such as a level.
    """
    if not isinstance(enabled, str):
        return bool(enabled)
    word = enabled.strip().lower()
    if word not in ("true", "false"):
        raise ArgumentTypeError(
            f"enabled={enabled!r}, the third argument of initialize, is neither True nor False: write"
            f" opt_level={enabled!r} if it is a level"
        )
    return word == "true"


# ---- models ----


def read_once(objects: Any) -> Any:
    """Return a list of the items if `objects` is an iterator, which can be read only once; else return `objects`."""
    return list(objects) if isinstance(objects, Iterator) else objects


def as_models(models: Any) -> list[nn.Module]:
    """Return the first argument of `initialize`, a module or an iterable, as a list of modules.

    Raises ArgumentTypeError if an item is no module.
    """
    result = [models]
    # some modules, such as nn.Sequential, and some classes are iterable, too
    if not isinstance(models, (nn.Module, type)) and _is_iterable(models):
        result = list(models)
    for model in result:
        if not isinstance(model, nn.Module):
            remedy = "pass the model itself, or amp.session(opt_level=...) for code without one"
            if isinstance(model, Optimizer):
                remedy = "models come first, then optimizers"
            raise ArgumentTypeError(
                f"models must be a torch.nn.Module or a sequence of them, not {_name_kind(model)}: {remedy}"
            )
    return result


def _is_iterable(value: Any) -> bool:
    try:
        iter(value)
    except TypeError:
        return False
    return True


def _name_kind(value: object) -> str:
    """Return the name of an object's type. If the object is a class, return its name, and the advice to make an
    instance.
    """
    return f"the class {value.__name__} (make an instance of it)" if isinstance(value, type) else type(value).__name__


def find_model_problems(model: nn.Module, policy: Policy, accept_low: bool = False) -> list[str]:
    """Return the reasons why `policy` cannot be applied to `model`. With `accept_low`, 16-bit weights are no reason."""
    name = type(model).__name__
    if isinstance(model, WRAPPERS):
        return [f"{name} is a parallel wrapper: pass the bare model to initialize, and wrap the result"]
    if isinstance(model, torch.jit.ScriptModule):
        return [
            f"{name} is TorchScript, which takes no hooks and calls no patched function: initialize the model it was"
            " made from"
        ]
    lazy = [key for key, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        return [f"{name} has uninitialized parameters ({_list_some(lazy)}): run one forward pass before initialize"]

    problems: list[str] = []
    sharding_problem = find_sharding_problem(model, policy)
    if sharding_problem is not None:
        problems.append(sharding_problem)
    if not accept_low and (policy.cast_model_type not in LOW_DTYPES or policy.master_weights):
        low = _find_wrongly_low(model, policy)
        if low:
            fix = "initialize casts the model"
            if policy.cast_model_type is None:
                fix = "only frozen weights (requires_grad=False) may be in 16 bits"
            problems.append(
                f"{name} is in 16 bits already ({_list_some(low)}): opt_level {policy.opt_level} starts from float32"
                f" weights. Leave out .half() and .bfloat16(); {fix}. Make a copy of an initialized model before"
                " initialize or after amp.reset(), when its weights are float32"
            )
    return problems


def _find_wrongly_low(model: nn.Module, policy: Policy) -> list[str]:
    """Return the names of 16-bit parameters and buffers that must be float32 when `policy` is applied."""
    low = {
        name: tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.dtype in LOW_DTYPES
    }
    if not low:
        return []
    allowed = ids_beside_opaque(model)  # ids of the 16-bit tensors of quantized layers, such as scales
    if policy.cast_model_type is None:  # weights keep their dtype, so frozen weights may be in 16 bits
        for module in model.modules():
            is_trained = False
            for parameter in module.parameters(recurse=False):
                is_trained = is_trained or parameter.requires_grad
                if not parameter.requires_grad:
                    allowed.add(id(parameter))
            if not is_trained:
                allowed.update(map(id, module.buffers(recurse=False)))
    return [name for name, tensor in low.items() if id(tensor) not in allowed]


def _list_some(names: Sequence[str]) -> str:
    """Return as text the first three names, and the number of further names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def device_type_of(models: Sequence[nn.Module]) -> str:
    """Return the device type of the models' parameters and buffers, such as "cuda"; "cpu" if they have none.

    Tensors on "meta" do not count. Raises ModelError if there are several types.
    """
    types: set[str] = set()
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            types.add(tensor.device.type)
    types.discard("meta")  # tensors on "meta" are offloaded, or get their values later
    if len(types) > 1:
        raise ModelError(
            f"the models are on several device types ({', '.join(sorted(types))}): move them to one before initialize"
        )
    return types.pop() if types else "cpu"


def ids_of_parameters(models: Sequence[nn.Module]) -> set[int]:
    """Return the ids of all parameters of the models."""
    ids: set[int] = set()
    for model in models:
        ids.update(map(id, model.parameters()))
    return ids


def describe(models: Sequence[nn.Module]) -> str:
    """Return the class names of the models, for messages."""
    return ", ".join(type(model).__name__ for model in models)


# ---- optimizers ----


def _get_wrapped(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper such as LARC (`.optim`) or AcceleratedOptimizer (`.optimizer`), or None if
    `optimizer` is no wrapper.

    AcceleratedOptimizer is a torch Optimizer itself, but has no `param_groups` of its own. An Optimizer with its own
    `param_groups`, such as Lookahead, is no wrapper.
    """
    if isinstance(optimizer, Optimizer) and "param_groups" not in vars(optimizer) and hasattr(optimizer, "optimizer"):
        return optimizer.optimizer
    return None if isinstance(optimizer, Optimizer) else getattr(optimizer, "optim", None)


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside wrappers, or `optimizer` itself. Raises ArgumentTypeError if there is none."""
    inner = optimizer
    while (wrapped := _get_wrapped(inner)) is not None:
        inner = wrapped
    if not isinstance(inner, Optimizer):
        raise _wrong_optimizer(optimizer)
    return inner


def _wrong_optimizer(given: object) -> ArgumentTypeError:
    """Return the error for an object that was passed as an optimizer, but is not one."""
    if isinstance(given, nn.Module):
        remedy = "pass the optimizer of its parameters"
    elif isinstance(given, Tensor) and not isinstance(given, nn.Parameter):
        remedy = "scale_loss takes the loss first, so write scale_loss(loss, optimizer)"
    elif isinstance(given, Tensor):
        remedy = "make an optimizer of the parameters first, as torch.optim.SGD(model.parameters(), lr=0.1)"
    elif isinstance(getattr(given, "optimizer", None), Optimizer):
        remedy = f"pass the optimizer of this {type(given).__name__}"
    else:
        remedy = "pass an object of torch.optim.SGD or another optimizer class"
    return ArgumentTypeError(f"optimizers must be torch.optim.Optimizer objects, not {_name_kind(given)}: {remedy}")


def as_optimizers(optimizers: Any) -> list[Optimizer]:
    """Return the torch optimizers in an argument (None, an optimizer, or an iterable), without wrappers, as a list.

    Raises ArgumentTypeError for anything else.
    """
    if optimizers is None:
        return []
    if isinstance(optimizers, Optimizer) and "param_groups" in vars(optimizers):
        return [optimizers]
    if isinstance(optimizers, Optimizer) or _get_wrapped(optimizers) is not None:
        return [unwrap_optimizer(optimizers)]
    if isinstance(optimizers, (str, type, nn.Module, Tensor)) or not _is_iterable(optimizers):
        raise _wrong_optimizer(optimizers)
    return [unwrap_optimizer(item) for item in optimizers]


def find_optimizer_problems(optimizers: Sequence[Optimizer], policy: Policy) -> list[str]:
    """Return the reasons, one sentence each, why `policy` cannot be applied to these optimizers."""
    use_masters = bool(policy.master_weights)
    problems = []
    for index, optimizer in enumerate(optimizers):
        name = type(optimizer).__name__
        if any(optimizer is earlier for earlier in optimizers[:index]):
            problems.append(f"the same {name} was passed twice")
        elif hasattr(optimizer, "_amp_stash"):
            problems.append(f"this {name} was initialized before: call amp.reset() first, or pass replace=True")
        if use_masters and is_instance_of(optimizer, "torch.distributed.optim", "ZeroRedundancyOptimizer"):
            problems.append(
                f"{name} divides the model's parameters among the ranks, and would not step on their masters: use a"
                " plain optimizer, or O1 or O4, or fully_shard with amp_patch.fsdp_policy, which shards masters too"
            )
        post_local = "torch.distributed.optim.post_localSGD_optimizer"
        if use_masters and is_instance_of(optimizer, post_local, "PostLocalSGDOptimizer"):
            problems.append(f"{name} would average no parameter at a level with masters: use O1 or O4")
        if isinstance(optimizer, torch.optim.LBFGS) and (policy.is_scale_dynamic or use_masters):
            problems.append(
                "LBFGS evaluates its closure many times in one step, so it can neither skip a step nor keep master"
                " weights: use O0, O1 with a static loss_scale, or O4"
            )
    return problems


def find_vanishing_eps(optimizers: Sequence[Optimizer], policy: Policy) -> list[str]:
    """Return a sentence for each optimizer that steps on 16-bit weights with an `eps` that is 0 in their dtype."""
    low = policy.cast_model_type
    if low not in LOW_DTYPES or policy.master_weights:
        return []
    sentences = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            # on the CPU, because the script may have set another default device
            if isinstance(eps, float) and eps and not float(torch.tensor(eps, dtype=low, device="cpu")):
                sentences.append(
                    f"eps={eps:g} of this {type(optimizer).__name__} is 0 in {dtype_name(low)}, in which"
                    f" {policy.opt_level} keeps weights and optimizer states, so a step may divide by 0 and give NaN:"
                    " pass an eps of 1e-4 or more, or use a level with float32 master weights"
                )
                break
    return sentences


def choose_policy(
    opt_level: str, arguments: Mapping[str, Any], presets: str | os.PathLike[str] | None, *, has_models: bool = True
) -> Policy:
    """Return the policy that the arguments ask for.

    Settings of a command, as in `amp-patch run --opt-level O4`, take precedence. Logs a line if they replace the level,
    and if lists of the command have no effect at a level that casts models.

    Raises PolicyError as `make_policy` does; without `has_models`, also for a level that casts only models.
    """
    make = make_policy if has_models else _presets.make_policy_without_model
    level, overrides, dropped = in_force.settings.override(opt_level, arguments)
    is_replaced = level != opt_level  # the script runs at another level than it asks for
    if is_replaced and "lists" in overrides and make(level, {}, presets=presets).low_dtype is None:
        dropped.append("lists")
        del overrides["lists"]
    policy = make(level, overrides, presets=presets)
    if is_replaced:
        message = describe_replaced(level, opt_level, dropped)
        if policy.lists and not policy.patch_torch_functions and not _has_module_rules(policy.lists):
            message += f"; of its lists, {level} takes the modules alone"
            policy = make(level, {**overrides, "lists": None}, presets=presets)
        say("%s", message)
    # the command's lists come second, because the policy decides which of them have an effect
    command_lists = find_command_lists(policy)
    unused = [name for name in in_force.settings.lists if name not in command_lists]
    if unused and policy.low_dtype is not None:
        say("amp_patch: %s takes the module rules of lists alone, and there are none in %s", level, ", ".join(unused))
    if command_lists:
        policy = make(level, {**overrides, "lists": (*policy.lists, *command_lists)}, presets=presets)
    return policy


def find_command_lists(policy: Policy) -> tuple[str, ...]:
    """Return the lists that a command (`amp-patch run --lists ...`) adds to the lists of a policy.

    If the policy patches functions, these are all lists of the command; if it casts models, only lists with module
    rules; at a float32 level, none. The other lists would have no effect.
    """
    if policy.patch_torch_functions:
        return in_force.settings.lists
    if policy.low_dtype is None:
        return ()
    return tuple(name for name in in_force.settings.lists if _has_module_rules(name))


def _has_module_rules(lists: str | Sequence[str]) -> bool:
    return bool(load_oplists(lists).modules)
