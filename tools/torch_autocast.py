"""What torch.autocast of the installed torch does on a device type, in the terms of the op lists.

Nothing is read off documentation. torch registers its casts with the dispatcher, one kernel for each overload and
device type, and the dispatcher says which there are. What a kernel does is seen by calling it with tensors that hold no
data and report the first call made on them: a cast, or the op itself. That needs no device: a torch built without CUDA
still tells what autocast does on CUDA.

Autocast casts overloads of C++ functions, a list casts Python names. `get_rules` translates: a function to its Python
name, and a Python name that meets a cast only further down in C++ (`_THROUGH`) to the rule it meets there.
"""

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from amp_patch.config.op_lists import find_spellings
from amp_patch.config.op_rules import RULE_KEYS, OpRule

_log = logging.getLogger(__name__)

# Names of torch that are not public: all ops, those with a kernel for autocast, and the cast that it makes.
get_all_op_names = torch._C._dispatch_get_all_op_names
has_kernel_for = torch._C._dispatch_has_kernel_for_dispatch_key
to_copy = torch.ops.aten._to_copy.default

Key = tuple[str, str]

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "mps": "AutocastMPS", "xpu": "AutocastXPU"}
DEVICE_TYPES = tuple(_KEYS)
"""The device types whose autocast is known."""
# Autocast is to cast to the one 16-bit dtype, and the tensors have the other: a kernel that runs in low or in float32
# must cast either way.
_LOW, _OTHER = torch.bfloat16, torch.float16

_UNSEEN: dict[str, dict[str, OpRule]] = {
    # Registered by CUDA builds alone, so a build without CUDA does not see it. Casts input, state and weights to low.
    "cuda": {"_cudnn_rnn": OpRule.WHITELIST},
    # Builds without XPU refuse these half-way, before 2.15. They are in the macro of torch's header that CUDA has, too.
    "xpu": {"softmax.int": OpRule.BLACKLIST, "log_softmax.int": OpRule.BLACKLIST},
}
# F.max_pool3d calls torch.max_pool3d, or, when asked for indices, a function that autocast leaves alone. So only the
# former is meant.
_NAMES = {"max_pool3d": "torch.max_pool3d"}
# Python name: functions below it, of which the first that is registered on a device type decides where the name itself
# is not.
_THROUGH = {
    # these do all their work there
    "affine_grid": ("bmm",),
    "affine_grid_generator": ("bmm",),
    "chain_matmul": ("mm",),
    "einsum": ("bmm",),
    "inner": ("tensordot",),
    "interpolate": ("upsample_bilinear2d",),
    "lstm": ("_cudnn_rnn", "mkldnn_rnn_layer"),
    "max_unpool1d": ("max_unpool2d",),
    "multi_dot": ("mm",),
    "square": ("pow",),
    "torch.sparse.addmm": ("addmm",),
    "torch.sparse.mm": ("mm",),
    "tensordot": ("mm",),
    # recurrent layers otherwise multiply there; the rest runs in the dtype of the state, which is low if the input is
    **dict.fromkeys(("gru", "rnn_tanh", "rnn_relu"), ("_cudnn_rnn", "linear")),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), ("linear",)),
    # these end there, so that the result has that dtype; what comes before runs in the dtype of the arguments under
    # autocast
    "cross_entropy": ("nll_loss",),
    "cumulative_trapezoid": ("cumsum",),
    "mvlgamma": ("sum",),
    "pairwise_distance": ("linalg_vector_norm",),
    "sum_to_size": ("sum",),
    "trapezoid": ("sum",),
    "_native_multi_head_attention": ("linear",),
    "_transformer_encoder_layer_fwd": ("layer_norm", "linear"),
}
# Made of an op that autocast casts if an operand is sparse, and left alone if all are dense and so of one dtype. In the
# widest dtype neither fails.
_IF_SPARSE = ("mv",)
# Higher-order ops, by the names of the functions that call them. Their kernels for autocast are written in Python, and
# cast to low.
_HIGHER_ORDER = {"flex_attention": torch.ops.higher_order.flex_attention}
# torchvision registers its own kernels for autocast, which cast to float32. Known for these device types alone.
_WITH_TORCHVISION = ("cpu", "cuda")
_OF_TORCHVISION = ("nms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")


