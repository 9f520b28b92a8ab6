"""torch's namespaces of ops, the aliases of ops, and the attributes of a namespace that are no ops."""

import functools
import inspect
import sys
import types
from typing import Any

import torch

from .. import torch_private

# The namespaces a name may be resolved in. A bare name is looked up in the first five. `torch.fft` is left to dotted
# names: its members are called `fft` or `rfft`, and `torch.fft` itself is a module, so a bare `fft` would be read two
# ways.
OWNERS: dict[str, object] = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.Tensor": torch.Tensor,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.sparse": torch.sparse,
    "torch._VF": torch_private.VF,
}
SEARCHED = ("torch", "torch.nn.functional", "torch.Tensor", "torch.special", "torch.linalg")
# nn.RNN and its relatives call the C functions through torch._VF, which torch.lstm and the others do not pass by.
RNN = frozenset(f"{name}{cell}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell"))

SET_ITEM = "__setitem__"
"""`x[index] = values`, which torch runs below `index_put_` and `copy_`."""

# Names of the same op: naming one names them all. Two names belong together if they compute the same function of the
# same arguments, in any order and up to argument defaults, because a rule looks at dtypes only.
# Kept apart on purpose: float_power (always float64), fmod (rounds differently from remainder), equal (returns one bool
# for a whole tensor), inv_ex and the other _ex forms (they also return an error code), sum and nansum, var and var_mean
# (another function).
# The same name in torch and torch.linalg may differ (norm, cross, lu_solve, vander) and still means both: each reads
# the same data with the same range, so one rule fits. torch.cond and torch.solve are not ops (control flow; a function
# that only raises) and are never matched.
ALIASES = (
    # arithmetic: the operators, their reflected and their augmented forms
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
    # other second names that torch documents as such
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
)
GROUPS = {name: tuple(group.split()) for group in ALIASES for name in group.split()}
OPERATORS = frozenset(name for name in GROUPS if name.startswith("__")) | {SET_ITEM}

# Casts call these themselves, or they compute nothing.
REFUSED = frozenset(
    {
        *("load", "save", "compile", "to", "type", "type_as", "float", "double", "half", "bfloat16", "backward"),
        *("detach", "copy_"),
    }
)

# These read a tensor and return a number, a tuple, a list or a handle, so casting the tensor is useless.
_READS = (
    "item tolist numpy size stride dim ndimension numel nelement element_size storage_offset storage storage_type",
    "untyped_storage data_ptr get_device dim_order sparse_dim dense_dim has_names retain_grad register_hook",
    "is_contiguous is_floating_point is_complex is_nonzero is_signed is_pinned is_shared is_inference is_neg is_conj",
    "is_same_size is_set_to is_coalesced register_post_accumulate_grad_hook",
)
READS = frozenset(name for row in _READS for name in row.split())


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


def find_fault(value: Any, name: str) -> str | None:
    """Return why an attribute of a namespace (or its replacement) is no op, or None if it is one."""
    if isinstance(value, type):
        return "a class"
    if isinstance(value, types.ModuleType):
        return "a module"
    if not callable(value):
        return "not a function"
    if isinstance(value, types.FunctionType):
        # a replacement names the module of its original; only the original shows whether that is a builtin
        value = inspect.unwrap(value)
    module = getattr(value, "__module__", None) or ""
    if isinstance(value, _FUNCTIONS) and module.partition(".")[0] in sys.stdlib_module_names:
        return f"a function of {module}, not of torch"  # other callables, such as mocks, stand for torch's
    if (
        isinstance(value, types.FunctionType)
        and (home := value.__globals__.get("__name__") or "").partition(".")[0] == "amp_patch"
    ):
        module = home  # a replacement names the module of the original
    # a method of C, or a replacement that amp_patch or another package installed
    is_foreign = module.partition(".")[0] != "torch"
    if (
        module == torch_private.C_MODULE
        or (isinstance(value, types.FunctionType) and not is_foreign and module not in torch_private.PYTHON_OP_MODULES)
        or name in REFUSED
    ):
        return "not an op"
    return None


@functools.cache
def get_op_names() -> tuple[str, ...]:
    """Return every name that a list may use for an op of this torch: bare names, then dotted ones, each sorted.

    Private names of torch are left out.
    """
    bare: set[str] = set()
    dotted: set[str] = set()
    for owner_name, owner in OWNERS.items():
        for name in dir(owner):
            is_operator = name in OPERATORS and owner is torch.Tensor
            value = None if name.startswith("_") and not is_operator else getattr(owner, name, None)
            if value is None or name in READS or find_fault(value, name):
                continue
            dotted.add(f"{owner_name}.{name}")
            if owner_name in SEARCHED or name in RNN:
                bare.add(name)
    return (*sorted(bare), *sorted(dotted))
