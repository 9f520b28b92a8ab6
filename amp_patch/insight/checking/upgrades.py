"""`Upgrade`: what another version of torch may have to do with an op that runs in another precision."""

import functools
import re

from ... import config
from ..op_constants import strip_spelling
from .contract import ContractOp

_VERSION = re.compile(r"(\d+)\.(\d+)")


class Upgrade:
    """The versions of torch before and after, such as "2.11.0+cpu", and the type of the device."""

    def __init__(self, before: str, after: str, device: str) -> None:
        self._before, self._after, self._device = before, after, device

    def describe(self, op: ContractOp) -> str:
        """Return what to add to the report on an op: the change of torch's autocast that explains it.

        Without one, it is that another version of torch ran; "" for the same version. Imports torch for two versions.
        """
        if self._before == self._after:
            return ""
        change = self._changes.get(strip_spelling(op.op))
        return f" ({change or f'torch {self._before} -> {self._after} lies between'})"

    @functools.cached_property
    def _changes(self) -> dict[str, str]:
        """What changed in torch's autocast, by op; {} for devices without a shipped list."""
        name = f"autocast-{self._device}"
        first, last = sorted([_read(self._before), _read(self._after)])
        if name not in config.shipped.shipped_names():
            return {}
        return {
            strip_spelling(row.op): f"torch {change.after} changed its autocast: {row.left} -> {row.right}"
            for change in config.explain.find_changes(name)
            if first < _read(change.after) <= last
            for row in change.differences
        }


def _read(version: str) -> tuple[int, int]:
    match = _VERSION.match(version)
    return (0, 0) if match is None else (int(match[1]), int(match[2]))
