"""References to patched functions outside torch: found without running anybody's code, redirected to replacements, and
given the originals back.

Where `Search` looks, in every imported module outside torch, this package and the standard library: globals, class
attributes, default arguments of the functions and methods defined there, and layers, dicts (keys too), lists, tuples
and sets in globals and class attributes, which may be nested; in models: attributes of their modules, and the classes
of those and of their parameters. Each kind of slot is one that a published package has;
`tests/patching/test_references.py` names it. Namespaces are read with C's own accessors: no property, no descriptor, no
`__getattr__` and no metaclass gets to run.

The containers matter most to tensors that answer calls themselves: their `__torch_function__` is given what the public
name holds, and looks it up there.

Passed over are packages that torch itself is built on, and any package none of whose modules holds a module of torch,
`torch.Tensor` or a patched function: it has no way to come by one.
"""

import functools
import gc
import sys
import types
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..dtypes import PLAIN_CLASSES
from ..torch_private import FUNCTION_TABLES, get_own_buffers, get_own_parameters
from . import pickling
from .patcher import (
    ClassAttribute,
    Defaults,
    Exchange,
    InstanceAttribute,
    Item,
    Key,
    Member,
    PartialFunction,
    Patcher,
    Place,
    Slot,
    attributes_of,
    namespace_of,
)

Functions = Mapping[int, Callable[..., Any]]
"""What is to stand for each function, by the id of the function."""

MAX_NAMED = 10  # of what cannot be redirected

_name_of: Callable[[type], str] = vars(type)["__name__"].__get__

