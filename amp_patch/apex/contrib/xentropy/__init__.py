"""`apex.contrib.xentropy`: cross entropy with label smoothing and padding, by torch's own function."""

from .softmax_xentropy import SoftmaxCrossEntropyLoss

__all__ = ["SoftmaxCrossEntropyLoss"]
