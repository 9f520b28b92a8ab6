"""`ApexFinder`: an import finder that lets `import apex` find `amp_patch.apex`, the stand-in for Apex.

An installed `apex` may stay in use: see `ApexFinder`. A module of the stand-in is one object under two names:
`sys.modules["apex.amp"]` is `sys.modules["amp_patch.apex.amp"]`.
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
"""The parts of the stand-in that scripts import."""

_PACKAGE = __name__.rpartition(".")[0]  # "amp_patch.apex"
_TOP_LEVEL = ("amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda")
"""Compiled modules of Apex, imported as `import amp_C`, that the stand-in has."""

_NVIDIA_PARTS = (*PARTS, "fused_dense", "transformer")
"""An installed `apex` that has one of these subpackages is taken for NVIDIA's."""


class _AliasLoader(importlib.abc.Loader):
    """Loads a module of the stand-in under its name in `apex`, such as "apex.amp".

    Args:
        real_name: the own name of the module, such as "amp_patch.apex.amp".
    """

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
        """Restore `__spec__`. Put submodules that are imported already into `sys.modules` under their `apex` names.

        If `apex.amp._amp_state` were not in `sys.modules`, a later import of it would ask a loader, and Python would
        set the attribute `_amp_state` of `apex.amp` to the submodule. As in Apex, that attribute must stay the
        `AmpState` object. The package `apex` itself has no such attributes, so this leaves its submodules out.
        """
        alias = getattr(module.__spec__, "name", self._real_name)
        module.__spec__ = self._spec
        if alias == "apex":
            return
        for name, submodule in list(sys.modules.items()):
            if name.startswith(self._real_name + "."):
                sys.modules.setdefault(alias + name.removeprefix(self._real_name), submodule)


