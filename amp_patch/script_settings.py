"""The opt_level and the op lists of a command, or of `apex.install`. The opt_level replaces the script's own, and the
lists are added to the script's.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import PolicyError, SessionError

# arguments of `initialize` that are dropped if the opt_level is replaced, because they may not fit the new one; other
# arguments, such as the loss scale, are kept
_OF_LEVELS = frozenset(
    {
        *("cast_model_type", "patch_torch_functions", "patch_torch_functions_type", "keep_batchnorm_fp32"),
        *("master_weights", "split_masters", "optimizer_state_type"),
    }
)


class NoRegionError(SessionError):
    """A script has taken steps without mixed precision, so the command could change nothing in it."""


class UnsuitedLevelError(PolicyError):
    """A script cannot run at the opt_level of a command. The command line is at fault, not the script.

    Either the opt_level casts models, and the script has regions of `torch.autocast`, which cast no models. Or the
    opt_level is for float16, and the script scales no loss.
    """


class HasRegionsError(PolicyError):
    """A script has regions of `torch.autocast`, and the command was to put the whole script into one region. The
    command line is at fault, not the script.
    """


class Settings(NamedTuple):
    """The settings of a command.

    Attributes:
        opt_level: replaces the opt_level of the script; None keeps it.
        lists: op lists on top of the script's lists; later ones win. If the opt_level casts models instead of the
            arguments of ops, only the module rules in lists are used. At O0, lists have no effect.
    """

    opt_level: str | None = None
    lists: tuple[str, ...] = ()

    def override(self, opt_level: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any], list[str]]:
        """Return the opt_level to use, the script's arguments to use, and the names of its arguments that are dropped.

        `opt_level` and `given` are the script's opt_level and its other arguments. If another opt_level is used, the
        arguments in `_OF_LEVELS` are dropped. An argument that is None counts as not given.
        """
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
    """Return the message about a replaced opt_level, and about the arguments that were dropped with it."""
    message = f"amp: told to use opt_level {level} instead of {opt_level}"
    if dropped:
        message += f", without the script's {', '.join(dropped)}"
    return message


class _CommandSettings:
    """Holds the settings of the command that has started this process, or of `apex.install`."""

    settings = Settings()


in_force = _CommandSettings()
