"""What O1 does with methods of `torch.Tensor`."""

import torch

from ._shipped import shipped_names

MODULE = torch.Tensor

FP16_FUNCS = shipped_names("torch.Tensor", "whitelist")
FP32_FUNCS = shipped_names("torch.Tensor", "blacklist")
CASTS = shipped_names("torch.Tensor", "promote")
SEQUENCE_CASTS = shipped_names("torch.Tensor", "sequence_promote")
