"""Apex's `torch_overrides`: names of functions of `torch`, by their rule in `lists/apex.yaml`."""

import torch

from ..._core import list_names

MODULE = torch

FP16_FUNCS = list_names("torch", "whitelist")
FP32_FUNCS = list_names("torch", "blacklist")
CASTS = list_names("torch", "promote")
SEQUENCE_CASTS = list_names("torch", "sequence_promote")
