"""What `torch_private` is, for what `insight` sees of ops: names that are not public, and what is lost without each.

All were seen in torch 2.6.0, 2.13.0 and 2.14.1; a missing one fails the import of this module, and with it `insight`.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

_aten = torch.ops.aten

# The node of autograd that runs in this thread, how many nodes the thread has made, and the number of one.
# Without them: ops of the backward pass are not told to the calls that they are of.
get_current_node: Callable[[], Any] = torch._C._current_autograd_node
count_nodes: Callable[[], int] = torch._C._autograd._get_sequence_nr
get_node_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")

# By which ops tensors are copied to another dtype, and which of those that are no views make no number.
# Without one: casts of that kind are not counted, or rows say nothing.
TO_COPY = _aten._to_copy
COPIES = frozenset({TO_COPY, _aten.copy_, _aten._foreach_copy_})
WITHOUT_KERNEL = frozenset(
    {_aten.detach, _aten.lift_fresh, _aten.empty, _aten.empty_like, _aten.empty_strided, _aten._unsafe_view}
)
