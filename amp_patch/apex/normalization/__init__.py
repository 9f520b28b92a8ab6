"""`apex.normalization`: Apex's layer norms, as subclasses of torch's and with the same keys in checkpoints."""

from typing import NoReturn

from .._finder import refuse_name
from .fused_layer_norm import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]


def __getattr__(name: str) -> NoReturn:
    refuse_name(__name__, name)
