"""torchvision's wheel is linked with CUDA. Beside a torch without it, its kernels do not load ("libc10_cuda.so: cannot
open shared object file"), and `import torchvision` raises "operator torchvision::nms does not exist". Once the two ops
that it describes while it is imported are defined (`qnms` is for quantised boxes), all its Python runs, unmodified.
"""

import importlib.util
from pathlib import Path

import torch

kept: list[torch.library.Library] = []
"""What a library defines goes when it goes."""


def define_missing() -> None:
    """Define them if torchvision is installed and its kernels do not load. To be called before its import."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.impl("nms", _nms, "CPU")
        kept.append(library)


def _nms(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """As torchvision's kernel for CPUs, what it refuses included."""
    if boxes.dtype is not scores.dtype:
        raise RuntimeError("dets should have the same type as scores")
    if boxes.dtype not in (torch.float32, torch.float64):
        raise NotImplementedError(f'"nms_kernel" not implemented for {boxes.dtype}')
    from torchvision.ops import box_iou

    left, kept = scores.argsort(descending=True, stable=True), []
    while left.numel():
        kept.append(left[0])
        left = left[1:][box_iou(boxes[left[:1]], boxes[left[1:]])[0] <= iou_threshold]
    return torch.stack(kept) if kept else left
