"""`amp-patch trace --fix` for a script that raises an exception because of dtypes: finds a list that prevents it."""

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
    """A list with one entry for each call that raised. A call is an op at a line of the script.

    The entry is the first of the `choices` of the call's `RaisedRecord`. If the call raises again, its next choice
    replaces the entry.
    """

    def __init__(self) -> None:
        self._left: dict[tuple[str, str | None], list[str]] = {}
        self._chosen: dict[tuple[str, str | None], str] = {}

    @property
    def entries(self) -> list[str]:
        """The lines of the list."""
        return merge_entries(self._chosen.values())

    def add(self, raised: "RaisedRecord") -> bool:
        """Choose the next entry for a call that raised. Return False if no choice is left."""
        key = raised.op, raised.site
        left = self._left.setdefault(key, list(raised.choices))
        if not left:
            return False
        self._chosen[key] = left.pop(0)
        return True


Again = Callable[[Sequence[str]], "RaisedRecord | None"]
"""Runs the script with these lines of a list, and returns the exception that it still raises, or None."""


def find_entries(raised: "RaisedRecord", run_again: Again) -> "RaisedRecord | None":
    """Run the script again with a list against the exception `raised`, then with a list against further exceptions.

    Return None once `run_again` returns no exception. Return the exception that is left if it has no choice left, or
    after `ROUNDS` lists.
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
