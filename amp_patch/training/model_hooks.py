"""Hooks on models: plain objects that are copied and pickled with the module they sit on."""

__role__ = "border"  # the role of the casts here in reports of `insight`: see `insight.sites`

import contextlib
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..casting import Mode, Switch, WeightCache, cast_tree, compiling
from ..dtypes import LOW_DTYPES, PLAIN_CLASSES, dtype_name, is_castable, is_opaque
from ..errors import SessionError
from ..reporting import warn
from ..torch_private import (
    get_backward_id,
    get_call_kwargs,
    get_own_buffers,
    get_own_parameters,
    is_called_from_outside,
)
from .masters import Masters


class CastInputs:
    """Forward pre-hook: cast every castable tensor (`dtypes.is_castable`) in the arguments to `dtype`."""

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


class CastModelInputs(CastInputs):
    """Forward pre-hook of a whole model: cast every castable tensor in the arguments to `dtype`.

    If `dtype` has 16 bits, the first call warns of whole numbers, such as timesteps, that `dtype` rounds. To see them,
    it waits for the device.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._is_checked = dtype not in LOW_DTYPES

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self._is_checked and not compiling.is_compiling():
            self._is_checked = True
            self._warn_of_rounded_counts(args, kwargs)
        return super().__call__(module, args, kwargs)

    def _warn_of_rounded_counts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rounded: list[str] = []

        def check(tensor: Tensor) -> Tensor:
            if is_castable(tensor) and type(tensor) in PLAIN_CLASSES and not tensor.is_meta:
                # attention masks are whole numbers too, but hold large negative ones, which may be rounded
                is_count = (tensor == tensor.round()) & (tensor >= 0)
                if bool(is_count.all()) and bool((tensor.to(self.dtype) != tensor).any()):
                    rounded.append(f"one of shape {tuple(tensor.shape)}")
            return tensor

        with torch.no_grad(), contextlib.suppress(RuntimeError):  # torch.func.vmap hides the values
            cast_tree((args, kwargs), check)
        if rounded:
            name = dtype_name(self.dtype)
            warn(
                f"inputs of the model hold whole numbers that {name} rounds ({', '.join(rounded)}): pass counts,"
                " positions and timesteps as integers, which are not cast"
            )


class TakeAnyInput(CastInputs):
    """Forward pre-hook of a layer whose weights were cast to `dtype`: cast its inputs to `dtype`, too.

    It casts the inputs only if a weight of the layer still has this dtype. A script that calls a submodule directly may
    pass float32 inputs.
    """

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(args) == 1 and isinstance(args[0], Tensor) and args[0].dtype is self.dtype and not kwargs:
            return args, kwargs
        for weight in get_own_parameters(module).values():
            if weight is not None and weight.dtype is self.dtype:
                return super().__call__(module, args, kwargs)
        return args, kwargs


class TakeOutsideInput(TakeAnyInput):
    """Forward pre-hook of a cast module that accepts any dtype: cast its inputs if the script calls it directly.

    If its model calls it, float32 inputs may be on purpose, and are left as they are. A forward that a backward pass
    runs again (checkpointing) is treated like the last forward before it. In compiled code, the hook does nothing.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._is_outside = False

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(args) == 1 and isinstance(args[0], Tensor) and args[0].dtype is self.dtype and not kwargs:
            return args, kwargs
        if compiling.is_compiling():
            return args, kwargs
        if get_backward_id() == -1:  # no backward pass runs this call
            self._is_outside = is_called_from_outside()
        if not self._is_outside:
            return args, kwargs
        return super().__call__(module, args, kwargs)


def take_any_input(original: Callable[..., Any], low: torch.dtype, count: int) -> Callable[..., Any]:
    """Return the forward of a layer that is patched instead of hooked (`PATCHED_LAYERS`).

    If an input is float32 and the first weight of the layer is `low`, this forward casts all arguments. Inputs are the
    first `count` positional arguments, and the keyword arguments in `_INPUTS`.
    """
    cast = CastInputs(low)

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for value in (*args[:count], *[kwargs.get(name) for name in _INPUTS]) if kwargs else args[:count]:
            if isinstance(value, Tensor) and value.dtype is torch.float32:
                weight = next(module.parameters(), None)
                if weight is not None and weight.dtype is low:
                    args, kwargs = cast(module, args, kwargs)
                break
        return original(module, *args, **kwargs)

    return forward


