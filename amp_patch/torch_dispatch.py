"""What `torch_private` is, for what `insight` sees of ops: names that are not public, and what is lost without each.

All were seen in torch 2.13.0; a missing one fails the import of this module, and with it `insight`.
"""

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_aten = torch.ops.aten

# The node of autograd that runs in this thread, how many nodes the thread has made, and the number of one.
# Without them: ops of the backward pass are not told to the calls that they are of.
get_current_node: Callable[[], Any] = torch._C._current_autograd_node
count_nodes: Callable[[], int] = torch._C._autograd._get_sequence_nr
get_node_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")


def as_called() -> AbstractContextManager[None]:
    """Return a block in which torch answers for this thread as where the op was called, that a mode is shown.

    Without it: no region of torch.autocast is seen from below ops, and so no list is offered for what is on none.
    """
    guard: AbstractContextManager[None] = torch._C._RestorePythonTLSSnapshot()  # type: ignore[attr-defined]
    return guard


def find_backward(node: Any) -> Callable[..., Any] | None:
    """Return the `backward` that a node of a torch.autograd.Function calls, None for a node of torch's own.

    Without the class that a node has: a fault in such a function is told at the line of its forward pass.
    """
    backward = getattr(getattr(type(node), "_forward_cls", None), "backward", None)
    return backward if callable(backward) else None


# By which ops tensors are copied to another dtype, and which of those that are no views make no number.
# Without one: casts of that kind are not counted, or rows say nothing.
TO_COPY = _aten._to_copy
COPIES = frozenset({TO_COPY, _aten.copy_, _aten._foreach_copy_})
WITHOUT_KERNEL = frozenset(
    {_aten.detach, _aten.lift_fresh, _aten.empty, _aten.empty_like, _aten.empty_strided, _aten._unsafe_view}
    | {_aten.new_empty, _aten.new_empty_strided, _aten.empty_permuted, _aten.resize_, _aten.set_}
    | {_aten._fused_sdp_choice}
)

# Ops that read nothing of their first argument, which they write. Without one: what was in memory before is looked at.
OVERWRITES = frozenset(
    {_aten.copy_, _aten.fill_, _aten.zero_, _aten.normal_, _aten.uniform_, _aten.random_, _aten.bernoulli_}
    | {_aten.exponential_, _aten.log_normal_, _aten.cauchy_, _aten.geometric_}
)


# The smallest and the largest element, and a copy: these run for every op, and no list reaches them as ops of torch's.
find_range = _aten.aminmax.default
clone = _aten.clone.default


def find_written(function: Any) -> frozenset[int]:
    """Return the positions of the arguments that an op writes. Without the schema: in-place ops are their own cause."""
    arguments = enumerate(function._schema.arguments)
    return frozenset(index for index, one in arguments if one.alias_info is not None and one.alias_info.is_write)


def is_mutable(function: Any) -> bool:
    """Tell whether an op writes an argument."""
    return bool(function._schema.is_mutable)


def is_random(function: Any) -> bool:
    """Tell whether an op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in function.tags


def leave_mode(mode: TorchDispatchMode) -> bool:
    """Take a mode off the stack of this thread, with others above it too; False if it is not there.

    Without it: a mode of the user's own that was entered later, and not left, is taken off in the place of this.
    """
    if not any(one is mode for one in _get_current_dispatch_mode_stack()):
        return False
    above = []
    while (top := _get_current_dispatch_mode_stack()[-1]) is not mode:
        TorchDispatchMode.__exit__(top, None, None, None)  # not what its class does at the end of a block
        above.append(top)
    mode.__exit__(None, None, None)
    for one in reversed(above):
        TorchDispatchMode.__enter__(one)
    return True
