"""`ContractProbe`: measures in one run the numbers and ops that a contract promises."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...native import Misuse
from ...session import Session, current
from ..comparing.probes import CurveProbe, find_floating, is_layer, name_layers
from ..numbers_record import SKETCH, ModuleNumbersRecord, OptimizerRecord, StepNormsRecord
from ..recorder import Recorder
from ..recordings import Record
from ..rules import short

RECORDED = 1
"""The number of the step whose ops are recorded, from 0. Step 0 is not typical: it fills the cache of cast weights."""


_Owner = int | str
"""The id of a module, or a text that describes a parameter outside of the models."""


class ContractProbe(CurveProbe):
    """Records the losses, the ops of the second step, and numbers of modules, optimizers and steps.

    Waits for the device at each layer in its first call with gradients enabled, and in each step at each gradient and
    each update of a parameter.

    Args:
        steps: the number of steps.
        is_noise: whether to move the weights by one unit in the last place before each step.
        threads: the number of threads that ops use; None: as the script sets it.
        on_end: called after the last step.
    """

    def __init__(
        self,
        steps: int,
        is_noise: bool = False,
        threads: int | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._ops = Recorder(RECORDED, RECORDED + 1, counts_before=False)
        self._modules = _ModuleNumbers(self._ops.paused)
        self._optimizers: dict[int, list[OptimizerRecord]] = {}  # by the id of the optimizer
        self._gradients: list[float] = []  # the norm in each step of an optimizer
        self._updates: list[float] = []  # the norm in each step of an optimizer
        self._before: dict[int, list[Tensor]] = {}  # copies of the weights at the start of a step, by optimizer id
        self._threads = threads
        self._threads_before: int | None = None
        super().__init__(steps, is_noise=is_noise, on_end=on_end)

    def session_opened(self, session: Session) -> None:
        """Begin to watch. Called again when a session gets more models."""
        if self._threads is not None and self._threads_before is None:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(self._threads)
        self._modules.watch(session)
        super().session_opened(session)
        self._ops.session_opened(session)

    def session_closing(self, session: Session) -> None:
        """Stop."""
        self._ops.session_closing(session)
        super().session_closing(session)

    def loss_scaled(self, loss: Tensor, scaled_loss: Tensor) -> None:
        """Keep the loss until the end of the step."""
        super().loss_scaled(loss, scaled_loss)
        self._ops.loss_scaled(loss, scaled_loss)

    def misused(self, misuse: Misuse) -> None:
        """Record a wrong use of GradScaler or autocast."""
        self._ops.misused(misuse)

    def step_begun(self, optimizer: Optimizer) -> None:
        """Measure the gradients, and keep a copy of the weights."""
        super().step_begun(optimizer)
        self._ops.step_begun(optimizer)
        self._take_settings(optimizer)
        parameters = _list_parameters(optimizer)
        gradients = self._modules.take_gradients(parameters)
        self._gradients.append(gradients)
        self._before[id(optimizer)] = [parameter.detach().clone() for parameter in parameters]

    def step_ended(self, optimizer: Optimizer) -> None:
        """Measure the changes of the weights, and record the step."""
        self._take_settings(optimizer)  # again, because a step with a closure reports only its end
        before = self._before.pop(id(optimizer), None)
        if before is not None:
            self._updates.append(self._modules.take_updates(_list_parameters(optimizer), before))
        self._ops.step_ended(optimizer)
        super().step_ended(optimizer)

    def _take_settings(self, optimizer: Optimizer) -> None:
        """Keep the settings of an optimizer, at the first call for it."""
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = list(_describe_settings(len(self._optimizers), optimizer))

    def stop(self) -> None:
        """Stop watching, and restore the number of threads. Harmless twice."""
        super().stop()
        self._ops.stop()
        self._modules.stop()
        self._before.clear()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None

    def _records(self) -> Iterable[Record]:
        yield from super()._records()
        for records in self._optimizers.values():
            yield from records
        yield from self._modules.records()
        yield StepNormsRecord(tuple(self._gradients), tuple(self._updates))
        if self._ops.run is not None:
            yield from self._ops.recording.records


class _ModuleNumbers:
    """Collects the fields of a `ModuleNumbersRecord` for each module. Dicts are by owner: see `_find_owners`.

    Args:
        pause: makes a context in which ops are not recorded, for the ops of the measurements.
    """

    def __init__(self, pause: Callable[[], AbstractContextManager[None]]) -> None:
        self._pause = pause
        self._names: dict[int, tuple[nn.Module, str]] = {}  # by the id of the module
        self._handle: RemovableHandle | None = None
        self._stepped: set[int] = set()  # the ids of parameters of optimizers that have begun a step
        self._types: dict[_Owner, str] = {}
        self._weights: dict[_Owner, tuple[float, ...]] = {}
        self._outputs: dict[_Owner, tuple[tuple[float, ...], str]] = {}  # the sketch, and the dtype
        self._gradients: dict[_Owner, tuple[float, ...]] = {}
        self._updates: dict[_Owner, float] = {}
        self._last_gradients: dict[_Owner, float] = {}
        self._last_updates: dict[_Owner, float] = {}

    def watch(self, session: Session) -> None:
        """Watch the modules of a session from their first call on.

        A module may get another name here: the only model has no prefix until the script calls a second one.
        """
        self._names.update(name_layers(session))
        if self._handle is None:
            self._handle = register_module_forward_hook(self._take_output)

    def stop(self) -> None:
        """Stop watching. Harmless twice."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _take_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """A global forward hook: measure the output of a layer in its first call with gradients enabled. Measure its
        weights, too, unless an optimizer may have changed them.
        """
        owner = id(module)
        if owner not in self._names or owner in self._types or not torch.is_grad_enabled() or not is_layer(module):
            return
        self._types[owner] = type(module).__name__
        tensor = find_floating(output)
        with current.without_casts(), self._pause():
            if not self._has_stepped(module):
                self._weights[owner] = sketch_all(list(module.parameters(recurse=False)))
            if tensor is not None:
                self._outputs[owner] = sketch_all([tensor]), short(tensor.dtype)

    def _has_stepped(self, module: nn.Module) -> bool:
        """Return whether an optimizer has begun a step for a parameter of the module, so that it may have changed."""
        find_master = current.require().find_master
        weights = list(module.parameters(recurse=False))
        masters = [master for master in map(find_master, weights) if master is not None]
        return not self._stepped.isdisjoint(map(id, (*weights, *masters)))

    def take_gradients(self, parameters: Sequence[Tensor]) -> float:
        """Measure the unscaled gradients of parameters, by module. Return the norm of all of them.

        The sketch of a module is made in the first step in which all gradients are finite: other steps may be skipped,
        and clipping by an infinite norm may have made their finite gradients zero.
        """
        self._stepped.update(map(id, parameters))
        with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
        sum_of_squares = 0.0
        gradients_by_owner: dict[_Owner, list[Tensor]] = {}
        for parameter, owner in zip(with_gradients, self._find_owners(with_gradients), strict=True):
            assert parameter.grad is not None
            gradients_by_owner.setdefault(owner, []).append(parameter.grad)
        for owner, gradients in gradients_by_owner.items():
            norm = math.hypot(*(float(_norm(gradient)) for gradient in gradients))
            sum_of_squares += norm * norm
            self._last_gradients[owner] = norm
        for owner, gradients in gradients_by_owner.items() if math.isfinite(sum_of_squares) else ():
            if owner not in self._gradients:
                self._gradients[owner] = sketch_all(gradients)
        return math.sqrt(sum_of_squares)

    def take_updates(self, parameters: Sequence[Tensor], before: Sequence[Tensor]) -> float:
        """Measure the changes of parameters since `before`, by module. Return the norm of all of them."""
        sums_of_squares: dict[_Owner, float] = {}
        for parameter, value_before, owner in zip(parameters, before, self._find_owners(parameters), strict=True):
            change = float(_norm(parameter.detach().float() - value_before.float()))
            sums_of_squares[owner] = sums_of_squares.get(owner, 0.0) + change * change
        for owner, sum_of_squares in sums_of_squares.items():
            self._last_updates[owner] = math.sqrt(sum_of_squares)
            # the first update that counts is the one of the first step with finite gradients
            if owner in self._gradients:
                self._updates.setdefault(owner, math.sqrt(sum_of_squares))
        return math.sqrt(sum(sums_of_squares.values()))

    def _find_owners(self, parameters: Sequence[Tensor]) -> list[_Owner]:
        """Return the owner of each parameter: the id of the module that has the parameter or, for a float32 master, its
        weight. For a parameter outside of the models, the owner is a text with its shape.
        """
        session = current.require()
        layers = name_layers(session)
        self._names.update(layers)  # the script may have added modules to a model
        owners: dict[int, int] = {}
        for module, _ in layers.values():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), id(module))
                master = session.find_master(parameter)
                if master is not None:
                    owners.setdefault(id(master), id(module))
        return [owners.get(id(parameter), f"parameter of shape {tuple(parameter.shape)}") for parameter in parameters]

    def records(self) -> Iterable[ModuleNumbersRecord]:
        """Yield a record for each owner (see `_find_owners`), in the order of first calls; those without a call last.
        Of several owners with one name, yield only the first.
        """
        names: set[str] = set()
        for owner in dict.fromkeys([*self._types, *self._last_updates]):
            name = owner if isinstance(owner, str) else self._names[owner][1]
            if name in names:
                continue
            names.add(name)
            output, dtype = self._outputs.get(owner, ((), ""))
            yield ModuleNumbersRecord(
                name,
                self._types.get(owner, ""),
                self._weights.get(owner, ()),
                output,
                dtype,
                self._gradients.get(owner, ()),
                self._updates.get(owner),
                self._last_gradients.get(owner),
                self._last_updates.get(owner),
            )


def _list_parameters(optimizer: Optimizer) -> list[Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _describe_settings(number: int, optimizer: Optimizer) -> Iterable[OptimizerRecord]:
    """Yield a record of the settings of each parameter group. `number` is the number of the optimizer."""
    for place, group in enumerate(optimizer.param_groups):
        settings = []
        for name, value in group.items():
            if isinstance(value, Tensor) and value.numel() == 1:  # such as the learning rate of a capturable optimizer
                value = value.item()
            if name != "params" and _is_setting(value):
                settings.append(f"{name}={value!r}")
        yield OptimizerRecord(number, type(optimizer).__name__, place, tuple(sorted(settings)))


def _is_setting(value: object) -> bool:
    """Return whether a value is a number, text, None, or a sequence of these."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_setting, value))
    return value is None or isinstance(value, (bool, int, float, str))


