"""`Growth`: whether a loss, or the weights, have grown without bound."""

from dataclasses import dataclass


@dataclass
class Growth:
    """How a size has changed in a run: what it once was, and what it is by now."""

    base: float | None = None
    last: float = 0.0

    def is_beyond(self, factor: float) -> bool:
        """Tell whether it has grown by more than a factor."""
        return self.base is not None and self.last > factor * max(self.base, 1e-3)
