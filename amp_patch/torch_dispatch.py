"""The private names of torch's dispatcher, modes and autograd, of flex_attention and of GradScaler.

As in `torch_private`, a sentence with "would" says what the package would lose without a name. Unless a comment or
docstring says otherwise, all names exist in torch 2.6.0, and in 2.13.0 to 2.15.0, and if torch drops one, this import
or the first use of the name fails.
"""

import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_function_stack_at as _get_function_mode
from torch._C import _len_torch_function_stack
from torch._ops import OpOverload as OpOverload
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode

_aten = torch.ops.aten

# The autograd node that runs in this thread, the number of nodes that the thread has made so far, and the number of a
# node. Without them, ops of the backward pass could not be matched with the calls of the forward pass.
get_current_node: Callable[[], Any] = torch._C._current_autograd_node
count_nodes: Callable[[], int] = torch._C._autograd._get_sequence_nr
get_node_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")

# Owner and name of the function that makes a tensor from the bytes of a file or of another process. It is patched while
# a script is kept in float32. Without it, a loaded tensor of 16 bits would be read as if it had 32.
REBUILD_TENSOR: tuple[object, str] = (torch._utils, "_rebuild_tensor")

FLEX_ATTENTION = "torch.nn.attention.flex_attention"
"""The module of flex_attention. torch does not import it before a script does."""

FLEX_CALLS = ("_validate_sdpa_input", "flex_attention_hop")
"""The names in `FLEX_ATTENTION` by which flex_attention checks its operands, and calls its kernel.

Without them, functions that torch.compile has made from flex_attention before a session opened would not be cast.
"""

# flex_attention in eager mode, forward and backward. Both are written in Python, and call patched methods of tensors.
# The package patches both. Without these names, scores, which torch keeps in float32, would be rounded to 16 bits.
_flex: Any = sys.modules["torch._higher_order_ops.flex_attention"]
EAGER_FLEX_ATTENTION = ((_flex, "math_attention"), (_flex.FlexAttentionAutogradOp, "backward"))


def restore_caller_state() -> AbstractContextManager[None]:
    """Return a context manager that restores the thread-local state of the code that called the op.

    torch runs a dispatch mode with autocast switched off. Without it, the mode could not tell whether the op was called
    in a region of torch.autocast, so `insight` would advise no list entries there.
    """
    guard: AbstractContextManager[None] = torch._C._RestorePythonTLSSnapshot()  # type: ignore[attr-defined]
    return guard


def find_backward(node: Any) -> Callable[..., Any] | None:
    """Return the `backward` that the node of a torch.autograd.Function calls, or None for torch's own nodes.

    If torch drops the attribute, this returns None for all nodes, and a fault in such a function would be reported at
    the line of its forward pass.
    """
    backward = getattr(getattr(type(node), "_forward_cls", None), "backward", None)
    return backward if callable(backward) else None


def list_schema_arguments(op: Any) -> list[tuple[str, bool]]:
    """Return the name of each argument of an op of torch.library or torch.ops, and whether it is passed by name only.

    The list is empty for anything else, and for an op without a default overload. If torch drops an attribute, it is
    empty for all ops, and an entry of a list could not name an argument of such an op.
    """
    overload = getattr(op, "_opoverload", None) or getattr(op, "default", None) or op
    arguments = getattr(getattr(overload, "_schema", None), "arguments", ())
    return [(argument.name, bool(argument.kwarg_only)) for argument in arguments]


# Ops that copy a tensor, perhaps to another dtype, and ops that compute no values. If an op is missing here, its casts
# would not be counted, or a report would have a row for an op without a result.
TO_COPY = _aten._to_copy
COPY = _aten.copy_
COPIES = frozenset({TO_COPY, COPY, _aten._foreach_copy_})
COMPUTES_NOTHING = frozenset(
    {_aten.detach, _aten.lift_fresh, _aten.empty, _aten.empty_like, _aten.empty_strided, _aten._unsafe_view}
    | {_aten.new_empty, _aten.new_empty_strided, _aten.empty_permuted, _aten.resize_, _aten.set_}
    | {_aten._fused_sdp_choice}
)

# Ops that return their argument as a new tensor object, whether or not torch calls them views. If one is missing,
# its result would be taken for a tensor that the op has computed.
ALIASES = frozenset({_aten.detach, _aten.lift_fresh, _aten._unsafe_view, _aten._reshape_alias, _aten.alias})

# Ops that overwrite their first argument without reading it. If one is missing here, the uninitialized memory that it
# is about to overwrite would be checked for faults.
OVERWRITES = frozenset(
    {_aten.copy_, _aten.fill_, _aten.zero_, _aten.normal_, _aten.uniform_, _aten.random_, _aten.bernoulli_}
    | {_aten.exponential_, _aten.log_normal_, _aten.cauchy_, _aten.geometric_}
)


# Overloads of aten, which op lists cannot patch.
aminmax = _aten.aminmax.default
clone = _aten.clone.default


def find_written(function: Any) -> frozenset[int]:
    """Return the positions of the arguments that an op writes to.

    Without the schema, an in-place op would be blamed for a bad value that its argument had before.
    """
    written = set()
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.add(index)
    return frozenset(written)