STRICT_LAYERS = (
    *(nn.Linear, nn.Bilinear, nn.LayerNorm, nn.GroupNorm, nn.RNNBase, nn.RNNCell, nn.LSTMCell, nn.GRUCell),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
"""Layers that raise an error for float32 inputs if their weights are in 16 bits."""

WITHOUT_HOOKS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Layers that take a slower path in torch if they, or modules that they hold, have hooks."""

# names of inputs in the layers of `PATCHED_LAYERS`
_INPUTS = ("src", "tgt", "memory", "query", "key", "value", "input_")

PATCHED_LAYERS = {
    nn.MultiheadAttention: 3,
    nn.TransformerEncoderLayer: 1,
    nn.TransformerEncoder: 1,
    nn.TransformerDecoderLayer: 2,
    nn.TransformerDecoder: 2,
    nn.Transformer: 2,
    nn.AdaptiveLogSoftmaxWithLoss: 1,
}
"""Layers whose forward is replaced instead of hooked, with the number of arguments that are inputs. These are the
layers in `WITHOUT_HOOKS`, the layers that call them with masks, and layers that read the dtype of their input."""


class CastOutputs(CastInputs):
    """Forward hook: cast every castable tensor in the result to `dtype`."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return cast_tree(output, self._cast)


class RegionHooks:
    """The hooks that a module rule adds to a module at levels that patch functions. They cast the inputs, and open a
    region while the module runs. Inside `disable_casts`, neither the inputs nor the arguments of ops in the module are
    cast. Inside a region of the same mode, the inputs stay as they are.

    If the parent of the module runs in the same way (`is_inside`), the hooks are needed only when the script calls the
    module directly. Compiled code leaves such hooks out, because each region breaks the graph.

    `enter` is a forward pre-hook. `leave` is a forward hook that torch also calls after an Exception. After an
    interrupt, torch does not call `leave`: then the switch finds the stale region and closes it.
    """

    def __init__(self, switch: Switch, mode: Mode, dtype: torch.dtype, *, is_inside: bool) -> None:
        self.switch = switch
        self.mode = mode
        self.is_inside = is_inside
        self.cast = CastInputs(dtype)

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Cast the inputs and open the region. Do nothing if `kwargs` is None: torch passes no `kwargs` to a hook that
        was removed while the hooks of this call were running.
        """
        if kwargs is None:
            return None
        if self.is_inside and (compiling.is_dynamo_compiling() or self.switch.is_in(self.mode)):
            return None  # the usual case: the region of the parent is open
        if self.switch.open_for_module(self.mode, self):
            return self.cast(module, args, kwargs)
        return args, kwargs

    def catch_up(self, module: nn.Module, args: tuple[Any, ...], frame: types.FrameType) -> tuple[Any, ...]:
        """Like `enter`, for a call in `frame` that may have begun before the hooks were set.

        Returns the positional inputs, and replaces the keyword inputs in the frame. If torch calls `enter` afterwards,
        `enter` sees the open region and does nothing.
        """
        kwargs = get_call_kwargs(frame)
        if self.switch.open_for_module(self.mode, self, frame):
            args, cast_kwargs = self.cast(module, args, kwargs)
            kwargs.update(cast_kwargs)
        return args

    def join(self, frame: types.FrameType) -> None:
        """Open the region of a forward that is under way in `frame`. Its inputs were not cast."""
        self.switch.open_for_module(self.mode, self, frame)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Close the region."""
        if not self.is_inside:
            self.switch.close_for_module(self)
        elif not compiling.is_dynamo_compiling() and self.switch.has_regions():
            self.switch.close_for_module(self, sys._getframe(1))


class SessionHook:
    """A hook with a target in a session, which it holds weakly. A copied or unpickled hook has no target, and does
    nothing when it is called.
    """

    def __init__(self, target: Any = None) -> None:
        # called like a weak reference: it returns the target, or None
        self._target = (lambda: None) if target is None else weakref.ref(target)

    def __deepcopy__(self, memo: Any) -> "SessionHook":
        return type(self)()

    def __reduce__(self) -> tuple[type["SessionHook"], tuple[()]]:
        return type(self), ()


class InvalidateCache(SessionHook):
    """Forward pre-hook and forward hook: invalidate the low copies of weights before and after a forward without
    gradients. For an evaluation, scripts may swap weights in ways that no version counter shows.
    """

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if compiling.is_compiling() or torch.is_grad_enabled():
            return
        cache: WeightCache | None = self._target()
        if cache is not None:
            cache.invalidate_all()


class SyncMasters(SessionHook):
    """Forward pre-hook: copy edited parameters to their masters, and edited masters to their parameters.

    Warns the first time that a model of the session is deep-copied, because the copy has 16-bit weights and no masters.
    """

    def __deepcopy__(self, memo: Any) -> SessionHook:
        masters: Masters | None = self._target()
        if masters is not None and not masters.has_warned_of_copy:
            masters.has_warned_of_copy = True
            warn(
                "this copy of a model has 16-bit weights and no float32 masters: averages kept in it lose changes"
                " that 16 bits cannot hold. Average over amp.master_params(optimizer), or over copies of"
                " model.state_dict(), which is float32. To train a copy, make it before initialize or after amp.reset()"
                ", when weights are float32, and create a new optimizer for it: a copied optimizer holds copies of the"
                " masters, which belong to no model."
            )
        return super().__deepcopy__(memo)

    def __call__(self, module: nn.Module, args: Any) -> None:
        masters: Masters | None = self._target()
        if masters is None or masters.is_paused:
            return
        if compiling.is_compiling():
            masters.is_compiled = True
        else:
            masters.sync(frees_memory=torch.is_grad_enabled())


class PrepareStateDict(SessionHook):
    """State-dict and load-state-dict pre-hook of a model: see `ModelBinding.prepare_state_dict`."""

    def __call__(self, *_: Any) -> None:
        binding = self._target()
        if binding is not None:
            binding.prepare_state_dict()


class Float32StateDict(SessionHook):
    """State-dict post-hook: store float32 values of the module's own 16-bit tensors, from the masters if there are any.

    A copy of the module stores its tensors as they are.
    """

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        masters: Masters | None = self._target()
        if masters is None:
            return
        masters.sync(rechecks=False)
        own: dict[str, Tensor | None] = {**get_own_parameters(module), **get_own_buffers(module)}
        for name, tensor in own.items():
            if tensor is None or tensor.dtype not in LOW_DTYPES or is_opaque(tensor) or prefix + name not in state_dict:
                continue
            value = masters.float32_of(tensor)
            if state_dict[prefix + name] is tensor:  # keep_vars=True: entries are the tensors themselves, not detached
                master = masters.get(tensor)
                value = value.requires_grad_(tensor.requires_grad) if master is None else master
            state_dict[prefix + name] = value


class LoadMasters(SessionHook):
    """Load-state-dict pre-hook: give masters and buffers their float32 values before torch rounds them.

    Raises SessionError if `load_state_dict(assign=True)` would replace a 16-bit tensor.
    """

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
    ) -> None:
        masters: Masters | None = self._target()
        if masters is None:
            return
        masters.copy_from_parameters(rechecks=False)
        is_assigned = local_metadata.get("assign_to_params_buffers", False)
        own: dict[str, Tensor | None] = {**get_own_parameters(module), **get_own_buffers(module)}
        for name, tensor in own.items():
            value = state_dict.get(prefix + name)
            if tensor is None or not isinstance(value, Tensor) or value.shape != tensor.shape:
                continue
            if is_assigned and tensor.dtype in LOW_DTYPES:
                raise SessionError(
                    f"load_state_dict(assign=True) would replace {prefix}{name}, which amp_patch keeps in"
                    f" {dtype_name(tensor.dtype)}. Load without assign=True, or before initialize."
                )
            # torch.distributed.checkpoint passes the parameter itself if the checkpoint lacks it: then keep the master
            if value.dtype is not tensor.dtype or value.data_ptr() != tensor.data_ptr():
                masters.load(tensor, value)


class EndLoading(SessionHook):
    """Load-state-dict post-hook: copy loaded masters to their parameters."""

    def __call__(self, module: nn.Module, _: Any) -> None:
        masters: Masters | None = self._target()
        if masters is not None:
            masters.copy_loaded_to_parameters(get_own_parameters(module).values())
