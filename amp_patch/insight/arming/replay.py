"""`Replay`: repeats a step whose calls a `Tape` has kept. A tracer looks at the ops, and finds the faults: values that
do not fit into their dtype, such as inf.

Afterwards, gradients, buffers and the generators of random numbers are as they were before the repetition.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ... import events
from ...casting import cast_tree, compiling
from ...session import Session
from ...training import unscaling
from ..sites import repeat
from ..tracer import Tracer
from .call_watch import tensors_of
from .obstacles import find_obstacle, unwrap_parallel
from .surroundings import ModuleState, RandomState, read_version, restored
from .tape import Call, Given, Kind, Made, Tape, has_graph


@dataclass
class Replayed:
    """The result of a replay, apart from the faults.

    Attributes:
        differences: sentences about what differed from the first time, or could not be followed.
        obstacle: why the step could not be repeated to its end; "" if nothing prevented it.
        micro_batch: the number, from 0, of the loss in whose forward or backward pass the first fault came; None if it
            came in no such pass, or if there was no fault.
        micro_batches: the number of losses in the step.
        is_repeated: False if the previous step has made weights that are not finite. Then no repetition is tried.
    """

    differences: list[str] = field(default_factory=list)
    obstacle: str = ""
    micro_batch: int | None = None
    micro_batches: int = 0
    is_repeated: bool = True


class Replay:
    """Repeats one step.

    Args:
        tape: the calls of the step.
        session: the session in force.
        tracer: looks at the ops.
    """

    def __init__(self, tape: Tape, session: Session, tracer: Tracer) -> None:
        self._tape = tape
        self._session = session
        self._tracer = tracer
        self._results: dict[int, list[Tensor]] = {}  # of the repeated calls, by the id of the call
        # by the id of an input that has a graph, but was made by no call on the tape: the input, detached
        self._cut: dict[int, Tensor] = {}
        self._scale = 1.0
        self._replayed = Replayed()

    def run(self, begin: Callable[[], None], optimizer: Optimizer | None, *, is_skipped: bool | None) -> Replayed:
        """Repeat the calls, unless there is an obstacle. Return how that went. Afterwards, the tracer has the faults.

        Args:
            begin: a function that starts the tracer.
            optimizer: the optimizer that is about to step; None if no optimizer is.
            is_skipped: whether the optimizer will skip its step; None if no step will come.
        """
        replayed = self._replayed
        models = {id(call.function): call.function for call in self._tape.calls if call.kind is Kind.MODEL}
        replayed.obstacle = self._find_obstacle(list(models.values()))
        replayed.micro_batches = sum(call.kind is Kind.LOSS for call in self._tape.calls)
        if replayed.obstacle:
            return replayed
        optimizers = [*self._session.optimizers(), *([] if optimizer is None else [optimizer])]
        assigned = self._find_assigned()
        with _kept(self._session, [*models.values(), *self._session.models()], optimizers):
            begin()
            renormed = {id(weight) for model in models.values() for weight in _find_renormed(model.modules())}
            kept = [(weight, read_version(weight)) for weight in self._holders() if id(weight) not in renormed]
            try:
                self._repeat_all()
                for holder, made in assigned:
                    holder.grad = self._find(made).detach()
            except Exception as error:
                replayed.obstacle = f"its repetition ended with {type(error).__name__}: {error}".partition("\n")[0]
            if any(read_version(weight) != version for weight, version in kept):
                self._note("the calls change weights, and their repetition has changed them again")
            self._tracer.judge_step(None if replayed.obstacle else optimizer, is_skipped=is_skipped)
        self._results.clear()
        return replayed

    def _find_obstacle(self, models: Sequence[nn.Module]) -> str:
        """Return why the step cannot be repeated, or ""."""
        if self._tape.is_too_long:
            return "the step has too many calls outside of modules to be kept"
        if not models:
            return "the step called no model that could be followed"
        for call in self._tape.calls:
            if call.obstacle:
                return call.obstacle
        return next(filter(None, map(find_obstacle, models)), "")

    def _find_assigned(self) -> list[tuple[Tensor, Made]]:
        """Return the parameters whose `.grad` is the result of a call on the tape, each with this result.

        The script has assigned such a gradient, for example a result of `torch.autograd.grad`.
        """
        gradients = [(holder, holder.grad) for holder in self._holders() if holder.grad is not None]
        makers = [(holder, self._tape.find_maker(gradient)) for holder, gradient in gradients]
        return [(holder, made) for holder, made in makers if made is not None]

    def _repeat_all(self) -> None:
        losses = 0
        for call in self._tape.calls:
            self._repeat(call)
            losses += call.kind is Kind.LOSS
            # a fault of a forward pass belongs to the next loss; a fault of a loss or a backward pass, to the last loss
            if self._tracer.fault_count and self._replayed.micro_batch is None:
                is_of_last = call.kind in (Kind.LOSS, Kind.BACKWARD)
                number = losses - 1 if is_of_last else losses
                if 0 <= number < self._replayed.micro_batches:
                    self._replayed.micro_batch = number

    def _repeat(self, call: Call) -> None:
        if call.has_raised:  # the script has caught its error
            return
        if call.random is not None:
            call.random.restore()
        with self._tracer.looking_away():
            for state in call.states:
                state.restore()
        args, kwargs = self._resolve(call.args), self._resolve(call.kwargs)
        with restored(call.around, self._session):
            if call.kind is Kind.LOSS:
                self._note_loss(call, *args)
                return
            if call.kind is Kind.BACKWARD:
                self._go_backward(call, args, kwargs)
                return
            is_model = call.kind is Kind.MODEL
            if is_model and call.function.training is not call.is_training:
                call.function.train(call.is_training)
            function = unwrap_parallel(call.function) if is_model else self._find_patched(call.function)
            result = repeat(call.caller, function, args, kwargs)
        results = tensors_of(result)
        if getattr(call.function, "__name__", "") == "__setitem__":
            results = [args[0]]
        self._results[id(call)] = results
        with self._tracer.looking_away():
            self._compare(call, results)

    # ---- arguments ---------------------------------------------------------------------------------------------------

    def _resolve(self, values: Any) -> Any:
        return cast_tree(values, self._find, (Made, Given))

    def _find(self, named: Made | Given) -> Tensor:
        """Return the tensor to use in this repetition in place of an argument on the tape."""
        if isinstance(named, Made):
            results = self._results.get(id(named.call), [])
            if named.position >= len(results):
                raise RuntimeError("a call returned fewer tensors than the first time")
            return results[named.position]
        tensor = named.tensor
        if read_version(tensor) != named.version:
            self._note("an input was changed in place after it was used")
        if not has_graph(tensor):
            return tensor
        # The graph of this tensor may be freed already. If not, the repetition would free it for the script. So detach.
        if id(tensor) not in self._cut:
            self._cut[id(tensor)] = tensor.detach().requires_grad_()
        return self._cut[id(tensor)]

    def _find_patched(self, function: Any) -> Any:
        """Return the function to call for a function on the tape. If it is patched now, this is its replacement, which
        casts, and whose calls the tracer sees. Else it is the function itself.
        """
        for owner, name, original, replacement in self._session.patcher.attributes():
            if function is original or function is replacement:
                return getattr(owner, name)
        return function

    # ---- losses and gradients ----------------------------------------------------------------------------------------

    def _note_loss(self, call: Call, loss: Tensor, scaled_loss: Tensor) -> None:
        self._scale = 1.0 if call.scale is None else call.scale()
        self._tracer.loss_scaled(loss, scaled_loss)
        self._tracer.set_scale(self._scale)
        first = call.loss
        with self._tracer.looking_away():
            loss = loss.detach()
            is_unchanged = first is not None and read_version(first.tensor) == first.version
            if first is not None and is_unchanged and not _are_equal(first.tensor, loss):
                self._note(f"the loss is {float(loss.mean()):.9g}, and was {float(first.tensor.mean()):.9g}")

    def _go_backward(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Repeat a backward pass. Then unscale the gradients, and move them to the float32 masters if there are any."""
        scale = None
        if self._scale != 1.0:
            scale = torch.tensor(self._scale, dtype=torch.float32, device=self._session.device_type)
            gradients = [holder.grad for holder in self._holders() if holder.grad is not None]
            unscaling.rescale_(gradients, scale)
        models = [known for known in self._tape.calls if known.kind is Kind.MODEL]
        passed_on = {id(source) for known in models for source in known.sources}
        # a result that is an input of another model gets its gradient from the backward pass of that model
        arrived = [
            (self._find(made), gradient)
            for made, gradient in call.arrived
            if id(made.call) in self._results and id(made.call) not in passed_on
        ]
        if arrived:
            args, kwargs = ([result for result, _ in arrived], [gradient for _, gradient in arrived]), {}
        if call.is_cut:
            self._note("its loss was made by code that cannot be followed, between the models and the backward pass")
        backward = inspect.unwrap(torch.autograd.backward)
        repeat(call.caller, backward, args, kwargs)
        pairs = [pair for pairs in self._pairs_with_masters() for pair in pairs]
        paired = {id(parameter) for parameter, _ in pairs}
        plain = [holder for holder in self._holders() if id(holder) not in paired]
        gradients = [holder.grad for holder in plain if holder.grad is not None]
        if scale is not None:
            unscaling.unscale_(gradients, scale, None)
        unscaling.move_to_masters_(pairs, scale, None)

    def _pairs_with_masters(self) -> Iterator[Sequence[tuple[Tensor, Tensor]]]:
        for binding in self._session.bindings.optimizers():
            yield binding.flags.groups.read()[1]

    def _holders(self) -> list[Tensor]:
        """Return the parameters of the session's models and optimizers, each once."""
        return _find_holders(self._session.models(), self._session.optimizers())

    # ---- comparing ---------------------------------------------------------------------------------------------------

    def _compare(self, call: Call, results: Sequence[Tensor]) -> None:
        """Compare the results of a repeated call with its first results that are still alive and unchanged. Note the
        first difference.
        """
        for (reference, version), result in zip(call.made, results, strict=False):
            first = reference()
            if first is None or first is result or read_version(first) != version:
                continue
            if not _are_equal(first, result):
                name = type(call.function).__name__ if call.kind is Kind.MODEL else call.function.__name__
                self._note(f"{name} returned other values than the first time")
                return

    def _note(self, difference: str) -> None:
        if difference not in self._replayed.differences:
            self._replayed.differences.append(difference)


