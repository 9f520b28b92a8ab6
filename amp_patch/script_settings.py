"""What a command lays over the arguments of a script's own `amp.initialize` call."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import SessionError

_OF_LEVELS = frozenset(
    {"cast_model_type", "patch_torch_functions", "patch_torch_functions_type", "keep_batchnorm_fp32", "master_weights"}
)


class NoRegionError(SessionError):
    """A script has neither `amp.initialize` nor `torch.autocast`, so nothing says where casts may act."""


class Settings(NamedTuple):
    """`opt_level` takes the place of the script's; `lists` are laid over its own, later ones winning. Levels that patch
    no functions take the module rules alone, and lists without any are left out there.
    """

    opt_level: str | None = None
    lists: tuple[str, ...] = ()

    def lay_over(self, opt_level: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any], str]:
        """Return the level to use, the arguments that were given and go with it, and what to tell of the others."""
        overrides = {name: value for name, value in given.items() if value is not None}
        if self.opt_level is None or self.opt_level == opt_level:
            return opt_level, overrides, ""
        dropped = sorted(_OF_LEVELS & overrides.keys())
        ignored = f" and ignore {', '.join(dropped)}" if dropped else ""
        kept = {name: value for name, value in overrides.items() if name not in _OF_LEVELS}
        return self.opt_level, kept, f"amp: told to use opt_level {self.opt_level} instead of {opt_level}{ignored}"


class _InForce:
    """Holds the settings of the process."""

    def __init__(self) -> None:
        self.settings = Settings()


in_force = _InForce()
