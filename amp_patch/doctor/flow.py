"""`Flow`: finds the dtypes that an expression of a script may have, as far as the text of the script shows them."""

import ast
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from .script import Script
from .tree import argument_of, end, function_of, position, text_of

LOW = frozenset({"float16", "bfloat16"})

_DTYPE_SPELLINGS = {
    **dict.fromkeys(("float16", "half", "fp16", "torch.float16", "torch.half"), "float16"),
    **dict.fromkeys(("bfloat16", "bf16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("float32", "float", "fp32", "torch.float32", "torch.float"), "float32"),
    **dict.fromkeys(("float64", "double", "torch.float64", "torch.double"), "float64"),
}
"""The dtype that each spelling in scripts and configurations means."""

_CASTS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float64"}
"""Methods of tensors and modules that cast to a fixed dtype, each with this dtype."""

_CASTS_TO = ("to", "type", "astype")
"""Methods that cast to a dtype among their arguments."""

_SAME_DTYPE = (
    "cuda",
    "cpu",
    "train",
    "eval",
    "requires_grad_",
    "clone",
    "detach",
    "contiguous",
    "share_memory",
    "copy",
)
"""Methods whose result has the dtype of the tensor or module that they are called on."""

_WRAPPERS = {
    *("compile", "deepcopy", "AveragedModel", "DistributedDataParallel", "DDP", "DataParallel"),
    *("FullyShardedDataParallel", "FSDP", "fully_shard", "zeros_like", "ones_like", "full_like", "empty_like"),
}
"""Functions whose result has the dtype of their first argument."""

_DTYPE_ARGUMENTS = ("dtype", "torch_dtype")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SPLITS = (ast.If, ast.IfExp, ast.Try, ast.Match)
"""Nodes with several branches. A run of the script may skip some of them."""

_MAX_DEPTH = 6
"""The number of steps, such as from a name to its value, after which a `Flow` gives up."""

_UNKNOWN = ast.Constant(None)
"""Stands for a value that the script does not show."""


class Origin(NamedTuple):
    """A dtype that a value may have, and the node that gave it, such as the call `model.half()`.

    The dtype is "" if the script does not show it.
    """

    dtype: str
    node: ast.AST


class Verdict(NamedTuple):
    """A 16-bit dtype that a value may have, and the node that gave it.

    `is_certain` tells whether every dtype that the value may have is a 16-bit one.
    """

    dtype: str
    node: ast.AST
    is_certain: bool


class Flow:
    """Follows values backwards: from a use, through assignments, arguments and functions, to the code that decided
    their dtype.

    Nothing is run. An attribute such as `self.model` counts as one variable in the whole script. A plain name belongs
    to the function, lambda or module that binds it.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._functions = {node.name: node for node in script.nodes if isinstance(node, _FUNCTIONS)}
        self._calls: dict[str, list[ast.Call]] = {}
        for call in script.calls:
            self._calls.setdefault(function_of(call), []).append(call)
        self._assigned: dict[str, list[ast.expr]] = {}
        for target, value in script.assignments:
            self._assigned.setdefault(target, []).append(value)
        self._bound = set[tuple[ast.AST, str]]()
        for node in script.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._bound.add((script.frame(node), node.id))
            elif isinstance(node, (*_FUNCTIONS, ast.Lambda)):
                self._bound.update((node, argument.arg) for argument in _arguments(node))

    def judge(self, node: ast.expr, at: ast.AST) -> Verdict | None:
        """Return the verdict on the expression `node` when the node `at` runs; None if no 16-bit dtype is found."""
        origins = self._find_origins(node, at, 0)
        low = [origin for origin in origins if origin.dtype in LOW]
        if not low:
            return None
        # report bfloat16 first: it rounds more coarsely than float16
        low.sort(key=lambda origin: origin.dtype != "bfloat16")
        return Verdict(low[0].dtype, low[0].node, is_certain=len(low) == len(origins))

    # ---- dtypes as values --------------------------------------------------------------------------------------------

    def find_dtypes(self, node: ast.expr | None, depth: int = 0) -> list[str]:
        """Return the dtypes that an expression such as `torch.half`, `args.dtype` or `"bf16"` may mean.

        For `torch.half if fast else dtype` these are "float16" and the dtypes that `dtype` may mean. "" stands for
        further dtypes that the script does not show. The list is empty if the script shows no dtype, as for a device.
        """
        if node is None or depth > _MAX_DEPTH:
            return []
        if isinstance(node, ast.Constant):
            return [_DTYPE_SPELLINGS[node.value]] if node.value in _DTYPE_SPELLINGS else []
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._find_in_name(node, depth)
        if isinstance(node, ast.IfExp):
            return self._find_in_values([node.body, node.orelse], depth)
        if isinstance(node, ast.Subscript):
            return self._find_in_table(node, depth)
        if isinstance(node, ast.Call) and text_of(node.func) == "getattr" and len(node.args) > 1:
            return self.find_dtypes(node.args[1], depth + 1)
        return []

    def _find_in_name(self, node: ast.Name | ast.Attribute, depth: int) -> list[str]:
        """Return the dtypes that a name may mean: by its values in the script, or as an import such as `torch.half`."""
        values: list[ast.expr] = []
        full_names = self._script.names.resolve(node)  # such as "torch.half", for an imported name
        imported = [_DTYPE_SPELLINGS[name] for name in full_names if name in _DTYPE_SPELLINGS]
        if isinstance(node, ast.Name) or not imported:
            values = self._values_of(node)
        if not values:
            # a local variable hides the import of the same name
            return [] if isinstance(self._scope_of(node), _FUNCTIONS) else imported
        return self._find_in_values(values, depth)

    def _find_in_values(self, values: Sequence[ast.expr], depth: int) -> list[str]:
        """Return the dtypes that an expression may mean if its value is one of `values`."""
        dtypes_of_values = [self.find_dtypes(value, depth + 1) for value in values]
        dtypes = [dtype for of_value in dtypes_of_values for dtype in of_value]
        # a value without a known dtype, such as the result of a function, may be any dtype
        if dtypes and not all(dtypes_of_values):
            dtypes.append("")
        return dtypes

    def _find_in_table(self, node: ast.Subscript, depth: int) -> list[str]:
        """Return the dtypes that `{"bf16": torch.bfloat16, ...}[key]` may mean.

        If `key` is a constant, the values at other constants do not count.
        """
        values: list[ast.expr] = []
        for table in [node.value, *self._values_of(node.value)]:
            if not isinstance(table, ast.Dict):
                continue
            for key, value in zip(table.keys, table.values, strict=True):
                are_constants = isinstance(key, ast.Constant) and isinstance(node.slice, ast.Constant)
                if not are_constants or ast.dump(key) == ast.dump(node.slice):  # type: ignore[arg-type]
                    values.append(value)
        return self._find_in_values(values, depth)

    def _find_argument_dtypes(self, call: ast.Call, *, with_positions: bool = False) -> list[str]:
        """Return the dtypes among the arguments of a call: `dtype=...` or `torch_dtype=...`, also in `**options`.

        With `with_positions`, arguments without a keyword count, too, as in `to(device, torch.half)`.
        """
        given: list[ast.expr] = [keyword.value for keyword in call.keywords if keyword.arg in _DTYPE_ARGUMENTS]
        for keyword in call.keywords:
            if keyword.arg is None:  # **options
                given += self._find_options(keyword.value)
        if with_positions:
            given += call.args
        return [dtype for argument in given for dtype in self.find_dtypes(argument)]

    def _find_options(self, node: ast.expr) -> Iterator[ast.expr]:
        """Yield the values of `dtype` and `torch_dtype` in a `{"dtype": ...}` or `dict(dtype=...)`.

        `node` is this expression, or a variable that may hold it.
        """
        for options in [node, *self._values_of(node)]:
            if isinstance(options, ast.Dict):
                for key, value in zip(options.keys, options.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value in _DTYPE_ARGUMENTS:
                        yield value
            elif isinstance(options, ast.Call) and text_of(options.func) == "dict":
                yield from (keyword.value for keyword in options.keywords if keyword.arg in _DTYPE_ARGUMENTS)

    # ---- names -------------------------------------------------------------------------------------------------------

    def _scope_of(self, name: ast.expr) -> ast.AST | None:
        """Return the function or lambda that binds a name, or else the module; None if the expression is no name."""
        if not isinstance(name, ast.Name):
            return None
        frame = self._script.frame(name)
        while frame is not self._script.tree and (frame, name.id) not in self._bound:
            frame = self._script.frame(frame)
        return frame

    def _values_of(self, node: ast.expr) -> list[ast.expr]:
        """Return the values that a name or attribute may have: those assigned to it, and those passed for it if it is
        an argument of a function.

        For an attribute, `_find_fields` finds further values. Other expressions have none.
        """
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return []
        scope = self._scope_of(node)
        values = self._find_assigned(text_of(node), scope)
        if isinstance(scope, _FUNCTIONS):
            values += self._find_passed(scope, text_of(node))
        if isinstance(node, ast.Attribute):
            values += self._find_fields(node.attr)
        return values

    def _find_assigned(self, name: str, scope: ast.AST | None) -> list[ast.expr]:
        """Return the values that are assigned to a name in a scope, or anywhere if `scope` is None."""
        values = self._assigned.get(name, ())
        return [value for value in values if scope is None or self._script.frame(value) is scope]

    def _find_fields(self, name: str) -> Iterator[ast.expr]:
        """Yield the values that an attribute such as `config.dtype` may have from a dataclass or an argument parser.

        For `name="dtype"`, these are the values of a field `dtype: str = "bf16"` of a class (see `_find_field`), and
        the default of `add_argument("--dtype", ...)`, followed by `_UNKNOWN`.
        """
        for outer in self._script.nodes:
            if isinstance(outer, ast.ClassDef):
                for statement in outer.body:
                    if isinstance(statement, ast.AnnAssign) and text_of(statement.target) == name and statement.value:
                        yield from self._find_field(outer.name, name, statement.value)
        for call in self._calls.get("add_argument", ()):
            flag = call.args[0] if call.args else None
            if isinstance(flag, ast.Constant) and str(flag.value).lstrip("-").replace("-", "_") == name:
                default = argument_of(call, "default")
                if default is not None:
                    yield default
                yield _UNKNOWN  # the value that a user may give

    def _find_field(self, class_name: str, name: str, default: ast.expr) -> Iterator[ast.expr]:
        """Yield the values that calls of a class pass for a field, and its default if a call may leave the field out.

        If the script may not show all values, `_UNKNOWN` comes last.
        """
        calls = self._calls.get(class_name, [])
        passed = [argument_of(call, name) for call in calls]
        yield from (value for value in passed if value is not None)
        if not calls or None in passed:
            yield default
        if any(call.args for call in calls) or self._may_get_others(class_name):
            yield _UNKNOWN

    def _find_passed(self, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[ast.expr]:
        """Yield the values that calls pass for an argument of a function, and its default if a call may omit it.

        `_UNKNOWN` follows the default if the script may not show all values that are passed.
        """
        positional = [*function.args.posonlyargs, *function.args.args]
        names = [argument.arg for argument in positional]
        defaults = dict(zip(reversed(names), reversed(function.args.defaults), strict=False))
        for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
            if default is not None:
                defaults[argument.arg] = default
        is_method = names[:1] in (["self"], ["cls"])
        if is_method:
            # `x.to(dtype)` seldom calls the method `to` of the script's own class
            if function.name in (*_CASTS, *_CASTS_TO):
                return
            names = names[1:]
        if name not in names and name not in defaults:
            return
        index = names.index(name) if name in names else None
        # a call of a class calls its `__init__`
        called_name, holder = function.name, self._script.parent(function)
        if called_name == "__init__" and isinstance(holder, ast.ClassDef):
            called_name = holder.name
        passed = [argument_of(call, name, index) for call in self._calls.get(called_name, ())]
        yield from (value for value in passed if value is not None)
        is_always_passed = bool(passed) and None not in passed
        if name in defaults and not is_always_passed:
            yield defaults[name]
            if not passed or self._may_get_others(called_name):
                yield _UNKNOWN

    def _may_get_others(self, called_name: str) -> bool:
        """Return whether a function or class may be called with arguments that the script does not show.

        That is so if a call has `*args` or `**kwargs`. It is also so if the function or class is itself an argument,
        as in `tyro.cli(Config)`, which calls `Config` with values from the command line.
        """
        for call in self._calls.get(called_name, ()):
            if any(isinstance(argument, ast.Starred) for argument in call.args):
                return True
            if any(keyword.arg is None for keyword in call.keywords):
                return True
        return called_name in self._names_given

    @cached_property
    def _names_given(self) -> frozenset[str]:
        """The names that are arguments of calls, such as `Config` in `tyro.cli(Config)`."""
        given: list[ast.expr] = []
        for call in self._script.calls:
            given += [*call.args, *(keyword.value for keyword in call.keywords)]
        return frozenset(argument.id for argument in given if isinstance(argument, ast.Name))

    # ---- models and tensors ------------------------------------------------------------------------------------------

    def _find_origins(self, node: ast.expr, at: ast.AST, depth: int) -> list[Origin]:
        """Return the dtypes that a model or tensor may have when the node `at` runs, each with the node that gave it.

        An `Origin` with the dtype "" stands for a dtype that the script does not show.
        """
        unknown = [Origin("", node)]
        if depth > _MAX_DEPTH:
            return unknown
        if isinstance(node, ast.IfExp):
            return [*self._find_origins(node.body, at, depth + 1), *self._find_origins(node.orelse, at, depth + 1)]
        if isinstance(node, (ast.Name, ast.Attribute)):
            origins = self._follow_name(node, at, depth)
            # `model.head` usually has the dtype of `model`
            if not origins and isinstance(node, ast.Attribute):
                return self._find_origins(node.value, at, depth + 1)
            return origins or unknown
        if isinstance(node, ast.Call):
            return self._follow_call(node, at, depth) or unknown
        return unknown

    def _follow_call(self, call: ast.Call, at: ast.AST, depth: int) -> list[Origin]:
        """Return the origins of the result of a call. The list may be empty if the script shows no dtype."""
        name = function_of(call)
        if isinstance(call.func, ast.Attribute) and not self._script.names.dotted(call.func.value):
            if (dtypes := self._find_cast(call)) is not None:
                return [Origin(dtype, call) for dtype in dtypes]
            if name in (*_CASTS_TO, *_SAME_DTYPE):
                return self._find_origins(call.func.value, at, depth + 1)
        if dtypes := self._find_argument_dtypes(call):
            return [Origin(dtype, call) for dtype in dtypes]
        if name in _WRAPPERS and call.args:
            return self._find_origins(call.args[0], call, depth + 1)
        function = self._functions.get(name)
        if function is not None:
            origins: list[Origin] = []
            for node in ast.walk(function):
                # not the `return` of a function inside this one
                if isinstance(node, ast.Return) and node.value and self._script.frame(node) is function:
                    origins += self._find_origins(node.value, node, depth + 1)
            return origins
        return self._find_default(call)

    def _find_cast(self, call: ast.Call) -> list[str] | None:
        """Return the dtypes to which a method call may cast its object: ["float16"] for `x.half()`.

        Returns None if the call is no cast, such as `x.to("cuda")`.
        """
        name = function_of(call)
        if name in _CASTS and not call.args:
            return [_CASTS[name]]
        if name in _CASTS_TO:
            return self._find_argument_dtypes(call, with_positions=True) or None
        return None

    def _find_default(self, maker: ast.Call) -> list[Origin]:
        """Return the dtypes that `torch.set_default_dtype` may have set when the call `maker` makes a model or tensor.

        Calls of `torch.set_default_dtype` are taken in the order of the text. Those in the function of `maker` come
        last, and count only if they stand before `maker`. A call that is at module level or in the function of `maker`,
        and that no `if` may skip, replaces the dtypes found so far. Any other call adds its dtype to them. If it is the
        first, the default before it is unknown, so "" is added, too.
        """
        here, module = self._script.frame(maker), self._script.tree
        calls = self._script.calls_of("torch.set_default_dtype")
        origins: list[Origin] = []
        # calls elsewhere have usually run before the function of `maker`
        for call in sorted(calls, key=lambda call: self._script.frame(call) is here):
            frame = self._script.frame(call)
            if frame is here and not self._script.is_before(call, maker):
                continue
            if (frame is here or frame is module) and not self._is_conditional(call, maker):
                origins = []
            elif not origins:
                origins = [Origin("", maker)]
            origins += [Origin(dtype, call) for dtype in self.find_dtypes(argument_of(call, "d", 0))]
        return origins

    def _follow_name(self, node: ast.expr, at: ast.AST, depth: int) -> list[Origin]:
        """Return the origins of the value that a name has when the node `at` runs.

        An *event* gives the name its dtype: an assignment, or a cast in place. In each function, the last event counts;
        in the function of `at`, the last one before `at`. If an `if` may skip this event, the event before it counts,
        too. If no event counts and the name is an argument of a function, the values that calls pass for it count.
        """
        events_by_frame: dict[ast.AST, list[ast.expr]] = {}
        for event in sorted(self._find_events(node), key=position):
            events_by_frame.setdefault(self._script.frame(event), []).append(event)
        origins: list[Origin] = []
        frame_of_use = self._script.frame(at)
        for frame, events in events_by_frame.items():
            for event in reversed(events):
                is_earlier = self._script.is_before(event, at) and not self._script.exits_before(event, at)
                if frame is frame_of_use and not is_earlier:
                    continue
                origins += self._follow_event(node, event, depth)
                if not self._is_conditional(event, at):
                    break
        scope = self._scope_of(node)
        if not origins and isinstance(scope, _FUNCTIONS):
            for value in self._find_passed(scope, text_of(node)):
                origins += self._find_origins(value, value, depth + 1)
        return origins

    def _follow_event(self, node: ast.expr, event: ast.expr, depth: int) -> list[Origin]:
        """Return the origins of the value that a name has after an event (see `_follow_name`)."""
        if isinstance(event, ast.Call) and isinstance(self._script.parent(event), ast.Expr):
            return self._follow_call(event, event, depth + 1)
        # model, optimizer = accelerator.prepare(model, optimizer)
        if isinstance(event, ast.Call) and function_of(event) == "prepare":
            for argument in event.args:
                if text_of(argument) == text_of(node):
                    return self._find_origins(argument, event, depth + 1)
        return self._find_origins(event, event, depth + 1)

    def _find_events(self, node: ast.expr) -> Iterator[ast.expr]:
        """Yield the values that are assigned to a name, and the calls that cast it in place (`model.half()`)."""
        name, scope = text_of(node), self._scope_of(node)
        yield from self._find_assigned(name, scope)
        for call, chain in self._casts_in_place:
            if text_of(chain) == name and (scope is None or self._scope_of(chain) is scope):
                yield call

    @cached_property
    def _casts_in_place(self) -> list[tuple[ast.Call, ast.expr]]:
        """Each call that is a statement and casts an object, with the object: `model` of `model.half().cuda()`."""
        casts = []
        for call in self._script.calls:
            if not isinstance(self._script.parent(call), ast.Expr):
                continue
            chain: ast.expr = call
            is_cast = False
            while isinstance(chain, ast.Call) and isinstance(chain.func, ast.Attribute):
                is_cast = is_cast or self._find_cast(chain) is not None
                chain = chain.func.value
            if is_cast:
                casts.append((call, chain))
        return casts

    def _is_conditional(self, event: ast.AST, at: ast.AST) -> bool:
        """Return whether an event may be skipped before `at`: an `if`, `try` or `match` holds it, but not `at`."""
        for outer, field in self._script.around(event):
            is_arm = isinstance(outer, _SPLITS) and field in ("body", "orelse", "handlers", "cases")
            if is_arm and not position(outer) <= position(at) < end(outer):
                return True
            if outer is self._script.frame(event):
                return False
        return False


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Sequence[ast.arg]:
    declared = function.args
    starred = [argument for argument in (declared.vararg, declared.kwarg) if argument is not None]
    return [*declared.posonlyargs, *declared.args, *declared.kwonlyargs, *starred]
