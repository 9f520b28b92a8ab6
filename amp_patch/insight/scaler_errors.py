"""Explains exceptions of `torch.amp.GradScaler` and of optimizers by the weights, gradients or calls behind them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..native import Kind, Misuse
from ..session import Session
from .failing_call import Levels
from .fault_record import Phase
from .misuse_record import MisuseRecord, record_misuse
from .module_casts import casts
from .origins import Origins
from .raised_record import Operand, OperandOrigin, RaisedCause, RaisedRecord
from .rules import short
from .sites import find_low_lines, find_site

_SCALER, _OPTIMIZERS = "torch/amp/grad_scaler.py", "torch/optim/"
_MOST_NODES = 200_000  # of the graph of a loss
_MOST_NAMES = 3  # of parameters, or lines of the script, in a line of a report


@dataclass(frozen=True)
class _Loss:
    """The last loss of the script.

    Attributes:
        site: the line that scaled it. For a loss that was not scaled, the line of its backward pass.
        has_graph: whether it has a `grad_fn`, so that gradients flow from it.
        leaves: ids of the leaves of its graph: the tensors that get its gradients.
        is_cut_off: whether none of the leaves is a parameter.
    """

    site: str
    has_graph: bool
    leaves: frozenset[int]
    is_cut_off: bool

    @property
    def trains_nothing(self) -> bool:
        """Whether no gradient flows from this loss to a parameter."""
        return not self.has_graph or self.is_cut_off


class ScalerErrors:
    """Keeps the last loss of the script, and the reasons for which GradScaler has refused calls."""

    def __init__(self) -> None:
        self._loss: _Loss | None = None
        self._training_lines: set[str] = set()  # lines of losses that were computed from parameters
        self._refusals: dict[str, MisuseRecord] = {}  # by the note on the exception
        self._misuses: dict[str, Misuse] = {}  # by the note on the exception

    def note_loss(self, loss: Tensor) -> None:
        """Note a loss that is scaled, or whose backward pass begins."""
        leaves = _find_leaves(loss)
        is_cut_off = not any(isinstance(leaf, nn.Parameter) for leaf in leaves)
        self._loss = _Loss(find_site().place, loss.grad_fn is not None, frozenset(map(id, leaves)), is_cut_off)
        if not self._loss.trains_nothing:
            self._training_lines.add(self._loss.site)

    def note_refusal(self, misuse: Misuse, step: int) -> None:
        """Note the reason for which GradScaler has raised an exception."""
        self._misuses[misuse.note] = misuse
        self._refusals.setdefault(misuse.note, record_misuse(misuse, step))

    @property
    def refusals(self) -> list[MisuseRecord]:
        """Records of the refused calls that `explain` has not explained, such as calls whose exception was caught."""
        return list(self._refusals.values())

    # ---- exceptions --------------------------------------------------------------------------------------------------

    def explain(
        self, error: BaseException, levels: Levels, empty: RaisedRecord, session: Session
    ) -> RaisedRecord | None:
        """Return the record of an exception that GradScaler itself has raised; None for another exception.

        In a script without `amp.initialize`, also return None if `note_refusal` was not called for the exception.
        `empty` is a record that has the facts which are known for every exception, and no others.
        """
        innermost = levels.all[-1] if levels.all else None
        if innermost is None or not innermost.file.endswith(_SCALER):
            return None
        empty = replace(empty, phase=Phase.STEP, op=f"GradScaler.{_find_method(levels)}")
        if not session.gives_way:
            return _explain_two_scales(empty, session)
        note = next((note for note in getattr(error, "__notes__", ()) if note in self._misuses), "")
        if not note:
            return None
        self._refusals.pop(note, None)
        misuse, optimizer = self._misuses[note], levels.find_local(_SCALER, "optimizer")
        match misuse.kind:
            case Kind.LOW_WEIGHTS:
                return _explain_low_weights(optimizer, empty, session, levels)
            case Kind.NO_GRADIENTS:
                return self._explain_no_gradients(optimizer, empty, session)
        return _explain_order(misuse, empty, self._loss)

    def _explain_no_gradients(self, optimizer: Optimizer, empty: RaisedRecord, session: Session) -> RaisedRecord:
        weights = list(_weights_of(optimizer))
        details, edit = self._find_reason(weights, session, empty.called_from or empty.site or "")
        first = f"none of the {len(weights)} parameters of {type(optimizer).__name__} has a gradient"
        return replace(empty, cause=RaisedCause.NO_GRADIENTS, details=(first, *details), edits=(edit,))

    def _find_reason(self, weights: Sequence[Tensor], session: Session, site: str) -> tuple[list[str], str]:
        """Return why the parameters of an optimizer have no gradients, and the edit of the script."""
        loss, names = self._loss, _name(weights, session)
        if not any(weight.requires_grad for weight in weights):
            return (
                [f"all are frozen: requires_grad=False ({names})"],
                "only parameters with requires_grad=True in the optimizer, or requires_grad_(True) before it is made",
            )
        if loss is None:
            return (
                ["no loss had a backward pass since the recording began"],
                "scaler.scale(loss).backward() before scaler.step(optimizer)",
            )
        depends = any(id(weight) in loss.leaves for weight in weights)
        if loss.trains_nothing and not depends and loss.site in self._training_lines:
            return (
                [f"the loss at {loss.site} depends on no parameter this time, while earlier losses did"],
                f"for a batch that adds nothing to the loss, skip {loss.site} and this step (if not loss.grad_fn:"
                " continue), or make the loss 0 * output.sum()",
            )
        if loss.trains_nothing and not depends:
            return (
                [f"the loss at {loss.site} has no autograd graph that leads to a parameter, so no gradient flows"],
                f"pass on the loss as the model computes it, at {loss.site}, without .item(), .detach(), no_grad or"
                " torch.tensor(...)",
            )
        if not depends:
            of_models = {id(weight) for model in session.models() for weight in model.parameters()}
            if not any(id(weight) in of_models for weight in weights):
                return (
                    ["they belong to no model that was called: perhaps the model was copied, made again or converted"],
                    "make the optimizer after the model, from the parameters of the model that is trained",
                )
            return (
                [f"the loss at {loss.site} does not depend on them ({names})"],
                f"leave out the step of this optimizer where no loss depends on its parameters ({site}); or let the"
                " loss depend on them, without .detach() or no_grad on the way",
            )
        return (
            [
                f"the loss at {loss.site} depends on them: its backward pass did not run, or left them out, or"
                " zero_grad() came after it"
            ],
            "scaler.scale(loss).backward() before scaler.step(optimizer), and no optimizer.zero_grad() in between",
        )


def _explain_two_scales(empty: RaisedRecord, session: Session) -> RaisedRecord:
    """Return the record of an exception of a GradScaler in a script that also calls `amp.initialize`."""
    level = session.policy.opt_level
    return replace(
        empty,
        cause=RaisedCause.TWO_SCALES,
        details=(f"amp_patch.initialize is in force at {level}, and has a loss scale of its own",),
        edits=(
            "no GradScaler: with amp_patch.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward(), then"
            " optimizer.step()",
        ),
    )


def _explain_order(misuse: Misuse, empty: RaisedRecord, loss: _Loss | None) -> RaisedRecord:
    """Return the record of a misuse other than float16 weights and missing gradients."""
    here, details = empty.site or "", tuple(f"since the last update(), {call}" for call in misuse.earlier)
    first = misuse.earlier[0].rpartition(" ")[2] if misuse.earlier else ""
    match misuse.kind:
        case Kind.UNSCALED_TWICE if first == here:
            edit = (
                "scaler.update() at the end of each step, also of one in which the script leaves out"
                f" scaler.step(optimizer); with accumulated gradients, {here} only before the step"
            )
        case Kind.UNSCALED_TWICE if any(call.startswith("backward") for call in misuse.earlier):
            edit = (
                f"leave out {first}: scaler.unscale_(optimizer) only after the last backward pass of the step;"
                " or, if this is the next step, scaler.update() at the end of each step"
            )
        case Kind.UNSCALED_TWICE:
            edit = f"leave out {here}: the gradients are unscaled already"
        case Kind.MISSING_UPDATE if empty.op.endswith("unscale_") and len(misuse.earlier) > 1:
            edit = f"leave out {here}; or, if this is the next step, scaler.update() at the end of each step"
        case Kind.MISSING_UPDATE if empty.op.endswith("unscale_"):
            edit = f"scaler.unscale_(optimizer) of {here} before scaler.step(optimizer), and scaler.update() after it"
        case Kind.MISSING_UPDATE:
            edit = f"scaler.update() once in each step, after the last scaler.step ({here})"
            stepped = next((call.rpartition(" ")[2] for call in misuse.earlier if call.startswith("step")), here)
            if stepped != here:
                edit += f"; or, if this is still the same step, leave out {here} or {stepped}"
        case Kind.UNSCALED_LOSS:
            details = ("no loss was scaled before: this GradScaler has no scale yet",)
            edit = "scaler.scale(loss).backward() in place of loss.backward()"
            if loss is not None:
                edit = f"{loss.site}: {edit}"
        case _:
            details, edit = (f"{misuse.line}: {misuse.effect}",), misuse.edit
    return replace(empty, cause=RaisedCause.SCALER_ORDER, details=details, edits=(edit,))


def _find_method(levels: Levels) -> str:
    """Return the name of the method of GradScaler that the script has called: the outermost among the frames."""
    return next(level.frame.f_code.co_name for level in levels.all if level.file.endswith(_SCALER))


def _weights_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _name(weights: Sequence[Tensor], session: Session) -> str:
    """Return the names of the first three parameters, and "..." if there are more."""
    names = session.names_of(weights[:_MOST_NAMES])
    return ", ".join([*names, "..."] if len(weights) > _MOST_NAMES else names)


def _explain_low_weights(optimizer: Optimizer, empty: RaisedRecord, session: Session, levels: Levels) -> RaisedRecord:
    """Return the record of an exception about float16 gradients, which a GradScaler does not unscale."""
    low = [
        weight
        for weight in _weights_of(optimizer)
        if weight.grad is not None and weight.grad.dtype is torch.float16  # the only dtype that GradScaler refuses
    ]
    names = session.names_of(low)
    operands: dict[tuple[str, str], Operand] = {}
    for name, weight in zip(names, low, strict=True):
        rule = casts.find(weight)
        operand = Operand(name, short(weight.dtype), OperandOrigin.WEIGHT, name, "", "", rule)
        operands.setdefault((operand.dtype, rule), operand)
    total = sum(1 for _ in _weights_of(optimizer))
    lines = list(dict.fromkeys(filter(None, map(casts.find, low))))
    made = f"no {' and no '.join(lines)}" if lines else "no .half(), dtype=torch.float16 or torch_dtype=torch.float16"
    details = [f"{len(low)} of {total} parameters of {type(optimizer).__name__} have float16 gradients"]
    named = find_low_lines(levels.own.file) if levels.own is not None and not lines else []
    if named:
        details.append(f"lines that name a 16-bit dtype: {', '.join(named[:_MOST_NAMES])}")
    return replace(
        empty,
        cause=RaisedCause.LOW_WEIGHTS,
        operands=tuple(operands.values()),
        details=tuple(details),
        edits=(
            f"make the trained weights float32: {made}, or model.float() before the optimizer is made. torch.autocast"
            " runs the ops in 16 bits",
            'or amp_patch.initialize(model, optimizer, opt_level="O2") with amp_patch.scale_loss in place of the'
            " GradScaler: float32 masters of 16-bit weights",
        ),
    )


def find_optimizer(levels: Levels) -> Optimizer | None:
    """Return the optimizer whose method was running; None without one."""
    holders = [level.frame.f_locals.get("self") for level in levels.all if _OPTIMIZERS in level.file]
    return next((holder for holder in reversed(holders) if isinstance(holder, Optimizer)), None)


def is_of_own_optimizer(levels: Levels) -> bool:
    """Return whether the exception came from the script's own code, and not from torch.optim or a package."""
    inner = levels.innermost
    if inner is None or inner.is_in_package:
        return False
    following = levels.all[levels.all.index(inner) + 1 :]
    return not any(_OPTIMIZERS in level.file for level in following)


