"""The private names of torch that the package uses. Only this module, `torch_distributed` and `torch_dispatch`
may use private names of torch. Others may use `HOT_PATH_ATTRIBUTES`.

Comments and docstrings say what a name is for. A sentence with "would" says what the package would lose without the
name, or what a maintainer could use instead. Unless a comment or docstring says otherwise, all names exist in torch
2.6.0, 2.13.0, 2.14.1 and 2.15.0, and if torch drops one, this import or the first use of the name fails.
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
from torch._C._autograd import _ProfilerResult
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.attention import SDPBackend
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

# ---- many tensors in one kernel --------------------------------------------------------------------------------------

# The multi-tensor ops that torch's own optimizers use for `foreach=True`.
# Without them, the package would loop over tensors, and launch a kernel for each.
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

# The kernels that torch.optim uses for `fused=True`. Without them, the package would use the multi-tensor ops, and a
# step that may be skipped would wait for the device.
fused_adam_: Callable[..., None] = torch._fused_adam_
fused_adamw_: Callable[..., None] = torch._fused_adamw_
fused_sgd_: Callable[..., None] = torch._fused_sgd_

# The kernels of GradScaler: one unscales gradients and checks them for inf and NaN, the other updates the scale.
# Without them, the package would use isfinite, mul and where, and read the gradients twice.
foreach_non_finite_check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
update_scale_ = torch._amp_update_scale_

# Copy many tensors into a flat one, and make views of it in their shapes. Without them, torch.cat and split would do.
flatten_dense_tensors: Callable[[Sequence[Tensor]], Tensor] = _flatten_dense_tensors
unflatten_dense_tensors: Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, ...]] = _unflatten_dense_tensors


# ---- tensors ---------------------------------------------------------------------------------------------------------

HOT_PATH_ATTRIBUTES = frozenset({"_version"})
"""Private attributes that hot paths in other modules read themselves, because a call of a function would cost time.

`Tensor._version` is the version counter. Edits in place raise it, except edits of `.data` and by fused optimizers.
Without it, every use of a weight would make a new copy.
"""

get_version: Callable[[Tensor], int] = operator.attrgetter("_version")

# The reference counts of the storage at an address, and of a tensor. They show, for example, whether an autograd graph
# still needs a copy of a weight. Without them, such copies would never be refreshed in place, but always replaced.
get_storage_uses: Callable[[int], int] = torch._C._storage_Use_Count


def get_tensor_uses(tensor: Tensor) -> int:
    """Return the reference count of a tensor in C++. See `get_storage_uses`."""
    return cast(int, tensor._use_count())  # type: ignore[attr-defined]


def get_storage_address(tensor: Tensor) -> int:
    """Return the address of the C++ storage, which `get_storage_uses` takes."""
    return cast(int, tensor.untyped_storage()._cdata)


view_negated: Callable[[Tensor], Tensor] = torch._neg_view
"""Returns a view of the memory of a gradient with `is_neg()`, whose values torch negates when it reads them. The view
can be scaled in place. Without it, a copy of the gradient would be scaled, and copied back.
"""


def get_sparse_values(gradient: Tensor) -> Tensor:
    """Return the stored values of a COO tensor, coalesced or not, in its own memory.

    Without it, the tensor would have to be coalesced first.
    """
    return gradient._values()


# A context manager in which torch does not call the `__torch_function__` of tensor subclasses, so that attributes and
# casts are torch's own. Without it, a class that handles only a few functions would raise an error when its dtype is
# read.
without_overrides = torch._C.DisableTorchFunctionSubclass

# The `__torch_dispatch__` of classes that handle no op. Without it, subclasses of Parameter would count as opaque
# (`dtypes.is_opaque`).
disabled_torch_dispatch = torch._C._disabled_torch_dispatch_impl


def get_local_tensor(tensor: Tensor) -> Any:
    """Return the local tensor of a DTensor on this rank, or None for any other tensor, and if torch drops the name."""
    return getattr(tensor, "_local_tensor", None)


# ---- modules ---------------------------------------------------------------------------------------------------------

# The parameters, buffers and children of one module. Without them, the package would call
# `named_parameters(recurse=False)` and the like, which take five times as long.
get_own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter("_parameters")
get_own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = operator.attrgetter("_buffers")
get_own_children: Callable[[nn.Module], dict[str, nn.Module | None]] = operator.attrgetter("_modules")

# The forward pre-hooks of a module. Without them, a copied module would keep the module rules of its original.
get_forward_pre_hooks: Callable[[nn.Module], dict[int, Any]] = operator.attrgetter("_forward_pre_hooks")

# The code of the frame in which torch runs a module. It identifies the calls of modules that are under way. Without it,
# a rule for the module whose forward enters the first region of torch.autocast would act from its second call on.
MODULE_CALL: types.CodeType = nn.Module._call_impl.__code__


def is_replica(module: nn.Module) -> bool:
    """Return whether DataParallel made a module for one call. Such a copy shares the hooks of its original.

    If torch drops the name, this returns False.
    """
    return bool(getattr(module, "_is_replica", False))


def get_call_kwargs(frame: types.FrameType) -> dict[str, Any]:
    """Return the keyword arguments of a module call, from the frame that runs its hooks.

    Changes of the dictionary reach `forward`. If torch renames its variable, this returns an empty dictionary, and
    keyword arguments keep their dtype in the first call under a rule.
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
    """Remove a hook of a module from the tables in `_HOOK_TABLES`.

    It is for a hook without a handle: an interrupt may come before `register_forward_hook` has returned one. Without
    the names of the tables, hooks would stay on a model after an interrupted `initialize`.
    """
    for table in [getattr(module, name) for name in _HOOK_TABLES]:
        for key, value in list(table.items()):
            is_same = value is hook or (isinstance(hook, types.MethodType) and value == hook)
            if is_same or getattr(value, "hook", None) is hook:  # torch wraps the hooks of some tables in an object
                for name in _HOOK_OPTIONS:
                    getattr(module, name).pop(key, None)
                table.pop(key, None)


