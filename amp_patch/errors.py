"""Every error that amp_patch raises on purpose.

Each class is an `AmpError` and also the builtin that a caller would catch. `AmpError` itself is a `RuntimeError`,
because that is what scripts written for Apex expect. A message says what was given, what is allowed and what to do.
"""

import difflib
import os
from collections.abc import Iterable
from typing import Any


class AmpError(RuntimeError):
    """Base of all errors of this package."""


class _Located(Exception):
    """An error that may stand in a file; its text then starts with `path:line:column: `.

    Attributes:
        path, line, column: the place, lines and columns counted from 1; all None where there is none.
    """

    def __init__(
        self,
        message: str,
        path: str | os.PathLike[str] | None = None,
        line: int | None = None,
        column: int | None = None,
    ) -> None:
        super().__init__(message if path is None else f"{os.fspath(path)}:{line}:{column}: {message}")
        self.path = None if path is None else os.fspath(path)
        self.line = line
        self.column = column


class PolicyError(_Located, AmpError, ValueError):
    """An opt_level, a preset or an override is unknown or contradicts another.

    `path`, `line` and `column` tell where in a presets file, and are None elsewhere.
    """


class OpListError(_Located, AmpError, ValueError):
    """An op list cannot be used.

    `path`, `line` and `column` tell where in a list file, and are None elsewhere.
    """


class ModelError(AmpError, ValueError):
    """A model cannot be prepared as asked."""


class OptimizerError(AmpError, ValueError):
    """An optimizer cannot be prepared, or cannot do what was asked of it."""


class ArgumentTypeError(AmpError, TypeError):
    """An argument is of a type the function does not take."""


class ArgumentValueError(AmpError, ValueError):
    """An argument has a value that the function does not take."""


class LossIdError(AmpError, IndexError):
    """There is no loss scaler of that number."""


class SessionError(AmpError):
    """The state of the session does not allow a call: there is no session yet, or the one there is is still in use."""


class BannedOpError(AmpError, NotImplementedError):
    """An op that the lists forbid on 16-bit tensors was called on one."""


class GradientOverflowError(AmpError, FloatingPointError):
    """Gradients stayed non-finite for so many steps in a row that the cause is not the loss scale."""


class NonFiniteError(AmpError, FloatingPointError):
    """`amp_patch.insight.trace` has found a value that does not fit.

    Attributes:
        fault: the record of it, an `amp_patch.insight.FaultRecord`.
    """

    def __init__(self, message: str, fault: Any = None) -> None:
        super().__init__(message)
        self.fault = fault


class CheckpointError(AmpError, ValueError):
    """A saved amp state does not fit the session it is loaded into."""


class RecordError(AmpError, ValueError):
    """A file is no recording of `amp_patch.insight`."""


class MissingExtraError(AmpError, ModuleNotFoundError):
    """A package that only an extra of this package installs is not there."""


def did_you_mean(word: object, allowed: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the closest allowed word, or an empty string when none is close."""
    if not isinstance(word, str):
        return ""
    by_folded = {name.casefold(): name for name in allowed}
    close = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=0.6)
    return f" Did you mean {by_folded[close[0]]!r}?" if close else ""
