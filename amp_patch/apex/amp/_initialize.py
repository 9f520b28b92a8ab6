"""`initialize` by the options of `_amp_state`, and casting whatever models take and return, under the names that they
have in Apex's `apex.amp._initialize`.

Containers keep their class here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core import cast_tree
from ._amp_state import _amp_state
from .frontend import Properties, initialize


def _initialize(
    models: Any,
    optimizers: Any,
    properties: Properties,
    num_losses: int = 1,
    cast_model_outputs: torch.dtype | None = None,
) -> Any:
    """`amp.initialize` with the options of `properties`, and the verbosity and bounds of `_amp_state`."""
    return initialize(
        models,
        optimizers,
        **properties.options,
        cast_model_outputs=cast_model_outputs,
        num_losses=num_losses,
        verbosity=_amp_state.verbosity,
        min_loss_scale=getattr(_amp_state, "min_loss_scale", None),
        max_loss_scale=getattr(_amp_state, "max_loss_scale", 2.0**24),
    )


def applier(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with `fn` applied to every tensor in it."""
    return cast_tree(value, fn)
