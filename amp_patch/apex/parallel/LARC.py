"""`LARC`: layer-wise adaptive rate clipping (You et al., arXiv:1708.03888), around any optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...torch_private import foreach_add_, foreach_mul, foreach_mul_
from .._forward import forwarded
from ..updates import at_full_precision, norms


class LARC(Optimizer):
    """Wraps an optimizer. Before a step, changes the gradient g of each parameter w:

    rate = trust_coefficient |w| / (|g| + wd |w| + eps)
    rate = min(rate / lr, 1), only with `clip`
    g = (g + wd w) rate, in place

    wd is the weight decay of the parameter group. The inner optimizer then steps without weight decay. If |w| or |g| is
    0, g is not changed, and w has no weight decay in that step. The formula is computed in float32 (float64 for
    float64), and does not wait for the device.

    It is an Optimizer, so LR schedulers accept it. Pass this object, not the inner optimizer, to amp and to schedulers.
    `param_groups`, `state`, hooks and other attributes are read from the inner optimizer, `optim`.
    """

    # A fused inner optimizer has True, which `__getattr__` would return. GradScaler would then expect that this object
    # unscales the gradients and skips steps.
    _step_supports_amp_scaling = False

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        # no call of Optimizer.__init__, which would make other groups and another state
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.eps = eps
        self.clip = clip

    state = forwarded("optim", "state")
    param_groups = forwarded("optim", "param_groups")

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # `copy` reads attributes before the copy has any
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("optim", "trust_coefficient", "eps", "clip")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer. LARC has no state."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the inner optimizer."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Call `zero_grad` of the inner optimizer."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Call `add_param_group` of the inner optimizer."""
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the closure, if there is one, change the gradients, and step the inner optimizer.

        Returns the result of the closure, or else the result of the inner optimizer's `step`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group.get("weight_decay", 0.0) for group in self.param_groups]
        try:
            for group, decay in zip(self.param_groups, decays, strict=True):
                # `_adapt` adds weight decay to the gradients, so the inner optimizer must not add it again
                self._adapt(group, decay)
                if "weight_decay" in group:
                    group["weight_decay"] = 0.0
            # no closure here: it has run already
            result = self.optim.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay
        return result if loss is None else loss

    @torch.no_grad()
    def _adapt(self, group: dict[str, Any], decay: float) -> None:
        """Add weight decay to the gradients of a group, and scale them."""
        pairs: list[tuple[Tensor, Tensor]] = [
            (parameter, parameter.grad) for parameter in group["params"] if parameter.grad is not None
        ]
        for p, g in at_full_precision([parameter for parameter, _ in pairs], [gradient for _, gradient in pairs]):
            param_norms, gradient_norms = torch.stack(norms(p)), torch.stack(norms(g))
            rates = self.trust_coefficient * param_norms / (gradient_norms + decay * param_norms + self.eps)
            if self.clip:
                rates = (rates / group["lr"]).clamp(max=1.0)
            is_adapted = (param_norms != 0) & (gradient_norms != 0)
            if decay:
                foreach_add_(g, foreach_mul(p, (is_adapted.to(param_norms.dtype) * decay).unbind()))
            foreach_mul_(g, torch.where(is_adapted, rates, 1.0).unbind())
