"""torch.autocast("cuda") on CPU tensors: CUDA's autocast kernels, written in Python, in the place of the CPU's. For
comparing with, without a GPU.

What a list of ops cannot tell is what the casts do inside composite functions of C++. There the dispatcher meets these
kernels as it would meet the real ones.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hand_casts import tensors_of
from torch import Tensor
from torch_autocast import get_overload_rules

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
# Not the input of these is cast, but the dtype of the result set: CUDA's way with them, as torch's header lists it.
_SET_DTYPE = frozenset(
    ["prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList"]
    + ["linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"]
)
_WITH_DTYPE = {
    "norm.Scalar": torch.ops.aten.norm.ScalarOpt_dtype,
    "norm.ScalarOpt_dim": torch.ops.aten.norm.ScalarOpt_dim_dtype,
}


@contextmanager
def emulated_autocast(device_type: str) -> Iterator[None]:
    """Inside, `torch.autocast("cpu")` has the rules of that device type. Process-wide, and undone at the end."""
    rules, replaced = get_overload_rules(device_type), get_overload_rules("cpu")
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are overridden
            for overload in sorted({*rules, *replaced} - {"_cudnn_rnn"}):
                kernel = (
                    _make_kernel(overload, rules[overload]) if overload in rules else torch.library.fallthrough_kernel
                )
                library.impl(overload, kernel, "AutocastCPU")
        yield
    finally:
        library._destroy()


def _make_kernel(overload: str, rule: str) -> Callable[..., Any]:
    name, _, variant = overload.partition(".")
    op = getattr(getattr(torch.ops.aten, name), variant or "default")
    parameters = [argument.name for argument in op._schema.arguments]
    takes_dtype = overload in _WITH_DTYPE or overload in _SET_DTYPE

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            if rule == "banned":
                raise RuntimeError(f"{name} is unsafe to autocast")
            if takes_dtype:
                return (
                    _in_float32_unless_told(op, overload, parameters, args, kwargs)
                    if _is_eligible(args[0])
                    else op(*args, **kwargs)
                )
            low = torch.get_autocast_dtype("cpu")
            dtypes = {tensor.dtype for tensor in tensors_of([*args, *kwargs.values()]) if _is_eligible(tensor)}
            widest = torch.float32 if torch.float32 in dtypes else low
            dtype = {"whitelist": low, "blacklist": torch.float32}.get(rule, widest)
            return op(*_cast(args, dtype), **_cast(kwargs, dtype))

    return kernel


def _in_float32_unless_told(
    op: Any, overload: str, parameters: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Softmax, sums and norms: not the input is cast, but the dtype of the result asked for, unless the call
    names one.
    """
    if overload in _WITH_DTYPE:
        missing = [argument.default_value for argument in op._schema.arguments][len(args) :]
        return _WITH_DTYPE[overload](*args, *missing, dtype=torch.float32)
    position = parameters.index("dtype")
    if len(args) > position:
        return op(*args[:position], args[position] or torch.float32, *args[position + 1 :], **kwargs)
    return op(*args, **{**kwargs, "dtype": kwargs.get("dtype") or torch.float32})


def _is_eligible(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if _is_eligible(value) else value
    if isinstance(value, dict):
        return {name: _cast(item, dtype) for name, item in value.items()}
    return type(value)(_cast(item, dtype) for item in value) if isinstance(value, (list, tuple)) else value
