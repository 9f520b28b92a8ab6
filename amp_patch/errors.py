"""Every error that amp_patch raises on purpose.

Each class is an `AmpError` and also the builtin that a caller would catch. `AmpError` itself is a `RuntimeError`,
because scripts written for Apex expect that. A message names the given value, the allowed values and the remedy.
"""

import difflib
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from .synonyms import SYNONYMS

_P = ParamSpec("_P")
_R = TypeVar("_R")

_LEVEL = re.compile("[o0]?([0-9])")


class AmpError(RuntimeError):
    """Base of all errors of this package."""


MAX_MESSAGE = 2000
"""The length limit of a message about a file, which may quote the file. The middle of a longer one is left out."""


class _Located(Exception):
    """An error that may have a place in a file; its text then starts with `path:line:column: `.

    Attributes:
        message: the text without the place.
        path, line, column: the place, with lines and columns counted from 1; all None if there is none.
    """

    def __init__(
        self,
        message: str,
        path: str | os.PathLike[str] | None = None,
        line: int | None = None,
        column: int | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE:
            message = f"{message[: MAX_MESSAGE // 2]} ... {message[-MAX_MESSAGE // 2 :]}"
        super().__init__(message if path is None else f"{os.fspath(path)}:{line}:{column}: {message}")
        self.message = message
        self.path = None if path is None else os.fspath(path)
        self.line = line
        self.column = column


class PolicyError(_Located, AmpError, ValueError):
    """An opt_level, a preset or an override is unknown or contradicts another.

    `path`, `line` and `column` give the place in a presets file. They are None if the error is not in a file.
    """


class OpListError(_Located, AmpError, ValueError):
    """An op list cannot be used.

    `path`, `line` and `column` give the place in a list file. They are None if the error is not in a file.
    """


class ModelError(AmpError, ValueError):
    """A model cannot be prepared at this level."""


class OptimizerError(AmpError, ValueError):
    """An optimizer cannot be prepared, or does not support a call."""


class ArgumentTypeError(AmpError, TypeError):
    """An argument has a type that the function does not accept."""


class ArgumentValueError(AmpError, ValueError):
    """An argument has a value that the function does not accept."""


class LossIdError(AmpError, IndexError):
    """There is no loss scaler with that number."""


class SessionError(AmpError):
    """The session does not allow a call: there is no session yet, or another session is still in use."""


class BannedOpError(AmpError, NotImplementedError):
    """An op that the lists ban on 16-bit tensors was called on a 16-bit tensor."""


class GradientOverflowError(AmpError, FloatingPointError):
    """Gradients were inf or NaN for so many steps in a row that the loss scale is not the cause."""


class NonFiniteError(AmpError, FloatingPointError):
    """`amp_patch.insight.trace` has found a value that does not fit into its dtype.

    Attributes:
        fault: its record, an `amp_patch.insight.FaultRecord`.
    """

    def __init__(self, message: str, fault: Any = None) -> None:
        super().__init__(message)
        self.fault = fault


class CheckpointError(AmpError, ValueError):
    """A saved amp state does not fit the session."""


class RecordError(AmpError, ValueError):
    """A file is not a recording of `amp_patch.insight`."""


class SettingsError(AmpError, ValueError):
    """A rule of the doctor that was named in an option does not exist."""


class MissingExtraError(AmpError, ModuleNotFoundError):
    """A package is missing that an extra of amp_patch installs."""


class NoLoss:
    """Base of the context managers that `scale_loss` returns: users call `.backward()` on them by mistake."""

    __slots__ = ()

    def backward(self, *_: object, **__: object) -> None:
        """Raise SessionError."""
        raise SessionError(
            "scale_loss(...) is a context manager: write `with amp.scale_loss(loss, optimizer) as scaled_loss:"
            " scaled_loss.backward()`, and step after the block"
        )


def did_you_mean(word: object, allowed: Iterable[str], *, prefix: str = "", cutoff: float = 0.6) -> str:
    """Return ` Did you mean 'x'?` for the allowed word that is meant. Return an empty string where none is close, or
    where the word itself is allowed.

    Case, hyphens and underscores do not matter. Other names of the same thing (`synonyms`), which may mean several
    words, come before words that are spelled alike.

    Args:
        prefix: put before each word that is suggested.
        cutoff: the required similarity of the spelling, as `difflib` counts it.
    """
    if not isinstance(word, str):
        return ""
    suggested = []
    for name in find_meant(word, allowed, cutoff):
        suggested.append(f"{prefix}{name}")
    if not suggested or suggested[0] == word:
        return ""
    told = " or ".join(map(repr, suggested))
    remark = ""
    if _LEVEL.fullmatch(_fold(suggested[0])) and word[0] != "O":
        remark = " The first character is the letter O."
    return f" Did you mean {told}?{remark}"


def refuse_unknown(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: a keyword argument that the function does not take is an ArgumentTypeError with a suggestion."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name not in known:
                raise ArgumentTypeError(
                    f"{function.__name__} takes no argument {name!r}: it takes {', '.join(known)}."
                    f"{did_you_mean(name, known)}"
                )
        return function(*args, **kwargs)

    return call


MAX_WORD = 100
"""The length limit of words that get a suggestion, and of words that are suggested for their spelling."""


def find_meant(word: str, allowed: Iterable[str], cutoff: float = 0.6) -> tuple[str, ...]:
    """Return the allowed words that a word means, as in `did_you_mean`."""
    if len(word) > MAX_WORD:
        return ()
    by_folded: dict[str, str] = {}
    for name in allowed:
        key = _fold(name)
        known = by_folded.get(key)
        # of two names that differ in case only, keep the one that looks more like the word
        if known is None or _compare(word, name) >= _compare(word, known):
            by_folded[key] = name
    folded = _fold(word)
    if folded in by_folded:
        return (by_folded[folded],)
    level = _LEVEL.fullmatch(folded)
    if level and f"o{level[1]}" in by_folded:
        return (by_folded[f"o{level[1]}"],)
    for synonym, names in SYNONYMS.items():
        if _fold(synonym) == folded:
            meant = tuple(name for name in names if by_folded.get(_fold(name)) == name)
            if meant:
                return meant
    closest = _find_closest(folded, by_folded, cutoff)
    return () if closest is None else (by_folded[closest],)


def _find_closest(word: str, names: Iterable[str], cutoff: float) -> str | None:
    """Return the name that `difflib.get_close_matches` would find.

    Lists have thousands of names, and comparing two words is slow. So the names that share the most letters come first,
    and the search ends when no remaining name can be closer than the best.
    """
    letters = _count_letters(word)
    bounds = []
    for name in names:
        if len(name) > MAX_WORD:
            continue
        shared = (letters & _count_letters(name)).bit_count()
        # as SequenceMatcher.ratio, which counts only letters in the same order, and so is never larger
        bound = 2 * shared / (len(word) + len(name) or 1)
        if bound >= cutoff:
            bounds.append((bound, name))
    best, closest = cutoff, None
    for bound, name in sorted(bounds, reverse=True):
        if bound < best:
            break
        likeness = _compare(name, word)
        if likeness > best or (likeness == best and name > (closest or "")):
            best, closest = likeness, name
    return closest


def _compare(word: str, name: str) -> float:
    return difflib.SequenceMatcher(None, word, name).ratio()


@functools.lru_cache(maxsize=8192)
def _count_letters(word: str) -> int:
    """Return a number with a bit for each letter of a word, the same bits for the same letters."""
    bits = 0
    for letter in word:
        # MAX_WORD bits for each letter; the second occurrence of a letter sets the second of its bits
        bit = 1 << (ord(letter) % 64 * MAX_WORD)
        while bits & bit:
            bit <<= 1
        bits |= bit
    return bits


@functools.lru_cache(maxsize=8192)
def _fold(word: str) -> str:
    """Return a word without case, and without hyphens and underscores inside it."""
    return re.sub(r"(?<=[^_])[-_ ]+(?=[^_])", "", word.casefold())
