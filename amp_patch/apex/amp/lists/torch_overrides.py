"""The functions of `torch` that O1 casts: a list of names for each rule, as in Apex's module of this name."""

import torch

from ..._core import list_names

MODULE = torch

FP16_FUNCS = list_names("torch", "whitelist")
FP32_FUNCS = list_names("torch", "blacklist")
CASTS = list_names("torch", "promote")
SEQUENCE_CASTS = list_names("torch", "sequence_promote")
