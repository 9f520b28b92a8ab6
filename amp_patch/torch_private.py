"""The private names of torch that the package uses. `torch_distributed` and `torch_dispatch` hold the others; no other
module may use one.

Each comment gives the use of a name, and the loss for amp_patch without it. All names exist in torch 2.6.0,
2.13.0, 2.14.1 and 2.15.0. If one is missing, importing this module fails, unless its comment says otherwise.
"""

import functools
import importlib
import inspect
import operator
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch._C._autograd import _ProfilerResult
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.attention import SDPBackend
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils.hooks import RemovableHandle

# ---- many tensors in one kernel --------------------------------------------------------------------------------------

# The multi-tensor ops of torch's own optimizers: semi-public, since torch.optim documents `foreach=True` by them.
# Without them: a loop over the tensors, one kernel each.
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_addcdiv_ = torch._foreach_addcdiv_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_div_ = torch._foreach_div_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sqrt = torch._foreach_sqrt

# The kernels of `fused=True` in torch.optim. Without them: the foreach kernels, and a step that may skip waits.
fused_adam_: Callable[..., None] = torch._fused_adam_
fused_adamw_: Callable[..., None] = torch._fused_adamw_
fused_sgd_: Callable[..., None] = torch._fused_sgd_

# Unscaling with the check for inf and NaN, and the growth rule of the scale: GradScaler's kernels.
# Without them: isfinite, mul and where, which read the gradients twice.
foreach_non_finite_check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
update_scale_ = torch._amp_update_scale_

# Many tensors in one flat one and back. Without them: torch.cat of views, and split.
flatten_dense_tensors: Callable[[Sequence[Tensor]], Tensor] = _flatten_dense_tensors
unflatten_dense_tensors: Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, ...]] = _unflatten_dense_tensors


# ---- tensors ---------------------------------------------------------------------------------------------------------

READ_IN_PLACE = frozenset({"_version"})
"""Attributes that hot paths read without a function from here. `Tensor._version` counts edits in place, except edits by
fused optimizers. Without it: every use of a weight makes a new copy.
"""

get_version: Callable[[Tensor], int] = operator.attrgetter("_version")

# The function that gives the bytes of a file or of another process to a tensor, with its owner. Patched while a script
# is kept in float32. Without it: a loaded tensor of 16 bits is read as if it were of 32.
REBUILD_TENSOR = (torch._utils, "_rebuild_tensor")

# The reference counts of a tensor and of the storage at an address. They show whether a graph still needs a copy of a
# weight. Without them: copies are never refreshed in place, only replaced.
get_storage_uses: Callable[[int], int] = torch._C._storage_Use_Count


def get_tensor_uses(tensor: Tensor) -> int:
    """Return the reference count of a tensor in C++. See `get_storage_uses`."""
    return cast(int, tensor._use_count())  # type: ignore[attr-defined]


def get_storage_address(tensor: Tensor) -> int:
    """Return the address of the C++ storage, which `get_storage_uses` takes."""
    return cast(int, tensor.untyped_storage()._cdata)


view_negated: Callable[[Tensor], Tensor] = torch._neg_view
"""Returns a view with the opposite sign; of a lazy negative, the memory itself. Without it: scale a copy."""


def get_sparse_values(gradient: Tensor) -> Tensor:
    """Return the stored values of a COO tensor, coalesced or not, in its own memory. Without it: `coalesce` first."""
    return gradient._values()


# A block in which torch does not call the `__torch_function__` of tensor subclasses: attributes and casts are torch's
# own. Without it: a class that handles only a few functions raises an error when its dtype is read.
without_overrides = torch._C.DisableTorchFunctionSubclass

# `__torch_dispatch__` of classes that handle no op. Without it: subclasses of Parameter count as opaque.
disabled_torch_dispatch = torch._C._disabled_torch_dispatch_impl


def get_local_tensor(tensor: Tensor) -> Any:
    """Return the local tensor of a DTensor on this rank. None for other tensors, and without the name."""
    return getattr(tensor, "_local_tensor", None)


# ---- modules ---------------------------------------------------------------------------------------------------------

# The contents of one module. Without them: `named_parameters(recurse=False)` and the like, five times slower.
get_own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter("_parameters")
get_own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = operator.attrgetter("_buffers")
get_own_children: Callable[[nn.Module], dict[str, nn.Module | None]] = operator.attrgetter("_modules")

# The forward pre-hooks of a module. Without them: a copied module keeps the rules of its original.
get_forward_pre_hooks: Callable[[nn.Module], dict[int, Any]] = operator.attrgetter("_forward_pre_hooks")

# The code that runs every call of a module. Without it: in the module that enters the first region of torch.autocast, a
# rule acts only from the second call on.
MODULE_CALL: types.CodeType = nn.Module._call_impl.__code__


