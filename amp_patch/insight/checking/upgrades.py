"""`Upgrade`: whether another version of torch explains why an op runs in another precision than in the contract."""

import functools
import re

from ... import config
from ..op_constants import strip_spelling
from .contract import ContractOp

_VERSION = re.compile(r"(\d+)\.(\d+)")


class Upgrade:
    """Compares the versions of torch of the contract (`before`) and of the check (`after`), such as "2.11.0+cpu".

    `device`: the type of the device.
    """

    def __init__(self, before: str, after: str, device: str) -> None:
        self._before, self._after, self._device = before, after, device

    def describe(self, op: ContractOp) -> str:
        """Return a text in parentheses to add to the report on an op; "" if both versions are the same.

        The text names the change of torch's autocast that explains the precision of the op. If there is none, the text
        only names the two versions. Imports torch, unless both versions are the same.
        """
        if self._before == self._after:
            return ""
        change = self._changes.get(strip_spelling(op.op))
        return f" ({change or f'torch {self._before} -> {self._after} lies between'})"

    @functools.cached_property
    def _changes(self) -> dict[str, str]:
        """The text on each op whose rule in torch's autocast changed between the versions, by the name of the op.

        Empty for a device without a shipped list of torch's rules.
        """
        name = f"autocast-{self._device}"
        if name not in config.shipped.shipped_names():
            return {}
        older, newer = sorted([_parse_version(self._before), _parse_version(self._after)])
        texts: dict[str, str] = {}
        for change in config.explain.find_changes(name):
            if not older < _parse_version(change.after) <= newer:
                continue
            for row in change.differences:
                text = f"torch {change.after} changed its autocast: {row.left} -> {row.right}"
                texts[strip_spelling(row.op)] = text
        return texts


def _parse_version(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version: (2, 11) for "2.11.0+cpu". For text without them, return (0, 0)."""
    match = _VERSION.match(version)
    return (0, 0) if match is None else (int(match[1]), int(match[2]))
