"""`Stats`: the result of `amp_patch.stats`."""

import html
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..dtypes import dtype_name


@dataclass(frozen=True, slots=True)
class Stats:
    """The state of a session. A notebook shows it as a table.

    Attributes:
        opt_level: the level, or None without a session.
        low_dtype: the 16-bit dtype of the level. None at a level without one, or without a session.
        names_patched: the number of names that hold a replacement, such as `torch.matmul`, and of references to the
            same functions in other modules and models.
        parameters_low: the number of elements of the 16-bit parameters of the session's models. Tied weights count
            once.
        parameters_float32: the number of elements of their float32 parameters.
        steps: the number of steps that all optimizers that are still alive have taken together. In a session of
            `amp_patch.native`, optimizers that were freed count, too.
        steps_skipped: the number of steps that these optimizers have skipped.
        loss_scales: the scale of each loss, in the order of `loss_id`.
    """

    opt_level: str | None
    low_dtype: torch.dtype | None
    names_patched: int
    parameters_low: int
    parameters_float32: int
    steps: int
    steps_skipped: int
    loss_scales: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields with JSON's types: `json.dumps(amp.stats().to_dict())`. A dtype becomes its name."""
        low = None if self.low_dtype is None else dtype_name(self.low_dtype)
        return {**asdict(self), "low_dtype": low, "loss_scales": list(self.loss_scales)}

    def _repr_html_(self) -> str:
        if self.opt_level is None:
            return "<p>amp_patch: no level is in force</p>"
        cells = {
            "opt_level": self.opt_level,
            "low dtype": dtype_name(self.low_dtype),
            "names patched": f"{self.names_patched:,}",
            "parameters in 16 bits": f"{self.parameters_low:,}",
            "parameters in float32": f"{self.parameters_float32:,}",
            "steps taken": f"{self.steps:,}",
            "steps skipped": f"{self.steps_skipped:,}",
            "loss scale": ", ".join(f"{scale:.12g}" for scale in self.loss_scales),
        }
        rows = "".join(f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in cells.items())
        return f"<table>{rows}</table>"
