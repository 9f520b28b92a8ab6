"""`OpCasts`: makes the replacement of each listed op, by the rule of the op.

The method of a rule, such as `_whitelist`, takes an op and returns a function `prepare`. Given a call of the op,
`prepare` returns the function to call, and the cast arguments. As under torch.autocast, a call with `out=` casts no
arguments. Neither does a call that passes a dtype to a blacklisted op. A *region* is a part of one thread's run, in
which a mode such as FLOAT32 says how ops cast (see the module `mode`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, float32, strided
from torch.overrides import has_torch_function

from ..config import OpRule, op_lists
from ..dtypes import CASTABLE, LOW_DTYPES, PLAIN_CLASSES, is_opaque
from ..errors import BannedOpError
from ..torch_private import count_dispatch_modes
from .autocast import Autocast, ModuleRulesSwitch
from .compiling import is_dynamo_compiling
from .float32_products import Float32Products
from .followed import DtypeFinder, find_widest, follow_argument, follow_first
from .mode import Mode, Switch
from .replacement import (
    NEVER_SKIP,
    OpFunction,
    PrepareCall,
    PreparedCall,
    PublicOp,
    Replacements,
    find_inplace_position,
    is_of_torch,
    replace,
    run_in_region,
    supports_overrides,
)
from .tensor_cast import (
    cast_arguments,
    cast_nested,
    get_conversion,
    is_compressed,
    make_device_test,
    make_plain_cast,
)
from .weight_cache import ValidEntry, WeightCache

# Python functions of torch that call products. On the blacklist, the products that they call must run in float32, too.
_COMPOSED = frozenset({"svd_lowrank", "pca_lowrank", "lobpcg", "linear_cross_entropy", "multi_head_attention_forward"})

# Ops of layers with weights. Their parameters are (input, weight, bias, ...).
_WEIGHTED = frozenset(
    {"linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
)

# The classes of an index that selects a view, as in `x[0]` and `x[1:]`. bool, a subclass of int, is not among them.
_VIEW_INDEXES = (int, slice, type(None), type(Ellipsis))

_BY_LISTS = Mode.BY_LISTS

_NO_ENTRIES: Mapping[int, Any] = {}
_NO_NAMES: dict[str, Any] = {}

_LAYER_NORM, _LAYER_NORM_KERNEL = torch.nn.functional.layer_norm, torch.layer_norm


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
) -> Tensor:
    """F.layer_norm, but without patched code in it. F.layer_norm calls `torch.layer_norm` by its public name, which
    may be patched, too.
    """
    return _LAYER_NORM_KERNEL(input, normalized_shape, weight, bias, eps)


class OpCasts:
    """Makes the replacements for one session.

    Args:
        switch: says whether ops cast in the calling thread, and in which mode.
        low: the 16-bit dtype of whitelisted ops.
        device_type: the only device type whose tensors are cast, such as "cuda".
        cache: the cache of weights in the low dtype, or None to cast weights at each use.
        in_float32: computes products, or only attention, in float32. None: products run in kernels of the low dtype.
        casts_inside: if a function that is not torch's is whitelisted or blacklisted, let the whitelisted and
            blacklisted ops in its body run in the same dtype.
        autocast: the torch.autocast blocks in which ops cast. None: ops cast everywhere.
    """

    def __init__(
        self,
        switch: Switch | ModuleRulesSwitch,
        low: torch.dtype,
        device_type: str,
        cache: WeightCache | None,
        in_float32: Float32Products | None = None,
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
        """Makes the replacements of ops that torch.autocast casts by itself. None: these ops are not replaced."""
        self._rounds_operands = in_float32 is not None and in_float32.covers_all
        self.to_low = make_plain_cast(low, device_type, is_for_kernels=not self._rounds_operands, takes_opaque=True)
        self.to_float = make_plain_cast(torch.float32, device_type)
        self._plain_to_low = self.to_low  # without the cache
        self._cached_copies: Mapping[int, ValidEntry] = _NO_ENTRIES  # `cache.valid`, by the id of the weight
        self._cached_weights: Mapping[int, Tensor] = _NO_ENTRIES
        if cache is not None and not self._rounds_operands:  # a cache of rounded copies belongs to `in_float32`
            self.to_low = cache.make_cast(self._plain_to_low)
            self._cached_copies, self._cached_weights = cache.valid, cache.owned
        self._replacements = Replacements()

    def choose(self, entry: op_lists.OpEntry) -> "OpCasts | None":
        """Return the OpCasts that replaces the ops of a list entry, or None if they are not replaced."""
        if self.autocast is not None and self.autocast.is_torch_rule(entry):
            return self.by_torch
        return self

    def wrap(self, rule: OpRule | str, original: OpFunction, like: str = "", location: str = "") -> OpFunction:
        """Return the replacement of `original` under a rule: the same one for every name of `original`.

        Args:
            like: the argument whose dtype the others take, for a rule with `takes_argument`.
            location: the place of the entry, for errors.

        Raises OpListError if `original` has no argument `like`.
        """
        chosen = op_lists.RULES[rule]
        place = location or "registered"
        return self._replacements.get(f"{rule} {like}", original, lambda: self._wrap(chosen, like, place, original))

    def drop_replacements(self) -> None:
        """Forget all replacements."""
        self._replacements.clear()
        if self.by_torch is not None:
            self.by_torch.drop_replacements()

    def _wrap(self, rule: OpRule, like: str, location: str, original: OpFunction) -> OpFunction:
        is_torch_op = is_of_torch(original)
        # A name identifies only functions of torch: a user's function of the same name may take any arguments.
        name = getattr(original, "__name__", "") if is_torch_op else ""
        overridable = original if is_torch_op and supports_overrides(original) else None
        public = PublicOp(name, overridable, takes_lists=rule.takes_sequence)
        if self.casts_inside and not is_torch_op and rule.runs_in:
            return replace(original, self._cast_inside(rule, original), self.switch, public, NEVER_SKIP)
        find_dtype = self._make_dtype_finder(rule, original, like, location)
        return public.set_replacement(self._replace(rule, original, name, public, find_dtype))

    def _make_dtype_finder(self, rule: OpRule, original: OpFunction, like: str, location: str) -> DtypeFinder | None:
        """Return the dtype finder (see `followed`) of a rule under which the arguments decide the dtype. Return None
        for any other rule.
        """
        if rule is OpRule.MATCH:
            return follow_argument(original, like, self.device_type, location)
        if rule is OpRule.MATCH_SELF:
            return follow_first(self.device_type)
        if rule in (OpRule.PROMOTE, OpRule.SEQUENCE_PROMOTE):
            return find_widest
        return None

    def _replace(
        self, rule: OpRule, original: OpFunction, name: str, public: PublicOp, find_dtype: DtypeFinder | None
    ) -> OpFunction:
        """Return the replacement for one of torch's functions, or for a user's function in whose body ops follow their
        own rules.
        """
        # `op` is `original`, wrapped in all that must happen after the casts. At the end, the casts wrap `op`.
        op = original
        if self.autocast is not None:
            op = self.autocast.run_without(op, self.switch)
        if self.in_float32 is not None and self.in_float32.covers(name):
            kernel, op = op, self.in_float32.run_low_in_float32(op)
            if rule is OpRule.WHITELIST and self._rounds_operands and op_lists.is_product(name):
                prepare = self.in_float32.round_operands(kernel, op, self._in_region)
                return replace(op, prepare, self.switch, public, NEVER_SKIP)
        if rule is OpRule.BLACKLIST and op is _LAYER_NORM:
            op = layer_norm
        if rule is OpRule.BLACKLIST and name in _COMPOSED:
            op = run_in_region(op, Mode.OFF, self.switch)
        if find_dtype is not None:
            prepare = self._cast_to_found(op, find_dtype, in_sequence=rule.takes_sequence)
            general = replace(op, prepare, self.switch, public, None)
        else:
            make_prepare, skip_dtype = {
                OpRule.WHITELIST: (self._whitelist, self.low),
                OpRule.BLACKLIST: (self._blacklist, torch.float32),
                OpRule.BANNED: (self._banned, torch.float32),
                OpRule.NEUTRAL: (_prepare_nothing, None),
            }[rule]
            general = replace(op, make_prepare(op), self.switch, public, skip_dtype)
        if rule is OpRule.WHITELIST and name in _WEIGHTED:
            return self._replace_weighted(op, general)
        if rule in (OpRule.MATCH_SELF, OpRule.NEUTRAL) and name == "__setitem__":
            return _replace_set_item(original, general)
        return general

    # ---- rules that cast to one dtype --------------------------------------------------------------------------------

    # For speed, the loops of `_whitelist` and `_blacklist` cast ordinary tensors with `convert`, a method in C. The
    # functions `to_low` and `to_float` test for every special case, and take a Python frame for each tensor. If
    # `is_fast` is False (Dynamo traces, or a dispatch mode is active), `to_low` and `to_float` cast all tensors.

    def _whitelist(self, original: OpFunction) -> PrepareCall:
        """Return a `prepare` for an op that runs in the low dtype.

        A call with `inplace=True` runs as it was written: after a cast, it would change the copy. A call with an
        `out_dtype` other than the low dtype runs as it was written, too, because its kernel may refuse low arguments.
        """
        low, to_low, convert = self.low, self.to_low, get_conversion(self.low)
        get_entry, cached_weights = self._cached_copies.get, self._cached_weights
        # under torch.autocast, leaves that require gradients go to `to_low`, because it may have copies of them
        may_cache_leaves = self.autocast is not None
        is_on_device, inplace_position = make_device_test(self.device_type), find_inplace_position(original)

        def prepare(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> PreparedCall:
            if inplace_position is not None and (
                kwargs.get("inplace") or (len(args) > inplace_position and args[inplace_position])
            ):
                return original, args, kwargs
            if mode is not _BY_LISTS:
                return self._in_region(original, args, kwargs, mode)
            if kwargs and (kwargs.get("out") is not None or (kwargs.get("out_dtype") or low) is not low):
                return original, args, kwargs
            is_fast = not is_dynamo_compiling() and not count_dispatch_modes()
            values = [*args, *kwargs.values()]
            for index, value in enumerate(values):
                if isinstance(value, Tensor):
                    given_dtype = value.dtype
                    if given_dtype is low or given_dtype not in CASTABLE:
                        continue
                    if is_fast:
                        entry = get_entry(id(value))
                        if entry is not None and given_dtype is float32:
                            # a weight: its copy is `entry[0]`, if it still has the signature `entry[1]`
                            address, strides = value.data_ptr(), value.stride()
                            if entry[1] == (value._version, address, value.requires_grad, value.shape, strides):
                                values[index] = entry[0]
                                continue
                        elif (
                            value.__class__ in PLAIN_CLASSES
                            and is_on_device(value)
                            and value.layout is strided
                            and id(value) not in cached_weights
                            and not (may_cache_leaves and value.requires_grad and value.is_leaf)
                        ):
                            values[index] = convert(value)
                            continue
                    values[index] = to_low(value)
                    if values[index] is value and is_compressed(value):
                        return self._match_uncastable(value, original, args, kwargs)
                elif (value.__class__ is list or value.__class__ is tuple) and value and value[0].__class__ is not int:
                    values[index] = cast_nested(value, to_low)
            if not kwargs:
                return original, values, kwargs
            count = len(args)
            return original, values[:count], dict(zip(kwargs, values[count:], strict=True))

        return prepare

    def _blacklist(self, original: OpFunction) -> PrepareCall:
        """Return a `prepare` for an op that runs in float32. Calls with `out`, a dtype or `inplace=True` stay as is."""
        to_float, convert = self.to_float, get_conversion(float32)
        is_on_device, inplace_position = make_device_test(self.device_type), find_inplace_position(original)

        def prepare(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> PreparedCall:
            if inplace_position is not None and (
                kwargs.get("inplace") or (len(args) > inplace_position and args[inplace_position])
            ):
                return original, args, kwargs
            if kwargs and (kwargs.get("out") is not None or kwargs.get("dtype") is not None):
                return original, args, kwargs
            if mode is not _BY_LISTS:
                if any(value.__class__ is torch.dtype for value in args):
                    return original, args, kwargs
                return self._in_region(original, args, kwargs, mode)
            is_fast = not is_dynamo_compiling() and not count_dispatch_modes()
            values = [*args, *kwargs.values()]
            for index, value in enumerate(values):
                if isinstance(value, Tensor):
                    if value.dtype not in LOW_DTYPES:
                        continue
                    is_plain = value.__class__ in PLAIN_CLASSES and value.layout is strided
                    if is_fast and is_plain and is_on_device(value):
                        values[index] = convert(value)
                        continue
                    values[index] = to_float(value)
                    if values[index] is value and is_opaque(value):
                        return self._match_uncastable(value, original, args, kwargs)
                elif (value.__class__ is list or value.__class__ is tuple) and value and value[0].__class__ is not int:
                    values[index] = cast_nested(value, to_float)
                elif value.__class__ is torch.dtype:  # the dtype is a positional argument
                    return original, args, kwargs
            if not kwargs:
                return original, values, kwargs
            count = len(args)
            return original, values[:count], dict(zip(kwargs, values[count:], strict=True))

        return prepare

    def _in_region(
        self, original: OpFunction, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode
    ) -> PreparedCall:
        """Prepare a call of a whitelisted or blacklisted op in a region of mode LOW or FLOAT32. The mode decides the
        dtype, and not the list. A call with `out`, or with an `out_dtype` other than this dtype, runs as written.
        """
        target = float32 if mode is Mode.FLOAT32 else self.low
        result_dtype = kwargs.get("out_dtype") or target
        if kwargs.get("out") is not None or result_dtype is not target:
            return original, args, kwargs
        if mode is Mode.FLOAT32:
            return (original, *cast_arguments(args, kwargs, self.to_float))
        if not self._rounds_operands:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and is_compressed(value):
                    return self._match_uncastable(value, original, args, kwargs)
        return (original, *cast_arguments(args, kwargs, self.to_low))

    def _match_uncastable(
        self, uncastable: Tensor, original: OpFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PreparedCall:
        """Prepare a call with a tensor that cannot be cast: cast the other tensors to the dtype of that tensor."""
        return (original, *cast_arguments(args, kwargs, make_plain_cast(uncastable.dtype, self.device_type)))

    def _cast_inside(self, rule: OpRule, original: OpFunction) -> PrepareCall:
        """Return a `prepare` for a function that is not torch's: cast its arguments, and run the whitelisted and
        blacklisted ops in its body in the same dtype.

        If such a function calls another one, each of the two follows its own rule, also in a region of mode LOW or
        FLOAT32. A call that names `out` runs as it was written, and so does a call of a blacklisted function that names
        a dtype.
        """
        if rule.runs_in == "low":
            cast, in_region = self.to_low, run_in_region(original, Mode.LOW, self.switch)
        else:
            cast, in_region = self.to_float, run_in_region(original, Mode.FLOAT32, self.switch)
        is_dtype_exempt = "dtype" in rule.opt_outs

        def prepare(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> PreparedCall:
            if kwargs.get("out") is not None:
                return original, args, kwargs
            if is_dtype_exempt:
                for value in (*args, kwargs.get("dtype")):
                    if isinstance(value, torch.dtype):
                        return original, args, kwargs
            return (in_region, *cast_arguments(args, kwargs, cast))

        return prepare

    def _replace_weighted(self, original: OpFunction, general: OpFunction) -> OpFunction:
        """Return a faster replacement for whitelisted ops with (input, weight, bias, ...).

        The faster replacement looks up weight and bias in the cache itself. It leaves unusual calls to `general`, the
        replacement that `replace` made.
        """
        switch, low = self.switch, self.low
        plain_cast, to_low, get_entry = self._plain_to_low, self.to_low, self._cached_copies.get

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            count = len(args)
            if (
                kwargs
                or count < 2
                or has_torch_function(args)
                or is_dynamo_compiling()
                or count_dispatch_modes()  # `general` takes copies from the cache if these modes only watch
                or not switch.on
                or (switch.regions and switch.mode_here() is not _BY_LISTS)
            ):
                return general(*args, **kwargs)
            x, w, b = args[0], args[1], args[2] if count > 2 else None
            try:
                # A cast returns its argument if it cannot cast it. Then `general` decides how to cast the others.
                if x.dtype is not low and (x := plain_cast(x)) is args[0]:
                    return general(*args)
                if (given_dtype := w.dtype) is not low:
                    entry = get_entry(id(w)) if given_dtype is float32 else None
                    is_valid = entry and entry[1] == (w._version, w.data_ptr(), w.requires_grad, w.shape, w.stride())
                    w = entry[0] if is_valid else to_low(w)  # type: ignore[index]
                    if w is args[1]:
                        return general(*args)
                if b is not None and (given_dtype := b.dtype) is not low:
                    entry = get_entry(id(b)) if given_dtype is float32 else None
                    is_valid = entry and entry[1] == (b._version, b.data_ptr(), b.requires_grad, b.shape, b.stride())
                    b = entry[0] if is_valid else to_low(b)  # type: ignore[index]
                    if b is args[2]:
                        return general(*args)
            except AttributeError:  # an argument is no tensor, for which torch raises an error
                return original(*args)
            if count == 2:
                return original(x, w)
            if count == 3:
                return original(x, w, b)  # without unpacking, which takes longer
            return original(x, w, b, *args[3:])

        return wrapper

    # ---- rules under which the dtypes of the arguments decide --------------------------------------------------------

    def _cast_to_found(self, original: OpFunction, find_dtype: DtypeFinder, *, in_sequence: bool) -> PrepareCall:
        """Return a `prepare` that casts the castable tensors of a call to the dtype that `find_dtype` finds in it.

        `in_sequence`: these tensors are the items of the first argument, as in `torch.cat(tensors, dim)`.
        """
        casts = {dtype: (make_plain_cast(dtype, self.device_type), get_conversion(dtype)) for dtype in CASTABLE}
        device_type = self.device_type

        def prepare(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> PreparedCall:
            if kwargs and kwargs.get("out") is not None:
                return original, args, kwargs
            given: Any = args
            named = kwargs
            if in_sequence:
                given, named = args[0] if args else kwargs.get("tensors"), _NO_NAMES
                if given.__class__ is not list and given.__class__ is not tuple:
                    return original, args, kwargs  # torch handles a named tuple, and refuses other values
            target = find_dtype(given, named)
            if target is None:
                return original, args, kwargs
            cast, convert = casts[target]
            values = [*given, *named.values()]
            for index, value in enumerate(values):
                if isinstance(value, Tensor):
                    if value.dtype is target or value.dtype not in CASTABLE:
                        continue
                    # `device.type`, because Dynamo cannot call the test of `make_device_test`
                    if value.__class__ in PLAIN_CLASSES and value.device.type == device_type:
                        values[index] = convert(value)
                    else:
                        values[index] = cast(value)
                elif (value.__class__ is list or value.__class__ is tuple) and value and value[0].__class__ is not int:
                    values[index] = cast_nested(value, cast)
            if in_sequence and not args:
                return original, (), {**kwargs, "tensors": values}
            if in_sequence:
                return original, (values, *args[1:]), kwargs
            count = len(args)
            return original, values[:count], dict(zip(kwargs, values[count:], strict=True))

        return prepare

    # ---- rules that cast nothing -------------------------------------------------------------------------------------

    def _banned(self, original: OpFunction) -> PrepareCall:
        """Return a `prepare` that raises BannedOpError if an argument is a 16-bit tensor on a device of the session's
        type. It does not look at the items of a list.
        """
        name = getattr(original, "__name__", str(original))

        def prepare(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> PreparedCall:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and value.dtype in LOW_DTYPES and value.device.type == self.device_type:
                    raise BannedOpError(
                        f"{name} is banned on {value.dtype} tensors by the op lists: its result or gradient may"
                        " overflow. For binary_cross_entropy use"
                        " torch.nn.functional.binary_cross_entropy_with_logits, which includes the sigmoid; or"
                        " cast the inputs with .float(), or move the op to the blacklist."
                    )
            return original, args, kwargs

        return prepare


def _replace_set_item(original: OpFunction, general: OpFunction) -> OpFunction:
    """Return a faster replacement of `x[index] = values` than `general`, the replacement that `replace` made.

    The faster one calls torch's own function if nothing has to be cast. For example, an index of numbers and slices
    selects a view, to which torch copies values of any dtype. Arguments with a `__torch_function__` also go to torch's
    function, which calls it.
    """

    def set_item(tensor: Tensor, index: Any, values: Any) -> Any:
        if (
            index.__class__ in _VIEW_INDEXES
            or not isinstance(values, Tensor)  # torch writes a number in the dtype of `tensor`
            or has_torch_function((tensor, values))
            or tensor.dtype is values.dtype
        ):
            return original(tensor, index, values)
        if index.__class__ is tuple and all(item.__class__ in _VIEW_INDEXES for item in index):
            return original(tensor, index, values)
        return general(tensor, index, values)

    return set_item


def _prepare_nothing(original: OpFunction) -> PrepareCall:
    """Return a `prepare` for an op that runs as it is called."""
    return lambda args, kwargs, mode: (original, args, kwargs)
