"""`install` and the other functions that start and remove a `Takeover`: the object that applies op lists to a script
which uses torch.autocast, or no mixed precision at all. A process has at most one at a time.
"""

import os
from collections.abc import Callable, Sequence

import torch

from ..config import make_policy
from ..errors import PolicyError, SessionError
from ..interrupts import UndoStack
from .takeover import Takeover

_TWICE = "amp_patch.native is installed already: call amp_patch.native.remove() first"
_IN_USE = (
    "amp-patch or a recording uses amp_patch.native now: leave out install, and give amp-patch the lists, or end the"
    " recording first"
)


class _Installed:
    """The takeover of the process.

    Attributes:
        is_by_install: whether `install` has started it. Only then may `remove` remove it: a command or a recording
            removes its own takeover.
    """

    takeover: Takeover | None = None
    is_by_install = False


_installed = _Installed()


def install(
    opt_level: str | None = None,
    *,
    lists: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    compute: str | None = None,
    everywhere: bool = False,
) -> Takeover:
    """Apply op lists inside regions of `torch.autocast`, from the next region on that the script enters.

    Args:
        opt_level: "O1" or "O4" runs regions with the lists and the dtype of that level, and "O0" disables them. A level
            that casts models, such as "O2", raises PolicyError when the script enters a region. None keeps the dtype of
            each region, and torch's rules for ops that `lists` do not name.
        lists: a shipped name, a path, or a sequence of them. Later lists win. None: no lists.
        compute: "auto", "native" or "float32". Needs `opt_level`.
        everywhere: run each thread in one bfloat16 region, from its first call of a model. For scripts without regions.

    Returns a handle whose `remove()` undoes everything. It is also a context manager, whose exit calls `remove()`. A
    later call of `install` replaces this installation.

    Raises:
        PolicyError: `opt_level` or `compute` is wrong, or `compute` is given without `opt_level`. Also for `everywhere`
            if nothing would be cast, or at a level with float16, because nothing would scale the loss.
        OpListError: a list is wrong.
        SessionError: `amp-patch` watches the script or applies lists to it, or a recording is in progress.
    """
    if compute is not None and opt_level is None:
        raise PolicyError(f'compute={compute!r} needs a level: pass opt_level="O4" or opt_level="O1", too')
    paths = [lists] if isinstance(lists, (str, os.PathLike)) else lists
    names = [os.fspath(path) for path in paths or ()]
    takeover = Takeover(opt_level, names, compute, everywhere=everywhere)  # raises before anything is replaced
    policy = None if opt_level is None else make_policy(opt_level, {"compute": compute})
    casts = bool(names) if policy is None else policy.low_dtype is not None
    if everywhere and not casts:
        raise PolicyError("everywhere=True needs a level that casts, O4, or lists")
    if everywhere and policy is not None and policy.low_dtype is torch.float16:
        raise PolicyError(
            f"{opt_level} is float16, whose gradients need a loss scale, and a script without amp scales no loss:"
            " use O4, which is bfloat16"
        )
    remove()
    check_not_installed()
    _start(takeover)
    _installed.is_by_install = True
    return takeover


def remove() -> None:
    """Undo `install`, also without its handle. The takeover of a command or a recording stays."""
    if _installed.takeover is not None and _installed.is_by_install:
        _installed.takeover.remove()


def check_not_installed() -> None:
    """Raise SessionError if a takeover is installed."""
    if _installed.takeover is not None:
        raise SessionError(_TWICE if _installed.is_by_install else _IN_USE)


def start(takeover: Takeover, *, is_watched: bool) -> Callable[[], None]:
    """Install a takeover for a command or a recording. Call the result to remove it.

    `is_watched`: see `Takeover.watch`. Raises SessionError if a takeover is installed already.
    """
    check_not_installed()
    undo = UndoStack()
    undo.callback(takeover.remove)
    _start(takeover)
    if is_watched:
        undo.callback(takeover.watch())
    return undo.close


def watch() -> Callable[[], None]:
    """Report the models, losses and steps of a script without `amp.initialize` to the watchers of `amp_patch.events`.
    Call the result to stop.
    """
    takeover = _installed.takeover
    return start(Takeover(), is_watched=True) if takeover is None else takeover.watch()


def _start(takeover: Takeover) -> None:
    _installed.takeover, _installed.is_by_install = takeover, False
    try:
        takeover.start(_forget)
    except BaseException:
        takeover.remove()
        raise


def _forget() -> None:
    _installed.takeover = None
