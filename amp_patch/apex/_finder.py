"""`ApexFinder`: makes `import apex` find this package, next to an installed `apex` or instead of it.

A module of the stand-in is one object under two names: `sys.modules["apex.amp"]` is
`sys.modules["amp_patch.apex.amp"]`.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from ._gone import advise

logger = logging.getLogger("amp_patch")

PARTS = ("amp", "contrib", "fp16_utils", "mlp", "multi_tensor_apply", "normalization", "optimizers", "parallel")
"""The subpackages of the stand-in. An installed `apex` that has one of them is NVIDIA's."""

_PACKAGE = __name__.rpartition(".")[0]
_TOP_LEVEL = ("amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda")
_NVIDIA_PARTS = (*PARTS, "fused_dense", "transformer")


class _AliasLoader(importlib.abc.Loader):
    """Loads a module of the stand-in under its name in `apex`."""

    def __init__(self, real_name: str) -> None:
        self._real_name = real_name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of the stand-in.

        The import machinery then overwrites its `__spec__`; `exec_module` restores it.
        """
        module = importlib.import_module(self._real_name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore `__spec__`. Register submodules that are imported already under their names in `apex`, too.

        Otherwise a later `import apex.amp._amp_state` would set the attribute `amp._amp_state` to the module of that
        name. It must stay the object of that name.
        """
        alias = getattr(module.__spec__, "name", self._real_name)
        module.__spec__ = self._spec
        if alias == "apex":  # no attribute of the package itself hides a submodule
            return
        for name, submodule in list(sys.modules.items()):
            if name.startswith(self._real_name + "."):
                sys.modules.setdefault(alias + name.removeprefix(self._real_name), submodule)