_BELOW_TORCH = {
    *("filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "numpy", "sympy", "typing_extensions"),
    *("wrapt", "yaml"),
}
_PASSED_OVER = sys.stdlib_module_names | _BELOW_TORCH | {"torch", "amp_patch"}
_PLAIN = frozenset(
    {
        *(str, bytes, int, float, complex, bool, type(None), type(Ellipsis)),
        *(types.ModuleType, types.CodeType, types.BuiltinFunctionType, types.GetSetDescriptorType),
        *(types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType),
    }
)
"""Types of values that hold no function, and are not looked into."""

_KEEPERS = frozenset({dict, tuple, list, set, frozenset})

_HOLDERS = frozenset({functools.partial, tuple, list, dict})
"""Types of a layer's attributes that may hold a function where it cannot be exchanged."""

_FIXED = frozenset({tuple, frozenset})
_CONTAINERS = _FIXED | {list, set}
"""Types of containers, beside dicts, that are looked into: named tuples and the like are not made anew."""

_Other = tuple[str, str, Any, tuple[Any, Any] | None]
"""Something that may hold a function: how to name it (two parts), itself, and where it is, as holder and key."""


# ---- what sessions do ------------------------------------------------------------------------------------------------


def functions_of(patcher: Patcher) -> Functions:
    """Return the replacement of each patched function, the last of several, by the id of the function."""
    return {id(original): replacement for original, replacement in patcher.functions()}


def redirect(
    functions: Sequence[tuple[Patcher, Functions]], models: Iterable[nn.Module], *, with_modules: bool = True
) -> list[str]:
    """Have what refers to one of the functions refer to its replacement: in models, and in the imported modules. Their
    patchers can undo it.

    Replacements that a copy of a model kept from an earlier session are redirected like their originals. Returns what
    could not be redirected.
    """
    models, wanted = list(models), dict[int, Callable[..., Any]]()
    for _, some in functions:
        wanted.update(some)
    if not wanted:
        return []
    _rewrite(_search_for_retired(), models, with_modules=False)
    search = Search(wanted, _packages_of(wanted.values()))
    search.look_through(models, with_modules=with_modules)
    for patcher, some in functions:
        patcher.redirect([exchange for function, exchange in search.found if function in some])
    return search.find_stuck()


def undo(patchers: Sequence[Patcher], models: Iterable[nn.Module]) -> None:
    """Undo the patchers, last one first, and give the originals back to whatever took hold of a replacement while it
    was in. Interrupted, it is to be called again.
    """
    for patcher in reversed(patchers):
        patcher.undo()
    _rewrite(_search_for_retired(), models, with_modules=True)


def uncover(patcher: Patcher, covers: Sequence[Callable[..., Any]]) -> None:
    """Take the covers off, and give the replacements to whatever took hold of a cover. Interrupted, it is to be called
    again. The covers are kept alive by the caller.
    """
    patcher.uncover()
    replacements = {id(cover): cover.__wrapped__ for cover in covers}  # type: ignore[attr-defined]
    _rewrite(Search(replacements, _packages_of(replacements.values())), (), with_modules=True)


def describe_stuck(stuck: Sequence[str]) -> str:
    """Return the warning about what could not be redirected."""
    shown = ", ".join(stuck[:MAX_NAMED])
    if len(stuck) > MAX_NAMED:
        shown += f" and {len(stuck) - MAX_NAMED} more"
    return (
        f"some objects hold patched functions where they cannot be replaced, so their calls are not cast: {shown}. "
        "Look the function up when it is called (F.gelu), or create these objects after initialize."
    )


def _search_for_retired() -> "Search":
    return Search(pickling.get_originals(), pickling.get_packages())


def _packages_of(replacements: Iterable[Callable[..., Any]]) -> set[str]:
    return {str(replacement.__module__ or "").partition(".")[0] for replacement in replacements} - {""}


def _rewrite(search: "Search", models: Iterable[nn.Module], *, with_modules: bool) -> None:
    """Write what is found, for good."""
    if search.functions:
        search.look_through(models, with_modules=with_modules)
    for _, exchange in search.found:
        exchange.slot.write(exchange.after)


# ---- the search ------------------------------------------------------------------------------------------------------


class Search:
    """Finds the slots that refer to some functions, and what else refers to them, where nothing can be exchanged.

    Args:
        functions: what is to stand for each function, by the function's id.
        packages: the top-level packages, beside torch, that these functions belong to.

    Attributes:
        found: the exchanges, each with the id of its function.
    """

    def __init__(self, functions: Functions, packages: Iterable[str] = ()) -> None:
        self.functions = functions
        self.found: list[tuple[int, Exchange]] = []
        self._ids = frozenset(functions)
        self._homes = {"torch", *packages}
        self._package = ""  # the one that is being searched
        # a replacement's own closure holds the original, and is to keep it
        self._seen = {id(function) for function in functions.values()}
        self._others: list[_Other] = []
        self._is_held_elsewhere = False  # one of the functions, in something that is neither a global nor an attribute
        self._exchanged: set[int] = set()  # ids of the tuples and frozensets that others take the place of

    def look_through(self, models: Iterable[nn.Module], *, with_modules: bool) -> None:
        """Look through models, and through the imported modules."""
        for model in models:
            self._search_model(model)
        if with_modules:
            self.search_modules()
        self._search_containers()

    def search_modules(self) -> None:
        """Look through the imported modules."""
        packages: dict[str, list[tuple[str, types.ModuleType]]] = {}
        evidence = {*self._ids, id(Tensor)}
        for name, module in list(sys.modules.items()):
            top = name.partition(".")[0]
            is_home, is_passed_over = top in self._homes, top in _PASSED_OVER
            if (is_passed_over and not is_home) or not issubclass(type(module), types.ModuleType):
                continue
            if is_home:
                evidence.add(id(module))
            if not is_passed_over:
                packages.setdefault(top, []).append((name, module))
        self._search_tables_of_torch()
        for package, modules in packages.items():
            if len(modules) > 1 and not any(_holds_any(module, evidence) for _, module in modules):
                continue
            self._package = package
            for name, module in modules:
                self._search_module(name, module)
        if self._homes != {"torch"}:  # lists name functions of the script: a criterion may be a partial of one
            for value in gc.get_objects():
                self._enter_partial(value)

    def find_stuck(self) -> list[str]:
        """Return what holds one of the functions where it cannot be redirected, as `module.name (its class)` each."""
        if not self._is_held_elsewhere:
            return []
        handled = set(self._seen)
        for module in list(sys.modules.values()):
            if issubclass(type(module), types.ModuleType):
                handled.add(id(namespace_of(module)))
        stuck = {}  # by the id of the value: the last of its names
        for prefix, key, value, _ in self._others:
            if id(value) in self._exchanged:
                continue
            if not self._ids.isdisjoint(map(id, _contents_of_all([value], handled))):
                stuck[id(value)] = f"{prefix}.{key} ({type(value).__name__})"
        return list(stuck.values())

    def _enter(self, slot: Slot, function: Any, after: Any = None) -> None:
        """Enter a slot that refers to a function, and what it is to hold if that is not just the replacement."""
        before = slot.read()
        original = before.__func__ if isinstance(before, staticmethod) else before
        if after is None:
            after = self.functions[id(function)]
        self.found.append((id(function), Exchange(slot, before, after, original)))

    def _enter_partial(self, value: Any) -> bool:
        """Enter the function of a partial, and tell whether it is one of those that are looked for."""
        if type(value) is not functools.partial or id(value.func) not in self._ids:
            return False
        if self._is_first_visit(value):
            self._enter(PartialFunction(value, "func"), value.func)
        return True

    def _is_first_visit(self, value: Any) -> bool:
        is_first = id(value) not in self._seen
        self._seen.add(id(value))
        return is_first

    def _search_tables_of_torch(self) -> None:
        for name, key in FUNCTION_TABLES.items():
            holder = sys.modules.get(name)
            if issubclass(type(holder), types.ModuleType):
                table = namespace_of(holder).get(key)
                if type(table) is dict and self._is_first_visit(table):
                    self._search_keys(table)

    def _search_module(self, name: str, module: types.ModuleType) -> None:
        namespace = namespace_of(module)
        if not self._is_first_visit(namespace):
            return
        for key, value in list(namespace.items()):
            if id(value) in self._ids:
                self._enter(Item(namespace, key, module), value)
            elif type(value) not in _PLAIN and not self._enter_partial(value):
                self._search_value(value, name, key, namespace)

    def _search_value(self, value: Any, prefix: str, key: str, holder: Any) -> None:
        """Look into a global or a class attribute. Its holder is the dict of the module, or the class."""
        kind = type(value)
        if kind is types.FunctionType:
            self._search_function(value)
        elif issubclass(kind, type):
            self._search_class(value)
        elif issubclass(kind, dict):
            if not key.startswith("__"):  # __builtins__, __annotations__...
                self._search_table(value, prefix, key)
        elif issubclass(kind, nn.Module):
            self._search_layer(value)
        elif not issubclass(kind, types.ModuleType):
            self._others.append((prefix, key, value, (holder, key)))

    def _search_class(self, owner: type) -> None:
        attributes = attributes_of(owner)
        home = attributes.get("__module__")
        if type(home) is not str or home.partition(".")[0] != self._package or not self._is_first_visit(owner):
            return
        for key, value in list(attributes.items()):
            kind = type(value)
            function = value
            if kind is staticmethod or kind is classmethod:
                function = value.__func__
            if id(function) in self._ids:
                self._enter(ClassAttribute(owner, key), function, self._as_class_attribute(value, function))
            elif type(function) is types.FunctionType:
                self._search_function(function)
            elif kind not in _PLAIN:
                self._search_value(value, f"{home}.{_name_of(owner)}", key, owner)

    def _as_class_attribute(self, value: Any, function: Callable[..., Any]) -> Any:
        """Return what is to be the class attribute instead of `value`: called through an instance, it gets the same
        arguments.
        """
        after = self.functions[id(function)]
        if function is not value:
            return type(value)(after)
        if hasattr(type(after), "__get__") and not hasattr(type(value), "__get__"):
            return staticmethod(after)  # a function is given the instance, a builtin is not
        return after

    def _search_table(self, table: dict[Any, Any], prefix: str, key: str) -> None:
        """Look through the values and the keys of a dict."""
        if not self._is_first_visit(table):
            return
        self._search_keys(table)
        for index, value in list(dict.items(table)):
            kind = type(value)
            if id(value) in self._ids:
                self._enter(Item(table, index), value)
            elif kind is types.FunctionType:
                self._search_function(value)
            elif issubclass(kind, nn.Module):
                self._search_layer(value)
            elif (
                kind not in _PLAIN and not issubclass(kind, (type, types.ModuleType)) and not self._enter_partial(value)
            ):
                self._others.append((prefix, key, value, (table, index)))

    def _search_containers(self) -> None:
        """Look through what the search has come by, and what that holds in turn."""
        contents = _contents_of_all([value for _, _, value, _ in self._others], self._seen)
        self._is_held_elsewhere = not self._ids.isdisjoint(map(id, contents))
        if not self._is_held_elsewhere:
            return
        handled = frozenset(self._seen)  # from before: a tuple may stand in several places
        for _, _, value, place in self._others:
            if place is not None and not self._ids.isdisjoint(map(id, _contents_of_all([value], handled))):
                self._search_container(value, *place)

    def _search_container(self, container: Any, holder: Any, key: Any) -> None:
        """Look through a list, tuple, set or dict, which `holder` (a class, dict, list or nothing) has under `key`."""
        kind = type(container)
        if kind is tuple or kind is frozenset:
            self._search_fixed(container, holder, key)
        if not (issubclass(kind, dict) or kind in _CONTAINERS) or not self._is_first_visit(container):
            return
        if issubclass(kind, dict):
            self._search_keys(container)
            members = list(dict.items(container))
        else:
            members = list(enumerate(container))
        for index, member in members:
            if kind in _FIXED:
                self._enter_partial(member)
                self._search_container(member, None, None)
            elif id(member) not in self._ids:
                self._enter_partial(member)
                self._search_container(member, container, index)
            elif kind is set:
                self._enter(Member(container, member), member)
            elif kind is list:
                self._enter(Place(container, index), member)
            else:
                self._enter(Item(container, index), member)

    def _search_fixed(self, container: Any, holder: Any, key: Any) -> None:
        """Enter the place of a tuple or frozenset with one that holds the replacements instead."""
        after, held = self._exchange_in(container)
        if held is None or holder is None:
            return
        if type(holder) is list:
            slot: Slot = Place(holder, key)
        elif issubclass(type(holder), dict):
            slot = Item(holder, key)
        elif issubclass(type(holder), type):
            slot = ClassAttribute(holder, key)
        else:  # a set
            return
        self.found.append((id(held), Exchange(slot, container, after, container)))
        self._exchanged.add(id(container))

    def _exchange_in(self, container: Any) -> tuple[Any, Callable[..., Any] | None]:
        """Return a tuple or frozenset with replacements, and one of the functions that it held, or None."""
        members, held = [], None
        for member in container:
            inner = None
            if id(member) in self._ids:
                inner, member = member, self.functions[id(member)]
            elif type(member) in _FIXED:
                member, inner = self._exchange_in(member)
            held = inner or held
            members.append(member)
        return (container if held is None else type(container)(members)), held

    def _search_keys(self, table: dict[Any, Any]) -> None:
        """Look at the keys: classes with a `__torch_function__` keep what they do instead of a function under it."""
        for key in list(dict.keys(table)):
            if id(key) in self._ids:
                self._enter(Key(table, key), key)

    def _search_function(self, function: Any) -> None:
        """Look at the defaults of a function, and of those that it decorates."""
        while type(function) is types.FunctionType and id(function) not in self._ids:
            has_references = function.__defaults__ or function.__kwdefaults__ or function.__closure__
            if not has_references or not self._is_first_visit(function):
                return
            if _package_of(function) == self._package:
                self._search_defaults(function)
            function = vars(function).get("__wrapped__")

    def _search_defaults(self, function: types.FunctionType) -> None:
        defaults, keyword_defaults = function.__defaults__ or (), function.__kwdefaults__ or {}
        originals = [value for value in defaults if id(value) in self._ids]
        if originals:
            after = tuple([self.functions.get(id(value), value) for value in defaults])
            self._enter(Defaults(function, "__defaults__"), originals[0], after)
        for key, value in list(keyword_defaults.items()):
            if id(value) in self._ids:
                self._enter(Item(keyword_defaults, key), value)

    # ---- models ------------------------------------------------------------------------------------------------------

    def _search_layer(self, layer: nn.Module) -> None:
        """Look through a layer that a package keeps, such as transformers.activations.gelu."""
        package = self._package
        if self._is_first_visit(layer):
            self._search_model(layer)
        self._package = package

    def _search_model(self, model: nn.Module) -> None:
        """Look through the attributes of the model's modules, through the functions among them and through the classes
        that torch does not define.
        """
        for path, module in model.named_modules():
            prefix = f"{type(model).__name__}.{path}" if path else type(model).__name__
            for key, value in list(vars(module).items()):
                if id(value) in self._ids:
                    self._enter(InstanceAttribute(module, key), value)
                elif type(value) is types.FunctionType:
                    self._package = _package_of(value)
                    if self._package not in _PASSED_OVER:
                        self._search_function(value)
                elif self._enter_partial(value):
                    continue
                elif type(value) in _HOLDERS:
                    self._others.append((prefix, key, value, None))
            owners = [*type(module).__mro__]
            for tensor in (*get_own_parameters(module).values(), *get_own_buffers(module).values()):
                if tensor is not None and type(tensor) not in PLAIN_CLASSES:
                    owners += type(tensor).__mro__
            for owner in owners:
                self._package = owner.__module__.partition(".")[0]
                if self._package not in _PASSED_OVER:
                    self._search_class(owner)


def _holds_any(module: types.ModuleType, ids: set[int]) -> bool:
    return not ids.isdisjoint(map(id, list(namespace_of(module).values())))


def _package_of(function: types.FunctionType) -> str:
    """Return the top-level package that a function was defined in; nothing where its globals do not tell."""
    home = function.__globals__.get("__name__")
    return home.partition(".")[0] if type(home) is str else ""


def _contents_of_all(values: Iterable[Any], handled: Container[int]) -> list[Any]:
    """Return what the values refer to, directly or through up to two containers. Runs no code of theirs."""
    layer = gc.get_referents(*values)
    found = [value for value in layer if id(value) not in handled]
    for _ in range(2):
        layer = gc.get_referents(*[value for value in layer if type(value) in _KEEPERS and id(value) not in handled])
        found += layer
    return found