def describe_dtypes(optimizer: Optimizer, session: Session) -> list[str]:
    """Return lines about the dtypes of the weights, gradients and state of an optimizer."""
    kinds: dict[str, dict[str, Tensor]] = {}  # for each kind of tensor and dtype: the first weight with it
    for weight in _weights_of(optimizer):
        tensors = {"weights": weight, "gradients": weight.grad, **optimizer.state.get(weight, {})}
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and name != "step":
                kinds.setdefault(name, {}).setdefault(short(tensor.dtype), weight)
    lines = []
    for name, dtypes in kinds.items():
        described = [f"{dtype} ({_name([weight], session)})" for dtype, weight in dtypes.items()]
        lines.append(f"{name} of {type(optimizer).__name__}: {', '.join(described)}")
    return lines


def advise_optimizer(optimizer: Optimizer, origins: Origins) -> str:
    """Return the edit of a script whose optimizer raises an exception in the code of torch.optim or of a package."""
    weights = list(_weights_of(optimizer))
    state = [tensor for weight in weights for tensor in optimizer.state.get(weight, {}).values()]
    made = [origins.find(tensor) for tensor in state if isinstance(tensor, Tensor)]
    is_of_step = any(each is not None and each.call is not None and each.call.phase == Phase.STEP for each in made)
    if len({weight.dtype for weight in weights}) > 1 or is_of_step:
        return "an optimizer for each dtype, or all weights in float32 and the forward under torch.autocast"
    cast = next(filter(None, map(casts.find, weights)), "the last .half(), .bfloat16() or .to(dtype)")
    return f"the optimizer made after {cast}, not before it"


def _find_leaves(loss: Tensor) -> list[Tensor]:
    """Return the leaves of the graph of a loss. Look at no more than `_MOST_NODES` nodes."""
    leaves: list[Tensor] = []
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves.append(variable)
        waiting += [following for following, _ in node.next_functions]
    return leaves
