"""The rules of O1 for functions of `torch.nn.functional`."""

import torch.nn.functional

from ..._core import list_names

MODULE = torch.nn.functional

FP16_FUNCS = list_names("torch.nn.functional", "whitelist")
FP32_FUNCS = list_names("torch.nn.functional", "blacklist")
BANNED_FUNCS = [
    (name, f"amp does not run {name} on float16 tensors") for name in list_names("torch.nn.functional", "banned")
]
