"""torch's namespaces of ops, the aliases of ops, and the attributes of a namespace that are not ops.

A *namespace* is a module or class whose functions are ops, such as `torch.nn.functional` and `torch.Tensor`.
"""

import functools
import inspect
import sys
import types
from typing import Any

import torch

from .. import torch_private

# The namespaces in which the ops of a list are looked up. A dotted name (`torch.fft.rfft`) says its namespace. A bare
# name (`softmax`) is looked up in all of `BARE_NAME_NAMESPACES`. `torch.fft` is not one of these, because a bare `fft`
# could mean the function `torch.fft.fft` or the module `torch.fft`.
NAMESPACES: dict[str, object] = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.Tensor": torch.Tensor,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.sparse": torch.sparse,
    "torch._VF": torch_private.VF,
}
BARE_NAME_NAMESPACES = ("torch", "torch.nn.functional", "torch.Tensor", "torch.special", "torch.linalg")
# Ops that recurrent layers (nn.LSTM and others) take from torch._VF, so a patch of torch.lstm alone would miss the
# layers. A bare name of one of these is therefore looked up in torch._VF too.
RNN_OPS = frozenset(f"{name}{cell}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell"))

SET_ITEM = "__setitem__"
"""The operator of `x[index] = values`. torch runs it by `index_put_` or `copy_` in C++, so patches of these miss it."""

# Aliases: names of the same op. An entry for one of these bare names applies to all. Two names are aliases if they
# compute the same function of the same arguments. Order and defaults of the arguments may differ, because a rule looks
# at dtypes only.
# Not aliases, on purpose: float_power (always float64), fmod (rounds differently from remainder), equal (returns one
# bool for a whole tensor), inv_ex and the other _ex forms (they also return an error code), sum and nansum, var and
# var_mean (another function).
# Some names mean different functions in torch and torch.linalg (norm, cross, lu_solve, vander). One bare name still
# means both, because a dtype that suits one of them suits the other. torch.cond (control flow) and torch.solve (a
# function that only raises an error) are not ops, and no name matches them.
ALIAS_GROUPS = (
    # arithmetic: functions, and their operators in plain, reflected (`__radd__`) and augmented (`__iadd__`) form
    "add __add__ __radd__ __iadd__",
    "sub subtract rsub __sub__ __rsub__ __isub__",
    "mul multiply __mul__ __rmul__ __imul__",
    "div divide true_divide __truediv__ __rtruediv__ __itruediv__ __div__ __rdiv__ __idiv__",
    "floor_divide __floordiv__ __rfloordiv__ __ifloordiv__",
    "remainder __mod__ __rmod__ __imod__",
    "pow __pow__ __rpow__ __ipow__",
    "matmul __matmul__ __rmatmul__",
    "mm spmm dsmm",
    "hspmm hsmm",
    "grouped_mm _grouped_mm",
    "sspaddmm saddmm",
    # comparison
    "eq __eq__",
    "ne not_equal __ne__",
    "gt greater __gt__",
    "ge greater_equal __ge__",
    "lt less __lt__",
    "le less_equal __le__",
    # numpy's names for trigonometry
    *(f"a{name} arc{name}" for name in ("cos", "cosh", "sin", "sinh", "tan", "tanh", "tan2")),
    # other second names
    "abs absolute __abs__",
    "neg negative __neg__",
    "clamp clip",
    "trunc fix",
    "cat concat concatenate",
    "vstack row_stack",
    "outer ger",
    "trapezoid trapz",
    "inverse inv",
    "pinverse pinv",
    "orgqr householder_product",
    "sigmoid expit",
    "digamma psi",
    "lgamma gammaln",
    "mvlgamma multigammaln",
    "igamma gammainc",
    "igammac gammaincc",
    # `x[index] = values`, which is `x.index_put_((index,), values)` if the index holds a tensor or a list
    f"index_put_ {SET_ITEM}",
)
ALIASES_OF = {name: tuple(group.split()) for group in ALIAS_GROUPS for name in group.split()}
"""All names of a group, by each of these names: {"clamp": ("clamp", "clip"), "clip": ("clamp", "clip"), ...}."""

OPERATORS = frozenset(name for name in ALIASES_OF if name.startswith("__")) | {SET_ITEM}

