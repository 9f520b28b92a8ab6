"""An opt-in stand-in for NVIDIA's `apex` package, made of torch's own parts and of amp_patch.

    import amp_patch.apex

    amp_patch.apex.install()
    from apex import amp  # from here on

or, without a change to the script, `amp-patch run script.py`. After `install`, `import apex` gives this package: `amp`,
`parallel`, `optimizers` and the other parts are imported when they are first asked for. Parts of Apex that are not here
fail to import and say what to use today.

An `apex` that is installed is respected. One that still has `amp` is left alone, unless `force` is given. One that has
lost it keeps what it has and gets from here what it lacks. Another project's package of that name (PyPI has one) is
named in a warning and stepped in front of.
"""

__role__ = ""  # in reports of `insight`: see its `sites`

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
    """What Apex warned with from 2022 on. Nothing here does; scripts name it to silence it."""


class Installed(contextlib.ExitStack):
    """What one `install` did. `remove()`, or leaving it as a `with` block, undoes just that; twice is harmless."""

    def remove(self) -> None:
        """Undo."""
        self.close()


def install(*, opt_level: str | None = None, lists: Sequence[str] = (), force: bool = False) -> Installed:
    """Have `import apex` and what lies below it, and `import amp_C`, find the stand-in. Calling it twice is harmless.

    Args:
        opt_level: use this level, of Apex's or the presets', whatever `amp.initialize` is told.
        lists: op lists (names or paths) to lay over the list `apex` at levels that patch functions; later ones win.
        force: stand in front of an installed `apex` even if it has what is asked for.

    Returns a handle whose `remove()` undoes this call; it works as a `with` block. Raises ArgumentTypeError for `lists`
    that are one name.
    """
    if isinstance(lists, str):
        raise ArgumentTypeError(f"lists={lists!r} must be a sequence of lists: write lists=[{lists!r}]")
    before = in_force.settings
    if opt_level is not None or lists:
        in_force.settings = Settings(opt_level, tuple(lists))
    installed = Installed()
    installed.callback(setattr, in_force, "settings", before)
    if _finder.installed() is None:
        finder = ApexFinder(__name__, force=force)
        finder.insert()
        installed.callback(finder.remove)
    return installed


def uninstall() -> None:
    """Undo every `install`: `sys.meta_path` and `sys.modules` are as they were. Harmless without one."""
    finder = _finder.installed()
    if finder is not None:
        finder.remove()
    in_force.settings = Settings()


def __getattr__(name: str) -> Any:
    return _finder.get_part(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_finder.PARTS})
