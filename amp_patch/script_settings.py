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
        """Return the level to use, the given arguments that go with it, and a message about those that do not."""
        is_replaced = self.opt_level is not None and self.opt_level != opt_level
        kept: dict[str, Any] = {}
        dropped: list[str] = []
        for name, value in given.items():
            if value is None:
                continue
            if is_replaced and name in _OF_LEVELS:
                dropped.append(name)
            else:
                kept[name] = value
        if self.opt_level is None or not is_replaced:
            return opt_level, kept, ""
        message = f"amp: told to use opt_level {self.opt_level} instead of {opt_level}"
        if dropped:
            message += f" and ignore {', '.join(sorted(dropped))}"
        return self.opt_level, kept, message


class _InForce:
    """Holds the settings of the process."""

    def __init__(self) -> None:
        self.settings = Settings()


in_force = _InForce()
