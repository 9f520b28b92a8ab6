"""`ModelBinding`: at levels that cast models, casts the parameters of one model in place, and adds hooks that cast its
inputs and outputs and keep its state dicts in float32. At levels that patch functions, it adds hooks that invalidate
stored copies of weights and apply module rules.

Every hook is a plain object that can be copied and pickled, so a deep copy or a DataParallel replica of the model runs
the same casts on its own weights.
"""

import fnmatch
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..casting import WeightCache
from ..config import ModuleRule, Policy
from ..dtypes import LOW_DTYPES, is_castable, is_opaque
from ..interrupts import UndoStack
from ..torch_private import STATE_DICT_HOOKS, BatchNormBase, get_local_tensor, put_first, remove_hook
from .masters import Masters
from .model_hooks import (
    STRICT_LAYERS,
    WITHOUT_HOOKS,
    CastInputs,
    CastModelInputs,
    CastOutputs,
    EndLoading,
    Float32StateDict,
    InvalidateCache,
    LoadMasters,
    PrepareStateDict,
    SyncMasters,
    TakeAnyInput,
    TakeOutsideInput,
)
from .rule_regions import RuleRegions, UpdateRules, decide_rules, find_borders


class ModelBinding:
    """One model under one policy.

    `bind` casts the model and adds the hooks. `undo` casts the model back to its earlier dtypes, with trained values.

    Args:
        rules: module rules that decide how parameters are cast. Empty at levels that patch functions, where
            `RuleRegions` applies the rules.

    Attributes:
        used_rules: the module rules that have chosen a module of the model.
        rules: for each module that a module rule covers, this rule.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        masters: Masters,
        cache: WeightCache | None,
        rules: Sequence[ModuleRule],
    ) -> None:
        self._model = weakref.ref(model)
        self._policy = policy
        self._masters = masters
        self._cache = cache
        decided, self.used_rules = decide_rules(model, rules)
        self._runs = {module: rule.run for module, rule in decided.items()}  # "low" or "float32"
        self.rules: Mapping[nn.Module, ModuleRule] = weakref.WeakKeyDictionary(decided)
        self._sharded = {
            name for name, parameter in model.named_parameters() if get_local_tensor(parameter) is not None
        }
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that save and load float32 values
        self._undo = UndoStack()

    def parameters(self) -> Iterator[Tensor]:
        """Yield the model's parameters. Leave out the full tensors that the model holds in place of shards while FSDP
        gathers them.
        """
        model = self.model
        if model is None:
            return
        for name, parameter in model.named_parameters():
            if name not in self._sharded or get_local_tensor(parameter) is not None:
                yield parameter

    @property
    def model(self) -> nn.Module | None:
        """The model, or None once it is gone."""
        return self._model()

    def bind(self, float32_data: dict[int, Tensor]) -> None:
        """Cast and hook the model.

        Fills `float32_data` with the values of each tensor before it was cast, by the tensor's id. Until the caller
        clears this dict, `undo` restores exactly these values.
        """
        model, policy = self.model, self._policy
        if model is None:
            return
        if policy.cast_model_type is not None:
            constants = self._find_constants(model, policy.cast_model_type)
            self._cast_parameters(model, policy.cast_model_type, constants, float32_data)
            self._cast_around_uncast_modules(model, policy.cast_model_type, constants)
            if policy.master_weights:
                self._register(model.register_forward_pre_hook, SyncMasters(self._masters))
            input_dtype = torch.float32 if self._runs.get(model) == "float32" else policy.cast_model_type
            self._register(model.register_forward_pre_hook, CastModelInputs(input_dtype), with_kwargs=True)
            self._cast_at_borders(model, policy.cast_model_type)
            self._cast_at_layers(model, policy.cast_model_type)
            prepare = PrepareStateDict(self)
            self._register(model.register_state_dict_pre_hook, prepare)
            self._register(model.register_load_state_dict_pre_hook, prepare)
            self.hook_new_modules()
        output_dtype = policy.cast_model_outputs or (torch.float32 if policy.cast_model_type is not None else None)
        if output_dtype is not None:
            self._register(model.register_forward_hook, CastOutputs(output_dtype))
        if self._cache is not None:
            invalidate = InvalidateCache(self._cache)
            self._register(model.register_forward_pre_hook, invalidate)
            self._register(model.register_forward_hook, invalidate)

    def prepare_state_dict(self) -> None:
        """Prepare for saving or loading the whole model: hook modules that were added, and sync the masters."""
        self.hook_new_modules()
        self._masters.sync()

    def hook_new_modules(self) -> None:
        """Let every module of a cast model save and load float32 values, also modules that the script has added."""
        model = self.model
        if model is None or self._policy.cast_model_type is None:
            return
        for module in model.modules():
            if module in self._hooked:
                continue
            self._hooked.add(module)
            hook = self._register(module.register_state_dict_post_hook, Float32StateDict(self._masters))
            put_first(hook, STATE_DICT_HOOKS, module)  # hooks of the script may rename the entries
            self._register(module.register_load_state_dict_pre_hook, LoadMasters(self._masters))
            self._register(module.register_load_state_dict_post_hook, EndLoading(self._masters))

    def apply_rules(self, regions: RuleRegions) -> None:
        """Apply module rules to the modules of the model, and to modules added later when the model is called again."""
        model = self.model
        if model is not None:
            self._undo.callback_on(model, regions.remove)
            regions.add(model)
            self._register(model.register_forward_pre_hook, UpdateRules(regions))

    def undo(self) -> None:
        """Remove the hooks, and cast the model back. Parameters with a master get the values of the master.

        A second call does nothing.
        """
        self._undo.close()

    def _register(self, register: Any, hook: Any, **options: bool) -> Any:
        """Register a hook by a method of a module, and return its handle."""
        self._undo.callback_on(register.__self__, remove_hook, hook)
        return register(hook, **options)

    def _cast_at_borders(self, model: nn.Module, low: torch.dtype) -> None:
        """With module rules, cast the inputs of two kinds of modules to the dtype in which they run: the modules that
        `find_borders` returns, and modules with weights of their own in this dtype. Of the second kind, BatchNorm
        layers without a rule are left out.
        """
        if not self._runs:
            return
        borders = find_borders(model, self._runs)
        for module in model.modules():
            run = self._runs.get(module)
            dtype = torch.float32 if run == "float32" else low
            has_weights = any(tensor.dtype == dtype for tensor in module.parameters(recurse=False))
            is_batchnorm_without_rule = not run and isinstance(module, BatchNormBase)
            if module in borders or (has_weights and not is_batchnorm_without_rule):
                self._register(module.register_forward_pre_hook, CastInputs(dtype), with_kwargs=True)

    def _cast_at_layers(self, model: nn.Module, low: torch.dtype) -> None:
        """Without module rules, add hooks that cast the inputs of layers.

        Hooks of `STRICT_LAYERS` cast inputs from any caller. Hooks of other layers with weights in `low` cast inputs
        only if the script calls the layer directly. The model itself, Embeddings, and layers in `WITHOUT_HOOKS` with
        their parts get no such hooks.
        """
        if self._runs or low not in LOW_DTYPES:
            return
        hookless = [module for module in model.modules() if isinstance(module, WITHOUT_HOOKS)]
        left_alone = {id(model), *(id(part) for module in hookless for part in module.modules())}
        for module in model.modules():
            if id(module) in left_alone:
                continue
            if isinstance(module, STRICT_LAYERS):
                self._register(module.register_forward_pre_hook, TakeAnyInput(low), with_kwargs=True)
            elif isinstance(module, nn.Embedding):  # its inputs are integers
                continue
            elif any(tensor.dtype == low for tensor in module.parameters(recurse=False)):
                self._register(module.register_forward_pre_hook, TakeOutsideInput(low), with_kwargs=True)

    def _find_constants(self, model: nn.Module, dtype: torch.dtype) -> set[nn.Module]:
        """Return the modules that hold floating buffers but no weights, such as rotary embeddings.

        Such modules are not cast: 16 bits would round the frequencies, filters and averages in the buffers. The model
        itself, BatchNorm layers and modules that a rule covers are left out.
        """
        constants: set[nn.Module] = set()
        if dtype not in LOW_DTYPES:
            return constants
        for module in model.modules():
            if module is model or module in self._runs or isinstance(module, BatchNormBase):
                continue
            has_floating = any(is_castable(buffer) for buffer in module.buffers(recurse=False))
            if has_floating and next(module.parameters(), None) is None:
                constants.add(module)
        return constants

    def _cast_around_uncast_modules(
        self, model: nn.Module, dtype: torch.dtype, constants: Collection[nn.Module]
    ) -> None:
        """Let `constants` run in float32, and modules with opaque tensors (`dtypes.is_opaque`) in the dtype of these.

        Their inputs are cast to that dtype, and their outputs to `dtype`. Their own tensors are not cast.
        """
        for module in model.modules():
            own_dtype = torch.float32 if module in constants else _opaque_dtype(module)
            if own_dtype is not None and own_dtype != dtype:
                self._register(module.register_forward_pre_hook, CastInputs(own_dtype), with_kwargs=True)
                self._register(module.register_forward_hook, CastOutputs(dtype))

    def _cast_parameters(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        constants: Collection[nn.Module],
        float32_data: dict[int, Tensor],
    ) -> None:
        cast: list[tuple[Tensor, torch.dtype]] = []
        self._undo.callback(_restore, cast, dtype, float32_data, self._masters)
        left_alone = _find_declared(model, dtype, self._runs)
        for module in constants:
            left_alone.update(map(id, _own_tensors(module)))
        for tensor in _tensors_to_cast(model, bool(self._policy.keep_batchnorm_fp32), self._runs, left_alone):
            if tensor.dtype == dtype:
                continue
            float32_data[id(tensor)] = tensor.data
            is_buffer = tensor.dtype is torch.float32 and not isinstance(tensor, nn.Parameter)
            if is_buffer and self._policy.master_weights:
                self._masters.keep_buffer(tensor, tensor.data)
            cast.append((tensor, tensor.dtype))
            if self._policy.master_weights and tensor.is_leaf and tensor.grad is not None:
                self._masters.keep_gradient(tensor)
            tensor.data = tensor.data.to(dtype)  # the Parameter object stays
            if tensor.is_leaf and tensor.grad is not None:
                tensor.grad = tensor.grad.to(dtype)
        for module in model.modules():
            if isinstance(module, nn.RNNBase):  # cuDNN needs the weights in one piece of memory, which the cast split
                module.flatten_parameters()


def _tensors_to_cast(
    model: nn.Module, keep_batchnorm: bool, runs: Mapping[nn.Module, str], left_alone: Iterable[int]
) -> Iterator[Tensor]:
    """Yield each castable parameter and buffer once.

    These are left out:

    * shards (DTensors)
    * opaque tensors, such as quantized weights, and the other tensors of their modules
    * tensors of modules that a rule keeps in float32, even if another module holds them too
    * the tensors in `left_alone`, by id
    * if `keep_batchnorm`, tensors of BatchNorm layers that no rule covers
    """
    seen = ids_beside_opaque(model) | {id(p) for p in model.parameters() if get_local_tensor(p) is not None}
    seen.update(left_alone)
    for module in model.modules():
        is_kept = runs[module] == "float32" if module in runs else keep_batchnorm and isinstance(module, BatchNormBase)
        if is_kept:
            seen.update(map(id, _own_tensors(module)))
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in seen and is_castable(tensor):
            seen.add(id(tensor))
            yield tensor


def _find_declared(model: nn.Module, low: torch.dtype, runs: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the tensors that must stay in float32 as a model of the transformers library declares it: in
    the class attributes `_keep_in_fp32_modules` (for float16) and `_keep_in_fp32_modules_strict`. Tensors of modules
    that a rule covers are left out.
    """
    ids: set[int] = set()
    if low not in LOW_DTYPES:
        return ids
    for module in model.modules():
        declared = list(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
        if low is torch.float16:
            declared += getattr(module, "_keep_in_fp32_modules", None) or ()
        if not declared:
            continue
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if any(fnmatch.fnmatchcase(f".{name}.", f"*.{pattern}.*") for pattern in declared):
                ids.add(id(tensor))
    for module in runs:
        ids.difference_update(map(id, _own_tensors(module)))
    return ids


def _opaque_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype that the module's own opaque tensors report, or None if it has no such tensor."""
    return next((tensor.dtype for tensor in _own_tensors(module) if is_opaque(tensor)), None)


def ids_beside_opaque(model: nn.Module) -> set[int]:
    """Return the ids of opaque tensors and of the other tensors of their modules, such as the scales of quantized
    weights.
    """
    ids: set[int] = set()
    for module in model.modules():
        if _opaque_dtype(module) is not None:
            ids.update(map(id, _own_tensors(module)))
    return ids


def _own_tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module, without those of its submodules."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _restore(
    tensors: Sequence[tuple[Tensor, torch.dtype]],
    cast_dtype: torch.dtype,
    float32_data: dict[int, Tensor],
    masters: Masters,
) -> None:
    """Cast tensors and gradients back to their earlier dtypes. Each tensor gets its values in `float32_data`, or else
    in `masters`.
    """
    for tensor, dtype in tensors:
        master = masters.get(tensor)
        # leave a tensor that the script has cast to another dtype since
        if tensor.dtype in LOW_DTYPES or tensor.dtype is cast_dtype:
            if id(tensor) in float32_data:
                tensor.data = float32_data[id(tensor)]
            else:
                tensor.data = masters.float32_of(tensor).to(dtype)
        if not tensor.is_leaf:  # reading .grad of a tensor with a graph warns
            continue
        if master is not None and master.grad is not None:
            tensor.grad = master.grad
        elif tensor.grad is not None:
            tensor.grad = tensor.grad.to(tensor.dtype)
