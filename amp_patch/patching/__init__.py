"""Replaces functions, redirects references to them, and restores everything as it was. Also watches imports."""

from . import references as references
from .import_hook import ImportWatch as ImportWatch
from .patcher import Patch as Patch
from .patcher import Patcher as Patcher
