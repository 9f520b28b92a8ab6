"""What `amp-patch run` and `install` lay over the arguments of a script's own `amp.initialize` call."""

from typing import NamedTuple


class Settings(NamedTuple):
    """`opt_level` takes the place of the script's; `lists` are laid over the list `apex`, later ones winning."""

    opt_level: str | None = None
    lists: tuple[str, ...] = ()


class _InForce:
    """Holds the settings of the process."""

    def __init__(self) -> None:
        self.settings = Settings()


in_force = _InForce()