def remove_global_hooks(*removed: Callable[..., Any]) -> None:
    """Remove forward pre-hooks and registration hooks that run for every module. See `remove_hook`."""
    module = torch.nn.modules.module
    for hooks in (module._global_forward_pre_hooks, module._global_module_registration_hooks):
        for key, hook in list(hooks.items()):
            if hook in removed:
                hooks.pop(key, None)


BatchNormBase = _BatchNorm
"""The base class of torch's batch normalization layers. Without it, a tuple of the public classes would miss some."""

# How torch.nn.SyncBatchNorm checks its input. Without these, SyncBatchNorm of `amp_patch.apex` would check nothing.
check_sync_batchnorm_dim: Any = nn.SyncBatchNorm._check_input_dim
check_sync_batchnorm_channels: Any = nn.SyncBatchNorm._check_non_zero_input_channels


def get_first_weight(layer: nn.RNNBase) -> Tensor | None:
    """Return the weight whose dtype a recurrent layer compares with the dtype of its input.

    Without it, the package would take the first parameter: another tensor if this weight is parametrized.
    """
    return cast("list[Tensor | None]", layer._flat_weights)[0]


# ---- optimizers ------------------------------------------------------------------------------------------------------

# The hooks around the steps of all optimizers. A fused step that is skipped on the device runs them nevertheless, so if
# a script has added any, the host must decide whether to skip. Without these names and `get_step_hooks`, every step
# under a dynamic scale would wait for the device.
GLOBAL_PRE_HOOKS: dict[int, Callable[..., Any]] = _global_optimizer_pre_hooks
GLOBAL_POST_HOOKS: dict[int, Callable[..., Any]] = _global_optimizer_post_hooks


