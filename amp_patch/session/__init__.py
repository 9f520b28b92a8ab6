"""The session: makes and undoes all changes of `initialize`. A process has at most one session at a time."""

from . import current as current
from .arguments import as_enabled as as_enabled
from .arguments import as_models as as_models
from .arguments import as_optimizers as as_optimizers
from .arguments import choose_policy as choose_policy
from .arguments import find_command_lists as find_command_lists
from .arguments import read_once as read_once
from .session import Session as Session
from .sharding import find_fsdp_modules as find_fsdp_modules
from .sharding import find_gathered_dtype as find_gathered_dtype
from .sharding import is_instance_of as is_instance_of
from .stats import Stats as Stats