def is_replica(module: nn.Module) -> bool:
    """Return whether DataParallel made a module for one call. Such copies share the hooks of the original.

    Without it: each call adds hooks.
    """
    return bool(getattr(module, "_is_replica", False))


def get_call_kwargs(frame: types.FrameType) -> dict[str, Any]:
    """Return the keyword arguments of the module call whose hooks a frame runs. `forward` gets changes made to them.

    Without it: keyword arguments of the first call under a rule keep their dtype.
    """
    return cast("dict[str, Any]", frame.f_locals.get("kwargs", {}))


_HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_HOOK_OPTIONS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def remove_hook(module: nn.Module, hook: Any) -> None:
    """Remove a hook from every table of a module that holds it, if any.

    An interrupt may come before functions such as `register_forward_hook` have returned a handle. Without the names:
    hooks stay on a model after an interrupted `initialize`.
    """
    for table in [getattr(module, name) for name in _HOOK_TABLES]:
        for key, value in list(table.items()):
            is_same = value is hook or (isinstance(hook, types.MethodType) and value == hook)
            if is_same or getattr(value, "hook", None) is hook:  # torch wraps some
                for name in _HOOK_OPTIONS:
                    getattr(module, name).pop(key, None)
                table.pop(key, None)


def remove_global_hooks(*removed: Callable[..., Any]) -> None:
    """Remove forward pre-hooks and registration hooks of all modules. Harmless without them. See `remove_hook`."""
    module = torch.nn.modules.module
    for hooks in (module._global_forward_pre_hooks, module._global_module_registration_hooks):
        for key, hook in list(hooks.items()):
            if hook in removed:
                hooks.pop(key, None)


BatchNormBase = _BatchNorm
"""The base class of all batch normalization layers. Without it: a tuple of the public ones, which misses subclasses."""

# The checks of torch.nn.SyncBatchNorm on its input, for a class that runs its code. Without them: no check.
check_sync_batchnorm_dim: Any = nn.SyncBatchNorm._check_input_dim
check_sync_batchnorm_channels: Any = nn.SyncBatchNorm._check_non_zero_input_channels


def get_first_weight(layer: nn.RNNBase) -> Tensor | None:
    """Return the weight whose dtype a recurrent layer compares its input with. Without it: the first parameter."""
    return cast("list[Tensor | None]", layer._flat_weights)[0]


# ---- optimizers ------------------------------------------------------------------------------------------------------

# The hooks around the steps of all optimizers: fused steps that skip on the device would run them as well.
# Without them: every step with dynamic scaling waits for the device. The same goes for the next two functions.
GLOBAL_PRE_HOOKS: dict[int, Callable[..., Any]] = _global_optimizer_pre_hooks
GLOBAL_POST_HOOKS: dict[int, Callable[..., Any]] = _global_optimizer_post_hooks


def get_step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that are registered on the steps of this optimizer alone."""
    instance: Any = optimizer
    return [*instance._optimizer_step_pre_hooks.values(), *instance._optimizer_step_post_hooks.values()]


def put_first(handle: RemovableHandle, hooks: str, owner: Any) -> None:
    """Make a hook that was just registered run first. Without it: other hooks see weights of the previous step, or
    rename keys that this hook looks for.
    """
    getattr(owner, hooks).move_to_end(handle.id, last=False)


STEP_POST_HOOKS, STATE_DICT_HOOKS = "_optimizer_step_post_hooks", "_state_dict_hooks"
"""Where optimizers and modules keep hooks, in the order in which they run."""


def remove_step_hook(optimizer: Optimizer | None, hook: Callable[..., Any]) -> None:
    """Remove a hook after the steps of one optimizer, or of all (None), if it is there. See `remove_hook`."""
    hooks = GLOBAL_POST_HOOKS if optimizer is None else getattr(optimizer, STEP_POST_HOOKS, {})
    for key in [key for key, value in hooks.items() if value is hook]:
        hooks.pop(key, None)


def reads_found_inf(optimizer: Optimizer) -> bool:
    """Return whether the kernels of an optimizer skip by a flag on the device, as fused ones do. False without it."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_wrapped_by_scheduler(step: Callable[..., Any]) -> bool:
    """Return whether an LR scheduler has put a function of its own around a bound `step`. False without it."""
    return hasattr(step, "_wrapped_by_lr_sched")


