"""`SoftmaxCrossEntropyLoss`, which scripts call by its `apply`."""

import torch.nn.functional as F
from torch import Tensor

from ...updates import full_dtype


class SoftmaxCrossEntropyLoss:
    """The autograd function that Apex had under this name, as its `apply`."""

    @staticmethod
    def apply(
        logits: Tensor, labels: Tensor, smoothing: float = 0.0, padding_idx: int = 0, half_to_float: bool = False
    ) -> Tensor:
        """Return the loss of each row, shape (n,), in float32 or wider: see `F.cross_entropy`.

        Args:
            logits: shape (n, classes), any floating dtype.
            labels: shape (n,), whole numbers; rows with the label `padding_idx` have the loss 0.
            smoothing: the share of the target that is spread evenly over all classes.
            half_to_float: without effect, as in Apex, where the result did not depend on it.
        """
        full = logits.to(full_dtype(logits))
        return F.cross_entropy(full, labels, ignore_index=padding_idx, reduction="none", label_smoothing=smoothing)
