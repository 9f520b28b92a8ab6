"""Patches that leave no trace: replaced attributes, references elsewhere that follow them, and word of imports."""

from . import references as references
from .import_hook import ImportWatch as ImportWatch
from .patcher import Patch as Patch
from .patcher import Patcher as Patcher
