"""What O1 does with functions of `torch.nn.functional`."""

import torch.nn.functional

from ._shipped import shipped_names

MODULE = torch.nn.functional

FP16_FUNCS = shipped_names("torch.nn.functional", "whitelist")
FP32_FUNCS = shipped_names("torch.nn.functional", "blacklist")
BANNED_FUNCS = [
    (name, f"amp does not run {name} on float16 tensors") for name in shipped_names("torch.nn.functional", "banned")
]
