"""References to patched functions in the rest of the process: found without running anybody's code, and redirected to
replacements.

Where it looks, in every imported module outside torch, this package and the standard library: globals, class
attributes, default arguments and closures of the functions and methods defined there, and dicts (keys too) and lists
(of dicts and lists) in globals and class attributes. Namespaces are read with C's own accessors: no property, no
descriptor, no `__getattr__` and no metaclass gets to run.

Passed over are packages that torch itself is built on, and any package none of whose modules holds a module of torch,
`torch.Tensor` or a patched function: it has no way to come by one.
"""

import functools
import gc
import sys
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch

from ..torch_private import FUNCTION_TABLES
from .patcher import Redirection
from .slots import (
    Cell,
    ClassAttribute,
    Defaults,
    InstanceAttribute,
    Item,
    Key,
    attributes_of,
    contents_of,
    namespace_of,
)

Functions = Mapping[int, Callable[..., Any]]
"""What is to stand for each function, by the id of the function."""

MAX_DEPTH = 2  # of dicts and lists in one another

_flags_of: Callable[[type], int] = vars(type)["__flags__"].__get__
_BELOW_TORCH = {
    "filelock",
    "fsspec",
    "jinja2",
    "markupsafe",
    "mpmath",
    "networkx",
    "numpy",
    "sympy",
    "typing_extensions",
    "wrapt",
    "yaml",
}
_PASSED_OVER = sys.stdlib_module_names | _BELOW_TORCH | {"torch", "amp_patch"}
_PLAIN = frozenset(
    {
        str,
        bytes,
        int,
        float,
        complex,
        bool,
        type(None),
        type(Ellipsis),
        types.ModuleType,
        types.CodeType,
        types.BuiltinFunctionType,
    }
)
_PLAIN |= {
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
}
_HOLDERS = frozenset({functools.partial, tuple, list, dict})
_IS_ASSIGNABLE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, or made to look so
_IS_IMMUTABLE = 1 << 8


