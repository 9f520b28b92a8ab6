"""`amp-patch trace --fix` for a script that raises because of dtypes: the list with which it goes on."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..insight import RaisedRecord

ROUNDS = 5
"""The largest number of lists that are tried."""


def merge_entries(entries: Iterable[str]) -> list[str]:
    """Return the lines of a list, with one line for each key. Entries are lines such as `promote: [cat]`."""
    keys: dict[str, list[str]] = {}
    for entry in entries:
        key, _, items = entry.partition(": ")
        keys.setdefault(key, []).append(items.removeprefix("[").removesuffix("]"))
    return [f"{key}: [{', '.join(dict.fromkeys(items))}]" for key, items in keys.items()]


class Choices:
    """The entries of a list, one for each call that raised.

    If a call raises again with its entry, the next choice for it takes the place of the entry.
    """

    def __init__(self) -> None:
        self._left: dict[tuple[str, str | None], list[str]] = {}
        self._chosen: dict[tuple[str, str | None], str] = {}

    @property
    def entries(self) -> list[str]:
        """The lines of the list."""
        return merge_entries(self._chosen.values())

    def add(self, raised: "RaisedRecord") -> bool:
        """Choose an entry for a call that raised. Return False if none is left."""
        key = raised.op, raised.site
        left = self._left.setdefault(key, list(raised.choices))
        if not left:
            return False
        self._chosen[key] = left.pop(0)
        return True


Again = Callable[[Sequence[str]], "RaisedRecord | None"]
"""Runs the script with these lines of a list, and returns the exception that is left."""


def find_entries(raised: "RaisedRecord", run_again: Again) -> "RaisedRecord | None":
    """Run the script again with a list against an exception, and with one more entry for each that follows.

    Return the exception that is left; None if the list is enough.
    """
    choices = Choices()
    left: RaisedRecord | None = raised
    for _ in range(ROUNDS):
        assert left is not None
        if not choices.add(left):
            return left
        left = run_again(choices.entries)
        if left is None:
            return None
    return left