class ApexFinder(importlib.abc.MetaPathFinder):
    """Finds `apex`, its submodules, and the compiled modules of Apex that the stand-in has.

    What it does with an installed `apex` depends on its kind:

    * NVIDIA's with `amp` is *left alone*: nothing comes from the stand-in.
    * NVIDIA's without `amp` is *completed*: the parts that it lacks come from the stand-in.
    * The `apex` of another project, or with `force` any `apex`, is *replaced*: nothing of it is found.

    Args:
        package: the name of the stand-in, "amp_patch.apex".
        force: replace an installed `apex` in any case.
    """

    def __init__(self, package: str, *, force: bool) -> None:
        self._package = package
        self._force = force
        # whether `apex` is the stand-in alone, because none is installed or it is replaced; None until `_examine`
        self._replaces: bool | None = None
        self._is_idle = False  # whether an installed `apex` is left alone
        self._displaced: dict[str, ModuleType] = {}  # modules of the replaced `apex`, by name, for `remove`
        self._completed: list[ModuleType] = []  # installed packages that `_complete` has given a `__getattr__`
        self._thread = threading.local()

    # ---- installing --------------------------------------------------------------------------------------------------

    def insert(self) -> None:
        """Put the finder first in `sys.meta_path`.

        If an `apex` is imported already, decide now whether to replace it, to complete it, or to leave it alone. To
        replace it, take its modules out of `sys.modules`; `remove` puts them back.
        """
        apex = sys.modules.get("apex")
        if apex is not None:
            self._examine(apex.__spec__, getattr(apex, "__path__", ()))
            if self._replaces:
                self._displaced = _find_modules()
            elif not self._is_idle:
                self._complete(apex)
        for name in self._displaced:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Remove the finder from `sys.meta_path`. If it is not there, do nothing.

        Remove the Apex names of the stand-in's modules, such as `apex.amp`, from `sys.modules`, and from the attributes
        of an installed `apex` that was completed. Put the modules of a replaced `apex` back into `sys.modules`.
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
        """Return the spec of a module of the stand-in, or of an installed `apex` that is completed.

        Return None for any other name, so that Python asks the next finder. If an installed `apex` is left alone,
        return None for all of its modules. For compiled modules, see `_find_compiled`. Raise ModuleNotFoundError for a
        part of Apex that neither package has, if `_gone` names a replacement.
        """
        # `from apex import RNN` looks for `amp_patch.apex.RNN`, because the stand-in keeps its own `__name__`
        if fullname.startswith(self._package + "."):
            _raise_if_gone("apex" + fullname.removeprefix(self._package))
        root, _, name_in_apex = fullname.partition(".")
        is_of_apex = root == "apex" or fullname in _TOP_LEVEL
        if not is_of_apex or getattr(self._thread, "is_asking", False):
            return None
        if self._replaces is None:
            spec = self._find_elsewhere("apex", None, None)
            self._examine(spec, () if spec is None else spec.submodule_search_locations or ())
        if self._is_idle:
            return None
        if root != "apex":
            return self._find_compiled(fullname, path, target)
        installed = None if self._replaces else self._find_elsewhere(fullname, path, target)
        if installed is None:
            spec = self._alias(fullname, name_in_apex)
            if spec is None:
                _raise_if_gone(fullname)
            return spec
        if fullname == "apex":
            self._complete_after(installed.loader)
        return installed

    def _find_compiled(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """Return the spec of a module in `_TOP_LEVEL`.

        Return None if an installed `apex` is completed, or if the module is installed and `force` is False.
        """
        if not self._replaces:
            return None
        if not self._force and self._find_elsewhere(fullname, path, target) is not None:
            return None
        return self._alias(fullname, fullname)

    @contextlib.contextmanager
    def _asking_others(self) -> Iterator[None]:
        """Context manager: while the block runs, this finder finds no module of Apex for this thread.

        The block calls other finders. They may go through `sys.meta_path` themselves, and would call this finder again.
        """
        self._thread.is_asking = True
        try:
            yield
        finally:
            self._thread.is_asking = False

    def _find_elsewhere(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders of `sys.meta_path` find, or None."""
        with self._asking_others():
            for finder in sys.meta_path:
                if finder is not self and hasattr(finder, "find_spec"):
                    spec = finder.find_spec(fullname, path, target)
                    if spec is not None:
                        return spec
            return None

    def _alias(self, fullname: str, own_name: str) -> ModuleSpec | None:
        """Return a spec that loads a module of the stand-in as `fullname`, or None if the stand-in has no such module.

        `own_name` is the name inside the stand-in, such as "amp.scaler"; "" is the stand-in itself.
        """
        real_name = f"{self._package}.{own_name}" if own_name else self._package
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
        """Yield the metadata of the stand-in under the name `apex`, unless an installed `apex` is in use.

        Yield nothing if `context` asks for another distribution. Some libraries read the version of `apex` from its
        metadata before they import it.
        """
        name = getattr(context, "name", None)
        if name not in (None, "apex") or getattr(self._thread, "is_asking", False):
            return
        if self._replaces is None:
            self.find_spec("apex")  # calls `_examine`
        if self._replaces:
            # imported only here, because it takes long
            yield importlib.import_module(f"{self._package}._metadata").Metadata()

    # ---- an installed apex -------------------------------------------------------------------------------------------

    def _examine(self, spec: ModuleSpec | None, path: Sequence[str]) -> None:
        """Decide, once, whether to replace an installed `apex`, to complete it, or to leave it alone.

        Logs a warning if the `apex` is left alone, or is not NVIDIA's.

        Args:
            spec: the spec of the installed `apex`, or None if there is none.
            path: the folders of its package; empty if there are none.
        """
        if self._replaces is not None:
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
        is_of_nvidia = is_installed and bool(parts)
        self._replaces = self._force or not is_of_nvidia
        self._is_idle = not self._replaces and "amp" in parts
        where = folders[0] if folders else getattr(spec, "origin", None) or ""
        if self._is_idle:
            logger.warning(
                "amp_patch: the apex in %s has amp itself and is left alone; force=True (`amp-patch run --force`)"
                " replaces it",
                where,
            )
        elif is_installed and not is_of_nvidia:
            logger.warning("amp_patch: the apex in %s is not NVIDIA's; the stand-in replaces it", where)

    def _complete_after(self, loader: Any) -> None:
        """Make the loader of an installed `apex` call `_complete` once it has imported the package."""
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self._complete(module)

        loader.exec_module = exec_module

    def _complete(self, module: ModuleType) -> None:
        """Give an installed `apex` a `__getattr__`, so that `apex.amp` imports the part `amp` of the stand-in.

        Do nothing if it has one already.
        """
        if "__getattr__" in vars(module):
            return

        def get_part(name: str) -> Any:
            if name in PARTS:
                try:
                    return importlib.import_module(f"apex.{name}")
                except ModuleNotFoundError as error:
                    if error.name != f"apex.{name}":
                        raise  # the part exists, but a module that it imports is missing
            raise AttributeError(f"module 'apex' has no attribute {name!r}")

        vars(module)["__getattr__"] = get_part
        self._completed.append(module)


def get_part(name: str) -> Any:
    """Import a part of the stand-in and return it.

    Raises AttributeError for any other name. The message gives a modern replacement, if there is one.
    """
    if name in PARTS:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    raise AttributeError(advise(f"apex.{name}") or f"module 'apex' has no attribute {name!r}")


def refuse_name(module: str, name: str) -> NoReturn:
    """Raise AttributeError for a name that a module of the stand-in lacks.

    The message gives a modern replacement, if there is one.
    """
    full_name = f"apex{module.removeprefix(_PACKAGE)}"
    raise AttributeError(advise(f"{full_name}.{name}") or f"module {full_name!r} has no attribute {name!r}")


def get_installed() -> ApexFinder | None:
    """Return the finder in `sys.meta_path`, or None."""
    return next((finder for finder in sys.meta_path if isinstance(finder, ApexFinder)), None)


def _find_modules() -> dict[str, ModuleType]:
    """Return the imported modules whose names are Apex's: `apex`, its submodules, and the modules of `_TOP_LEVEL`."""
    roots = ("apex", *_TOP_LEVEL)
    return {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] in roots}


def _raise_if_gone(name: str) -> None:
    """Raise ModuleNotFoundError if `name` is a part of Apex that the stand-in lacks and that has a replacement."""
    advice = advise(name)
    if advice is not None:
        # not with `name=name`: Python's `from apex import X` would then replace the message by its own
        raise ModuleNotFoundError(f"No module named {name!r}: {advice}")