# Functions that no list may name. Some are called by casts, so a patch of them would call itself for ever. The others
# are not ops.
NEVER_LISTED = frozenset(
    {
        *("load", "save", "compile", "to", "type", "type_as", "float", "double", "half", "bfloat16", "backward"),
        *("detach", "copy_"),
    }
)

# Functions of a tensor that return no tensor, so that casting the tensor is useless.
_ACCESSORS = (
    "item tolist numpy size stride dim ndimension numel nelement element_size storage_offset storage storage_type",
    "untyped_storage data_ptr get_device dim_order sparse_dim dense_dim has_names retain_grad register_hook",
    "is_contiguous is_floating_point is_complex is_nonzero is_signed is_pinned is_shared is_inference is_neg is_conj",
    "is_same_size is_set_to is_coalesced register_post_accumulate_grad_hook",
)
ACCESSORS = frozenset(name for row in _ACCESSORS for name in row.split())


# Functions that create tensors from shapes, numbers or data. An argument, the data or a default decides their dtype.
_FACTORIES = (
    "arange as_tensor asarray bartlett_window blackman_window empty empty_permuted empty_strided eye from_file",
    "from_numpy frombuffer full hamming_window hann_window kaiser_window linspace logspace ones rand randint randn",
    "randperm range scalar_tensor tensor tril_indices triu_indices zeros",
)
FACTORIES = frozenset(name for row in _FACTORIES for name in row.split())


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)  # written in Python, written in C


def explain_non_op(value: Any, name: str, *, module_name: str = "") -> str | None:
    """Return why an attribute of torch is not an op, such as "a class". Return None if it counts as an op.

    Args:
        value: the attribute; also a replacement of torch's function, which amp_patch or another package has installed.
        name: its name.
        module_name: the module of torch that has the attribute, if that is not in `NAMESPACES`. Python functions that
            this module defines count as ops.
    """
    if isinstance(value, type):
        return "a class"
    if isinstance(value, types.ModuleType):
        return "a module"
    if not callable(value) or type(value).__module__ == "typing":
        return "not a function"
    if isinstance(value, types.FunctionType):
        # judge the original of a replacement: the replacement is a Python function, even if the original is a builtin
        value = inspect.unwrap(value)
    module = getattr(value, "__module__", None) or ""
    # Only functions are looked at. The class of a mock is in the standard library, too, but the mock stands for a
    # function of torch.
    if isinstance(value, _FUNCTIONS) and module.partition(".")[0] in sys.stdlib_module_names:
        return f"a function of {module}, not of torch"
    # Most ops of torch are written in C++. Some functions in C++ and most functions in Python are helpers instead.
    if isinstance(value, types.FunctionType):
        is_helper = _is_helper_of_torch(value, module_name)
    else:
        is_helper = module == torch_private.C_MODULE
    if is_helper or name in NEVER_LISTED:
        return "not an op"
    if name in FACTORIES:
        return "a function that creates tensors"
    return None


def _is_helper_of_torch(function: types.FunctionType, module_name: str) -> bool:
    """Return whether a Python function of torch is not an op: neither `module_name` nor a module of ops defines it."""
    file_module = function.__globals__.get("__name__") or ""
    if file_module.partition(".")[0] == "amp_patch":
        return False  # a replacement that cannot be unwrapped; its `__module__` names the module of torch's function
    defined_in = function.__module__ or ""
    if defined_in.partition(".")[0] != "torch" or defined_in in torch_private.PYTHON_OP_MODULES:
        return False
    is_of_module = bool(module_name) and f"{defined_in}.".startswith(f"{module_name}.")
    return not is_of_module


@functools.cache
def get_op_names() -> tuple[str, ...]:
    """Return the names for ops in `NAMESPACES` that a list may use: bare names, then dotted ones, each sorted.

    Names that begin with an underscore are left out, except operators such as `__add__`.
    """
    bare: set[str] = set()
    dotted: set[str] = set()
    for owner_name, owner in NAMESPACES.items():
        for name in dir(owner):
            is_operator = name in OPERATORS and owner is torch.Tensor
            value = None if name.startswith("_") and not is_operator else getattr(owner, name, None)
            if value is None or name in ACCESSORS or explain_non_op(value, name):
                continue
            dotted.add(f"{owner_name}.{name}")
            if owner_name in BARE_NAME_NAMESPACES or name in RNN_OPS:
                bare.add(name)
    return (*sorted(bare), *sorted(dotted))
