"""The private names of torch's dispatcher and autograd with which `insight` observes ops. See `torch_private`.

All exist in torch 2.6.0 and 2.13.0 to 2.15.0. If one is missing, importing this module fails, and so does `insight`.
"""

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_aten = torch.ops.aten

# The autograd node that runs in this thread, the number of nodes that the thread has made, and the number of a node.
# Without them: ops of the backward pass cannot be matched with the calls of the forward pass.
get_current_node: Callable[[], Any] = torch._C._current_autograd_node
count_nodes: Callable[[], int] = torch._C._autograd._get_sequence_nr
get_node_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")


def as_called() -> AbstractContextManager[None]:
    """Return a block with the thread-local state of the code that called the op.

    A dispatch mode runs below autocast. Without it: no mode sees regions of torch.autocast, so no list is offered for
    unlisted ops.
    """
    guard: AbstractContextManager[None] = torch._C._RestorePythonTLSSnapshot()  # type: ignore[attr-defined]
    return guard


def find_backward(node: Any) -> Callable[..., Any] | None:
    """Return the `backward` that the node of a torch.autograd.Function calls, or None for torch's own nodes.

    Without the class of the node: a fault in such a function is reported at the line of its forward pass.
    """
    backward = getattr(getattr(type(node), "_forward_cls", None), "backward", None)
    return backward if callable(backward) else None


# Ops that copy tensors to another dtype, and ops that return a new tensor without computing its values.
# Without one: such casts are not counted, or a report has a row without a result.
TO_COPY = _aten._to_copy
COPY = _aten.copy_
COPIES = frozenset({TO_COPY, COPY, _aten._foreach_copy_})
WITHOUT_KERNEL = frozenset(
    {_aten.detach, _aten.lift_fresh, _aten.empty, _aten.empty_like, _aten.empty_strided, _aten._unsafe_view}
    | {_aten.new_empty, _aten.new_empty_strided, _aten.empty_permuted, _aten.resize_, _aten.set_}
    | {_aten._fused_sdp_choice}
)

# Ops that overwrite their first argument without reading it. Without one: uninitialized memory is checked for faults.
OVERWRITES = frozenset(
    {_aten.copy_, _aten.fill_, _aten.zero_, _aten.normal_, _aten.uniform_, _aten.random_, _aten.bernoulli_}
    | {_aten.exponential_, _aten.log_normal_, _aten.cauchy_, _aten.geometric_}
)


# The smallest and the largest element, and a copy. They run for every op; as overloads of aten, no list patches them.
find_range = _aten.aminmax.default
clone = _aten.clone.default


def find_written(function: Any) -> frozenset[int]:
    """Return the positions of the arguments that an op writes. Without the schema, in-place ops would be blamed."""
    arguments = enumerate(function._schema.arguments)
    writes = set()
    for index, argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.add(index)
    return frozenset(writes)


def is_mutable(function: Any) -> bool:
    """Return whether an op writes an argument."""
    return bool(function._schema.is_mutable)


def is_random(function: Any) -> bool:
    """Return whether an op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in function.tags


def leave_mode(mode: TorchDispatchMode) -> bool:
    """Take a mode off the stack of this thread, even if others are above it. Return False if it is not there.

    Without it: a user's mode that was entered later, and not left, would be taken off instead.
    """
    if not any(entered is mode for entered in _get_current_dispatch_mode_stack()):
        return False
    above = []
    while (top := _get_current_dispatch_mode_stack()[-1]) is not mode:
        TorchDispatchMode.__exit__(top, None, None, None)  # not the __exit__ of its class: its block goes on
        above.append(top)
    mode.__exit__(None, None, None)
    for other_mode in reversed(above):
        TorchDispatchMode.__enter__(other_mode)
    return True
