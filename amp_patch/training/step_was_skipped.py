"""`optimizer.step_was_skipped`: whether the last step of an optimizer was skipped, for training loops that ask.

The answer is kept in the instance. A session with masters or a loss scale adds a property to `torch.optim.Optimizer`,
which asks the device first.
"""

from collections.abc import Callable

from torch.optim import Optimizer

from ..interrupts import UndoStack

_NAME = "step_was_skipped"


def set_step_was_skipped(optimizer: Optimizer, value: bool) -> None:
    """Set the answer for one optimizer. Bypasses a property of that name in its class, which may be read-only."""
    vars(optimizer)[_NAME] = value


def remove_step_was_skipped(optimizer: Optimizer) -> None:
    """Forget the answer for one optimizer. If there is none, do nothing."""
    vars(optimizer).pop(_NAME, None)


def get_step_was_skipped(optimizer: object) -> bool:
    """Return whether the last step of an optimizer, or of a wrapper around one, was skipped. Return False for an
    optimizer that `initialize` has not seen. May wait for the device.
    """
    return bool(getattr(optimizer, _NAME, False))


def install_property(resolve: Callable[[Optimizer], None], undo: UndoStack) -> None:
    """Call `resolve(optimizer)` before `step_was_skipped` of any optimizer is read, until `undo` is closed."""

    def read(optimizer: Optimizer) -> bool:
        resolve(optimizer)
        try:
            return bool(vars(optimizer)[_NAME])
        except KeyError:
            raise AttributeError(f"{type(optimizer).__name__!r} object has no attribute {_NAME!r}") from None

    def delete(optimizer: Optimizer) -> None:
        if vars(optimizer).pop(_NAME, None) is None:
            raise AttributeError(_NAME)

    undo.callback(_remove_property)
    setattr(Optimizer, _NAME, property(read, set_step_was_skipped, delete))


def _remove_property() -> None:
    if _NAME in vars(Optimizer):
        delattr(Optimizer, _NAME)
