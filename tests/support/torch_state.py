"""What torch holds, before and after: every test leaves it as it was."""

import importlib
import operator
import sys
import types

import torch
import torch._dynamo  # replaces torch.manual_seed when it is first imported, which is not ours to undo
import torch.utils.checkpoint

import amp_patch

# the first compilation replaces a few more names of torch's, for good
torch.compile(lambda x: x, backend="eager")(torch.ones(1))

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
"""Of torch, such as (2, 13)."""

FLEX_KERNELS = sys.modules["torch._higher_order_ops.flex_attention"]  # the package has the op under this name

NAMESPACES = (
    torch,
    torch.nn.functional,
    torch.Tensor,
    torch._VF,
    torch._C._nn,
    torch.special,
    torch.linalg,
    torch.fft,
    torch.sparse,
    torch.nn.Module,
    torch.utils.checkpoint,
    torch.jit,
    torch.jit._trace,
    torch.nn.utils,
    torch.nn.utils.clip_grad,
    torch.nn.RNNBase,
    torch.nn.MultiheadAttention,
    torch.nn.TransformerEncoder,
    torch.nn.TransformerEncoderLayer,
    torch.nn.TransformerDecoder,
    torch.nn.TransformerDecoderLayer,
    torch.nn.Transformer,
    torch.nn.AdaptiveLogSoftmaxWithLoss,
    torch.nn.parallel.DistributedDataParallel,
    torch.nn.parallel.distributed,
    torch.optim.Optimizer,
    torch.amp,
    torch.autocast,
    torch.amp.GradScaler,
    torch.autograd,
    FLEX_KERNELS,
    FLEX_KERNELS.FlexAttentionAutogradOp,
    importlib,
)


def snapshot() -> dict[tuple[str, str], object]:
    """Every name that the namespaces hold, with its object; names served dynamically are absent until somebody leaves
    one behind.
    """
    return {
        # a session cannot replace what a static method holds, and would warn of the method here
        (owner.__name__, name): value.__func__ if isinstance(value, staticmethod) else value
        for owner in NAMESPACES
        for name, value in vars(owner).items()
        if callable(value)
    }


ORIGINALS = snapshot()
seen_unchanged: list[object] = []


def find_changes() -> list[str]:
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        torch.set_autocast_enabled("cpu", False)  # so that one test alone fails
        torch.set_autocast_enabled("cuda", False)
        return ["autocast was left enabled"]
    if getattr(torch.compiler.config, "cache_key_tag", ""):
        return ["the key of compiled programs was left changed"]
    if not torch._C._is_torch_function_enabled():
        enable_torch_function()
        return ["subclasses of Tensor were left without their overrides"]
    functions = torch.overrides._get_current_function_mode_stack()
    left = [mode for mode in functions if not isinstance(mode, torch.utils._device.DeviceContext)]  # a default device
    if modes := len(left) + torch._C._len_torch_dispatch_stack():
        return [f"{modes} modes were left"]
    values = [value for owner in NAMESPACES for value in vars(owner).values()]
    if len(values) == len(seen_unchanged) and all(map(operator.is_, values, seen_unchanged)):
        return []
    changes = _find_changes()
    if not changes:
        seen_unchanged[:] = values
    return changes


def enable_torch_function() -> None:
    """Let subclasses of Tensor override functions in this thread, as they do in torch."""
    torch._C._set_torch_function_state(torch._C._TorchFunctionState.ENABLED)


def _find_changes() -> list[str]:
    now = snapshot()
    changed = [
        f"{owner}.{name} replaced" for (owner, name), value in ORIGINALS.items() if now.get((owner, name)) is not value
    ]
    ours = [
        f"{owner}.{name} left behind"
        for (owner, name), value in now.items()
        if (owner, name) not in ORIGINALS and is_ours(value)
    ]
    return changed + ours


def is_ours(value: object) -> bool:
    return isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith(amp_patch.__path__[0])
