"""One model, as a session changes it: parameters cast in place, inputs and outputs cast by hooks, float32 state dicts.

Everything is attached through torch's hook APIs, and every hook is a plain object that can be copied and pickled: a
deep copy or a DataParallel replica runs the same casts on its own weights.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import compiling
from .dtypes import LOW_DTYPES, cast_tree, is_castable, is_opaque
from .errors import ArgumentTypeError, ModelError
from .masters import Masters
from .modulerules import ModuleRule, decide_runs, find_borders
from .policy import Policy
from .switch import Mode, Switch, enter_in_graph, leave_in_graph
from .weights import WeightLinks

WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


# ---- hooks: copied and pickled with the module they sit on -----------------------------------------------------------


class CastInputs:
    """Forward pre-hook: cast every castable tensor in the arguments to `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if is_castable(tensor) else tensor

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple([cast_tree(value, self._cast) for value in args]), {
            name: cast_tree(value, self._cast) for name, value in kwargs.items()
        }


class CastOutputs(CastInputs):
    """Forward hook: cast every castable tensor in the result to `dtype`."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return cast_tree(output, self._cast)


class RegionHooks:
    """What a module rule adds around a module at the levels that patch functions: its inputs cast, and a region while
    it runs.

    `enter` is a forward pre-hook, `leave` a forward hook that is called also after an exception. Inside `disable_casts`
    both do nothing.
    """

    def __init__(self, switch: Switch, mode: Mode, dtype: torch.dtype) -> None:
        self.switch = switch
        self.mode = mode
        self.cast = CastInputs(dtype)
        self._entries = _EntriesByThread()
        self._is_traced: list[bool] = []

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast the inputs and open the region."""
        if torch.compiler.is_dynamo_compiling():
            self._is_traced.append(self.switch.is_on_here())
            if not self._is_traced[-1]:
                return args, kwargs
            self.switch.enter_traced(self.mode)
            return self.cast(module, args, kwargs)
        if not self.switch.is_on_here():
            self._entries.stack.append(None)
            return args, kwargs
        self._entries.stack.append(self.switch.enter(self.mode))
        return self.cast(module, args, kwargs)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Close the region."""
        if torch.compiler.is_dynamo_compiling():
            if self._is_traced.pop():
                self.switch.leave_traced()
        elif self._entries.stack and (entry := self._entries.stack.pop()) is not None:
            self.switch.leave(entry)


class _EntriesByThread(threading.local):
    """The regions that hooks of one module have open, innermost last; None for one that was not opened.

    Copies start empty.
    """

    def __init__(self) -> None:
        self.stack: list[tuple[Mode, object] | None] = []

    def __reduce__(self) -> tuple[type["_EntriesByThread"], tuple[()]]:
        return _EntriesByThread, ()


class _SessionHook:
    """A hook that serves one model of one live session; a copy of it, and what is left after the session, does the part
    that needs none.
    """

    def __init__(self, target: Any = None) -> None:
        self._target = (lambda: None) if target is None else weakref.ref(target)

    def __deepcopy__(self, memo: Any) -> "_SessionHook":
        return type(self)()

    def __reduce__(self) -> tuple[type["_SessionHook"], tuple[()]]:
        return type(self), ()


class DoubtLinks(_SessionHook):
    """Forward hook: after an outermost forward without gradients, links must be refreshed before they are used
    again.
    """

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return
        links: WeightLinks | None = self._target()
        if links is not None:
            links.doubt_all()


class SyncMasters(_SessionHook):
    """Forward pre-hook: what was done to masters or to parameters since the last step shows in this forward."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        masters: Masters | None = self._target()
        if masters is not None and not torch.compiler.is_compiling():
            masters.sync()


class Float32StateDict(_SessionHook):
    """State-dict hook: store this module's own masters, or float32 copies of 16-bit entries that have none.

    A copy of the module stores its own tensors, as they are: whoever averages weights into the state dict of a copy
    means those.
    """

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        masters: Masters | None = self._target()
        if masters is None:
            return
        masters.sync()
        own: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
        for name, tensor in own.items():
            if tensor is None or tensor.dtype not in LOW_DTYPES or is_opaque(tensor) or prefix + name not in state_dict:
                continue
            master = masters.get(tensor)
            state_dict[prefix + name] = tensor.detach().float() if master is None else master.detach()


class LoadMasters(_SessionHook):
    """Load-state-dict pre-hook: copy the float32 values of this module's own parameters to their masters before torch
    rounds them.
    """

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        masters: Masters | None = self._target()
        if masters is None:
            return
        for name, parameter in module._parameters.items():
            value = state_dict.get(prefix + name)
            master = None if parameter is None else masters.get(parameter)
            if master is not None and isinstance(value, Tensor) and value.shape == master.shape:
                with torch.no_grad():
                    master.copy_(value)


# ---- the binding -----------------------------------------------------------------------------------------------------


def as_models(models: Any) -> list[nn.Module]:
    """Return the models of `initialize`'s first argument (one module, or an iterable of them) as a list.

    Raises ArgumentTypeError.
    """
    if isinstance(models, nn.Module):
        return [models]
    try:
        result = list(models)
    except TypeError:
        raise ArgumentTypeError(
            f"models must be a torch.nn.Module or a sequence of them, not {type(models).__name__}"
        ) from None
    for model in result:
        if not isinstance(model, nn.Module):
            raise ArgumentTypeError(f"models must hold torch.nn.Module objects, not {type(model).__name__}")
    return result


def find_model_problems(model: nn.Module, policy: Policy, accept_low: bool = False) -> list[str]:
    """Return everything that keeps `model` from being trained under `policy`, one sentence each.

    `accept_low`: 16-bit parameters are no fault.
    """
    name = type(model).__name__
    if isinstance(model, WRAPPERS):
        return [f"{name} is a parallel wrapper: pass the bare model to initialize, and wrap what it returns"]
    problems: list[str] = []
    if isinstance(model, torch.jit.ScriptModule):
        return [
            f"{name} is TorchScript, which takes no hooks and calls no patched function: initialize the model it was"
            " made from"
        ]
    lazy = [key for key, value in model.named_parameters() if nn.parameter.is_lazy(value)]
    if lazy:
        return [f"{name} has uninitialized parameters ({_some(lazy)}): run one forward pass before initialize"]
    if not accept_low and (policy.cast_model_type not in LOW_DTYPES or policy.master_weights):
        left_alone = _ids_beside_opaque(model)
        tensors = (*model.named_parameters(), *model.named_buffers())
        low = [key for key, value in tensors if value.dtype in LOW_DTYPES and id(value) not in left_alone]
        if low:
            problems.append(
                f"{name} is in 16 bits already ({_some(low)}): opt_level {policy.opt_level} starts from float32"
                " weights. Leave out .half() and .bfloat16(); initialize casts the model"
            )
    return problems


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def device_type_of(models: Sequence[nn.Module]) -> str:
    """Return the device type of the models' parameters, such as "cuda"; raises ModelError if they are on several."""
    types = {tensor.device.type for model in models for tensor in (*model.parameters(), *model.buffers())} - {"meta"}
    if len(types) > 1:
        raise ModelError(
            f"the models are on several device types ({', '.join(sorted(types))}): move them to one before initialize"
        )
    return types.pop() if types else "cpu"


class ModelBinding:
    """One model under one policy.

    `bind` changes it; `undo` gives a plain float32 model back, with the weights it has by then.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        masters: Masters,
        links: WeightLinks | None,
        rules: Sequence[ModuleRule],
        switch: Switch,
    ) -> None:
        self._model = weakref.ref(model)
        self._policy = policy
        self._masters = masters
        self._links = links
        self._switch = switch
        self._runs, self.used_rules = decide_runs(model, rules)
        self._undo = contextlib.ExitStack()

    @property
    def model(self) -> nn.Module | None:
        """The model, or None once it is gone."""
        return self._model()

    def bind(self, float32_data: dict[int, Tensor]) -> None:
        """Cast and hook the model.

        Fills `float32_data` with what each tensor held before it was cast, by the tensor's id. While it is there,
        undoing restores exactly that; the caller clears it once nothing can fail any more.
        """
        model, policy = self.model, self._policy
        if model is None:
            return
        if policy.cast_model_type is not None:
            self._cast_parameters(model, policy.cast_model_type, float32_data)
            self._let_opaque_modules_be(model, policy.cast_model_type)
            if policy.master_weights:
                self._add(model.register_forward_pre_hook(SyncMasters(self._masters)))
            self._add(model.register_forward_pre_hook(CastInputs(policy.cast_model_type), with_kwargs=True))
            self._cast_at_borders(model, policy.cast_model_type)
            for module in model.modules():
                self._add(module.register_state_dict_post_hook(Float32StateDict(self._masters)))
                self._add(module.register_load_state_dict_pre_hook(LoadMasters(self._masters)))
        elif policy.low_dtype is not None:
            self._open_regions(model, policy.low_dtype)
        output_dtype = policy.cast_model_outputs or (torch.float32 if policy.cast_model_type is not None else None)
        if output_dtype is not None:
            self._add(model.register_forward_hook(CastOutputs(output_dtype)))
        if self._links is not None:
            self._add(model.register_forward_hook(DoubtLinks(self._links)))

    def undo(self) -> None:
        """Take the hooks out and turn what was cast back to float32: to the masters' values where there are masters.

        Harmless twice.
        """
        self._undo.close()

    def _add(self, handle: Any) -> None:
        self._undo.callback(handle.remove)

    def _open_regions(self, model: nn.Module, low: torch.dtype) -> None:
        """Where functions are patched: a region around each module that runs otherwise than what holds it."""
        borders = find_borders(model, self._runs)
        if borders:
            compiling.write_into_graphs(enter_in_graph, leave_in_graph)
        for module, run in borders.items():
            hooks = RegionHooks(self._switch, *((Mode.LOW, low) if run == "low" else (Mode.FLOAT32, torch.float32)))
            self._add(module.register_forward_pre_hook(hooks.enter, with_kwargs=True, prepend=True))
            self._add(module.register_forward_hook(hooks.leave, always_call=True))

    def _cast_at_borders(self, model: nn.Module, low: torch.dtype) -> None:
        """Where the model is cast: any module with weights of its own takes what the module before it gives, be that
        the other dtype.
        """
        borders = find_borders(model, self._runs)
        for module in model.modules() if self._runs else ():
            run = self._runs.get(module)
            owns = any(
                tensor.dtype == (torch.float32 if run == "float32" else low)
                for tensor in module.parameters(recurse=False)
            )
            if module in borders or (owns and (run or not isinstance(module, nn.modules.batchnorm._BatchNorm))):
                self._add(
                    module.register_forward_pre_hook(
                        CastInputs(torch.float32 if run == "float32" else low), with_kwargs=True
                    )
                )

    def _let_opaque_modules_be(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Have modules whose weights are not ours to cast run in the dtype that the weights show, between their
        neighbours in `dtype`.
        """
        for module in model.modules():
            shown = _shown_dtype(module)
            if shown is not None and shown != dtype:
                self._add(module.register_forward_pre_hook(CastInputs(shown), with_kwargs=True))
                self._add(module.register_forward_hook(CastOutputs(dtype)))

    def _cast_parameters(self, model: nn.Module, dtype: torch.dtype, float32_data: dict[int, Tensor]) -> None:
        cast: list[Tensor] = []
        self._undo.callback(_restore_float32, cast, float32_data, self._masters)
        for tensor in _tensors_to_cast(model, bool(self._policy.keep_batchnorm_fp32), self._runs):
            if tensor.dtype == dtype:
                continue
            float32_data[id(tensor)] = tensor.data
            cast.append(tensor)
            _set_dtype(tensor, dtype)
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()


def _tensors_to_cast(model: nn.Module, keep_batchnorm: bool, runs: Mapping[nn.Module, str]) -> Iterator[Tensor]:
    """Yield each castable parameter and buffer once.

    Left out are opaque tensors and what a module holds beside them; what a module rule keeps in float32, also where
    another module holds it too; and, if they are kept, those of BatchNorm layers (of any kind, affine or not) that no
    rule covers.
    """
    seen = _ids_beside_opaque(model)
    for module in model.modules():
        is_kept = (
            runs[module] == "float32"
            if module in runs
            else keep_batchnorm and isinstance(module, nn.modules.batchnorm._BatchNorm)
        )
        if is_kept:
            seen.update(id(tensor) for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in seen and is_castable(tensor):
            seen.add(id(tensor))
            yield tensor


def _shown_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype that the module's own opaque tensors show, or None if it has none."""
    return next((tensor.dtype for tensor in _own_tensors(module) if is_opaque(tensor)), None)


def _ids_beside_opaque(model: nn.Module) -> set[int]:
    """Return the ids of opaque tensors and of what their modules hold beside them, which fits them."""
    return {
        id(tensor) for module in model.modules() if _shown_dtype(module) is not None for tensor in _own_tensors(module)
    }


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _set_dtype(tensor: Tensor, dtype: torch.dtype) -> None:
    """Cast in place, and the gradient with it; the Parameter object, and so every reference to it, stays."""
    gradient, tensor.grad = (tensor.grad, None) if tensor.is_leaf else (None, None)
    tensor.data = tensor.data.to(dtype)
    if gradient is not None:
        tensor.grad = gradient.to(dtype)


def _restore_float32(tensors: Sequence[Tensor], float32_data: dict[int, Tensor], masters: Masters) -> None:
    for tensor in tensors:
        master = masters.get(tensor)
        if tensor.dtype in LOW_DTYPES:
            _set_dtype(tensor, torch.float32)
            if id(tensor) in float32_data:
                tensor.data = float32_data[id(tensor)]
            elif master is not None:
                tensor.data = master.data
            if master is not None and master.grad is not None:
                tensor.grad = master.grad


def describe(models: Sequence[nn.Module]) -> str:
    """Return the class names of the models, for messages."""
    return ", ".join(type(model).__name__ for model in models)
