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
"""The number of the step whose ops are recorded. Step 0 casts weights whose copies later steps find in the cache."""


class ContractProbe(CurveProbe):
    """Records losses as `CurveProbe` does, the ops of the second step, and numbers of modules, optimizers and steps.

    Waits for the device at each module in the first step, and several times in each later step.

    Args:
        steps: the number of steps.
        is_noise: whether to move the weights by one unit in the last place before each step.
        threads: the number of threads that ops use; None leaves it alone.
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
        self._optimizers: dict[int, list[OptimizerRecord]] = {}
        self._gradients: list[float] = []
        self._updates: list[float] = []
        self._before: dict[int, list[Tensor]] = {}
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
        self._take_settings(optimizer)  # a step with a closure reports only its end
        before = self._before.pop(id(optimizer), None)
        if before is not None:
            self._updates.append(self._modules.take_updates(_list_parameters(optimizer), before))
        self._ops.step_ended(optimizer)
        super().step_ended(optimizer)

    def _take_settings(self, optimizer: Optimizer) -> None:
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
    """Collects the numbers of modules."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[nn.Module, str]] = {}
        self._handle: RemovableHandle | None = None
        self._types: dict[str, str] = {}
        self._weights: dict[str, tuple[float, ...]] = {}
        self._outputs: dict[str, tuple[tuple[float, ...], str]] = {}
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
        known = self._names.get(id(module))
        if known is None or known[1] in self._types or not torch.is_grad_enabled() or not is_layer(module):
            return
        name = known[1]
        self._types[name] = type(module).__name__
        first = find_floating(output)
        with current.without_casts():
            self._weights[name] = sketch_all(list(module.parameters(recurse=False)))
            if first is not None:
                self._outputs[name] = sketch_all([first]), short(first.dtype)

    def take_gradients(self, parameters: Sequence[Tensor]) -> float:
        """Measure the unscaled gradients of parameters, by module. Return the norm of all of them."""
        with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
        squares = 0.0
        groups: dict[str, list[Tensor]] = {}
        for parameter, name in zip(with_gradients, _name_owners(with_gradients), strict=True):
            groups.setdefault(name, []).append(parameter)
        for name, group in groups.items():
            gradients = [parameter.grad for parameter in group if parameter.grad is not None]
            norm = math.hypot(*(float(_norm(gradient)) for gradient in gradients))
            squares += norm * norm
            self._last_gradients[name] = norm
            if name not in self._gradients and math.isfinite(norm):
                self._gradients[name] = sketch_all(gradients)
        return math.sqrt(squares)

    def take_updates(self, parameters: Sequence[Tensor], before: Sequence[Tensor]) -> float:
        """Measure the changes of parameters since `before`, by module. Return the norm of all of them."""
        squares: dict[str, float] = {}
        for parameter, old, module in zip(parameters, before, _name_owners(parameters), strict=True):
            change = float(_norm(parameter.detach().float() - old.float()))
            squares[module] = squares.get(module, 0.0) + change * change
        for module, square in squares.items():
            self._last_updates[module] = math.sqrt(square)
            if module in self._gradients:
                self._updates.setdefault(module, math.sqrt(square))
        return math.sqrt(sum(squares.values()))

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
    for place, group in enumerate(optimizer.param_groups):
        settings = []
        for name, value in group.items():
            if isinstance(value, Tensor) and value.numel() == 1:  # a capturable learning rate
                value = value.item()
            if name != "params" and _is_setting(value):
                settings.append(f"{name}={value!r}")
        yield OptimizerRecord(number, type(optimizer).__name__, place, tuple(sorted(settings)))


def _is_setting(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_setting, value))
    return value is None or isinstance(value, (bool, int, float, str))


@torch.no_grad()
def _norm(tensor: Tensor) -> Tensor:
    """Return the L2 norm in float32."""
    norm: Tensor = torch.linalg.vector_norm(_flatten(tensor))
    return norm


def _flatten(tensor: Tensor) -> Tensor:
    if hasattr(tensor, "to_local"):  # of a DTensor, this rank's shard
        tensor = tensor.to_local()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.detach().float().reshape(-1)


@torch.no_grad()
def sketch_all(tensors: Sequence[Tensor]) -> tuple[float, ...]:
    """Return the sketch of tensors: see `ModuleNumbersRecord`. () if none has floating values. Waits for the device.

    Each of the `SKETCH` values sums every sixteenth element with random signs. They come from a generator of their own,
    so the random numbers of the run stay the same. Tensors on the meta device add nothing.
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
        part = padded.view(-1, SKETCH).sum(0).cpu()
        total = part if total is None else total + part
    if total is None:
        return ()
    return tuple(float(f"{value:.7g}") for value in total.tolist())
