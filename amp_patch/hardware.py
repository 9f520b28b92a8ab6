"""What the hardware has instructions for: whether it multiplies 16-bit values, or torch would imitate that slowly."""

import platform

import torch

from .torch_private import has_cpu_flag, onednn_takes

CPU_FLAGS = {
    torch.float16: ("avx512_fp16", "amx_fp16"),
    torch.bfloat16: ("avx512_bf16", "amx_tile", "avx_ne_convert"),
}
"""The x86 instructions that multiply values of a 16-bit dtype. One is enough."""


def has_low_products(device_type: str, dtype: torch.dtype) -> bool:
    """Tell whether devices of a type multiply matrices of a 16-bit dtype by instructions made for it.

    Looks at what the hardware says, and at no clock. On a CPU oneDNN must take the dtype (which follows
    ONEDNN_MAX_CPU_ISA and `torch.backends.mkldnn.enabled`), and an x86 CPU must have the instructions as well, since
    oneDNN imitates bfloat16 by AVX-512. NVIDIA GPUs take float16 from compute capability 5.3 and bfloat16 from 8.0 on;
    any other device is taken at its word.
    """
    if device_type == "cpu":
        if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled and onednn_takes(dtype)):
            return False
        return not _is_x86() or any(has_cpu_flag(flag) for flag in CPU_FLAGS[dtype])
    if device_type == "cuda" and dtype is torch.bfloat16 and torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return True


def cpu_flags() -> tuple[str, ...]:
    """Return which instructions for 16-bit products torch sees on this CPU, of those that it can tell about."""
    return tuple(flag for flags in CPU_FLAGS.values() for flag in flags if has_cpu_flag(flag))


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
