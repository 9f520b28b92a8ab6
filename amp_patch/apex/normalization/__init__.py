"""`apex.normalization`:

Apex's layer norms as subclasses of torch's. Checkpoints are interchangeable with torch.nn.LayerNorm and RMSNorm.
"""

from .fused_layer_norm import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]