@torch.no_grad()
def _norm(tensor: Tensor) -> Tensor:
    """Return the L2 norm in float32."""
    norm: Tensor = torch.linalg.vector_norm(_flatten(tensor))
    return norm


def _flatten(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor in float32, shape (n,)."""
    if hasattr(tensor, "to_local"):  # of a DTensor, this rank's shard
        tensor = tensor.to_local()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.detach().float().reshape(-1)


@torch.no_grad()
def sketch_all(tensors: Sequence[Tensor]) -> tuple[float, ...]:
    """Return one sketch of several tensors: see `ModuleNumbersRecord`. () if none has floating values.

    A sketch has `SKETCH` (16) values; value number i is the sum of the elements i, i + 16, i + 32, ... of each tensor,
    each with a random sign. The signs come from a generator of their own, so the random numbers of the run stay the
    same. Tensors on the meta device add nothing. Waits for the device.
    """
    total: Tensor | None = None
    for place, tensor in enumerate(tensors):
        if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
            continue
        flat = _flatten(tensor)
        generator = torch.Generator("cpu").manual_seed(place)
        signs = torch.randint(2, flat.shape, generator=generator, dtype=torch.int8, device="cpu")
        signed = flat * signs.mul_(2).sub_(1).to(flat.device)
        padded = nn.functional.pad(signed, (0, -len(signed) % SKETCH))
        sketch = padded.view(-1, SKETCH).sum(0).cpu()
        total = sketch if total is None else total + sketch
    if total is None:
        return ()
    return tuple(float(f"{value:.7g}") for value in total.tolist())