def mark_step_called(optimizer: Optimizer) -> None:
    """Mark `step` as called, although it was skipped. Without it: LR schedulers warn once."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


# ---- autograd and tracing --------------------------------------------------------------------------------------------

# Whether torch.jit.trace or torch.func is active. Both must see the casts of weights.
# Without them: traces hold weights as constants, and transforms compute no gradients of them.
get_tracing_state: Callable[[], Any] = torch._C._get_tracing_state
peek_interpreter_stack: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack

# The number of active TorchDispatchModes in this thread: fake tensors, make_fx, selective checkpoints, counters...
# Without it: they see stored copies of weights instead of casts, and fake copies are used as real ones.
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

# The function in which a trace of torch.jit starts; Dynamo wraps the public one for good. Without it: patch that.
JIT_TRACE = (torch.jit._trace, "_trace_impl")

# The id of the running backward pass, and the function that queues a callback for its end. Without them: the user must
# ask for gradients to be reduced.
get_backward_id: Callable[[], int] = torch._C._current_graph_task_id
queue_after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


def is_engine_thread() -> bool:
    """Return whether this is a thread of the autograd engine: they run the backward code of a device, and its hooks."""
    return get_backward_id() != -1 and isinstance(threading.current_thread(), threading._DummyThread)


# Whether an instance of torch.autocast enables or disables casts. Without it: O0 does not reach scripts with autocast.
is_region_enabled: Callable[[Any], bool] = operator.attrgetter("_enabled")


def get_autocast_depth() -> int:
    """Return the number of torch.autocast blocks around this thread, including blocks that disable it.

    Without it: a module rule acts inside `autocast(enabled=False)` in the module.
    """
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def enable_region(region: Any, is_enabled: bool) -> None:
    """Set whether an instance of torch.autocast enables or disables casts when it is entered."""
    region._enabled = is_enabled


# ---- ops and dispatch ------------------------------------------------------------------------------------------------

# The namespace through which recurrent layers call their kernels. Without it: op lists cannot patch them.
VF: types.ModuleType = torch._VF

# The module from which torch.nn.functional, graphs of torch.fx and nested tensors take functions in C++. Without it:
# calls in such graphs are not cast.
C_NN: types.ModuleType = torch._C._nn

# Tables of torch with functions as keys, by module. Without them: torch's tensor classes reject patched functions.
FUNCTION_TABLES = {
    "torch.masked.maskedtensor._ops_refs": "_MASKEDTENSOR_FUNCTION_TABLE",
    "torch.nn.utils._expanded_weights.expanded_weights_impl": "HANDLED_FUNCTIONS",
    "torch.distributed._shard.sharded_tensor.api": "_SHARDED_OPS",
}


def build_function_tables() -> None:
    """Build the tables that torch builds late, from functions that it has imported earlier."""
    importlib.import_module("torch.masked.maskedtensor._ops_refs")


# Python functions count as ops if one of these is their module. Without them: lists reject them as no ops.
PYTHON_OP_MODULES = frozenset({"torch.functional", "torch.nn.functional", "torch._tensor", "torch._lowrank"})
PYTHON_OP_MODULES |= {"torch._lobpcg"}
C_MODULE = "torch._C"
"""The module of functions in C++ that are no ops."""


# The kernels for most attention on a CPU, forward and backward. Without them: short attention saves float32 operands
# for backward.
flash_attention: Callable[..., tuple[Tensor, Tensor]]
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_attention_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def chooses_flash_attention(*args: Any, **kwargs: Any) -> bool:
    """Return whether torch runs a call of scaled_dot_product_attention by these kernels. See `flash_attention`."""
    return torch._fused_sdp_choice(*args, **kwargs) == SDPBackend.FLASH_ATTENTION.value


def has_cpu_flag(flag: str) -> bool:
    """Return whether torch sees an instruction set, such as "avx512_bf16", on this CPU. False where it cannot tell."""
    probe = getattr(torch.cpu, f"_is_{flag}_supported", None)
    if probe is not None:
        return bool(probe())
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    return capabilities is not None and bool(capabilities().get(flag, False))


def onednn_takes_bfloat16() -> bool:
    """Return whether oneDNN has products of bfloat16 values for this CPU; follows ONEDNN_MAX_CPU_ISA. False where it
    cannot tell: products are then computed in float32, which is right everywhere.
    """
    answer = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return answer is not None and bool(answer())


# ---- Dynamo: only casting/compiling uses these names -----------------------------------------------------------------

DYNAMO = "torch._dynamo"


def build_dynamo_tables() -> None:
    """Import Dynamo, and make it build its tables from the functions that torch's names hold now.

    Without it: Dynamo has no rule for functions that are patched when it builds them.
    """
    import torch._dynamo.trace_rules as trace_rules

    trace_rules.get_torch_obj_rule_map()
    trace_rules.get_tensor_method()


def has_proxies() -> bool:
    """Return whether make_fx records this code. Without it: the region of a whole script is lost in a trace."""
    module: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return module is not None and module.get_proxy_mode() is not None


def mark_constant(function: Callable[[], Any]) -> None:
    """`torch.compiler.assume_constant_result`, which would import Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_tracing_graph() -> bool:
    """Return whether Dynamo is active in this thread. False without it: patches made meanwhile fail the compilation."""
    guards = sys.modules.get("torch._guards")
    return guards is not None and guards.TracingContext.try_get() is not None


