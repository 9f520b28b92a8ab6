"""The level and lists of a command, which replace the arguments of a script's own `amp.initialize` call."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import PolicyError, SessionError

_OF_LEVELS = frozenset(
    {"cast_model_type", "patch_torch_functions", "patch_torch_functions_type", "keep_batchnorm_fp32", "master_weights"}
)


class NoRegionError(SessionError):
    """A script has neither `amp.initialize` nor `torch.autocast`, so there is no place for casts."""


class UnsuitedLevelError(PolicyError):
    """A script cannot run at the level of a command: regions of `torch.autocast` cannot take the level, or nothing
    scales the loss. The script is not at fault.
    """


class Settings(NamedTuple):
    """`opt_level` replaces the script's level. `lists` are laid over the script's lists; later ones win.

    Levels that patch no functions use only the module rules of lists, and ignore lists without any.
    """

    opt_level: str | None = None
    lists: tuple[str, ...] = ()

    def lay_over(self, opt_level: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any], list[str]]:
        """Return the level to use, the arguments that fit it, and the names of the arguments that do not."""
        level = self.opt_level or opt_level
        kept: dict[str, Any] = {}
        dropped: list[str] = []
        for name, value in given.items():
            if value is None:
                continue
            if level != opt_level and name in _OF_LEVELS:
                dropped.append(name)
            else:
                kept[name] = value
        return level, kept, sorted(dropped)


def describe_replaced(level: str, opt_level: str, dropped: list[str]) -> str:
    """Return the message about a replaced level, and about the arguments that were dropped with it."""
    told = f"amp: told to use opt_level {level} instead of {opt_level}"
    if dropped:
        told += f", without the script's {', '.join(dropped)}"
    return told


class _CommandSettings:
    """Holds the settings of the process."""

    settings = Settings()


in_force = _CommandSettings()
