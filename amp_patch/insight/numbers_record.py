"""Records of the modules, optimizers and steps of a run, for the contracts of `amp-patch check`. Needs no torch."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """The settings of one parameter group of an optimizer, in the first step of the optimizer.

    Attributes:
        number: the number of the optimizer, in the order of first steps.
        type: the name of its class.
        group: the number of the parameter group.
        settings: `name=value` for each setting of the group that is a number, text, None, a sequence of these, or a
            tensor of one element; sorted.
    """

    kind: ClassVar[str] = "optimizer"

    number: int
    type: str
    group: int
    settings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModuleNumbersRecord:
    """Numbers of a module, or of the parameters of one shape outside of the models.

    Only modules with parameters of their own, or without submodules, have a record.

    A sketch stands for tensors by `SKETCH` values. Each is a sum of some of their elements, with random signs (see
    `checking.probe.sketch_all`). The signs are the same in each run. The norm of a sketch estimates the L2 norm of the
    tensors. The norm of the difference of two sketches estimates the norm of the difference of their tensors. A sketch
    is () if there was no tensor.

    Attributes:
        module: the qualified name of the module. For parameters outside of the models, a text with their shape.
        type: the name of the module's class. "" for parameters outside of the models, and for a module of which no call
            with gradients enabled was seen.
        weights: the sketch of the parameters in the first call with gradients enabled; () if an optimizer had begun a
            step for them before this call.
        output, dtype: the sketch of the first floating tensor in the output of this call, and its dtype.
        gradient: the sketch of the unscaled gradients in the first step whose gradients are finite.
        update, last_update: the L2 norms of the changes of the parameters in the step of `gradient` and in the last
            step; None without such a step.
        last_gradient: the L2 norm of the unscaled gradients in the last step; None without any.
    """

    kind: ClassVar[str] = "module_numbers"

    module: str
    type: str
    weights: tuple[float, ...] = ()
    output: tuple[float, ...] = ()
    dtype: str = ""
    gradient: tuple[float, ...] = ()
    update: float | None = None
    last_gradient: float | None = None
    last_update: float | None = None


@dataclass(frozen=True, slots=True)
class StepNormsRecord:
    """L2 norms over all parameters of an optimizer, a value for each step of each optimizer, in the order of steps.

    Attributes:
        gradients, updates: the norms of the unscaled gradients, and of the changes of the parameters.
    """

    kind: ClassVar[str] = "step_norms"

    gradients: tuple[float, ...]
    updates: tuple[float, ...]


SKETCH = 16
"""The number of values of a sketch: it estimates the norm of a difference within a factor of 1.4 in 93 of 100 cases."""