def get_step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks around the steps of this optimizer alone. See `GLOBAL_PRE_HOOKS`."""
    instance: Any = optimizer
    return [*instance._optimizer_step_pre_hooks.values(), *instance._optimizer_step_post_hooks.values()]


def put_first(handle: RemovableHandle, hooks: str, owner: Any) -> None:
    """Make a hook that was just registered run before the others in the table `hooks` of `owner`.

    Without it, a hook after a step would see weights of the step before, and a state_dict hook would see keys that
    another hook has renamed.
    """
    getattr(owner, hooks).move_to_end(handle.id, last=False)


STEP_POST_HOOKS, STATE_DICT_HOOKS = "_optimizer_step_post_hooks", "_state_dict_hooks"
"""The attributes in which optimizers and modules keep hooks, in the order in which the hooks run."""


def remove_step_hook(optimizer: Optimizer | None, hook: Callable[..., Any]) -> None:
    """Remove a hook that runs after the steps of one optimizer, or for None, of all optimizers. See `remove_hook`."""
    hooks = GLOBAL_POST_HOOKS if optimizer is None else getattr(optimizer, STEP_POST_HOOKS, {})
    for key in [key for key, value in hooks.items() if value is hook]:
        hooks.pop(key, None)


def reads_found_inf(optimizer: Optimizer) -> bool:
    """Return whether the kernels of an optimizer skip a step by a flag on the device, as fused ones do.

    If torch drops the name, this returns False, and steps wait for the device.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_wrapped_by_scheduler(step: Callable[..., Any]) -> bool:
    """Return whether an LR scheduler has wrapped the `step` of an optimizer. If torch drops the name, False."""
    return hasattr(step, "_wrapped_by_lr_sched")


