"""`optimizer.step_was_skipped`: whether the last step of an optimizer was skipped, for training loops that ask.

The answer is kept in the optimizer's `__dict__`. A session with masters, or with a loss scale other than 1, adds a
property of the same name to `torch.optim.Optimizer`, which waits for the device if the answer is not known yet.
"""

from collections.abc import Callable

from torch.optim import Optimizer

from ..interrupts import UndoStack

_NAME = "step_was_skipped"


def set_step_was_skipped(optimizer: Optimizer, value: bool) -> None:
    """Set the answer for one optimizer, even if its class has a read-only property of that name."""
    vars(optimizer)[_NAME] = value


def remove_step_was_skipped(optimizer: Optimizer) -> None:
    """Forget the answer for one optimizer, if there is one."""
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
