"""Apex's `SoftmaxCrossEntropyLoss`."""

import torch.nn.functional as F
from torch import Tensor

from ...updates import full_dtype


class SoftmaxCrossEntropyLoss:
    """A class with the `apply` of Apex's autograd function of this name, because scripts use only that method."""

    @staticmethod
    def apply(
        logits: Tensor, labels: Tensor, smoothing: float = 0.0, padding_idx: int = 0, half_to_float: bool = False
    ) -> Tensor:
        """Return the loss of each row, shape (n,), in float32 or wider: see `F.cross_entropy`.

        Args:
            logits: shape (n, classes), any floating dtype.
            labels: shape (n,), int64; rows with the label `padding_idx` have the loss 0.
            smoothing: the share of the target that is spread evenly over all classes.
            half_to_float: ignored. Apex's result did not depend on it either.
        """
        full = logits.to(full_dtype(logits))
        return F.cross_entropy(full, labels, ignore_index=padding_idx, reduction="none", label_smoothing=smoothing)
