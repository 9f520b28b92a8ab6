"""`Question`: the script that a check runs, and its settings."""

from typing import NamedTuple

from ...script_settings import Settings


class Question(NamedTuple):
    """A script, and how to run it.

    Attributes:
        script: the name of the script.
        settings: the level and the lists.
        everywhere: whether one region of autocast is put around the whole script.
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
