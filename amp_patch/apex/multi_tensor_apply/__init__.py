"""`apex.multi_tensor_apply`: `MultiTensorApply` calls functions of `amp_C`; `multi_tensor_applier` is the
instance that scripts import.
"""

from .multi_tensor_apply import MultiTensorApply

multi_tensor_applier = MultiTensorApply(2048 * 32)  # Apex's chunk size, without effect here

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