class ApexFinder(importlib.abc.MetaPathFinder):
    """Finds `apex`, its submodules, and the compiled modules of Apex that the stand-in has.

    Args:
        package: the name of the stand-in.
        force: ignore an installed `apex`.
    """

    def __init__(self, package: str, *, force: bool) -> None:
        self._package = package
        self._force = force
        # True: all of `apex` is found here. False: only parts that an installed `apex` lacks. None: not decided yet
        self._is_whole: bool | None = None
        self._is_idle = False  # whether an installed `apex` has amp, and is used alone
        self._displaced: dict[str, ModuleType] = {}  # modules that were set aside, by name
        self._completed: list[ModuleType] = []  # installed packages that find missing parts here
        self._thread = threading.local()

    # ---- installing --------------------------------------------------------------------------------------------------

    def insert(self) -> None:
        """Put the finder first in `sys.meta_path`.

        If an `apex` is imported already, decide now whether to replace it, to complete it, or to leave it alone. To
        replace it, set its modules aside.
        """
        apex = sys.modules.get("apex")
        if apex is not None:
            self._examine(apex.__spec__, getattr(apex, "__path__", ()))
            if self._is_whole:
                self._displaced = _find_modules()
            elif not self._is_idle:
                self._complete(apex)
        for name in self._displaced:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Remove the finder from `sys.meta_path`. If it is not there, do nothing.

        Remove the modules that it has found from `sys.modules`, and from the installed packages that have them as
        attributes. Restore the modules that were set aside.
        """
        if self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        for name, module in _find_modules().items():
            if self._is_of_stand_in(module):
                del sys.modules[name]
                parent, _, own_name = name.rpartition(".")
                package = sys.modules.get(parent)
                # Python has set the imported part as an attribute of the installed apex
                if package is not None and not self._is_of_stand_in(package) and vars(package).get(own_name) is module:
                    delattr(package, own_name)
        for package in self._completed:
            vars(package).pop("__getattr__", None)
        sys.modules.update(self._displaced)

    def _is_of_stand_in(self, value: object) -> bool:
        return isinstance(value, ModuleType) and (value.__name__ + ".").startswith(self._package + ".")

    # ---- finding -----------------------------------------------------------------------------------------------------

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module in `apex`: in an installed one that is not replaced and has it, else here.

        Return None for names that are not Apex's, for modules that neither has, and if the installed `apex` is used
        alone. Raises ModuleNotFoundError, with a modern replacement, for parts of Apex that neither has.
        """
        root, _, rest = fullname.partition(".")
        # `from apex import X` looks for `amp_patch.apex.X`, because the package keeps its own `__name__`
        if fullname.startswith(self._package + "."):
            _raise_if_gone("apex" + fullname.removeprefix(self._package))
        if (root != "apex" and fullname not in _TOP_LEVEL) or getattr(self._thread, "is_asking", False):
            return None
        if self._is_whole is None:
            spec = self._find_elsewhere("apex", None, None)
            self._examine(spec, () if spec is None else spec.submodule_search_locations or ())
        if self._is_idle:
            return None
        if root != "apex":
            # an installed extension is used, unless `force` is given
            is_free = self._force or self._find_elsewhere(fullname, path, target) is None
            return self._alias(fullname, fullname) if self._is_whole and is_free else None
        elsewhere = None if self._is_whole else self._find_elsewhere(fullname, path, target)
        if elsewhere is None:
            spec = self._alias(fullname, rest)
            if spec is None:
                _raise_if_gone(fullname)
            return spec
        # this is the import of the installed `apex` itself
        if not rest:
            self._complete_after(elsewhere.loader)
        return elsewhere

    @contextlib.contextmanager
    def _asking_others(self) -> Iterator[None]:
        """Context manager in which this finder finds nothing, because other finders may search `sys.meta_path`, too."""
        self._thread.is_asking = True
        try:
            yield
        finally:
            self._thread.is_asking = False

    def _find_elsewhere(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """Ask the other finders."""
        with self._asking_others():
            for finder in sys.meta_path:
                if finder is not self and hasattr(finder, "find_spec"):
                    spec = finder.find_spec(fullname, path, target)
                    if spec is not None:
                        return spec
            return None

    def _alias(self, fullname: str, rest: str) -> ModuleSpec | None:
        """Return the spec of a module of the stand-in under the name `fullname`, or None if there is no such module.

        `rest` is the name without `apex.`, empty for the package itself.
        """
        real_name = f"{self._package}.{rest}" if rest else self._package
        try:
            real = importlib.util.find_spec(real_name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(self._package):
                raise
            real = None  # the package that would hold the module is missing
        if real is None:
            return None
        spec = ModuleSpec(fullname, _AliasLoader(real_name), origin=real.origin)
        # a package needs these, or Python would not search for its submodules
        if real.submodule_search_locations is not None:
            spec.submodule_search_locations = list(real.submodule_search_locations)
        return spec

    def find_distributions(self, context: Any = None) -> Iterator[Any]:
        """Yield the metadata of `apex` if all of it is found here. Some libraries read its version before they import
        it.
        """
        name = getattr(context, "name", None)
        if name not in (None, "apex") or getattr(self._thread, "is_asking", False):
            return
        if self._is_whole is None:
            self.find_spec("apex")
        if self._is_whole:
            # imported only here, because it takes long
            yield importlib.import_module(f"{self._package}._metadata").Metadata()

    # ---- an installed apex -------------------------------------------------------------------------------------------

    def _examine(self, spec: ModuleSpec | None, path: Sequence[str]) -> None:
        """Decide, once, whether to replace an installed `apex`, to complete it, or to leave it alone.

        Logs a warning if it is left alone, or is not NVIDIA's.
        """
        if self._is_whole is not None:
            return
        folders = [os.fspath(folder) for folder in path]
        parts = {
            part
            for part in _NVIDIA_PARTS
            for folder in folders
            if os.path.exists(os.path.join(folder, part, "__init__.py"))
        }
        # a folder without __init__.py, such as a checkout, is no installed package; its spec has no origin
        is_installed = spec is not None and spec.origin is not None
        self._is_whole = self._force or not (is_installed and parts)
        self._is_idle = not self._is_whole and "amp" in parts
        where = folders[0] if folders else getattr(spec, "origin", None) or ""
        if self._is_idle:
            logger.warning(
                "amp_patch: the apex in %s has amp itself and is left alone; force=True (`amp-patch run --force`)"
                " replaces it",
                where,
            )
        elif is_installed and not parts:
            logger.warning("amp_patch: the apex in %s is not NVIDIA's; the stand-in replaces it", where)

    def _complete_after(self, loader: Any) -> None:
        """Let the installed apex look here for parts that it lacks, once it is imported."""
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._complete(module)

        loader.exec_module = exec_module

    def _complete(self, module: ModuleType) -> None:
        """Give an installed apex a `__getattr__` that imports parts from here."""
        if "__getattr__" in vars(module):
            return  # the package has a `__getattr__` of its own, which must not be replaced

        def get_part(name: str) -> Any:
            if name in PARTS:
                try:
                    return importlib.import_module(f"apex.{name}")
                except ModuleNotFoundError as error:
                    # the part exists, but a module that it imports is missing
                    if error.name != f"apex.{name}":
                        raise
            raise AttributeError(f"module 'apex' has no attribute {name!r}")

        vars(module)["__getattr__"] = get_part
        self._completed.append(module)


def get_part(name: str) -> Any:
    """Import a part of the stand-in and return it.

    Raises AttributeError for any other name, with a modern replacement if it is a part of Apex.
    """
    if name in PARTS:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    raise AttributeError(advise(f"apex.{name}") or f"module 'apex' has no attribute {name!r}")


def refuse_name(module: str, name: str) -> NoReturn:
    """Raise AttributeError for a name that a module of the stand-in lacks, with a modern replacement if there is
    one.
    """
    full_name = f"apex{module.removeprefix(_PACKAGE)}"
    raise AttributeError(advise(f"{full_name}.{name}") or f"module {full_name!r} has no attribute {name!r}")


def get_installed() -> ApexFinder | None:
    """Return the finder in `sys.meta_path`, or None."""
    return next((finder for finder in sys.meta_path if isinstance(finder, ApexFinder)), None)


def _find_modules() -> dict[str, ModuleType]:
    """Return the imported modules with names that the finder finds."""
    roots = ("apex", *_TOP_LEVEL)
    return {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] in roots}


def _raise_if_gone(name: str) -> None:
    advice = advise(name)
    if advice is not None:
        # without the argument `name`: with it, `from apex import X` would replace the message by its own
        raise ModuleNotFoundError(f"No module named {name!r}: {advice}")
