"""Applies op lists to unmodified scripts that use `torch.autocast`. Commands also observe scripts through it.

    import amp_patch.native

    amp_patch.native.install(lists="my_lists.yaml")

or run `amp-patch run --lists my_lists.yaml train.py`.
"""

__role__ = ""  # the role of this code in reports; `insight/sites.py` lists the roles

from .float32_script import as_written as as_written
from .float32_script import find_float32_script as find_float32_script
from .installation import check_not_installed as check_not_installed
from .installation import install as install
from .installation import remove as remove
from .installation import start as start
from .installation import watch as watch
from .misuse import Kind as Kind
from .misuse import Misuse as Misuse
from .outer_hooks import PausableHook as PausableHook
from .outer_hooks import outer_hooks as outer_hooks
from .roots import calls_under_way as calls_under_way
from .session import AS_IS as AS_IS
from .session import NativeSession as NativeSession
from .takeover import Takeover as Takeover

__all__ = ["AS_IS", "Misuse", "NativeSession", "Takeover", "check_not_installed", "install", "remove", "start", "watch"]