def mark_step_called(optimizer: Optimizer) -> None:
    """Mark `step` as called, although it was skipped. Without it, an LR scheduler would warn once."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


# ---- autograd and tracing --------------------------------------------------------------------------------------------

# These show whether torch.jit.trace or a transform of torch.func is active. Both must see casts of weights, not stored
# copies. Without them, traces would contain weights as constants, and transforms would give weights no gradients.
get_tracing_state: Callable[[], Any] = torch._C._get_tracing_state
peek_interpreter_stack: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack

# The number of active TorchDispatchModes in this thread: fake tensors, make_fx, selective checkpoints, counters, ...
# Without it, they would see stored copies of weights instead of casts, and a fake copy would be used as a real one.
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

# The function in which a trace of torch.jit starts. Without it, the package would patch the public torch.jit.trace,
# which Dynamo wraps once and for all.
JIT_TRACE = (torch.jit._trace, "_trace_impl")

# The id of the backward pass that runs in this thread, -1 if none does; and the function that queues a callback for its
# end. Without them, users of DistributedDataParallel of `amp_patch.apex` would have to reduce gradients themselves.
get_backward_id: Callable[[], int] = torch._C._current_graph_task_id
queue_after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


def is_engine_thread() -> bool:
    """Return whether this is a thread of the autograd engine. It runs the backward pass of a device, and its hooks."""
    return get_backward_id() != -1 and isinstance(threading.current_thread(), threading._DummyThread)


# Whether an instance of torch.autocast enables or disables casts. Without it, `amp-patch run --opt-level O0` would not
# switch off the regions of a script.
is_region_enabled: Callable[[Any], bool] = operator.attrgetter("_enabled")


def get_autocast_depth() -> int:
    """Return the number of torch.autocast blocks that this thread is in, including blocks that disable it.

    Without it, a module rule would act inside a block `autocast(enabled=False)` in the module.
    """
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def enable_region(region: Any, is_enabled: bool) -> None:
    """Set whether an instance of torch.autocast enables or disables casts when it is entered."""
    region._enabled = is_enabled


# ---- ops and dispatch ------------------------------------------------------------------------------------------------

# The namespace through which recurrent layers call their kernels. Without it, op lists would not reach these layers.
VF: types.ModuleType = torch._VF

# The module from which torch.nn.functional, graphs of torch.fx and nested tensors take functions in C++. Without it,
# calls in such graphs would not be cast.
C_NN: types.ModuleType = torch._C._nn

# Tables of torch with functions as keys, by module. Without them, some tensor classes of torch would reject patched
# functions.
FUNCTION_TABLES = {
    "torch.masked.maskedtensor._ops_refs": "_MASKEDTENSOR_FUNCTION_TABLE",
    "torch.nn.utils._expanded_weights.expanded_weights_impl": "HANDLED_FUNCTIONS",
    "torch.distributed._shard.sharded_tensor.api": "_SHARDED_OPS",
}


def build_function_tables() -> None:
    """Import the module of the one table that torch builds late, so that it is built from unpatched functions."""
    importlib.import_module("torch.masked.maskedtensor._ops_refs")


# A Python function of torch counts as an op if one of these is its module. If one is renamed, lists would reject its
# functions.
PYTHON_OP_MODULES = frozenset({"torch.functional", "torch.nn.functional", "torch._tensor", "torch._lowrank"})
PYTHON_OP_MODULES |= {"torch._lobpcg"}
C_MODULE = "torch._C"
"""The `__module__` of functions in C++ that are not ops."""


# The kernels for most attention on a CPU, forward and backward. Without them, short attention, which is computed in
# float32, would keep its operands in float32 for the backward pass.
flash_attention: Callable[..., tuple[Tensor, Tensor]]
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_attention_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def chooses_flash_attention(*args: Any, **kwargs: Any) -> bool:
    """Return whether torch would run a call of scaled_dot_product_attention by the kernel `flash_attention`."""
    return torch._fused_sdp_choice(*args, **kwargs) == SDPBackend.FLASH_ATTENTION.value


def has_cpu_flag(flag: str) -> bool:
    """Return whether torch sees an instruction set, such as "avx512_bf16", on this CPU. False if torch cannot tell."""
    probe = getattr(torch.cpu, f"_is_{flag}_supported", None)
    if probe is not None:
        return bool(probe())
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    return capabilities is not None and bool(capabilities().get(flag, False))


def onednn_takes_bfloat16() -> bool:
    """Return whether oneDNN has products of bfloat16 values for this CPU. The variable ONEDNN_MAX_CPU_ISA limits it.

    False if torch cannot tell: products are then computed in float32, which is correct on every CPU.
    """
    answer = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return answer is not None and bool(answer())


# ---- Dynamo ----------------------------------------------------------------------------------------------------------

DYNAMO = "torch._dynamo"


def build_dynamo_tables() -> None:
    """Import Dynamo, and make it build its tables from the functions that torch's names hold now.

    Without it, Dynamo would build them later, and have no rule for the functions that are patched then.
    """
    import torch._dynamo.trace_rules as trace_rules

    trace_rules.get_torch_obj_rule_map()
    trace_rules.get_tensor_method()


def has_proxies() -> bool:
    """Return whether make_fx is recording this code.

    Without it, the region around a whole script (`--everywhere`) would be lost in such a trace.
    """
    module: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return module is not None and module.get_proxy_mode() is not None


def mark_constant(function: Callable[[], Any]) -> None:
    """Mark a function as `torch.compiler.assume_constant_result` does, but without importing Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_tracing_graph() -> bool:
    """Return whether Dynamo is compiling in this thread.

    If torch renames `torch._guards`, this returns False, and patching at such a time makes the compilation fail.
    """
    guards = sys.modules.get("torch._guards")
    return guards is not None and guards.TracingContext.try_get() is not None


IDLE_DEVICE_TYPES = ("ipu", "maia")
"""Device types that torch no longer runs on, although they still have an autocast state.

The package uses the autocast state of such a type as a flag. Except in torch 2.6, Dynamo guards the flag, so code that
was compiled with it set is not run without it. Without these types, `IDLE_KEYS` would serve instead. Without types
and keys, code that was compiled inside a region of amp_patch would also run outside of it.
"""

IDLE_KEYS = ("TESTING_ONLY_GenericMode", "TESTING_ONLY_GenericWrapper")
"""Dispatch keys for which no op has a kernel. Dynamo guards the dispatch keys of the thread."""


