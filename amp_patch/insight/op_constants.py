"""Plain names of ops, and the constants among the arguments of a call, such as an eps or a factor."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_ARITHMETIC = frozenset(
    {
        "add",
        "sub",
        "mul",
        "div",
        "pow",
        "true_divide",
        "floor_divide",
        "remainder",
        "fmod",
        "clamp",
        "addcmul",
        "addcdiv",
    }
    | {"subtract", "multiply", "divide", "rsub", "lerp", "float_power"}
)
"""Ops whose integer arguments are values. In most other ops, they are sizes, positions and numbers of dimensions."""

_FLAGS = ("is_causal",)
"""Names of bool arguments that count as constants of a call where they are True."""

_SECOND_NAMES = {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "divide": "div",
    "true_divide": "div",
    "multiply": "mul",
    "subtract": "sub",
}
"""Second names of ops, each with the name that `strip_spelling` returns for it."""

_KERNELS = {
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "native_batch_norm": "batch_norm",
    "native_dropout": "dropout",
    "_fused_rms_norm": "rms_norm",
    "max_pool2d_with_indices": "max_pool2d",
    "max_pool3d_with_indices": "max_pool3d",
    "_adaptive_avg_pool2d": "adaptive_avg_pool2d",
    "_adaptive_avg_pool3d": "adaptive_avg_pool3d",
    "_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_efficient_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_cudnn_attention": "scaled_dot_product_attention",
}
"""Kernels that compute a whole op, each with the name of that op. A recording names an op on a list by its function,
and an op on no list by its kernel. Without this table, an op that leaves a list would seem to vanish.
"""


def strip_spelling(op: str) -> str:
    """Return the plain name of an op: without its owner, the marks of an operator, and the `_` of an op in place.

    A kernel that computes a whole op gets the name of that op. If an op has two names, both give the same plain name.

    `F.relu_`, `torch.relu` and `aten.relu` are "relu"; `Tensor.__rmul__`, `Tensor.mul_` and `aten.mul` are "mul";
    `F.layer_norm` and `aten.native_layer_norm` are "layer_norm".
    """
    name = op.rpartition(".")[2]
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        plain = name[1:]  # of an operator with its operand on the right, such as radd, or in place, such as iadd
        if name[:1] in "ri" and (plain in _ARITHMETIC or plain in _SECOND_NAMES or plain == "matmul"):
            name = plain
    name = name.rstrip("_")
    return _KERNELS.get(name) or _SECOND_NAMES.get(name, name)


def find_constants(
    op: str, args: Sequence[Any], kwargs: Mapping[str, Any], function: Callable[..., Any] | None = None
) -> tuple[str, ...]:
    """Return the constants of a call as text: floats, strings, integers of an arithmetic op, and the names of flags
    that are True and passed by name.

    Strings are for example a reduction and the approximation of an activation. The equation of an einsum is no
    constant, since its letters mean nothing. Values that equal the default of `function` are left out, because modules
    pass them, and scripts often do not.
    """
    plain = strip_spelling(op)
    by_place = [(place, value) for place, value in enumerate(args) if _is_constant(plain, "", value)]
    by_name = {name: value for name, value in kwargs.items() if _is_constant(plain, name, value)}
    if not by_place and not by_name:
        return ()  # at once, because looking up the defaults is slow
    defaults = {} if function is None else _find_defaults(function)
    names = list(defaults)
    values = [(names[place] if place < len(names) else "", value) for place, value in by_place]
    values.extend(by_name.items())
    return tuple(_show(name, value) for name, value in values if name not in defaults or defaults[name] != value)


def _is_constant(op: str, name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value and name in _FLAGS
    if isinstance(value, str):
        return op != "einsum"
    return isinstance(value, float) or (isinstance(value, int) and op in _ARITHMETIC)


def _show(name: str, value: object) -> str:
    if value is True:
        return name
    return value if isinstance(value, str) else f"{value:.9g}"


def _find_defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the default of each parameter of a function, in order; {} if the function has no readable signature.

    For a parameter without a default, this is `inspect.Parameter.empty`.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {parameter.name: parameter.default for parameter in parameters}
