"""Apex's `tensor_overrides`: names of methods of `torch.Tensor`, by their rule in `lists/apex.yaml`."""

import torch

from ..._core import list_names

MODULE = torch.Tensor

FP16_FUNCS = list_names("torch.Tensor", "whitelist")
FP32_FUNCS = list_names("torch.Tensor", "blacklist")
CASTS = list_names("torch.Tensor", "promote")
SEQUENCE_CASTS = list_names("torch.Tensor", "sequence_promote")
