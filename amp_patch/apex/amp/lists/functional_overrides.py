"""Apex's `functional_overrides`: names of functions of `torch.nn.functional`, by their rule in `lists/apex.yaml`."""

import torch.nn.functional

from ..._core import list_names

MODULE = torch.nn.functional

FP16_FUNCS = list_names("torch.nn.functional", "whitelist")
FP32_FUNCS = list_names("torch.nn.functional", "blacklist")
BANNED_FUNCS = [
    (name, f"amp does not run {name} on float16 tensors") for name in list_names("torch.nn.functional", "banned")
]