def is_autocast_state_guarded(device_type: str) -> bool:
    """Return whether Dynamo guards the autocast state of a device type. Leaves autocast of this type disabled."""
    from torch._C._dynamo.guards import GlobalStateGuard

    guard = GlobalStateGuard()
    torch.set_autocast_enabled(device_type, True)
    try:
        return not guard.check()
    finally:
        torch.set_autocast_enabled(device_type, False)


@functools.cache  # torch takes one registration for each key
def pass_keys_through() -> torch.library.Library:
    """Let all ops run in threads where `IDLE_KEYS` are set, for ever. Without it, they would raise errors."""
    library = torch.library.Library("_", "IMPL")
    for key in IDLE_KEYS:
        library.fallback(torch.library.fallthrough_kernel, key)
        for op in torch._ops._higher_order_ops.values():  # as under vmap, and in flex_attention
            op.fallthrough(torch._C._dispatch_key_parse(key))
    return library


def set_keys(*are_set: bool) -> None:
    """Set or clear each of `IDLE_KEYS` in this thread."""
    for key, is_set in zip(IDLE_KEYS, are_set, strict=True):
        torch._C._dispatch_tls_set_dispatch_key_included(key, is_set)


def get_forced_setting(config: Any, name: str) -> object:
    """Return what `force_setting` overwrites, so that another call of `force_setting` can restore it."""
    value: object = getattr(*_find_setting(config, name))
    return value


def force_setting(config: Any, name: str, value: object) -> None:
    """Set a setting of one of torch's config modules in all threads.

    The setting is a ContextVar, so `setattr` on the module sets it in the calling thread only; its private entry has a
    value for all threads. In torch 2.6 there is no such entry, and `setattr` sets it in all threads.
    """
    setattr(*_find_setting(config, name), value)


def _find_setting(config: Any, name: str) -> tuple[Any, str]:
    """Return the object, and the name of its attribute, that holds the value of a setting for all threads."""
    entry: Any = getattr(config, "_config", {}).get(name)
    return (entry, "env_value_force") if hasattr(entry, "env_value_force") else (config, name)


def is_called_from_outside() -> bool:
    """Return whether the script itself, and no other module, called the module whose hook calls this function."""
    frame: types.FrameType | None = sys._getframe(1)
    calls = 0
    while frame is not None and calls < 2:
        calls += frame.f_code is MODULE_CALL
        frame = frame.f_back
    return calls == 1


def find_cast_inputs(function: Any) -> tuple[str, torch.dtype] | None:
    """Return the device type and dtype of the `torch.amp.custom_fwd(cast_inputs=...)` that decorates a function.

    Returns None for a function without it. If torch changes the closure of the decorator, None for all functions.
    """
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and (code.co_name, code.co_filename) == ("decorate_fwd", torch.amp.autocast_mode.__file__):
            variables = inspect.getclosurevars(function).nonlocals
            dtype, device_type = variables.get("cast_inputs"), variables.get("device_type")
            return None if dtype is None or device_type is None else (device_type, dtype)
        function = getattr(function, "__wrapped__", None)
    return None


# ---- files -----------------------------------------------------------------------------------------------------------

PATH_FUNCTIONS: tuple[tuple[object, str, int, str, str], ...] = (
    (torch._C.PyTorchFileWriter, "__init__", 1, "file_name", "write"),
    (torch._C.PyTorchFileReader, "__init__", 1, "file_name", "read"),
    (torch._C.ScriptModule, "save", 1, "filename", "write"),
    (torch._C, "import_ir_module", 1, "filename", "read"),
    (_ProfilerResult, "save", 1, "path", "write"),
    (torch.UntypedStorage, "from_file", 0, "filename", "map"),
    (torch, "from_file", 0, "filename", "map"),
)
"""Functions that open a file by its path in C++, for torch.save, torch.load(mmap=True), torch.jit and profiles.

Each row has the fields of `scratch.libraries.PathFunction`: owner, name, position and name of the path, and how the
file is used. Without them, repeated runs of a script would overwrite the files that it writes with torch.save.
"""
