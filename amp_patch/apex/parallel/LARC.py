"""`LARC`: layer-wise adaptive rate clipping around any optimizer, of You et al. (arXiv:1708.03888). torch has none."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...torch_private import foreach_add_, foreach_mul, foreach_mul_
from .._forward import forward
from ..updates import in_full, norms


class LARC(Optimizer):
    """Scales the gradient of each parameter before the optimizer inside takes its step, so that no layer moves too far.

    local = trust_coefficient |w| / (|g| + wd |w| + eps), with `clip` min(local / lr, 1); g = (g + wd w) local, in
    place, and the optimizer inside sees no weight decay. Where |w| or |g| is 0, g stays as it is and there is no weight
    decay in that step. Computed in float32; waits for nothing.

    Unlike Apex's it is an Optimizer itself, so that LR schedulers take it; it shares `param_groups`, `state` and hooks
    with the optimizer inside, `optim`. Give amp and schedulers this object; whatever it does not have itself, it has
    from `optim`.
    """

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optim = optimizer  # not Optimizer.__init__: there is nothing of its own to keep
        self.trust_coefficient = trust_coefficient
        self.eps = eps
        self.clip = clip

    state = forward("optim", "state")
    param_groups = forward("optim", "param_groups")

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # not there yet: a copy in the making
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("optim", "trust_coefficient", "eps", "clip")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer inside; there is no other."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the optimizer inside."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer inside does it."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer inside does it."""
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Adapt the gradients (with a closure, those that it computes) and step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group.get("weight_decay", 0.0) for group in self.param_groups]
        try:
            for group, decay in zip(self.param_groups, decays, strict=True):
                # the gradient has the weight decay afterwards, and the optimizer inside must not add it again
                self._adapt(group, decay)
                if "weight_decay" in group:
                    group["weight_decay"] = 0.0
            # the closure has run, so the optimizer inside gets none
            result = self.optim.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay
        return result if loss is None else loss

    @torch.no_grad()
    def _adapt(self, group: dict[str, Any], decay: float) -> None:
        pairs: list[tuple[Tensor, Tensor]] = [
            (parameter, parameter.grad) for parameter in group["params"] if parameter.grad is not None
        ]
        for p, g in in_full([parameter for parameter, _ in pairs], [gradient for _, gradient in pairs]):
            size, slope = torch.stack(norms(p)), torch.stack(norms(g))
            local = self.trust_coefficient * size / (slope + decay * size + self.eps)
            if self.clip:
                local = (local / group["lr"]).clamp(max=1.0)
            adapts = (size != 0) & (slope != 0)
            if decay:
                foreach_add_(g, foreach_mul(p, (adapts.to(size.dtype) * decay).unbind()))
            foreach_mul_(g, torch.where(adapts, local, 1.0).unbind())
