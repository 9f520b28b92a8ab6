"""`Question`: what a check runs."""

from typing import NamedTuple

from ...script_settings import Settings


class Question(NamedTuple):
    """What to run.

    Attributes:
        script: the name of the script.
        settings: the level and the lists.
        everywhere: whether the script is in one region of autocast.
        lists: the lists as the contract names them.
        steps, seed: the number of steps, and the seed.
        version: the version of amp_patch.
    """

    script: str
    settings: Settings
    everywhere: bool
    lists: tuple[str, ...]
    steps: int
    seed: int
    version: str = ""