def _are_equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and values. NaN equals NaN.

    If `first` is not strided, for example sparse, the values are not compared.
    """
    if first.shape != second.shape or first.dtype is not second.dtype:
        return False
    if first.layout is not torch.strided:
        return True
    same = first.detach() == second.detach()
    if first.is_floating_point() or first.is_complex():
        same |= first.detach().isnan() & second.detach().isnan()
    return bool(same.all())


@contextlib.contextmanager
def _kept(session: Session, models: Iterable[nn.Module], optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Context manager for a repetition. Afterwards, it restores gradients, buffers, attributes of modules, the weights
    that `_find_renormed` finds, and the generators of random numbers.

    In the block, gradients start as None, buffers and these weights are copies, forward passes do not copy edited
    weights to the float32 masters, `events.watchers` is empty, and functions of torch.compile run uncompiled.
    """
    modules = {id(module): module for model in models for module in model.modules()}
    states = [ModuleState(module, copies=False) for module in modules.values()]
    holders = _find_holders(list(modules.values()), optimizers)
    gradients = [(holder, holder.grad) for holder in holders]
    random = RandomState(session.device_type, has_python=True)
    watchers = list(events.watchers)
    with contextlib.ExitStack() as undo:
        undo.callback(session.drop_casts)
        if compiling.is_dynamo_imported():
            undo.callback(compiling.run_eagerly())
        undo.callback(setattr, session.bindings.masters, "is_paused", False)
        undo.callback(events.watchers.__setitem__, slice(None), watchers)
        undo.callback(random.restore)
        for holder, gradient in gradients:
            undo.callback(setattr, holder, "grad", gradient)
        for state in states:
            undo.callback(state.restore)
        for weight in _find_renormed(modules.values()):
            undo.callback(setattr, weight, "data", weight.data)
            weight.data = weight.data.clone()
        session.bindings.masters.is_paused = True
        events.watchers.clear()
        for holder in holders:
            holder.grad = None
        for state in states:
            state.set_scratch_buffers()
        yield


def _find_renormed(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the weights that a forward pass changes in place: the weights of embeddings with `max_norm`."""
    weights: dict[int, Tensor] = {}
    for module in modules:
        weight = getattr(module, "weight", None)
        if getattr(module, "max_norm", None) is not None and isinstance(weight, Tensor):
            weights[id(weight)] = weight
    return list(weights.values())


def _find_holders(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters of modules and optimizers, each once. Those of an optimizer may be float32 masters."""
    holders: dict[int, Tensor] = {}
    for module in modules:
        for parameter in module.parameters():
            holders[id(parameter)] = parameter
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                holders[id(parameter)] = parameter
    return list(holders.values())
