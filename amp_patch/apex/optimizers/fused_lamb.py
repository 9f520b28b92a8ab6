"""`FusedLAMB`: LAMB with Apex's arguments."""

from typing import Any, ClassVar

from .. import amp_C
from ..updates import lamb_, total_norm
from .base import FusedOptimizer, Work


class FusedLAMB(FusedOptimizer):
    """LAMB with clipping by the norm of all gradients. `updates.lamb_` has the formula.

    Unlike Apex's, `step` does not change `.grad`.

    Args:
        adam_w_mode: whether weight decay is decoupled from the gradient, as in AdamW.
        grad_averaging: weigh the gradient by 1 - beta1 in the first moment.
        max_grad_norm: clip the gradients of all groups together to this norm. 0 or None: do not clip.
        use_nvlamb: adapt the learning rate also in groups without weight decay.
        amsgrad: raises OptimizerError if true.
    """

    _options: ClassVar[tuple[str, ...]] = ("set_grad_none", "adam_w_mode", "use_nvlamb")
    # Apex's attributes, for scripts that read them; unused here
    multi_tensor_lamb = staticmethod(amp_C.multi_tensor_lamb)
    multi_tensor_l2norm = staticmethod(amp_C.multi_tensor_l2norm)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, set_grad_none, amsgrad)
        self.adam_w_mode = bool(adam_w_mode)
        self.use_nvlamb = use_nvlamb

    def _update(self, work: Work) -> None:
        gradient_norm = total_norm([gradient for _, _, gradients in work for gradient in gradients])
        for group, params, gradients in work:
            targets = self._get_masters(params)
            lamb_(
                gradients,
                targets,
                self._moments(params, "exp_avg"),
                self._moments(params, "exp_avg_sq"),
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=group["eps"],
                step=int(self._count_step(group)),
                weight_decay=group["weight_decay"],
                is_decoupled=self.adam_w_mode,
                corrects_bias=bool(group["bias_correction"]),
                averages_gradients=bool(group["grad_averaging"]),
                gradient_norm=gradient_norm,
                # as in Apex, from the defaults and not from the group: the norm is taken over all groups
                max_gradient_norm=self.defaults["max_grad_norm"],
                always_adapts=self.use_nvlamb,
            )
            self._copy_masters(params, targets)
