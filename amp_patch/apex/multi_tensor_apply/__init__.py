"""`apex.multi_tensor_apply`: the caller of `amp_C`'s functions, and one for all."""

from .multi_tensor_apply import MultiTensorApply

multi_tensor_applier = MultiTensorApply(2048 * 32)  # Apex's chunk size, without effect here

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
