"""Finds out whether a device has instructions for products of 16-bit values. Without them, torch imitates such products
slowly.

Products are matrix products, convolutions and the like.
"""

import platform

import torch

from .errors import ArgumentTypeError, ArgumentValueError, did_you_mean
from .torch_private import has_cpu_flag, onednn_takes_bfloat16

CPU_FLAGS = ("avx512_bf16", "amx_tile", "avx_ne_convert", "avx512_fp16", "amx_fp16")
"""Instructions of x86 CPUs that products of 16-bit values use, under the names that torch uses."""

_BFLOAT16_FLAGS = CPU_FLAGS[:3]  # the others are for float16


def has_low_products(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether devices of a type compute products in a 16-bit dtype fast.

    CPUs do so only in bfloat16. oneDNN must have products of bfloat16 (ONEDNN_MAX_CPU_ISA and
    `torch.backends.mkldnn.enabled` can forbid them). An x86 CPU must also have an instruction for bfloat16, because
    oneDNN imitates these products on any CPU with AVX-512. float16 counts as slow on every CPU: even with avx512_fp16,
    the backward pass of a convolution takes 150 times as long as in float32 (torch 2.13.0).

    NVIDIA GPUs have fast products of bfloat16 from compute capability 8.0 on. float16 counts as fast on every GPU, and
    both dtypes on every other accelerator.
    """
    if device_type == "cpu":
        if dtype is not torch.bfloat16 or not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
            return False
        return onednn_takes_bfloat16() and (not _is_x86() or any(has_cpu_flag(flag) for flag in _BFLOAT16_FLAGS))
    if device_type == "cuda" and dtype is torch.bfloat16 and torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return True


def get_max_attention_scores(device_type: str, dtype: torch.dtype) -> int:
    """Return the number of scores up to which attention is clearly faster in float32 than in 16-bit kernels.

    Each head computes a score for each query and key. The number is 0 on hardware that was not measured, and where
    `has_low_products` is False.

    On CPUs, the backward pass of torch's bfloat16 attention takes up to six times as long as in float32, because it
    calls oneDNN for each of many small products. The time of forward, backward and casts in float32, divided by the
    time in bfloat16 (AVX512_BF16, torch 2.13.0, heads of size 64): 0.45 at 64x64 scores, 0.55 at 128x128, 0.8 at
    196x196, 0.9 at 256x256, 1 at 384x384. With AMX, products are faster, but a call of oneDNN costs the same, so
    float32 wins only up to 64x64.
    """
    if device_type != "cpu" or not _is_x86() or not has_low_products(device_type, dtype):
        return 0
    if has_cpu_flag("amx_tile"):
        return 64 * 64
    if has_cpu_flag("avx512_bf16"):
        return 200 * 200
    return 0


def as_device_type(device: torch.device | str | None) -> str:
    """Return the type of a device, such as "cuda". For None, return the type of the accelerator, or "cpu" without one.

    Raises ArgumentValueError for an unknown device, and ArgumentTypeError if `device` is neither text nor a device.
    """
    if device is None:
        accelerator = None
        if torch.accelerator.is_available():
            accelerator = torch.accelerator.current_accelerator()
        return "cpu" if accelerator is None else accelerator.type
    if not isinstance(device, (torch.device, str)):
        raise ArgumentTypeError(
            f"device={device!r} is neither text nor a torch.device: pass one such as 'cuda' or 'cpu', or leave it out"
            " for the accelerator, if there is one"
        )
    try:
        return torch.device(device).type
    except RuntimeError:
        hint = did_you_mean(device, ("cuda", "cpu", "mps", "xpu"))
        raise ArgumentValueError(
            f"device={device!r} is not a device that torch knows: pass one such as 'cuda', 'cpu' or 'mps', or leave"
            f" it out for the accelerator, if there is one.{hint}"
        ) from None


def explain_products(device_type: str, dtype: torch.dtype) -> str:
    """Return the message that products are computed in float32. If the hardware is the reason, it also names the faster
    levels, and on a CPU the cost.
    """
    name = str(dtype).removeprefix("torch.")
    rounding = f"values are rounded to {name}, products are computed in float32, as tensor cores do"
    if has_low_products(device_type, dtype):
        return rounding
    cost = ""
    if device_type == "cpu":
        cost = "a step usually takes 1.1 to 1.7 times as long as in float32; "
    fast_levels = "O0"
    if has_low_products(device_type, torch.bfloat16):
        fast_levels = "O4 or O5, or O0 for a small model"
    elif has_low_products(device_type, torch.float16):
        fast_levels = "O1 or O2, or O0 for a small model"
    explanation = f"this {device_type.upper()} has no fast {name} products: {rounding}"
    return f"{explanation}\n  {cost}for speed here, use {fast_levels}"


def explain_imitation(device_type: str, dtype: torch.dtype) -> str:
    """Return the message that torch imitates 16-bit products, because the user has chosen `compute="native"`."""
    name = str(dtype).removeprefix("torch.")
    return (
        f"this {device_type.upper()} has no fast {name} products. With compute='native', torch imitates them, which is"
        " slower than float32 (on most CPUs 8 to 30 times): leave compute out, or pass compute='float32'"
    )


def cpu_flags() -> tuple[str, ...]:
    """Return the instructions in `CPU_FLAGS` that torch sees on this CPU."""
    return tuple(flag for flag in CPU_FLAGS if has_cpu_flag(flag))


def name_kind(device_type: str) -> str:
    """Return a name for the kind of a device. On two devices of the same kind, torch usually runs the same
    kernels.

    For a CPU, it consists of the architecture and the instructions by which torch chooses kernels. For an accelerator,
    it is the name of the hardware, or the device type if torch has no name.
    """
    if device_type == "cpu":
        return " ".join([platform.machine(), torch.backends.cpu.get_cpu_capability(), *cpu_flags()])
    get_name = getattr(torch.get_device_module(device_type), "get_device_name", None)
    return device_type if get_name is None else str(get_name())


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
