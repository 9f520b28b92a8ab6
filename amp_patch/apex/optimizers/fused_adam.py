"""`FusedAdam`: Adam and AdamW with Apex's arguments."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from ...errors import CheckpointError, OptimizerError
from ...torch_private import unflatten_dense_tensors
from .. import amp_C
from ..updates import adam_, full_dtype, total_norm
from .base import FusedOptimizer, Work


class FusedAdam(FusedOptimizer):
    """AdamW (`adam_w_mode`), or Adam with L2 regularization; `updates.adam_` has the formula.

    Differs from torch.optim.AdamW:

    * The arguments have another order, and `weight_decay` is 0 by default.
    * `bias_correction=False` leaves out the correction of the moments.
    * Steps are counted for each group (`param_groups[i]["step"]`), not for each parameter.

    `load_state_dict` also takes state dicts of torch.optim.Adam and AdamW without `amsgrad` and `maximize`, if their
    weight decay is of the same kind (L2 or decoupled) and all parameters of a group have taken equally many steps.

    Args:
        max_grad_norm: clip the gradients of each group to this norm. 0: do not clip.
        capturable: without effect. While a CUDA graph is captured, `step` raises OptimizerError.
        master_weights: step on float32 masters of 16-bit parameters. The state dict holds the masters. Has no effect
            under `amp.initialize` at O2 or O5, which makes masters itself.
        amsgrad: raises OptimizerError if true.
    """

    _options: ClassVar[tuple[str, ...]] = ("set_grad_none", "adam_w_mode", "capturable", "master_weights")
    multi_tensor_adam = staticmethod(amp_C.multi_tensor_adam)
    reads_flag = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        max_grad_norm: float = 0.0,
    ) -> None:
        if not isinstance(bias_correction, (bool, int)):
            raise OptimizerError(
                f"FusedAdam: bias_correction={bias_correction!r} must be a bool; the third argument is not betas here"
            )
        # `max_grad_norm` is a key only if clipping was requested, because state dicts of today's Apex do not have it
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            **({"max_grad_norm": max_grad_norm} if max_grad_norm else {}),
        }
        super().__init__(params, defaults, set_grad_none, amsgrad)
        self.adam_w_mode = bool(adam_w_mode)
        self.capturable = capturable
        self.master_weights = bool(master_weights)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> Any:
        """Take one step. Any argument but `closure` raises OptimizerError."""
        if any(argument is not None for argument in (grads, output_params, scale, grad_norms)):
            raise OptimizerError(
                "FusedAdam.step takes no grads, output_params, scale or grad_norms: unscale the gradients, then call"
                " step()"
            )
        if grad_scaler is not None:
            raise OptimizerError("FusedAdam.step takes no grad_scaler: call grad_scaler.step(optimizer)")
        return super().step(closure)

    step_by_flag = step

    def _update(self, work: Work) -> None:
        for group, params, gradients in work:
            if group.get("max_grad_norm"):
                # plus 1e-6, as in Apex
                factor = ((total_norm(gradients) + 1e-6) / group["max_grad_norm"]).clamp(min=1.0)
                gradients = [g.to(full_dtype(g)) / factor.to(g.device) for g in gradients]
            targets = self._get_masters(params)
            adam_(
                gradients,
                targets,
                self._moments(params, "exp_avg"),
                self._moments(params, "exp_avg_sq"),
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                found_inf=self.found_inf,
                **self._options_of_step(group, self._count_step(group)),
            )
            self._copy_masters(params, targets)

    def _has_master(self, parameter: Tensor) -> bool:
        return self.master_weights

    def _options_of_step(self, group: dict[str, Any], step: int | Tensor) -> dict[str, Any]:
        """Return the arguments of `adam_` that a subclass may compute differently."""
        return {
            "lr": float(group["lr"]),
            "step": step,
            "is_decoupled": self.adam_w_mode,
            "corrects_bias": bool(group["bias_correction"]),
        }

    def _convert_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved state of Apex, or of torch's Adam or AdamW, with one count of steps for each group.

        Raises CheckpointError if the state says that its weight decay is of the other kind (decoupled or L2), or if the
        parameters of a group have taken different numbers of steps.
        """
        saved = self._split_flat(super()._convert_state_dict(state_dict))
        for group in saved["param_groups"]:
            decoupled = group.get("decoupled_weight_decay", self.adam_w_mode)
            if group["weight_decay"] and decoupled != self.adam_w_mode:
                raise CheckpointError(
                    "the saved optimizer had weight decay of the other kind: build FusedAdam with"
                    f" adam_w_mode={decoupled}"
                )
            entries = [saved["state"][key] for key in group["params"] if key in saved["state"]]
            steps = {int(entry.pop("step")) for entry in entries if "step" in entry}
            if len(steps) > 1:
                raise CheckpointError(
                    f"parameters of one saved group are at different steps ({', '.join(map(str, sorted(steps)))}), and"
                    " FusedAdam counts them for each group: resume in torch.optim.AdamW, or give these parameters"
                    " groups of their own"
                )
            if steps:
                group["step"] = steps.pop()
        return saved

    def _split_flat(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Split the flat tensors of a saved state among the parameters. Return any other state as it is.

        In 2019, a state of Apex's FP16_Optimizer had one flat tensor for all parameters of a group. Raises
        CheckpointError if such a tensor has another number of elements than the parameters.
        """
        counts = [len(group["params"]) for group in self.param_groups]
        # a saved group with a single parameter is flat only if a group of this optimizer has several
        is_flat = all(len(group["params"]) == 1 for group in saved["param_groups"]) and max(counts, default=1) > 1
        if not is_flat or len(saved["param_groups"]) != len(counts):
            return saved
        groups: list[dict[str, Any]] = []
        state: dict[int, dict[str, Any]] = {}
        first = 0
        for own, group in zip(self.param_groups, saved["param_groups"], strict=True):
            keys = list(range(first, first + len(own["params"])))
            first += len(keys)
            groups.append({**group, "params": keys})
            count = sum(parameter.numel() for parameter in own["params"])
            for name, value in saved["state"].get(group["params"][0], {}).items():
                parts = [value] * len(keys)
                if isinstance(value, Tensor) and value.dim() > 0:
                    if value.numel() != count:
                        raise CheckpointError(
                            f"the saved group has {value.numel()} elements in one tensor, and this one {count}"
                        )
                    parts = [part.clone() for part in unflatten_dense_tensors(value, own["params"])]
                for key, part in zip(keys, parts, strict=True):
                    state.setdefault(key, {})[name] = part
        return {**saved, "state": state, "param_groups": groups}
