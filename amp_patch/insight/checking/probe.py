"""`ContractProbe`: measures in one run the numbers and ops that a contract promises."""

import math
from collections.abc import Callable, Iterable, Sequence
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


class ContractProbe(CurveProbe):
    """Records the losses, the ops of the second step, and numbers of modules, optimizers and steps.

    Waits for the device at each module in the first step, and in each step at each gradient and each update of a
    parameter.

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
        self._modules = _ModuleNumbers()
        self._optimizers: dict[int, list[OptimizerRecord]] = {}  # by the id of the optimizer
        self._gradients: list[float] = []  # the norm in each step
        self._updates: list[float] = []  # the norm in each step
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
        """Stop watching. Harmless twice."""
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
    """Collects the fields of a `ModuleNumbersRecord` for each module. Most dicts are by the name of the module."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[nn.Module, str]] = {}  # by the id of the module
        self._handle: RemovableHandle | None = None
        self._types: dict[str, str] = {}
        self._weights: dict[str, tuple[float, ...]] = {}
        self._outputs: dict[str, tuple[tuple[float, ...], str]] = {}  # the sketch, and the dtype
        self._gradients: dict[str, tuple[float, ...]] = {}
        self._updates: dict[str, float] = {}
        self._last_gradients: dict[str, float] = {}
        self._last_updates: dict[str, float] = {}

    def watch(self, session: Session) -> None:
        """Watch the modules of a session from their first call on."""
        self._names = name_layers(session)
        if self._handle is None:
            self._handle = register_module_forward_hook(self._take_output)

    def stop(self) -> None:
        """Stop watching. Harmless twice."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _take_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """Measure the weights and the output of a layer in its first call with gradients. A global forward hook."""
        _, name = self._names.get(id(module), (module, None))
        if name is None or name in self._types or not torch.is_grad_enabled() or not is_layer(module):
            return
        self._types[name] = type(module).__name__
        tensor = find_floating(output)
        with current.without_casts():
            self._weights[name] = sketch_all(list(module.parameters(recurse=False)))
            if tensor is not None:
                self._outputs[name] = sketch_all([tensor]), short(tensor.dtype)

    def take_gradients(self, parameters: Sequence[Tensor]) -> float:
        """Measure the unscaled gradients of parameters, by module. Return the norm of all of them."""
        with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
        sum_of_squares = 0.0
        gradients_by_module: dict[str, list[Tensor]] = {}
        for parameter, name in zip(with_gradients, _name_owners(with_gradients), strict=True):
            assert parameter.grad is not None
            gradients_by_module.setdefault(name, []).append(parameter.grad)
        for name, gradients in gradients_by_module.items():
            norm = math.hypot(*(float(_norm(gradient)) for gradient in gradients))
            sum_of_squares += norm * norm
            self._last_gradients[name] = norm
            if name not in self._gradients and math.isfinite(norm):
                self._gradients[name] = sketch_all(gradients)
        return math.sqrt(sum_of_squares)

    def take_updates(self, parameters: Sequence[Tensor], before: Sequence[Tensor]) -> float:
        """Measure the changes of parameters since `before`, by module. Return the norm of all of them."""
        sums_of_squares: dict[str, float] = {}
        for parameter, value_before, module in zip(parameters, before, _name_owners(parameters), strict=True):
            change = float(_norm(parameter.detach().float() - value_before.float()))
            sums_of_squares[module] = sums_of_squares.get(module, 0.0) + change * change
        for module, sum_of_squares in sums_of_squares.items():
            self._last_updates[module] = math.sqrt(sum_of_squares)
            # the first update that counts is the one of the first step with finite gradients
            if module in self._gradients:
                self._updates.setdefault(module, math.sqrt(sum_of_squares))
        return math.sqrt(sum(sums_of_squares.values()))

    def records(self) -> Iterable[ModuleNumbersRecord]:
        """Yield a record for each module, in the order of first calls."""
        for name in dict.fromkeys([*self._types, *self._last_updates]):
            output, dtype = self._outputs.get(name, ((), ""))
            yield ModuleNumbersRecord(
                name,
                self._types.get(name, ""),
                self._weights.get(name, ()),
                output,
                dtype,
                self._gradients.get(name, ()),
                self._updates.get(name),
                self._last_gradients.get(name),
                self._last_updates.get(name),
            )


def _list_parameters(optimizer: Optimizer) -> list[Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _name_owners(parameters: Sequence[Tensor]) -> list[str]:
    """Return the name of the module that owns each parameter or its master.

    A parameter outside of the models is named by its shape.
    """
    session = current.require()
    masters = session.bindings.masters
    owners: dict[int, str] = {}
    for module, name in name_layers(session).values():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), name)
            master = masters.get(parameter)
            if master is not None:
                owners.setdefault(id(master), name)
    return [owners.get(id(parameter), f"parameter of shape {tuple(parameter.shape)}") for parameter in parameters]


def _describe_settings(number: int, optimizer: Optimizer) -> Iterable[OptimizerRecord]:
    """Yield a record of the settings of each parameter group. `number` is the number of the optimizer."""
    for place, group in enumerate(optimizer.param_groups):
        settings = []
        for name, value in group.items():
            if isinstance(value, Tensor) and value.numel() == 1:  # a capturable learning rate
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

    A sketch has `SKETCH` (16) values; value number i is the sum of the elements i, i + 16, i + 32, ..., each with a
    random sign. The signs come from a generator of their own, so the random numbers of the run stay the same. Tensors
    on the meta device add nothing. Waits for the device.
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