IDLE_DEVICE_TYPES = ("ipu", "maia")
"""Device types with an autocast state, which Dynamo guards, that torch no longer runs on.

Without any: `IDLE_KEYS` take their place. Without those: code that was compiled inside a region also runs outside it.
"""

IDLE_KEYS = ("TESTING_ONLY_GenericMode", "TESTING_ONLY_GenericWrapper")
"""Dispatch keys that no op has a kernel for. Dynamo guards the keys of the thread with each tensor, in every torch."""


def is_autocast_state_guarded(device_type: str) -> bool:
    """Return whether Dynamo guards the autocast state of an unused device type. In torch 2.6 it does not."""
    from torch._C._dynamo.guards import GlobalStateGuard

    guard = GlobalStateGuard()
    torch.set_autocast_enabled(device_type, True)
    try:
        return not guard.check()
    finally:
        torch.set_autocast_enabled(device_type, False)


@functools.cache  # torch takes one registration for each key
def pass_keys_through() -> torch.library.Library:
    """Let ops run in threads with `IDLE_KEYS` set; they would raise errors. Lasts until the process ends."""
    library = torch.library.Library("_", "IMPL")
    for key in IDLE_KEYS:
        library.fallback(torch.library.fallthrough_kernel, key)
    return library


def set_keys(*are_set: bool) -> None:
    """Set or clear each of `IDLE_KEYS` in this thread."""
    for key, is_set in zip(IDLE_KEYS, are_set, strict=True):
        torch._C._dispatch_tls_set_dispatch_key_included(key, is_set)


def get_forced_setting(config: Any, name: str) -> object:
    """Return the value with which `force_setting` restores a setting of one of torch's config modules."""
    value: object = getattr(*_find_setting(config, name))
    return value


def force_setting(config: Any, name: str, value: object) -> None:
    """Set a setting in all threads: `setattr` sets it in the calling thread only, since it is a ContextVar.

    Without the private entry, as in torch 2.6: with `setattr`, which sets it in all threads there.
    """
    setattr(*_find_setting(config, name), value)


def _find_setting(config: Any, name: str) -> tuple[Any, str]:
    """Return the object and its attribute that hold the value of a setting for all threads."""
    entry: Any = getattr(config, "_config", {}).get(name)
    return (entry, "env_value_force") if hasattr(entry, "env_value_force") else (config, name)


def is_called_from_outside() -> bool:
    """Return whether no other module called the module whose hook calls this."""
    frame: types.FrameType | None = sys._getframe(1)
    calls = 0
    while frame is not None and calls < 2:
        calls += frame.f_code is MODULE_CALL
        frame = frame.f_back
    return calls == 1


def find_cast_inputs(function: Any) -> tuple[str, torch.dtype] | None:
    """Return the device type and dtype of the `torch.amp.custom_fwd(cast_inputs=...)` that decorates a function, or
    None. Without the closure of torch's decorator: such functions count as undecorated.
    """
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and (code.co_name, code.co_filename) == ("decorate_fwd", torch.amp.autocast_mode.__file__):
            variables = inspect.getclosurevars(function).nonlocals
            dtype, device_type = variables.get("cast_inputs"), variables.get("device_type")
            return None if dtype is None or device_type is None else (device_type, dtype)
        function = getattr(function, "__wrapped__", None)
    return None


def leave_function_mode(mode: TorchFunctionMode) -> None:
    """Take a function mode off the stack of this thread, even if others are above it. Harmless if it is not there.

    Without it: the mode that a script has entered last would be taken off instead.
    """
    above = []
    for _ in range(_len_torch_function_stack()):
        top = _pop_mode()
        if top is mode:
            break
        above.append(top)
    for other_mode in reversed(above):
        _push_mode(other_mode)


# ---- files -----------------------------------------------------------------------------------------------------------

PATH_TAKERS: tuple[tuple[object, str, int, str, str], ...] = (
    (torch._C.PyTorchFileWriter, "__init__", 1, "file_name", "write"),
    (torch._C.PyTorchFileReader, "__init__", 1, "file_name", "read"),
    (torch._C.ScriptModule, "save", 1, "filename", "write"),
    (torch._C, "import_ir_module", 1, "filename", "read"),
    (_ProfilerResult, "save", 1, "path", "write"),
    (torch.UntypedStorage, "from_file", 0, "filename", "map"),
    (torch, "from_file", 0, "filename", "map"),
)
"""Functions that open a file by its path in C++, for torch.save, torch.load(mmap=True), torch.jit and profiles: owner,
name, position and name of the path, and how the file is used. Without them: repeated runs of a script overwrite files
of torch.save.
"""
