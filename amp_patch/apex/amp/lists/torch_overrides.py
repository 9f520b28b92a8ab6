"""What O1 does with functions of `torch`."""

import torch

from ._shipped import shipped_names

MODULE = torch

FP16_FUNCS = shipped_names("torch", "whitelist")
FP32_FUNCS = shipped_names("torch", "blacklist")
CASTS = shipped_names("torch", "promote")
SEQUENCE_CASTS = shipped_names("torch", "sequence_promote")
