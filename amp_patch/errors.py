"""Most error classes of amp_patch, and suggestions for misspelled words in messages.

Most errors are also the builtin exception that a caller would catch, such as ValueError. `AmpError` itself is a
`RuntimeError`, because scripts written for Apex expect that.
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
"""Matches a word, after `_fold`, that means an opt_level: "o1", "01" (with a zero for the letter O) or "1"."""


class AmpError(RuntimeError):
    """Base of all errors of this package."""


MAX_MESSAGE = 2000
"""How many characters are kept of a longer message of a PolicyError or OpListError, which may quote a file.

Half of them are from its beginning, half from its end.
"""


class _Located(Exception):
    """An error that may have a location in a file. Its text then starts with `path:line:column: `.

    Attributes:
        message: the text without the location.
        path, line, column: the location, with lines and columns counted from 1; all None if the error is not in a file.
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
    """An opt_level, a preset or an override is unknown or unsuited, or contradicts another one.

    `path`, `line` and `column` are the location in a presets file; all None if the error is not in a file.
    """


class OpListError(_Located, AmpError, ValueError):
    """An op list cannot be used.

    `path`, `line` and `column` are the location in a list file; all None if the error is not in a file.
    """


class ModelError(AmpError, ValueError):
    """A model cannot be prepared at this opt_level."""


class OptimizerError(AmpError, ValueError):
    """An optimizer cannot be prepared, or does not support a call."""


class ArgumentTypeError(AmpError, TypeError):
    """An argument has a type that the function does not accept."""


class ArgumentValueError(AmpError, ValueError):
    """An argument has a value that the function does not accept."""


class LossIdError(AmpError, IndexError):
    """There is no loss scaler with that number."""


class SessionError(AmpError):
    """A call comes at the wrong time: for example there is no session, or a `scale_loss` block is open."""


class BannedOpError(AmpError, NotImplementedError):
    """An op that the lists ban on 16-bit tensors was called on a 16-bit tensor."""


class GradientOverflowError(AmpError, FloatingPointError):
    """Gradients were inf or NaN so often that the loss scale cannot be the cause."""


class NonFiniteError(AmpError, FloatingPointError):
    """`trace` or `armed` of `amp_patch.insight` has found a value that does not fit into its dtype.

    Attributes:
        fault: the record of the value, an `amp_patch.insight.FaultRecord`; None if the error was made without one.
    """

    def __init__(self, message: str, fault: Any = None) -> None:
        super().__init__(message)
        self.fault = fault


class CheckpointError(AmpError, ValueError):
    """A saved state, of amp or of an optimizer of `amp_patch.apex`, does not fit or cannot be read."""


class RecordError(AmpError, ValueError):
    """A file is not a recording or contract of `amp_patch.insight`, or not one that the call can use."""


class SettingsError(AmpError, ValueError):
    """A rule that was named for `amp-patch doctor` does not exist."""


class MissingExtraError(AmpError, ModuleNotFoundError):
    """A package is missing that one of amp_patch's extras installs, such as `pip install amp_patch[completion]`."""


class NoLoss:
    """Base class of the context managers that `scale_loss` returns.

    `amp.scale_loss(loss, optimizer).backward()` is a common mistake, so `backward` raises an error with the remedy.
    """

    __slots__ = ()

    def backward(self, *_: object, **__: object) -> None:
        """Raise a SessionError that shows how to write the block."""
        raise SessionError(
            "scale_loss(...) is a context manager: write `with amp.scale_loss(loss, optimizer) as scaled_loss:"
            " scaled_loss.backward()`, and step after the block"
        )


def did_you_mean(word: object, allowed: Iterable[str], *, prefix: str = "", cutoff: float = 0.6) -> str:
    """Return ` Did you mean 'x'?` with the allowed words that `word` may mean, to append to an error.

    Returns an empty string if no allowed word is similar, if `word` itself would be suggested, or if `word` is not
    text or has more than `MAX_WORD` letters. Case does not matter, nor do spaces, hyphens and underscores inside a
    word. If the module `synonyms` knows an allowed word for `word`, that is suggested, and not a word with a similar
    spelling.

    Args:
        prefix: put before each suggested word.
        cutoff: the least similarity of the spelling, from 0 to 1, as `difflib` computes it.
    """
    if not isinstance(word, str):
        return ""
    suggestions = []
    for name in find_meant(word, allowed, cutoff):
        suggestions.append(f"{prefix}{name}")
    if not suggestions or suggestions[0] == word:
        return ""
    shown = " or ".join(map(repr, suggestions))
    note = ""
    if _LEVEL.fullmatch(_fold(suggestions[0])) and word[0] != "O":
        note = " The first character is the letter O."
    return f" Did you mean {shown}?{note}"


def refuse_unknown(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: an unknown keyword argument raises ArgumentTypeError, perhaps with a suggestion."""
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
"""The most letters of a word that gets suggestions, and of a word that is suggested because its spelling is similar."""


def find_meant(word: str, allowed: Iterable[str], cutoff: float = 0.6) -> tuple[str, ...]:
    """Return the allowed words that a word may mean, as `did_you_mean` suggests them; empty if there are none."""
    if len(word) > MAX_WORD:
        return ()
    by_folded: dict[str, str] = {}
    for name in allowed:
        key = _fold(name)
        earlier = by_folded.get(key)
        # of two allowed names that fold to the same word, keep the one that looks more like the given word
        if earlier is None or _compare(word, name) >= _compare(word, earlier):
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
    """Return the name that is spelled most like a word, or None if the similarity of all is below `cutoff`.

    There may be thousands of names, and comparing two words is slow. So an upper bound of the similarity is computed
    for each name, from the letters that it shares with the word. Names are compared in the order of these bounds, the
    highest first, until a bound is lower than the best similarity.
    """
    letters = _count_letters(word)
    bounds = []
    for name in names:
        if len(name) > MAX_WORD:
            continue
        shared = (letters & _count_letters(name)).bit_count()
        # SequenceMatcher.ratio has the same formula, but counts only shared letters in the same order: it is at most
        # this bound
        bound = 2 * shared / (len(word) + len(name) or 1)
        if bound >= cutoff:
            bounds.append((bound, name))
    best, closest = cutoff, None
    for bound, name in sorted(bounds, reverse=True):
        if bound < best:
            break
        similarity = _compare(name, word)
        # of equally similar names, the last in alphabetical order
        if similarity > best or (similarity == best and name > (closest or "")):
            best, closest = similarity, name
    return closest


def _compare(word: str, name: str) -> float:
    """Return the similarity of two words, from 0 to 1."""
    return difflib.SequenceMatcher(None, word, name).ratio()


@functools.lru_cache(maxsize=8192)
def _count_letters(word: str) -> int:
    """Return a number with one bit for each letter of a word; for a letter that occurs twice, two different bits.

    Two words share at most as many letters as their numbers have bits in common.
    """
    bits = 0
    for letter in word:
        # MAX_WORD bits for each code modulo 64: the first letter with this code sets the first bit, the second letter
        # the second bit, ...
        bit = 1 << (ord(letter) % 64 * MAX_WORD)
        while bits & bit:
            bit <<= 1
        bits |= bit
    return bits


@functools.lru_cache(maxsize=8192)
def _fold(word: str) -> str:
    """Return a word in lower case, without hyphens, underscores and spaces inside it."""
    return re.sub(r"(?<=[^_])[-_ ]+(?=[^_])", "", word.casefold())
