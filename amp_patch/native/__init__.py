"""Apply op lists to scripts that use `torch.autocast`, without changing them; and examine scripts without amp.

    import amp_patch.native

    amp_patch.native.install(lists="my_lists.yaml")

or run `amp-patch run --lists my_lists.yaml train.py`.
"""

__role__ = ""  # in reports of `insight`: see its `sites`

from .session import AS_IS as AS_IS
from .session import NativeSession as NativeSession
from .takeover import Takeover as Takeover
from .takeover import check_not_installed as check_not_installed
from .takeover import install as install
from .takeover import remove as remove
from .takeover import start as start
from .takeover import watch as watch

__all__ = ["AS_IS", "NativeSession", "Takeover", "check_not_installed", "install", "remove", "start", "watch"]