def get_argument_names(function: Any) -> list[str]:
    """Return the names of the arguments of an op. Without the schema, reports could not name operands."""
    return [argument.name for argument in function._schema.arguments]


def is_mutable(function: Any) -> bool:
    """Return whether an op writes to an argument."""
    return bool(function._schema.is_mutable)


def is_random(function: Any) -> bool:
    """Return whether an op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in function.tags


def leave_mode(mode: TorchDispatchMode) -> bool:
    """Take a mode off the stack of this thread, even if others are above it. Return whether it was there.

    torch itself always takes the topmost mode off. The user may have entered another mode later, which is then on top.
    """
    if not any(entered is mode for entered in _get_current_dispatch_mode_stack()):
        return False
    above = []
    while (top := _get_current_dispatch_mode_stack()[-1]) is not mode:
        # The base class only changes the stack. The `__exit__` of the mode's own class may do more, but the user's
        # `with` block has not ended.
        TorchDispatchMode.__exit__(top, None, None, None)
        above.append(top)
    if mode.old_dispatch_mode_flags:
        mode.__exit__(None, None, None)
    else:  # it was left inside a backward pass, at whose end autograd restored the stack, with the mode on it
        _pop_dispatch_mode()
    for other_mode in reversed(above):
        TorchDispatchMode.__enter__(other_mode)
    return True


def leave_function_mode(mode: TorchFunctionMode) -> bool:
    """Take a function mode off the stack of this thread, even if others are above it. Return False if it is not on
    the stack: torch takes a mode off while it handles a function.

    Without the names used here, the mode that a script has entered last would be taken off instead.
    """
    above = []
    is_there = False
    for _ in range(_len_torch_function_stack()):
        top = _pop_mode()
        if top is mode:
            is_there = True
            break
        above.append(top)
    for other_mode in reversed(above):
        _push_mode(other_mode)
    return is_there


def has_foreign_function_mode() -> bool:
    """Return whether a function mode is on in this thread, other than a mode for the default device.

    torch itself always takes the topmost mode off. So no mode may be put above the mode of a `with` block of the user,
    which may end first. Only a `with torch.device` block takes off its own mode.
    """
    modes = [_get_function_mode(index) for index in range(_len_torch_function_stack())]
    return not all(isinstance(mode, DeviceContext) for mode in modes)


CLIP_BY_NORM: tuple[object, str] = (torch.nn.utils.clip_grad, "_clip_grads_with_norm_")
"""`clip_grad_norm_` calls this function, so a patch of it also sees the calls of a script that has imported
`clip_grad_norm_` by name. Without it, such calls would not be seen.
"""


# Hides ops from all dispatch modes of this thread, and from tensor classes with a `__torch_dispatch__`.
# Without it, `explain` would list the ops of a flight recorder that a script uses.
without_dispatch: Callable[[], AbstractContextManager[None]] = torch._C._DisableTorchDispatch

# Hides calls from all function modes of this thread, and from tensor classes with a `__torch_function__`.
# Without it, an armed run would take the ops of its flight recorder for ops of the script, and repeat them.
without_functions: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction

# Returns the scale of a GradScaler as a tensor on its device, None before its first use.
# Without it, `get_scale` would have to be called, which waits for the device.
get_scale_on_device: Callable[[Any], Tensor | None] = operator.methodcaller("_get_scale_async")


def count_compiled() -> int:
    """Return how often Dynamo has begun to compile a function in this process. If torch drops the name, return 0."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", {})
    return int(counters.get("frames", {}).get("total", 0))


def get_found_inf(scaler: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the flags that a GradScaler has for an optimizer since its last update.

    The list is empty if there are none, or if torch drops the name.
    """
    states: dict[int, dict[str, Any]] = getattr(scaler, "_per_optimizer_states", {})
    found_inf = states.get(id(optimizer), {}).get("found_inf_per_device", {})
    return list(found_inf.values())


def read_factors(node: Any) -> Iterator[float]:
    """Yield the absolute values of the operands that the node of a product or quotient keeps, if they are on the host
    and have one element.

    Without these names, a loss that a script multiplies by the loss scale itself would pass for an unscaled one. No
    dispatch mode sees the reading.
    """
    for name in ("_saved_other", "_saved_self"):
        try:
            operand = getattr(node, name, None)
        except RuntimeError:  # an earlier backward pass has freed the graph, or an op has changed the operand
            return
        if type(operand) is Tensor and operand.numel() == 1 and operand.device.type == "cpu":
            with torch._C._DisableTorchDispatch():
                yield abs(operand.detach().item())


def walk_graph(loss: Tensor, most: int) -> Iterator[tuple[str, torch.dtype | None]]:
    """Yield the name of each node in the graph of a loss, and the dtype of the first gradient that the node receives.

    Goes breadth first, and stops after `most` nodes. Without `_input_metadata`, the dtypes are None, and `native` would
    not notice that a script trains in float16 without a scale.
    """
    queue = deque([loss.grad_fn])
    seen = set[Any]()
    while queue and len(seen) < most:
        node = queue.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        metadata = getattr(node, "_input_metadata", None)
        yield node.name(), getattr(metadata[0], "dtype", None) if metadata else None
        queue.extend(following for following, _ in node.next_functions)
