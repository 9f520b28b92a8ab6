"""`Search`: finds references to functions in models and in the imported modules. It runs no property and no
`__getattr__` of the objects that it searches.

In imported modules, it searches:
- globals, class attributes, and the default arguments of functions and methods that are defined there;
- layers in globals and class attributes;
- dicts (values and keys), lists, tuples and sets in globals and class attributes, also nested ones, a few levels deep.
In a model, it searches the attributes of each module, and the classes of its modules, parameters and buffers.

It skips torch (except `FUNCTION_TABLES`), this package, the standard library, and packages that torch and this package
need. It also skips a package of several modules if none of them has one of these as a global: a function that is
searched for, a module of torch or of another package that defines such a function, or `torch.Tensor`. A package without
such a global hardly ever refers to the functions.
"""

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from ..dtypes import PLAIN_CLASSES
from ..torch_private import FUNCTION_TABLES, get_own_buffers, get_own_parameters
from .containers import ContainerSearch, Unsearched
from .exchanges import ExchangeList, Replacements
from .slots import Entry, WeakAttribute, attributes_of, namespace_of

_NEEDED_BY_TORCH = {
    *("filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "numpy", "sympy", "typing_extensions"),
    *("wrapt", "yaml"),
}
SKIPPED_PACKAGES = sys.stdlib_module_names | _NEEDED_BY_TORCH | {"torch", "amp_patch"}
"""Top-level packages whose modules are not searched."""

_SKIPPED_TYPES = frozenset(
    {
        *(str, bytes, int, float, complex, bool, type(None), type(Ellipsis)),
        *(types.ModuleType, types.CodeType, types.BuiltinFunctionType, types.GetSetDescriptorType),
        *(types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType),
    }
)
"""Types whose values need no search: they hold no function, or are searched elsewhere, as modules are."""

_REPORTED_TYPES = frozenset({functools.partial, tuple, list, dict})
"""Types of attributes of layers. If such an attribute holds a function that cannot be replaced, it is reported."""

_name_of: Callable[[type], str] = vars(type)["__name__"].__get__


class Search:
    """Finds the slots that hold one of the given functions.

    Args:
        replacements: the replacement of each function to find, by the id of the function.
        packages: the top-level packages that define these functions. torch is always one of them.

    Attributes:
        result: an exchange for each slot that was found.
    """

    def __init__(self, replacements: Replacements, packages: Iterable[str] = ()) -> None:
        self.result = ExchangeList(replacements)
        self._wanted = self.result.wanted
        self._defining_packages = {"torch", *packages}
        self._unsearched: list[Unsearched] = []
        self._containers = ContainerSearch(self.result, self._unsearched)

    def run(self, models: Iterable[nn.Module], *, with_modules: bool) -> None:
        """Search models, and with `with_modules` also the imported modules."""
        for model in models:
            self._search_model(model)
        if with_modules:
            self.search_modules()
        self._containers.run()

    def find_unreplaced(self) -> list[str]:
        """Return the objects that still hold one of the functions, as `module.name (class)`. Call it after the
        exchanges of `result` were written.
        """
        return self._containers.find_unreplaced()

    # ---- modules -----------------------------------------------------------------------------------------------------

    def search_modules(self) -> None:
        """Search the imported modules."""
        modules_of: dict[str, list[tuple[str, types.ModuleType]]] = {}  # by package, each with its name
        # A package that refers to one of the functions usually has one of these objects as a global: the function,
        # torch.Tensor, or a module of a package that defines the function (added below).
        access_ids = {*self._wanted, id(Tensor)}
        for name, module in list(sys.modules.items()):
            if not issubclass(type(module), types.ModuleType):
                continue
            package = name.partition(".")[0]
            if package in self._defining_packages:
                access_ids.add(id(module))
            if package not in SKIPPED_PACKAGES:
                modules_of.setdefault(package, []).append((name, module))
        self._search_tables_of_torch()
        for package, modules in modules_of.items():
            # for a package of a single module, this check would cost as much as the search
            if len(modules) > 1 and not any(_holds_any(module, access_ids) for _, module in modules):
                continue
            for name, module in modules:
                self._search_module(name, module, package)
        # A local variable may hold a partial of a function of the script, such as the loss
        # `functools.partial(criterion, weight=...)`. The garbage collector knows the partials.
        if self._defining_packages != {"torch"}:
            for value in gc.get_objects():
                self.result.append_partial(value)

    def _search_tables_of_torch(self) -> None:
        """Search the dicts of torch that have functions as keys. The rest of torch is not searched."""
        for name, key in FUNCTION_TABLES.items():
            module = sys.modules.get(name)
            if issubclass(type(module), types.ModuleType):
                table = namespace_of(module).get(key)
                if type(table) is dict and self.result.is_first_visit(table):
                    self.result.append_keys(table)

    def _search_module(self, name: str, module: types.ModuleType, package: str) -> None:
        namespace = namespace_of(module)
        if not self.result.is_first_visit(namespace):
            return
        for key, value in list(namespace.items()):
            if id(value) in self._wanted:
                self.result.append(Entry(namespace, key, module=module), value)
            elif type(value) not in _SKIPPED_TYPES and not self.result.append_partial(value):
                self._search_value(value, name, key, namespace, package)

    def _search_value(self, value: Any, prefix: str, name: str, holder: Any, package: str) -> None:
        """Search the value of a global or a class attribute.

        Args:
            prefix: the name of the module or class that holds the value under `name`. Messages say `prefix.name`.
            holder: the module's namespace or the class.
            package: the top-level package of the module or class. Classes of other packages are not searched.
        """
        kind = type(value)
        if kind is types.FunctionType:
            self._search_function(value)
        elif issubclass(kind, type):
            self._search_class(value, package)
        elif issubclass(kind, dict):
            if not name.startswith("__"):  # __builtins__, __annotations__...
                self._search_table(value, prefix, name)
        elif issubclass(kind, nn.Module):
            self._search_layer(value)
        elif not issubclass(kind, types.ModuleType):
            self._unsearched.append(Unsearched(prefix, name, value, holder, name))

    def _search_table(self, table: dict[Any, Any], prefix: str, name: str) -> None:
        """Search the keys and the values of a dict. Collect containers and other objects for `ContainerSearch`."""
        if not self.result.is_first_visit(table):
            return
        self.result.append_keys(table)
        for key, value in list(dict.items(table)):
            kind = type(value)
            if id(value) in self._wanted:
                self.result.append(Entry(table, key), value)
            elif kind in _SKIPPED_TYPES or issubclass(kind, (type, types.ModuleType)):
                continue  # a class is searched with the module that defines it, and each module by `search_modules`
            elif kind is types.FunctionType:
                self._search_function(value)
            elif issubclass(kind, nn.Module):
                self._search_layer(value)
            elif not self.result.append_partial(value):
                self._unsearched.append(Unsearched(prefix, name, value, table, key))

    # ---- classes and functions ---------------------------------------------------------------------------------------

    def _search_class(self, owner: type, package: str) -> None:
        """Search the attributes of a class, unless another package than `package` defines it."""
        attributes = attributes_of(owner)
        home = attributes.get("__module__")
        if type(home) is not str or home.partition(".")[0] != package or not self.result.is_first_visit(owner):
            return
        for key, value in list(attributes.items()):
            kind = type(value)
            function = value
            if kind is staticmethod or kind is classmethod:
                function = value.__func__
            if id(function) in self._wanted:
                self.result.append(WeakAttribute(owner, key), function, self._as_class_attribute(value, function))
            elif type(function) is types.FunctionType:
                self._search_function(function)
            elif kind not in _SKIPPED_TYPES and not self.result.append_partial(function):
                self._search_value(value, f"{home}.{_name_of(owner)}", key, owner, package)

    def _as_class_attribute(self, value: Any, function: Callable[..., Any]) -> Any:
        """Return the replacement of a class attribute. Its `value` is `function`, or a static or class method of it."""
        replacement = self.result.replacements[id(function)]
        if function is not value:  # `value` is a static or class method that contains the function
            return type(value)(replacement)
        if hasattr(type(replacement), "__get__") and not hasattr(type(value), "__get__"):
            # Called through an instance, a Python function gets the instance as its first argument, and a builtin
            # does not. So the replacement of a builtin becomes a static method.
            return staticmethod(replacement)
        return replacement

    def _search_function(self, function: Any) -> None:
        """Search the default arguments of a function. If a decorator made it, also those of the decorated function."""
        while type(function) is types.FunctionType and id(function) not in self._wanted:
            # a wrapper that a decorator has made has a closure, which holds the decorated function
            may_hold_functions = function.__defaults__ or function.__kwdefaults__ or function.__closure__
            if not may_hold_functions or not self.result.is_first_visit(function):
                return
            if _package_of(function) not in SKIPPED_PACKAGES:
                self._search_defaults(function)
            function = vars(function).get("__wrapped__")

    def _search_defaults(self, function: types.FunctionType) -> None:
        defaults, keyword_defaults = function.__defaults__ or (), function.__kwdefaults__ or {}
        for value in (*defaults, *keyword_defaults.values()):
            self.result.append_partial(value)
        functions = [value for value in defaults if id(value) in self._wanted]
        if functions:
            after = tuple([self.result.replacements.get(id(value), value) for value in defaults])
            # One slot holds the whole tuple, with perhaps several of the functions. The exchange goes to the patcher of
            # the first one, which can undo it for all.
            self.result.append(WeakAttribute(function, "__defaults__"), functions[0], after)
        for key, value in list(keyword_defaults.items()):
            if id(value) in self._wanted:
                self.result.append(Entry(keyword_defaults, key), value)

    # ---- models ------------------------------------------------------------------------------------------------------

    def _search_layer(self, layer: nn.Module) -> None:
        """Search a layer that is the value of a global or of a dict, such as `transformers.activations.gelu`."""
        if self.result.is_first_visit(layer):
            self._search_model(layer)

    def _search_model(self, model: nn.Module) -> None:
        """Search the attributes of a model's modules, and the classes of the modules, parameters and buffers."""
        for path, module in model.named_modules():
            prefix = f"{type(model).__name__}.{path}" if path else type(model).__name__
            for key, value in list(vars(module).items()):
                if id(value) in self._wanted:
                    self.result.append(WeakAttribute(module, key), value)
                elif type(value) is types.FunctionType:
                    self._search_function(value)
                elif not self.result.append_partial(value) and type(value) in _REPORTED_TYPES:
                    self._unsearched.append(Unsearched(prefix, key, value))
            owners = [*type(module).__mro__]
            for tensor in (*get_own_parameters(module).values(), *get_own_buffers(module).values()):
                if tensor is not None and type(tensor) not in PLAIN_CLASSES:
                    owners += type(tensor).__mro__
            for owner in owners:
                package = owner.__module__.partition(".")[0]
                if package not in SKIPPED_PACKAGES:
                    self._search_class(owner, package)


def _holds_any(module: types.ModuleType, ids: set[int]) -> bool:
    """Return whether a global of a module is one of the objects with these ids."""
    return not ids.isdisjoint(map(id, list(namespace_of(module).values())))


def _package_of(function: types.FunctionType) -> str:
    """Return the top-level package that defines a function, or "" if its globals do not name a module."""
    home = function.__globals__.get("__name__")
    return home.partition(".")[0] if type(home) is str else ""