class Search:
    """Finds the slots that refer to some functions, and what else refers to them, where nothing can be exchanged.

    Args:
        functions: what is to stand for each function, by the function's id.
        packages: the top-level packages, beside torch, that these functions belong to.
    """

    def __init__(self, functions: Functions, packages: Iterable[str] = ()) -> None:
        self._functions = functions
        self._ids = frozenset(functions)
        self._homes = {"torch", *packages}
        self._package = ""  # the one that is being searched
        # a replacement's own closure holds the original, and is to keep it
        self._seen = {id(function) for function in functions.values()}
        self._others: list[tuple[str, str, Any]] = []
        self.found: list[Redirection] = []

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to look for."""
        return not self._ids

    def search_modules(self) -> None:
        """Look through the imported modules."""
        packages: dict[str, list[tuple[str, types.ModuleType]]] = {}
        evidence = {*self._ids, id(torch.Tensor)}
        for name, module in list(sys.modules.items()):
            top = name.partition(".")[0]
            is_home, is_passed_over = top in self._homes, top in _PASSED_OVER
            if (is_passed_over and not is_home) or not issubclass(type(module), types.ModuleType):
                continue
            if is_home:
                evidence.add(id(module))
            if not is_passed_over:
                packages.setdefault(top, []).append((name, module))
        for name, key in FUNCTION_TABLES.items():
            holder = sys.modules.get(name)
            table = namespace_of(holder).get(key) if issubclass(type(holder), types.ModuleType) else None
            if type(table) is dict and self._is_first_visit(table):
                self._search_keys(table)
        for self._package, modules in packages.items():
            if len(modules) == 1 or any(
                not evidence.isdisjoint(map(id, list(namespace_of(module).values()))) for _, module in modules
            ):
                for name, module in modules:
                    self._search_module(name, module)

    def search_model(self, model: torch.nn.Module) -> None:
        """Look through the attributes of the model's modules, through the functions among them and through the classes
        that torch does not define.
        """
        for path, module in model.named_modules():
            prefix = ".".join(filter(None, (type(model).__name__, path)))
            for key, value in list(vars(module).items()):
                if id(value) in self._ids:
                    self.found.append(
                        Redirection(InstanceAttribute(module, key), value, self._functions[id(value)], value)
                    )
                elif type(value) is types.FunctionType:
                    self._package = _package_of(value)
                    if self._package not in _PASSED_OVER:
                        self._search_function(value)
                elif type(value) is functools.partial and id(value.func) in self._ids:
                    after = functools.partial(self._functions[id(value.func)], *value.args, **value.keywords)
                    self.found.append(Redirection(InstanceAttribute(module, key), value, after, value.func))
                elif type(value) in _HOLDERS:
                    for function in _functions_in(value):
                        self._package = _package_of(function)
                        if self._package not in _PASSED_OVER:
                            self._search_function(function)
                    self._others.append((prefix, key, value))
            for owner in type(module).__mro__:
                self._package = owner.__module__.partition(".")[0]
                if self._package not in _PASSED_OVER:
                    self._search_class(owner)

    def find_stuck(self) -> list[str]:
        """Return what holds one of the functions where it cannot be redirected, as `module.name (its class)` each."""
        if self._ids.isdisjoint(map(id, _contents_of_all([value for _, _, value in self._others], self._seen))):
            return []
        handled = {
            id(namespace_of(module))
            for module in list(sys.modules.values())
            if issubclass(type(module), types.ModuleType)
        } | self._seen
        holders = {id(value): (prefix, key, value) for prefix, key, value in self._others}
        return [
            f"{prefix}.{key} ({type(value).__name__})"
            for prefix, key, value in holders.values()
            if not self._ids.isdisjoint(map(id, _contents_of_all([value], handled)))
        ]

    def _is_first_visit(self, value: Any) -> bool:
        is_first = id(value) not in self._seen
        self._seen.add(id(value))
        return is_first

    def _search_module(self, name: str, module: types.ModuleType) -> None:
        namespace = namespace_of(module)
        if self._is_first_visit(namespace):
            for key, value in list(namespace.items()):
                if id(value) in self._ids:
                    self.found.append(
                        Redirection(Item(namespace, key, module), value, self._functions[id(value)], value)
                    )
                elif type(value) not in _PLAIN:
                    self._search_value(value, name, key)

    def _search_class(self, owner: type) -> None:
        attributes = attributes_of(owner)
        home = attributes.get("__module__")
        if type(home) is not str or home.partition(".")[0] != self._package or not self._is_first_visit(owner):
            return
        for key, value in list(attributes.items()):
            kind = type(value)
            function = value.__func__ if kind is staticmethod or kind is classmethod else value
            if id(function) in self._ids:
                if _flags_of(owner) & (_IS_ASSIGNABLE | _IS_IMMUTABLE) == _IS_ASSIGNABLE:
                    self.found.append(
                        Redirection(ClassAttribute(owner, key), value, self._as_attribute(value, function), function)
                    )
            elif type(function) is types.FunctionType:
                self._search_function(function)
            elif kind not in _PLAIN:
                self._search_value(value, f"{home}.{owner.__name__}", key)

    def _as_attribute(self, value: Any, function: Callable[..., Any]) -> Any:
        """Return what is to be the class attribute instead of `value`: called through an instance, it gets the same
        arguments.
        """
        after = self._functions[id(function)]
        if function is not value:
            return type(value)(after)
        # a builtin is not given the instance, a function is
        is_given_now, will_be_given = hasattr(type(value), "__get__"), hasattr(type(after), "__get__")
        return staticmethod(after) if will_be_given and not is_given_now else after

    def _search_value(self, value: Any, prefix: str, key: str) -> None:
        kind = type(value)
        if kind is types.FunctionType:
            self._search_function(value)
        elif issubclass(kind, type):
            self._search_class(value)
        elif issubclass(kind, (dict, list)):
            if not key.startswith("__"):  # __builtins__, __annotations__...
                self._search_table(value, prefix, key, 1)
        elif issubclass(kind, torch.nn.Module):
            self._search_layer(value)
        elif not issubclass(kind, types.ModuleType):
            self._others.append((prefix, key, value))

    def _search_table(self, table: dict[Any, Any] | list[Any], prefix: str, key: str, depth: int) -> None:
        if not self._is_first_visit(table):
            return
        items = list(dict.items(table)) if isinstance(table, dict) else list(enumerate(list.__iter__(table)))
        if isinstance(table, dict):
            self._search_keys(table)
        for index, value in items:
            kind = type(value)
            if id(value) in self._ids:
                self.found.append(Redirection(Item(table, index), value, self._functions[id(value)], value))
            elif kind is types.FunctionType:
                self._search_function(value)
            elif issubclass(kind, (dict, list)) and depth < MAX_DEPTH:
                self._search_table(value, prefix, key, depth + 1)
            elif issubclass(kind, torch.nn.Module):
                self._search_layer(value)
            elif kind not in _PLAIN and not issubclass(kind, (type, types.ModuleType)):
                self._others.append((prefix, key, value))

    def _search_layer(self, layer: torch.nn.Module) -> None:
        """Look through a layer that a package keeps, such as transformers.activations.gelu."""
        package = self._package
        if self._is_first_visit(layer):
            self.search_model(layer)
        self._package = package

    def _search_keys(self, table: dict[Any, Any]) -> None:
        """Look at the keys: classes with a `__torch_function__` keep what they do instead of a function under it."""
        for key in [key for key in dict.keys(table) if id(key) in self._ids]:
            self.found.append(Redirection(Key(table, key), key, self._functions[id(key)], key))

    def _search_function(self, function: types.FunctionType) -> None:
        """Look at the defaults and the closure of a function, and at the functions in its closure: a decorator keeps
        there what it decorates.
        """
        pending = [function]
        while pending:
            function = pending.pop()
            defaults, keyword_defaults, closure = function.__defaults__, function.__kwdefaults__, function.__closure__
            if not (defaults or keyword_defaults or closure) or not self._is_first_visit(function):
                continue
            is_own = self._is_of_package(function)
            if is_own and defaults and not self._ids.isdisjoint(map(id, defaults)):
                after = tuple([self._functions.get(id(value), value) for value in defaults])
                original = next(value for value in defaults if id(value) in self._ids)
                self.found.append(Redirection(Defaults(function), defaults, after, original))
            if is_own and keyword_defaults:
                self._search_items(keyword_defaults)
            for cell in closure or ():
                contents = contents_of(cell)
                if type(contents) is types.FunctionType and id(contents) not in self._ids:
                    pending.append(contents)
                elif is_own and id(contents) in self._ids and self._is_first_visit(cell):
                    self.found.append(Redirection(Cell(cell), contents, self._functions[id(contents)], contents))

    def _search_items(self, keyword_defaults: dict[str, Any]) -> None:
        for key, value in keyword_defaults.items():
            if id(value) in self._ids:
                self.found.append(Redirection(Item(keyword_defaults, key), value, self._functions[id(value)], value))

    def _is_of_package(self, function: types.FunctionType) -> bool:
        return _package_of(function) == self._package


def _functions_in(value: Any, depth: int = 1) -> Iterator[types.FunctionType]:
    """Yield the Python functions in lists, tuples and dicts of an object's own, in one another."""
    items = dict.values(value) if type(value) is dict else value if type(value) in (list, tuple) else ()
    for item in list(items):
        if type(item) is types.FunctionType:
            yield item
        elif depth < MAX_DEPTH:
            yield from _functions_in(item, depth + 1)


def _package_of(function: types.FunctionType) -> str:
    """Return the top-level package that a function was defined in; nothing where its globals do not tell."""
    home = function.__globals__.get("__name__")
    return home.partition(".")[0] if type(home) is str else ""


def _contents_of_all(values: Iterable[Any], handled: Container[int]) -> list[Any]:
    """Return what the values refer to, directly or through a dict or tuple of theirs.

    The garbage collector knows, and asks nobody.
    """
    direct = gc.get_referents(*values)
    inner = [value for value in direct if type(value) in (dict, tuple) and id(value) not in handled]
    return [value for value in direct if id(value) not in handled] + gc.get_referents(*inner)
