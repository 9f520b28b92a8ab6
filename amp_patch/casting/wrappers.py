"""`OpCasts`: the rules of the op lists, each for one op, and what stands in the place of the op.

A rule looks at the arguments of a call and says what to call with which. As in torch.autocast, a call with an explicit
`out=` (and, for float32 ops, a dtype) runs as it was written.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function_variadic

from ..config import op_lists
from ..dtypes import CASTABLE, LOW_DTYPES, PLAIN_CLASSES, TensorCast
from ..errors import BannedOpError
from ..torch_private import count_dispatch_modes
from .autocast import Autocast, RulesAlone
from .compiling import is_dynamo_compiling
from .mode import Mode, Switch
from .products import Products
from .replacement import ALWAYS, Call, Op, PublicOp, Replacements, Rule, replace, run_in_region
from .tensor_cast import CONVERSIONS, cast_arguments, cast_nested, is_compressed, is_uncastable, make_plain_cast
from .weight_cache import ValidEntry, WeightCache

# Python functions of torch that call products, which would cast to low again what these were to compute in float32.
_COMPOSED = frozenset({"svd_lowrank", "pca_lowrank", "linear_cross_entropy", "multi_head_attention_forward"})

# Those that models call most, with (input, weight, bias, ...).
_WEIGHTED = frozenset(
    {"linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
)

_NOTHING: Mapping[int, Any] = {}
_MISSING: Any = object()
_is_given = functools.partial(operator.is_not, _MISSING)  # enters no frame


_LAYER_NORM, _LAYER_NORM_KERNEL = torch.nn.functional.layer_norm, torch.layer_norm


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
) -> Tensor:
    """Do as F.layer_norm, which calls torch.layer_norm by its name: that is listed, too."""
    return _LAYER_NORM_KERNEL(input, normalized_shape, weight, bias, eps)


class OpCasts:
    """Makes the replacements for one session.

    Args:
        switch: whether the casts act.
        low: the 16-bit dtype of whitelisted ops.
        device_type: the only device type whose tensors are cast, such as "cuda".
        cache: the cache of low-precision weights, or None to cast weights at each use.
        in_float32: computes products in float32, or some of them; None leaves all to the kernels of the low dtype.
        casts_inside: run the bodies of listed functions that are not of torch by their rule, too.
        autocast: the regions in which all this acts, or None for everywhere.
    """

    def __init__(
        self,
        switch: Switch | RulesAlone,
        low: torch.dtype,
        device_type: str,
        cache: WeightCache | None,
        in_float32: Products | None = None,
        *,
        casts_inside: bool = True,
        autocast: Autocast | None = None,
    ) -> None:
        self.switch = switch
        self.low = low
        self.device_type = device_type
        self.in_float32 = in_float32
        self.casts_inside = casts_inside
        self.autocast = autocast
        self.by_torch: OpCasts | None = None
        """Replaces ops that torch.autocast is to cast; None leaves them alone. See `choose`."""
        self._rounds = in_float32 is not None and in_float32.takes_all
        self.to_low = make_plain_cast(low, device_type, is_for_kernels=not self._rounds, takes_opaque=True)
        self.to_float = make_plain_cast(torch.float32, device_type)
        self._plain = self.to_low
        self._valid: Mapping[int, ValidEntry] = _NOTHING
        self._owned: Mapping[int, Tensor] = _NOTHING
        if cache is not None and not self._rounds:  # else its copies are for products
            self.to_low = cache.make_cast(self._plain)
            self._valid, self._owned = cache.valid, cache.owned
        self._replacements = Replacements()

    def choose(self, entry: op_lists.OpEntry) -> "OpCasts | None":
        """Return what replaces the ops of an entry, None where they are to be left alone."""
        return self.by_torch if self.autocast is not None and self.autocast.leaves(entry) else self

    def wrap(self, kind: str, original: Op) -> Op:
        """Return the replacement of `original` under the rule `kind`: the same one wherever `original` is found."""
        return self._replacements.get(kind, original, lambda: self._wrap(kind, original))

    def let_go(self) -> None:
        """Hold no replacement any more."""
        self._replacements.clear()
        if self.by_torch is not None:
            self.by_torch.let_go()

    def _wrap(self, kind: str, original: Op) -> Op:
        is_torchs = _is_torchs(original)
        # a user's function of that name may take anything
        name = getattr(original, "__name__", "") if is_torchs else ""
        public = PublicOp(name, original if is_torchs else None, takes_lists=kind == "sequence_promote")
        if self.casts_inside and not is_torchs and kind in ("whitelist", "blacklist"):
            return replace(original, self._cast_inside(kind, original), self.switch, public, ALWAYS)
        return public.lead_to(self._replace(kind, original, name, public))

    def _replace(self, kind: str, original: Op, name: str, public: PublicOp) -> Op:
        if self.autocast is not None:
            original = self.autocast.run_without(original, self.switch)
        if self.in_float32 is not None and self.in_float32.covers(name):
            computed, original = original, self.in_float32.run_low(original)
            if kind == "whitelist" and self._rounds and op_lists.is_product(name):
                rule = self.in_float32.round_operands(computed, original, self._in_region)
                return replace(original, rule, self.switch, public, ALWAYS)
        if kind == "blacklist" and original is _LAYER_NORM:
            original = layer_norm
        if kind == "blacklist" and name in _COMPOSED:
            original = run_in_region(original, Mode.OFF, self.switch)
        make_rule, passing = {
            "whitelist": (self._whitelist, self.low),
            "blacklist": (self._blacklist, torch.float32),
            "promote": (self._promote, None),
            "sequence_promote": (lambda original: self._promote(original, is_in_sequence=True), None),
            "match_self": (self._match_self, None),
            "inplace_error": (self._inplace_error, torch.float32),
            "banned": (self._banned, torch.float32),
            "neutral": (_leave, None),
        }[kind]
        general = replace(original, make_rule(original), self.switch, public, passing)
        if kind == "whitelist" and name in _WEIGHTED:
            return self._weighted(original, general)
        return general

    # ---- one dtype for all -------------------------------------------------------------------------------------------

    def _whitelist(self, original: Op) -> Rule:
        """Run in the low dtype."""
        return self._cast_to(self.low, self.to_low, original, honours_dtype=False)

    def _blacklist(self, original: Op) -> Rule:
        """Run in float32, unless the call names a dtype."""
        return self._cast_to(torch.float32, self.to_float, original, honours_dtype=True)

    def _cast_to(self, dtype: torch.dtype, cast: TensorCast, original: Op, *, honours_dtype: bool) -> Rule:
        """Run in `dtype`, to which `cast` casts a tensor. With `honours_dtype`, a call that names a dtype runs as
        written; so does one with `inplace=True`, since a cast copy is not what it is to change.
        """
        position, by_lists = _position_of_inplace(original), Mode.BY_LISTS
        float32, strided, convert = torch.float32, torch.strided, CONVERSIONS[dtype]
        on_cpu, on_cuda = self.device_type == "cpu", self.device_type == "cuda"
        get_entry, owned, caches_leaves = self._valid.get, self._owned, self.autocast is not None
        stays = is_compressed
        if dtype is float32:
            get_entry, owned, stays = _NOTHING.get, _NOTHING, is_uncastable

        def rule(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> Call:
            if position is not None and (kwargs.get("inplace") or (len(args) > position and args[position])):
                return original, args, kwargs
            if mode is not by_lists:
                return self._in_region(original, args, kwargs, mode)
            if kwargs and (kwargs.get("out") is not None or (honours_dtype and kwargs.get("dtype") is not None)):
                return original, args, kwargs
            # the short ways in this loop save a frame for each cast; compilers and dispatch modes take the long one
            is_short = not is_dynamo_compiling() and not count_dispatch_modes()
            values = [*args, *kwargs.values()]
            for index, value in enumerate(values):
                if isinstance(value, Tensor):
                    given = value.dtype
                    if given is dtype or given not in CASTABLE:
                        continue
                    if is_short:
                        entry = get_entry(id(value))
                        if entry is not None and given is float32:
                            version, address = value._version, value.data_ptr()
                            if entry[1] == (version, address, value.requires_grad, value.shape, value.stride()):
                                values[index] = entry[0]
                                continue
                        elif (
                            value.__class__ in PLAIN_CLASSES
                            and (value.is_cpu if on_cpu else value.is_cuda and on_cuda)
                            and value.layout is strided
                            and id(value) not in owned
                            and not (caches_leaves and value.requires_grad and value.is_leaf)
                        ):
                            values[index] = convert(value)
                            continue
                    values[index] = cast(value)
                    if values[index] is value and stays(value):
                        return self._beside(value, original, args, kwargs)
                elif value.__class__ is list or value.__class__ is tuple:
                    if value and value[0].__class__ is not int:
                        values[index] = cast_nested(value, cast)
                elif honours_dtype and value.__class__ is torch.dtype:
                    return original, args, kwargs
            if not kwargs:
                return original, values, kwargs
            count = len(args)
            return original, values[:count], dict(zip(kwargs, values[count:], strict=True))

        return rule

    def _in_region(self, original: Op, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> Call:
        """Run an op of either list where a region decides for both."""
        if kwargs.get("out") is not None:
            return original, args, kwargs
        if mode is Mode.FLOAT32:
            return (original, *cast_arguments(args, kwargs, self.to_float))
        if not self._rounds:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and is_compressed(value):
                    return self._beside(value, original, args, kwargs)
        return (original, *cast_arguments(args, kwargs, self.to_low))

    def _beside(self, uncastable: Tensor, original: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Run an op of either list on a tensor that is not to be cast: in the dtype that it shows, to which the others
        are cast.
        """
        return (original, *cast_arguments(args, kwargs, make_plain_cast(uncastable.dtype, self.device_type)))

    def _cast_inside(self, kind: str, original: Op) -> Rule:
        """Cast the arguments of a function that is no op of torch, and what the ops in its body get, as under
        `torch.amp.custom_fwd(cast_inputs=...)`.

        The innermost function decides: whatever region it is called in, its body runs as its own rule says, unless
        casts are off there. A call that names `out`, or a dtype where float32 is the rule, runs as it was written.
        """
        honours_dtype = kind == "blacklist"
        if honours_dtype:
            cast, in_region = self.to_float, run_in_region(original, Mode.FLOAT32, self.switch)
        else:
            cast, in_region = self.to_low, run_in_region(original, Mode.LOW, self.switch)

        def rule(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> Call:
            if kwargs.get("out") is not None:
                return original, args, kwargs
            if honours_dtype:
                for value in (*args, kwargs.get("dtype")):
                    if isinstance(value, torch.dtype):
                        return original, args, kwargs
            return (in_region, *cast_arguments(args, kwargs, cast))

        return rule

    def _weighted(self, original: Op, walk: Op) -> Op:
        """Serve calls of whitelisted ops with (input, weight, bias, ...) in one frame: weight and bias are looked up in
        the cache in place, the input is not. Leave all others to `walk`, which does what this does.
        """
        switch, low, float32, by_lists = self.switch, self.low, torch.float32, Mode.BY_LISTS
        plain_cast, to_low, get_entry = self._plain, self.to_low, self._valid.get

        def wrapper(
            value: Any = _MISSING, weight: Any = _MISSING, bias: Any = _MISSING, /, *rest: Any, **named: Any
        ) -> Any:
            if (
                named
                or weight is _MISSING
                or has_torch_function_variadic(value, weight, bias)
                or is_dynamo_compiling()
                or count_dispatch_modes()  # a mode that only watches sees the same from there
                or not switch.on
                or (switch.regions and switch.mode_here() is not by_lists)
            ):
                return walk(*filter(_is_given, (value, weight, bias)), *rest, **named)
            x, w, b = value, weight, None if bias is _MISSING else bias
            try:
                if x.dtype is not low and (x := plain_cast(x)) is value and is_compressed(x):
                    return walk(*filter(_is_given, (value, weight, bias)), *rest)
                if (dtype := w.dtype) is not low:
                    entry = get_entry(id(w)) if dtype is float32 else None
                    valid = entry and entry[1] == (w._version, w.data_ptr(), w.requires_grad, w.shape, w.stride())
                    w = entry[0] if valid else to_low(w)  # type: ignore[index]
                    if w is weight and is_compressed(w):
                        return walk(*filter(_is_given, (value, weight, bias)), *rest)
                if b is not None and (dtype := b.dtype) is not low:
                    entry = get_entry(id(b)) if dtype is float32 else None
                    valid = entry and entry[1] == (b._version, b.data_ptr(), b.requires_grad, b.shape, b.stride())
                    b = entry[0] if valid else to_low(b)  # type: ignore[index]
            except AttributeError:  # not tensors: the error is torch's to raise
                return original(*filter(_is_given, (value, weight, bias)), *rest)
            if bias is _MISSING:
                return original(x, w)
            return original(x, w, b, *rest)

        return wrapper

    # ---- the dtypes of the arguments decide --------------------------------------------------------------------------

    def _promote(self, original: Op, *, is_in_sequence: bool = False) -> Rule:
        """Run in the widest dtype among the arguments, or among the tensors of the first one, a sequence.

        With a float64 or complex tensor torch's own rule (or error) stands.
        """
        to_float = self.to_float

        def rule(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> Call:
            if kwargs.get("out") is not None:
                return original, args, kwargs
            if is_in_sequence:
                values = args[0] if args else kwargs.get("tensors")
                if values.__class__ is not list and values.__class__ is not tuple:
                    return original, args, kwargs
                values = list(values)
            else:
                values = [*args, *kwargs.values()]
            dtypes = set()
            for value in values:
                if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                    dtypes.add(value.dtype)
            if len(dtypes) < 2 or not dtypes <= CASTABLE:
                return original, args, kwargs
            for index, value in enumerate(values):
                if isinstance(value, Tensor) and value.dtype in LOW_DTYPES:
                    values[index] = to_float(value)
            if not is_in_sequence:
                count = len(args)
                return original, values[:count], dict(zip(kwargs, values[count:], strict=True))
            if args:
                return original, (values, *args[1:]), kwargs
            return original, (), {**kwargs, "tensors": values}

        return rule

    def _match_self(self, original: Op) -> Rule:
        """Run in place in the dtype of the first argument; the other tensors are cast to it."""

        def rule(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> Call:
            target = _target_of(args, kwargs)
            if not isinstance(target, Tensor) or target.dtype not in CASTABLE or target.device.type != self.device_type:
                return original, args, kwargs
            # the target has the dtype, and stays itself
            return (original, *cast_arguments(args, kwargs, make_plain_cast(target.dtype, self.device_type)))

        return rule

    # ---- refusals ----------------------------------------------------------------------------------------------------

    def _inplace_error(self, original: Op) -> Rule:
        """Refuse to run in place on a 16-bit tensor; cast the other arguments to float32 otherwise."""
        in_float = self._blacklist(original)
        name = getattr(original, "__name__", str(original))

        def rule(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> Call:
            target = _target_of(args, kwargs)
            if _is_low(target, self.device_type):
                raise BannedOpError(
                    f"the op lists run {name} in float32, which cannot be done in place on a {target.dtype} tensor."
                    f" Call {name.removesuffix('_')} instead, or cast the tensor with .float() first."
                )
            return in_float(args, kwargs, mode)

        return rule

    def _banned(self, original: Op) -> Rule:
        """Refuse to run on any 16-bit tensor."""
        name = getattr(original, "__name__", str(original))

        def rule(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> Call:
            for value in (*args, *kwargs.values()):
                if _is_low(value, self.device_type):
                    raise BannedOpError(
                        f"{name} is banned on {value.dtype} tensors by the op lists: its result or gradient may"
                        " overflow. For binary_cross_entropy use"
                        " torch.nn.functional.binary_cross_entropy_with_logits, which includes the sigmoid; or"
                        " cast the inputs with .float(), or move the op to the blacklist."
                    )
            return original, args, kwargs

        return rule


def _leave(original: Op) -> Rule:
    """Run in the dtypes that are given."""
    return lambda args, kwargs, mode: (original, args, kwargs)


def _is_torchs(original: Op) -> bool:
    """Tell whether a function is of torch: methods of tensors name no module."""
    module = getattr(original, "__module__", None)
    if module is None:
        return issubclass(Tensor, getattr(original, "__objclass__", ()))
    return bool(module.partition(".")[0] == "torch")


def _position_of_inplace(original: Op) -> int | None:
    """Return where a function takes the flag `inplace`, or None if it takes none."""
    code = getattr(getattr(original, "__wrapped__", original), "__code__", None)
    if code is None:
        return None
    names = code.co_varnames[: code.co_argcount]
    if "inplace" not in names:
        return None
    return int(names.index("inplace"))


def _target_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an in-place op works on: its first argument, which torch's functions call `input`."""
    if args:
        return args[0]
    return kwargs.get("input")


def _is_low(value: Any, device_type: str) -> bool:
    return isinstance(value, Tensor) and value.dtype in LOW_DTYPES and value.device.type == device_type
