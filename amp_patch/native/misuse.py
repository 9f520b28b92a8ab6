"""`Misuse`: a wrong use of GradScaler or autocast by a script, with the edit that repairs it."""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """A way to use GradScaler or autocast wrongly."""

    CLIPPED = "scaled gradients are clipped"
    READ = "scaled gradients are read"
    UNSCALED_LOSS = "the loss is not scaled"
    NOTHING_SCALED = "no loss was scaled"
    SCALED_STEP = "a step on scaled gradients"
    EARLY_UPDATE = "update comes before a step"
    UNSCALED_TWICE = "unscale_ twice"
    ADDED_SCALED = "a backward pass after unscale_"
    MISSING_UPDATE = "no update after a step"
    UPDATE_WITHOUT_STEP = "update without a step"
    NO_GRADIENTS = "no gradients"
    LOW_WEIGHTS = "float16 weights"
    CLOSURE = "a closure"
    LOOP_IN_REGION = "a loop in one region"
    NO_SCALER = "float16 without a scaler"
    LOSS_OUTSIDE = "a loss in 16 bits"
    SCALED_BFLOAT16 = "a scaler for bfloat16"
    SCHEDULED_SKIP = "a schedule that counts skipped steps"
    UNSAVED_SCALER = "a checkpoint without the scaler"


@dataclass(frozen=True, slots=True)
class Misuse:
    """A wrong use of GradScaler or autocast.

    Attributes:
        kind: which misuse it is.
        line: the line of the script, such as `train.py:12`; "" if it is not known.
        detail: more about the effect, or "".
        earlier: for some errors of torch, the calls since the last `update` that led to them, such as "unscale_() at
            train.py:9".
    """

    kind: Kind
    line: str
    detail: str = ""
    earlier: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """The note for an exception that this misuse caused."""
        return f"amp_patch: {self}"

    @property
    def effect(self) -> str:
        """The effect of the misuse, as a sentence without a full stop."""
        effect = _TEXTS[self.kind][0]
        return f"{effect} ({self.detail})" if self.detail else effect

    @property
    def edit(self) -> str:
        """What the script should do instead."""
        return _TEXTS[self.kind][1]

    def __str__(self) -> str:
        return f"{self.line or 'this script'}: {self.effect}. {self.edit}"


# the effect and the edit of each kind
_TEXTS = {
    Kind.CLIPPED: (
        "gradients are clipped while they are multiplied by the loss scale, so the limit is too low for them",
        "Call scaler.unscale_(optimizer) before the clipping",
    ),
    Kind.READ: (
        "gradients are measured while they are multiplied by the loss scale",
        "Call scaler.unscale_(optimizer) before this line, or divide the result by scaler.get_scale()",
    ),
    Kind.UNSCALED_LOSS: (
        "this loss goes backward without scaler.scale, and scaler.step divides its gradients by the loss scale",
        "Write scaler.scale(loss).backward()",
    ),
    Kind.NOTHING_SCALED: (
        "this GradScaler has scaled no loss yet, so it has no scale",
        "Call scaler.scale(loss).backward() before scaler.unscale_, scaler.step and scaler.update",
    ),
    Kind.SCALED_STEP: (
        "the optimizer steps on gradients that are multiplied by the loss scale, and on inf after an overflow",
        "Write scaler.step(optimizer) and scaler.update() in place of optimizer.step()",
    ),
    Kind.EARLY_UPDATE: (
        "scaler.update() may change the scale, and a later scaler.step divides older gradients by the new scale",
        "Call scaler.update() once per iteration, after the scaler.step of all optimizers",
    ),
    Kind.UNSCALED_TWICE: (
        "gradients are unscaled twice before one update",
        "Call scaler.unscale_(optimizer) once for each step of the optimizer, after the last backward pass before it."
        " If an iteration calls unscale_ and leaves out scaler.step, call scaler.update() all the same",
    ),
    Kind.ADDED_SCALED: (
        "a scaled loss goes backward after scaler.unscale_, so scaler.step does not divide its gradients by the loss"
        " scale",
        "Call scaler.unscale_(optimizer) once for each step of the optimizer, after the last backward pass before it."
        " If an iteration calls unscale_ and leaves out scaler.step, call scaler.update() all the same",
    ),
    Kind.MISSING_UPDATE: (
        "the optimizer has stepped already since the last scaler.update()",
        "Call scaler.step once for each optimizer in an iteration, and scaler.update() after the last of these calls",
    ),
    Kind.UPDATE_WITHOUT_STEP: (
        "scaler.update() is called without a scaler.unscale_ or scaler.step since the last update",
        "Call scaler.update() only in iterations that call scaler.unscale_ or scaler.step",
    ),
    Kind.NO_GRADIENTS: (
        "no parameter of the optimizer has a gradient",
        "Check that the loss depends on them, that backward() ran and zero_grad() did not run since, and that the"
        " optimizer was made after the model was copied or wrapped",
    ),
    Kind.LOW_WEIGHTS: (
        "the optimizer trains float16 weights, and GradScaler refuses their gradients",
        "Keep trained weights in float32: load the model without dtype=torch.float16 and without .half(), or call"
        " parameter.data = parameter.data.float() for the trained ones. torch.autocast casts them where it pays",
    ),
    Kind.CLOSURE: (
        "a GradScaler takes steps without a closure only: it unscales gradients once, and the closure computes scaled"
        " ones again",
        "Call the closure, then scaler.step(optimizer) without it. An optimizer that needs a closure, such as LBFGS,"
        " trains in float32 or under torch.autocast with dtype=torch.bfloat16, without a GradScaler",
    ),
    Kind.LOOP_IN_REGION: (
        "one region of torch.autocast surrounds several optimizer steps: torch keeps the 16-bit copies of the weights"
        " until the region ends, so steps do not change the outputs",
        "Enter the region inside the loop, around the forward pass and the loss",
    ),
    Kind.NO_SCALER: (
        "this loss goes backward through float16 without a loss scale, so small gradients may become zero",
        "Scale the loss by a torch.amp.GradScaler, or use dtype=torch.bfloat16, which needs none",
    ),
    Kind.LOSS_OUTSIDE: (
        "the loss is computed in 16 bits, outside of the region: it is rounded, and overflows early in float16",
        "Compute the loss inside the region, where autocast computes it in float32, or compute it from output.float()",
    ),
    Kind.SCALED_BFLOAT16: (
        "a GradScaler takes the steps of a script whose regions are all bfloat16, which needs no loss scale: steps"
        " may wait for the device",
        "Leave the GradScaler out, or create it with enabled=False",
    ),
    Kind.SCHEDULED_SKIP: (
        "the learning rate schedule counts a step that the GradScaler has skipped, and gets ahead of the training",
        "Call scheduler.step() only if scaler.get_scale() has not fallen in scaler.update()",
    ),
    Kind.UNSAVED_SCALER: (
        "the checkpoint has the optimizer's state but not the GradScaler's, so a resumed run may skip steps until"
        " its scale fits",
        "Save scaler.state_dict() as well, and load it with scaler.load_state_dict",
    ),
}