def get_rules(device_type: str) -> dict[str, tuple[str, ...]]:
    """Return the ops of each rule, as names for a list file that does what autocast does on one of `DEVICE_TYPES`.

    Ops are sorted; rules without ops are left out. Raises ValueError for another device type.
    """
    functions = {overload.partition(".")[0]: rule for overload, rule in get_overload_rules(device_type).items()}
    rules = {name: rule for function, rule in functions.items() if (name := _name_of(function))}
    bare = _spellings(name for name in rules if "." not in name)
    rules = {name: rule for name, rule in rules.items() if "." not in name or not _spellings([name]) <= bare}
    claimed = _spellings(rules)
    for name, below in _THROUGH.items():
        function = next((function for function in below if function in functions), None)
        if function and not _spellings([name]) & claimed:
            rules[name] = functions[function]
    key = getattr(torch._C.DispatchKey, _KEYS[device_type], None)
    rules |= {name: OpRule.WHITELIST for name, op in _HIGHER_ORDER.items() if key in op.py_kernels}
    rules |= {name: OpRule.PROMOTE for name in _IF_SPARSE if not _spellings([name]) & claimed}
    if device_type in _WITH_TORCHVISION:
        rules |= {f"torchvision.ops.{name}": OpRule.BLACKLIST for name in _OF_TORCHVISION}
    return {
        rule.value: ops for rule in RULE_KEYS if (ops := tuple(sorted(name for name in rules if rules[name] is rule)))
    }


def get_overload_rules(device_type: str) -> dict[str, OpRule]:
    """Return the rule of every overload that autocast has a kernel for on a device type.

    An example is {"pow.Tensor_Scalar": "blacklist"}. An overload whose kernel could not be understood is left out, and
    logged. Raises ValueError for a device type that is not one of `DEVICE_TYPES`.
    """
    if device_type not in _KEYS:
        raise ValueError(f"device type {device_type!r} is not one whose autocast is known ({', '.join(_KEYS)})")
    rules = dict(_UNSEEN.get(device_type, {}))
    for full_name in sorted(get_all_op_names()):
        namespace, _, name = full_name.partition("::")
        if "name" in name.partition(".")[2].lower():
            continue  # by the name of a dimension, which torch 2.6 has still: treated as the overload by its number
        if namespace == "aten" and name not in rules and has_kernel_for(full_name, _KEYS[device_type]):
            rule = _observe(name, device_type)
            if rule is None:
                _log.warning(
                    "what autocast of torch %s does to %s on %s is not understood, so no rule says it",
                    torch.__version__,
                    name,
                    device_type,
                )
            else:
                rules[name] = rule
    return rules


def _name_of(function: str) -> str | None:
    """Return how a list names a C++ function, or None where Python has no name for it."""
    if function in _NAMES:
        return _NAMES[function]
    prefix, _, rest = function.partition("_")
    for name in (function, f"torch.{prefix}.{rest}" if prefix in ("linalg", "fft", "special") else ""):
        if name and find_spellings(name, may_be_missing=True):
            return name
    return None


def _spellings(names: Iterable[str]) -> set[Key]:
    return {key for name in names for key in find_spellings(name, may_be_missing=True)}


# ---- observing -------------------------------------------------------------------------------------------------------


class _Seen(Exception):
    """The first call that was made on a reporting tensor."""

    def __init__(self, function: str, arguments: tuple[object, ...], cast_to: torch.dtype | None) -> None:
        super().__init__(function)
        self.function, self.arguments, self.cast_to = function, arguments, cast_to


class _Reporting(Tensor):
    """A tensor without data, of any device type: what is computed with it ends in `_Seen`."""

    @staticmethod
    def __new__(cls, dtype: torch.dtype, device_type: str) -> "_Reporting":
        return torch.Tensor._make_wrapper_subclass(cls, (2, 2), dtype=dtype, device=torch.device(device_type))

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        named = dict(kwargs or {})
        dtype = named.get("dtype") if func is to_copy else None
        raise _Seen(func.name(), tuple(_plain(value) for value in (*args, *named.items())), dtype)


