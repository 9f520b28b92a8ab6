"""`is_fp_tensor`, for scripts that import it from Apex's `apex.amp.utils`."""

from torch import Tensor


def is_fp_tensor(x: object) -> bool:
    """Return whether `x` is a floating tensor, or a list or tuple of floating tensors."""
    if isinstance(x, (list, tuple)):
        return all(is_fp_tensor(item) for item in x)
    return isinstance(x, Tensor) and x.is_floating_point()
