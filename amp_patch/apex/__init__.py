"""An opt-in stand-in for NVIDIA's `apex` package, built on torch and amp_patch.

    import amp_patch.apex

    amp_patch.apex.install()
    from apex import amp  # this package's

or, without a change to the script, `amp-patch run script.py`. After `install`, `import apex` imports this package.
`amp`, `parallel`, `optimizers` and the other parts are imported at their first use. Importing a part of Apex that is
missing here raises an error, which may name a modern replacement.

But if an `apex` is installed, what `import apex` finds depends on its kind:

* NVIDIA's with `amp` (until 2025): the installed package, and nothing of this one.
* NVIDIA's without `amp`: the installed package. The parts that it lacks come from here.
* The `apex` of another project (PyPI has one): this package, with a warning.

With `force`, `import apex` finds this package in any case.
"""

__role__ = ""  # for reports: `insight/sites.py` explains the roles

import contextlib
from collections.abc import Sequence
from typing import Any

from ..errors import ArgumentTypeError
from ..script_settings import Settings, in_force
from . import _finder
from ._finder import ApexFinder
from ._gone import COMPILED as GONE_EXTENSIONS
from ._gone import describe as describe_gone

__all__ = ["GONE_EXTENSIONS", "DeprecatedFeatureWarning", "Installed", "describe_gone", "install", "uninstall"]


class DeprecatedFeatureWarning(FutureWarning):
    """The class of Apex's warnings since 2022, for scripts that silence them. This package issues no such warning."""


class Installed(contextlib.ExitStack):
    """The handle of one call of `install`: `remove()`, or the end of a `with` block, undoes the call.

    Remove several handles in the reverse order of their calls: each restores the `opt_level` and `lists` that were in
    force before its call.
    """

    def remove(self) -> None:
        """Undo the call. A second call does nothing."""
        self.close()


def install(*, opt_level: str | None = None, lists: Sequence[str] = (), force: bool = False) -> Installed:
    """Make `import apex`, its submodules and `import amp_C` find the stand-in.

    If an earlier call is still in force, this one only sets `opt_level` and `lists`: if either is given, both replace
    the earlier values. `force` then has no effect.

    Args:
        opt_level: replaces the opt_level that the script passes to `amp.initialize`. None keeps the script's.
        lists: op lists (names or paths) that are added to the op list `apex`. Later lists win. At an opt_level that
            casts the model to 16 bits, only the module rules in them have an effect. At O0, the lists have none.
        force: use the stand-in even if an installed `apex` has the part that is imported.

    Returns a handle whose `remove()` undoes this call. The handle is also a context manager, which undoes the call at
    the end of its block. Raises ArgumentTypeError if `lists` is a str.
    """
    if isinstance(lists, str):
        raise ArgumentTypeError(f"lists={lists!r} must be a sequence of lists: write lists=[{lists!r}]")
    before = in_force.settings
    if opt_level is not None or lists:
        in_force.settings = Settings(opt_level, tuple(lists))
    installed = Installed()
    installed.callback(setattr, in_force, "settings", before)
    if _finder.get_installed() is None:
        finder = ApexFinder(__name__, force=force)
        finder.insert()
        installed.callback(finder.remove)
    return installed


def uninstall() -> None:
    """Undo every `install`: restore `sys.meta_path` and `sys.modules`, and drop `opt_level` and `lists`."""
    finder = _finder.get_installed()
    if finder is not None:
        finder.remove()
    in_force.settings = Settings()


def __getattr__(name: str) -> Any:
    # imports a part at its first use
    return _finder.get_part(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_finder.PARTS})
