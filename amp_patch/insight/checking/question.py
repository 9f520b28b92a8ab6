"""`Question`: the script that a check runs, and its settings."""

from typing import NamedTuple

from ...script_settings import Settings


class Question(NamedTuple):
    """A script, and how to run it.

    Attributes:
        script: the name of the script's file, or "-m" and its module.
        settings: the opt_level to run the script at; without lists, because the runner knows them.
        everywhere: whether the whole script runs in one region of autocast.
        lists: the lists as the contract names them: shipped names, and paths relative to the folder of the contract.
        steps, seed: the number of steps, and the seed.
        version: the version of amp_patch that the contract names.
    """

    script: str
    settings: Settings
    everywhere: bool
    lists: tuple[str, ...]
    steps: int
    seed: int
    version: str = ""
