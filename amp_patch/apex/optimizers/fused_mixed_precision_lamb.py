"""`FusedMixedPrecisionLamb`, which is not offered: amp gives FusedLAMB the masters that it had of its own."""

from typing import Any

from ...errors import OptimizerError


class FusedMixedPrecisionLamb:
    """Raises OptimizerError that says what to use instead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise OptimizerError(
            'FusedMixedPrecisionLamb is not offered: use FusedLAMB, with amp.initialize(..., opt_level="O2") for'
            " float32 masters"
        )