def _plain(value: Any) -> object:
    """Return a value that compares: the dtype of a tensor, and what is no tensor as it is."""
    if isinstance(value, Tensor):
        return value.dtype
    return tuple(_plain(item) for item in value) if isinstance(value, (list, tuple)) else value


def _observe(overload: str, device_type: str) -> OpRule | None:
    """Return the rule of one overload, or None if what it does is none of the known things."""
    name, _, variant = overload.partition(".")
    op = getattr(getattr(torch.ops.aten, name), variant or "default")
    try:
        first = _outcome(op, device_type, (_OTHER,))
        if isinstance(first, _Seen) and first.cast_to in (_LOW, torch.float32):
            return OpRule.WHITELIST if first.cast_to is _LOW else OpRule.BLACKLIST
        kinds = [kind for argument in op._schema.arguments if "Tensor" in (kind := str(argument.type))]
        is_sequence = kinds[:1] == ["List[Tensor]"]
        if is_sequence or len(kinds) > 1:  # with one tensor there is nothing to promote
            mixed = _outcome(op, device_type, (_LOW, torch.float32))
            if isinstance(mixed, _Seen) and mixed.cast_to is torch.float32:
                return OpRule.SEQUENCE_PROMOTE if is_sequence else OpRule.PROMOTE
        plain = _outcome(op, device_type, (_OTHER,), is_on=False)
    except NotImplementedError:
        return None
    if isinstance(first, _Seen) and isinstance(plain, _Seen):
        # the same but for a dtype of the result, which such ops compute in
        return OpRule.BLACKLIST if (first.function, first.arguments) != (plain.function, plain.arguments) else None
    return OpRule.BANNED if isinstance(plain, _Seen) else None


def _outcome(op: Any, device_type: str, dtypes: tuple[torch.dtype, ...], is_on: bool = True) -> Exception | None:
    """Return what ends a call of `op` whose tensors have these dtypes in turn: the first call on one, or an error."""
    count = 0

    def tensor() -> Tensor:
        nonlocal count
        count += 1
        return _Reporting(dtypes[(count - 1) % len(dtypes)], device_type)

    with _autocast(device_type, is_on):
        arguments = [(argument.name, _make(argument, tensor), argument.kwarg_only) for argument in op._schema.arguments]
        positional = [value for _, value, is_keyword in arguments if not is_keyword]
        try:
            op(*positional, **{name: value for name, value, is_keyword in arguments if is_keyword})
        except (_Seen, RuntimeError, IndexError, ValueError, TypeError) as outcome:
            return outcome
    return None


def _make(argument: Any, tensor: Any) -> Any:
    """Return a value for an argument of an op: tensors where it takes any, else the default or a simple one."""
    kind = str(argument.type)
    if kind in ("Tensor", "Optional[Tensor]"):
        return tensor()
    if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
        return [tensor(), tensor()]
    if argument.has_default_value():
        return argument.default_value
    if kind.startswith("Optional"):
        return None
    simplest = {
        "int": 0,
        "SymInt": 0,
        "List[int]": [0],
        "List[SymInt]": [0],
        "bool": False,
        "float": 1.0,
        "number": 1.0,
        "str": "ij,jk->ik",
    }
    if kind not in simplest:
        raise NotImplementedError(kind)
    return simplest[kind]


@contextmanager
def _autocast(device_type: str, is_on: bool) -> Iterator[None]:
    """Autocast to `_LOW`, or none. torch.autocast itself would refuse a device type that this machine lacks."""
    before = (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
    )
    try:
        torch.set_autocast_enabled(device_type, is_on)
        torch.set_autocast_dtype(device_type, _LOW)
        torch.set_autocast_cache_enabled(False)
        # in inference mode a cast is reported as the call of `to` around it
        with torch.inference_mode(False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])
        torch.set_autocast_cache_enabled(before[2])
