"""Mixed precision written out by hand, behind the names that amp_patch gives its functions: `by_hand.scale_loss(...)`.

A training script runs on either, and must find the same numbers bit by bit. Nothing here imports amp_patch, and nothing
here is clever: casts are `.to(low)`, masters are float32 copies, loss scales move as those of torch.amp.GradScaler, and
what a block leaves is divided by the scale before the next line of the script. Scales are powers of 2.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOWS = {
    "O1": torch.float16,
    "O2": torch.float16,
    "O3": torch.float16,
    "O4": torch.bfloat16,
    "O5": torch.bfloat16,
}
WITH_MASTERS = ("O2", "O5")
CAST = ("O2", "O3", "O5")

# ---- models ----------------------------------------------------------------------------------------------------------


class Casts:
    """What a forward by hand does to its operands: nothing, until it is told of a level with a low dtype."""

    def __init__(self) -> None:
        self.level: str | None = None
        self.compute = "native"

    def product(self, op: Callable[..., Tensor], *operands: Any, **options: Any) -> Tensor:
        """A product of 16-bit values; computed in float32, its operands are widened and its result rounded."""
        if self.level not in LOWS:
            return op(*operands, **options)
        low = LOWS[self.level]
        rounded = [operand.to(low) for operand in operands]
        if self.compute == "native":
            return op(*rounded, **options)
        return op(*[operand.float() for operand in rounded], **options).to(low)

    def full(self, tensor: Tensor) -> Tensor:
        """What the lists of O1 and O4 run in float32; a model that is cast itself stays as it is."""
        return tensor.float() if self.level in ("O1", "O4") else tensor


class Mlp(nn.Module):
    """Two linear layers, and a layer norm between, without which nothing saves a float32 weight at O1 and O4."""

    def __init__(self, *, has_norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4) if has_norm else nn.Identity()
        self.last = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(inputs))))

    def forward_by_hand(self, inputs: Tensor, casts: Casts) -> Tensor:
        hidden = casts.product(F.linear, inputs, self.first.weight, self.first.bias)
        if isinstance(self.norm, nn.LayerNorm):
            hidden = F.layer_norm(casts.full(hidden), (4,), self.norm.weight, self.norm.bias)
        return casts.product(F.linear, torch.tanh(hidden), self.last.weight, self.last.bias)


class ConvNet(nn.Module):
    """A convolution, a batch norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.last = nn.Linear(32, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(inputs))).flatten(1))

    def forward_by_hand(self, inputs: Tensor, casts: Casts) -> Tensor:
        hidden = casts.product(F.conv2d, inputs, self.first.weight, self.first.bias, padding=1)
        hidden = torch.relu(self.norm(hidden)).flatten(1)
        return casts.product(F.linear, hidden, self.last.weight, self.last.bias)


class Attention(nn.Module):
    """An embedding, one head of attention, and a last layer whose weight is that of the embedding."""

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.first = nn.Embedding(5, 4, max_norm=max_norm)
        self.query = nn.Linear(4, 4)
        self.value = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 5)
        self.last.weight = self.first.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.first(tokens)
        scores = self.query(hidden) @ hidden.transpose(1, 2)
        return self.last(torch.softmax(scores, -1) @ self.value(hidden))

    def forward_by_hand(self, tokens: Tensor, casts: Casts) -> Tensor:
        hidden = self.first(tokens)
        query = casts.product(F.linear, hidden, self.query.weight, self.query.bias)
        scores = casts.product(torch.matmul, query, hidden.transpose(1, 2))
        weights = torch.softmax(casts.full(scores), -1)
        mixed = casts.product(torch.matmul, weights, casts.product(F.linear, hidden, self.value.weight))
        return casts.product(F.linear, mixed, self.last.weight, self.last.bias)


MODELS = {"mlp": Mlp, "conv": ConvNet, "attention": Attention}
SHAPES = {"mlp": (4, 3), "conv": (4, 1, 4, 4)}


def make_model(kind: str, seed: int, *, is_by_hand: bool = False, **options: Any) -> Any:
    """A model of the same weights for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[kind](**options)
    model.kind = kind
    if is_by_hand:
        model.__class__ = type(f"{kind} by hand", (ModelByHand, MODELS[kind]), {})
        model.hand = None
    return model


def make_inputs(kind: str, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    if kind == "attention":
        return torch.randint(5, (2, 3), generator=generator, device="cpu").to(torch.get_default_device())
    return torch.randn(SHAPES[kind], generator=generator, device="cpu").to(torch.get_default_device())


def loss_of(model: Any, batch: int, factor: float = 1.0) -> Tensor:
    """The loss of a model on one of its batches, times a factor, which may be inf."""
    output = model(make_inputs(model.kind, batch)).float()
    generator = torch.Generator().manual_seed(100 + batch)
    targets = torch.randn(output.shape, generator=generator, device="cpu").to(output.device)
    return ((output - targets) ** 2).mean() * factor


class ModelByHand(nn.Module):
    """A model in the care of a `ByHand`, or of nobody."""

    hand: "ByHand | None"

    def forward(self, inputs: Tensor) -> Tensor:
        if self.hand is None:
            return self.forward_by_hand(inputs, Casts())
        self.hand.bring_together()
        output = self.forward_by_hand(inputs, self.hand.casts)
        return output.float() if self.hand.casts.level in CAST else output

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.hand is not None:
            self.hand.on_zero_grad(self)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        if self.hand is not None:
            self.hand.bring_together()
            state.update({name: value.float() for name, value in state.items() if value.dtype in LOWS.values()})
            for name, parameter in self.named_parameters(remove_duplicate=False):
                if id(parameter) in self.hand.masters:
                    state[name] = self.hand.masters[id(parameter)].detach()
        return state

    def load_state_dict(self, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self.hand is not None:
            self.hand.bring_together()
        result = super().load_state_dict(state, *args, **kwargs)
        for name, parameter in self.named_parameters(remove_duplicate=False) if self.hand is not None else ():
            if id(parameter) in self.hand.masters:
                self.hand.masters[id(parameter)].data.copy_(state[name])
                self.hand.push([self.hand.pairs[id(parameter)]])
        return result


# ---- loss scales -----------------------------------------------------------------------------------------------------


class Scaler:
    """The loss scale, which moves once for all passes since it moved last. As torch.amp.GradScaler's; its hysteresis is
    that of Megatron-LM.
    """

    def __init__(self, loss_scale: Any, minimum: float | None, maximum: float) -> None:
        knobs = {"init": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "hysteresis": 1}
        self.is_dynamic = not isinstance(loss_scale, float)
        self.knobs = {**knobs, **loss_scale} if isinstance(loss_scale, dict) else knobs
        self.minimum, self.maximum = minimum or torch.finfo(torch.float32).tiny, maximum
        first = max(min(self.knobs["init"], maximum), minimum or 0.0)
        self.scale = first if self.is_dynamic else loss_scale
        self.unskipped, self.left = 0, self.knobs["hysteresis"]
        self.found: bool | None = None  # whether passes overflowed that moved nothing yet; None: there are none
        self.moves = 0  # how often the scale may have changed

    @property
    def window(self) -> Any:
        """What gradients are scaled by: something else whenever the scale may have changed. None: by nothing."""
        return (self, self.moves) if self.is_dynamic or self.scale != 1.0 else None

    def next_state(self) -> tuple[float, int, int]:
        if self.found is None or not self.is_dynamic:
            return self.scale, self.unskipped + (self.found is not None), self.left
        scale, unskipped, left = self.scale, self.unskipped + 1, self.left
        if self.found:
            left, unskipped = max(left - 1, 0), 0
            if left == 0:
                scale *= self.knobs["backoff_factor"]
        elif unskipped == self.knobs["growth_interval"]:
            scale, unskipped, left = scale * self.knobs["growth_factor"], 0, self.knobs["hysteresis"]
        return min(max(scale, self.minimum), self.maximum), unskipped, left

    def decide(self) -> None:
        if self.found is not None:
            self.scale, self.unskipped, self.left = self.next_state()
            self.found = None
            self.moves += 1

    def state_dict(self) -> dict[str, Any]:
        scale, unskipped, left = self.next_state()
        state = {"loss_scale": scale, "unskipped": unskipped}
        return {**state, "hysteresis_tracker": left} if self.knobs["hysteresis"] > 1 else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found, self.unskipped = None, state["unskipped"]
        self.moves += 1
        if self.is_dynamic:
            self.scale = state["loss_scale"]
            self.unskipped = min(self.unskipped, self.knobs["growth_interval"] - 1)
        self.left = min(state.get("hysteresis_tracker", self.knobs["hysteresis"]), self.knobs["hysteresis"])


class Pass:
    """One block: the optimizers whose next step an overflow skips, and whether there was one."""

    def __init__(self, scaler: Scaler, optimizers: list[Any]) -> None:
        self.scaler, self.optimizers = scaler, optimizers
        self.window, self.scale = scaler.window, scaler.scale
        self.is_overflow = self.has_failed = False
        self.stepped: list[Any] = []  # optimizers that have stepped before all was looked at


# ---- optimizers ------------------------------------------------------------------------------------------------------


class OptimizerByHand:
    """What is put before an optimizer of torch: it steps on masters, and skips."""

    hand: "ByHand | None" = None

    def begin(self, hand: "ByHand") -> None:
        self.hand = hand
        self.end_window()
        self.placed: dict[int, Tensor] = {}  # every master that it ever had, by its id
        self.step_was_skipped = False
        self.place_masters()

    def end_window(self) -> None:
        self.found: dict[Scaler, bool] = {}  # by scaler: whether a pass overflowed that may skip the next step
        self.zeroed: set[Scaler] = set()  # of passes whose gradients were zeroed without a step
        self.is_unjudged_overflow = False  # left in masters by a pass that was not for this optimizer
        self.awaits_step = False  # since a pass

    def note(self, scaler: Scaler, is_overflow: bool) -> None:
        self.found[scaler] = self.found.get(scaler, False) or is_overflow

    def place_masters(self) -> None:
        """Put masters where the script has put 16-bit parameters."""
        if self.hand.casts.level not in WITH_MASTERS:
            return
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.dtype in LOWS.values():
                    master = self.hand.master_of(parameter)
                    self.placed[id(master)] = master
                    group["params"][index] = master
                    if parameter in self.state:
                        self.state[master] = self.state.pop(parameter)

    def stepped(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        if self.hand is not None:
            self.place_masters()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.hand is None:
            return super().step(closure) if closure is not None else super().step()
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.hand.begin_step(self)
        found = dict(self.found)
        is_finite_here = all(is_finite(p.grad) for p in self.stepped() if p.grad is not None)
        for scaler in self.zeroed:  # the script may have put together what is there of what was zeroed
            found[scaler] = found.get(scaler, False) or not is_finite_here
        for scaler in found:
            scaler.decide()
        self.step_was_skipped = any(scaler.is_dynamic and is_overflow for scaler, is_overflow in found.items())
        if not self.step_was_skipped:
            super().step()
            self.hand.push(self.hand.pairs_of(self))
        self.end_window()
        self.hand.finish_step(self)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.hand is not None:
            self.hand.abandon(self)
            for parameter, master in self.hand.pairs.values():
                if id(master) in self.placed:
                    parameter.grad = None
        super().zero_grad(set_to_none)


def make_by_hand(kind: type) -> type:
    """An optimizer class of torch, by hand."""
    return type(f"{kind.__name__} by hand", (OptimizerByHand, kind), {})


class SessionError(RuntimeError):
    """What the package refuses as well."""


class CheckpointError(RuntimeError):
    """A state that is not loaded."""


# ---- what a script calls ---------------------------------------------------------------------------------------------


class ByHand:
    """The functions of amp_patch, by hand."""

    SessionError, CheckpointError = SessionError, CheckpointError

    def __init__(self) -> None:
        self.casts = Casts()
        self.forget_everything()

    def forget_everything(self) -> None:
        self.casts.level = None
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        self.scalers: list[Scaler] = []
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}  # 16-bit parameter and master, by the parameter's id
        self.masters: dict[int, Tensor] = {}
        self.pushed: dict[int, Tensor] = {}  # each master when it was copied to its parameter
        self.known: dict[int, tuple[Tensor, Tensor, int]] = {}  # each master when it was last looked at
        self.is_split = False
        self.full: dict[int, Tensor] = {}  # parameters before they were cast
        self.window: Any = None  # what gradients are scaled by now, and its number
        self.scale_of_gradients = 1.0
        self.waiting: list[Pass] = []  # have ended, and nobody has looked at their gradients
        self.open: list[Pass] = []

    def initialize(
        self,
        models: list[Any],
        optimizers: list[Any],
        opt_level: str,
        loss_scale: Any,
        num_losses: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        compute: str = "native",
        verbosity: int = 0,
        split_masters: bool = False,
    ) -> None:
        self.is_split = split_masters
        self.scalers = [Scaler(loss_scale, min_loss_scale, max_loss_scale) for _ in range(num_losses)]
        self.casts.level, self.casts.compute = opt_level, compute
        self.models, self.optimizers = list(models), list(optimizers)
        gradients: list[tuple[Tensor, Tensor]] = []
        for model in models:
            model.hand = self
            if opt_level in CAST:
                gradients += self.cast_model(model)
        for optimizer in optimizers:
            optimizer.begin(self)
        self.full.clear()
        for parameter, gradient in gradients:
            if id(parameter) in self.masters:
                self.masters[id(parameter)].grad = gradient
            else:
                parameter.grad = gradient.to(parameter.dtype)
        for optimizer in self.optimizers:
            if self.has_gradients(optimizer):  # nobody has judged them
                optimizer.zeroed = {scaler for scaler in self.scalers if scaler.is_dynamic}

    def cast_model(self, model: Any) -> list[tuple[Tensor, Tensor]]:
        """Cast the parameters of a model, and return those that have gradients with these."""
        gradients = []
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                if self.casts.level in WITH_MASTERS:
                    continue
                for name, buffer in module.named_buffers():
                    setattr(module, name, buffer.to(LOWS[self.casts.level]) if buffer.is_floating_point() else buffer)
            for parameter in module.parameters(recurse=False):
                if parameter.dtype is torch.float32:
                    gradient, parameter.grad = parameter.grad, None
                    self.full[id(parameter)] = parameter.detach().clone()
                    parameter.data = parameter.data.to(LOWS[self.casts.level])
                    if gradient is not None:
                        gradients.append((parameter, gradient))
        return gradients

    def master_of(self, parameter: Tensor) -> Tensor:
        """The master of a 16-bit parameter, made of what it held in float32 or else of what it holds."""
        if id(parameter) not in self.masters:
            value = self.full.get(id(parameter), parameter.detach().float())
            master = value.clone().requires_grad_()
            self.masters[id(parameter)] = master
            self.pairs[id(parameter)] = parameter, master
            self.push([(parameter, master)])
        return self.masters[id(parameter)]

    def reset(self) -> None:
        self.settle()
        self.bring_together()
        for optimizer in self.optimizers:
            originals = {id(master): parameter for parameter, master in self.pairs.values()}
            for group in optimizer.param_groups:
                group["params"] = [originals.get(id(stepped), stepped) for stepped in group["params"]]
            entries = [(originals.get(id(stepped), stepped), entry) for stepped, entry in optimizer.state.items()]
            optimizer.state.clear()
            optimizer.state.update(entries)
            optimizer.hand = None
        for model in self.models:
            model.hand = None
            for parameter in model.parameters():
                if parameter.dtype in LOWS.values():
                    gradient, parameter.grad = parameter.grad, None
                    master = self.masters.get(id(parameter))
                    parameter.data = parameter.data.float() if master is None else master.detach().clone()
                    if gradient is not None and self.casts.level not in WITH_MASTERS:
                        parameter.grad = gradient.float()
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.float() if buffer.dtype in LOWS.values() else buffer)
        self.forget_everything()

    def master_params(self, optimizer: Any) -> Iterator[Tensor]:
        return iter(optimizer.stepped())

    def refresh(self) -> None:
        self.bring_together()

    def scale(self, tensor: Any, loss_id: int = 0) -> Any:
        return tensor.float() * self.scalers[loss_id].scale

    def unscale(self, gradients: tuple[Tensor, ...], loss_id: int = 0) -> tuple[Tensor, ...]:
        return tuple(gradient / self.scalers[loss_id].scale for gradient in gradients)

    def state_dict(self) -> dict[str, Any]:
        return {f"loss_scaler{index}": scaler.state_dict() for index, scaler in enumerate(self.scalers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state) != len(self.scalers):
            raise CheckpointError("another number of losses")
        for index, scaler in enumerate(self.scalers):
            scaler.load_state_dict(state[f"loss_scaler{index}"])

    def clip_grad_norm_(self, parameters: Any, max_norm: float) -> Tensor:
        """Of a 16-bit parameter its master is clipped."""
        given = list(parameters)
        if any(id(parameter) in self.masters for parameter in given) and not self.waiting:
            self.settle()
        stepped = [self.masters.get(id(parameter), parameter) for parameter in given]
        return torch.nn.utils.clip_grad_norm_(stepped, max_norm)

    @contextlib.contextmanager
    def disable_casts(self) -> Iterator[None]:
        """Of a model that is cast itself there is nothing to leave out."""
        level = self.casts.level
        if level not in CAST:
            self.casts.level = None
        try:
            yield
        finally:
            self.casts.level = level

    @contextlib.contextmanager
    def scale_loss(
        self, loss: Tensor, optimizers: Any, loss_id: int = 0, delay_unscale: bool = False
    ) -> Iterator[Tensor]:
        chosen = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        reached = self.with_partners(chosen)
        for optimizer in reached:  # which may change the scale
            optimizer.place_masters()
            if (optimizer.found or optimizer.is_unjudged_overflow) and not self.has_gradients(optimizer):
                self.abandon(optimizer)
            optimizer.awaits_step = True
        one = Pass(self.scalers[loss_id], reached)
        if self.open and self.open[-1].window != one.window:
            raise SessionError("blocks of different scales")
        self.carry(one)
        self.open.append(one)
        try:
            yield loss.float() * one.scale
        except Exception:
            one.has_failed = True
            raise
        finally:
            self.leave(one, is_delayed=delay_unscale and not one.has_failed)

    def leave(self, one: Pass, *, is_delayed: bool) -> None:
        self.open.remove(one)
        if one.window is not None or self.casts.level in WITH_MASTERS:
            self.waiting.append(one)
        if not is_delayed:
            self.settle()
            if self.open:
                self.carry(self.open[-1])

    def with_partners(self, chosen: list[Any]) -> list[Any]:
        """Optimizers, and those that have a parameter in common with one of them."""
        found: list[Any] = []
        for optimizer in chosen:
            partners = self.partners_of(optimizer)
            found += [other for other in (optimizer, *partners) if other not in found]
        return found

    def partners_of(self, optimizer: Any) -> list[Any]:
        own = set(map(id, optimizer.stepped()))
        return [other for other in self.optimizers if other is not optimizer and own & set(map(id, other.stepped()))]

    def note(self, optimizer: Any, scaler: Scaler, is_overflow: bool) -> None:
        """An overflow in a parameter of two optimizers may be new to one of them, and not to the other."""
        has_overflowed = any(any(other.found.values()) for other in self.partners_of(optimizer))
        optimizer.note(scaler, is_overflow or has_overflowed)

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def has_gradients(self, optimizer: Any) -> bool:
        pairs = self.pairs_of(optimizer)
        holders = [*optimizer.stepped(), *[parameter for parameter, _ in pairs]]
        return any(holder.grad is not None for holder in holders)

    def pairs_of(self, optimizer: Any) -> list[tuple[Tensor, Tensor]]:
        stepped = set(map(id, optimizer.stepped()))
        return [(parameter, master) for parameter, master in self.pairs.values() if id(master) in stepped]

    def plain_of(self, optimizer: Any) -> list[Tensor]:
        """What it steps on without a master."""
        masters = {id(master) for master in self.masters.values()}
        return [parameter for parameter in optimizer.stepped() if id(parameter) not in masters]

    def plain(self) -> list[Tensor]:
        """Every parameter of a model that no optimizer steps on by way of a master, and what optimizers step on."""
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        has_master = set()
        for optimizer in self.optimizers:
            parameters += self.plain_of(optimizer)
            has_master.update(id(parameter) for parameter, _ in self.pairs_of(optimizer))
        found = {id(parameter): parameter for parameter in parameters}
        return [parameter for key, parameter in found.items() if key not in has_master]

    def carry(self, one: Pass) -> None:
        """Multiply the sums so far, so that the pass may add to them."""
        if self.window == one.window and (one.window is not None or self.waiting):
            return
        self.settle()
        self.window, self.scale_of_gradients = one.window, one.scale
        multiply(self.plain(), one.scale)

    def settle(self) -> None:
        """Make true sums of what gradients there are, in the masters where there are masters, and judge the passes."""
        judged = [one for one in self.waiting if one.window is not None]
        seen: set[int] = set()
        found: dict[Any, bool] = {}
        for one in (*judged, *self.open):
            for optimizer in one.optimizers:
                if optimizer not in found:
                    found[optimizer] = self.look(optimizer, seen)
        for optimizer in self.optimizers:
            if self.window is None and self.has_unfolded(optimizer):
                for one in (optimizer, *self.partners_of(optimizer)):  # nobody has judged them
                    if one is not optimizer and not self.has_unfolded(one):
                        continue
                    one.zeroed |= {scaler for scaler in self.scalers if scaler.is_dynamic}
                    one.awaits_step = True
            if not self.fold(optimizer) and self.window is not None:
                optimizer.is_unjudged_overflow = True
        multiply([parameter for parameter in self.plain() if id(parameter) not in seen], 1.0 / self.scale_of_gradients)
        self.window, self.scale_of_gradients, self.waiting = None, 1.0, []
        for one in self.open:
            one.is_overflow = one.is_overflow or any(found[optimizer] for optimizer in one.optimizers)
        for one in judged:
            one.is_overflow = one.is_overflow or any(found[optimizer] for optimizer in one.optimizers)
            if not one.has_failed or (one.is_overflow and one.scaler.is_dynamic):
                self.judge(one, found)

    def look(self, optimizer: Any, seen: set[int]) -> bool:
        """Make true sums of the gradients of an optimizer, but for those seen before, and tell whether a pass has
        overflowed: where the next step is skipped for an earlier pass, nobody can tell.
        """
        plain = [parameter for parameter in self.plain_of(optimizer) if id(parameter) not in seen]
        seen.update(map(id, plain))
        multiply(plain, 1.0 / self.scale_of_gradients)
        is_overflow = not all(is_finite(p.grad) for p in plain if p.grad is not None)
        is_overflow = is_overflow or optimizer.is_unjudged_overflow
        optimizer.is_unjudged_overflow = False
        if any(optimizer.found.values()):  # the next step is skipped anyway, and what these sums hold may be of before
            is_overflow = False
        return not self.fold(optimizer) or is_overflow

    def has_unfolded(self, optimizer: Any) -> bool:
        return any(parameter.grad is not None for parameter, _ in self.pairs_of(optimizer))

    @torch.no_grad()
    def fold(self, optimizer: Any) -> bool:
        """Add 16-bit gradients to those of the masters, and tell whether they were finite."""
        are_finite = True
        for parameter, master in self.pairs_of(optimizer):
            if parameter.grad is not None:
                gradient, parameter.grad = parameter.grad.float() / self.scale_of_gradients, None
                are_finite = are_finite and is_finite(gradient)
                master.grad = gradient if master.grad is None else master.grad + gradient
        return are_finite

    def judge(self, one: Pass, found: dict[Any, bool]) -> None:
        """Tell the optimizers and the scaler of a pass whether it overflowed."""
        for optimizer in one.optimizers:
            if optimizer not in one.stepped:
                self.note(optimizer, one.scaler, one.is_overflow)
            elif self.has_gradients(optimizer):  # that came after its step
                self.note(optimizer, one.scaler, found[optimizer])
        one.scaler.found = bool(one.scaler.found) or one.is_overflow
        if all(optimizer in one.stepped for optimizer in one.optimizers):
            one.scaler.decide()

    # ---- steps and zeroing -------------------------------------------------------------------------------------------

    def begin_step(self, optimizer: Any) -> None:
        for other in self.optimizers:
            other.place_masters()
        self.bring_together()
        self.make_true(optimizer)

    def make_true(self, optimizer: Any) -> None:
        """Make true sums for a step: of everything, and inside a block of what this optimizer steps on."""
        if not self.open:
            self.settle()
        elif self.window is None:
            self.fold(optimizer)
        else:
            is_overflow = self.look(optimizer, set())
            for one in self.passes_of(optimizer):
                one.is_overflow = one.is_overflow or is_overflow
                self.note(optimizer, one.scaler, is_overflow if optimizer in one.stepped else one.is_overflow)

    def passes_of(self, optimizer: Any) -> list[Pass]:
        return [one for one in (*self.waiting, *self.open) if optimizer in one.optimizers]

    def finish_step(self, optimizer: Any) -> None:
        """Take in that an optimizer has stepped or skipped; inside a block the rest of its pass is to come."""
        for one in self.passes_of(optimizer):
            one.stepped.append(optimizer)
        partners = [other for other in self.partners_of(optimizer) if other.awaits_step]
        awaited = {id(one) for other in partners for one in other.stepped()}
        for master in optimizer.placed.values():
            if id(master) not in awaited:
                master.grad = None
        self.scale_again(optimizer)

    def scale_again(self, optimizer: Any) -> None:
        if self.open:
            multiply(self.plain_of(optimizer), self.scale_of_gradients)

    def abandon(self, optimizer: Any) -> None:
        """The gradients are dropped. What had overflowed in them is for the scale, and for the step only if it is in
        what the script puts there in their stead.
        """
        if self.waiting and not self.open:
            self.settle()
        elif self.waiting:
            self.make_true(optimizer)
            self.scale_again(optimizer)
            if not any(optimizer in one.optimizers for one in self.open):  # else all these passes count as one
                for one in self.waiting:
                    one.stepped.append(optimizer)
        scalers = list(optimizer.found)
        zeroed = optimizer.zeroed | {scaler for scaler in scalers if scaler.is_dynamic}
        optimizer.end_window()
        optimizer.zeroed = zeroed
        for scaler in scalers:
            scaler.decide()

    def on_zero_grad(self, model: Any) -> None:
        covered = {id(parameter) for parameter in model.parameters()}
        for parameter in model.parameters():
            if id(parameter) in self.masters:
                self.masters[id(parameter)].grad = None
                covered.add(id(self.masters[id(parameter)]))
        for optimizer in self.optimizers:
            if all(id(parameter) in covered for parameter in optimizer.stepped()):
                self.abandon(optimizer)

    # ---- masters -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def push(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for parameter, master in pairs:
            parameter.copy_(self.round(parameter, master))
            self.pushed[id(parameter)] = master.detach().clone()
            self.look_at(id(parameter), master)

    def round(self, parameter: Tensor, master: Tensor) -> Tensor:
        """A master in 16 bits: ties to even, or with split masters, away from zero."""
        if not self.is_split or parameter.dtype is not torch.bfloat16:
            return master.to(parameter.dtype)
        bits = master.detach().view(torch.int32)
        rounded = ((bits + 0x8000) & -0x10000).view(torch.float32)
        return torch.where(master.detach().isnan(), master.detach(), rounded).bfloat16()  # NaN bits may overflow to 0

    def look_at(self, key: int, master: Tensor) -> None:
        self.known[key] = master.detach().clone(), master.detach(), master._version

    def is_written(self, key: int, master: Tensor) -> bool:
        """Whether somebody wrote to a master since it was last looked at, be it what was there."""
        value, alias, version = self.known[key]
        return master._version != version or master.data_ptr() != alias.data_ptr() or not equal(master, value)

    @torch.no_grad()
    def bring_together(self) -> None:
        """A master that was written to goes to its parameter. Of a parameter that was edited, the elements that differ
        go to the master; an edit that is taken back leaves no trace.
        """
        for key, (parameter, master) in self.pairs.items():
            if self.is_written(key, master):
                parameter.copy_(self.round(parameter, master))
                self.pushed[key] = master.detach().clone()
            else:
                pushed = self.pushed[key]
                edited = torch.where(parameter == self.round(parameter, master), master, parameter.float())
                master.copy_(torch.where(parameter == self.round(parameter, pushed), pushed, edited))
            self.look_at(key, master)


@torch.no_grad()
def multiply(parameters: list[Tensor], factor: float) -> None:
    """Multiply gradients in place, in float32."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.float() * factor)


def is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def equal(left: Any, right: Any) -> bool:
    """Whether two trees of tensors and plain values hold the same bits; NaN equals NaN."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.dtype is not right.dtype or left.shape != right.shape:
            return False
        return bool(((left == right) | ((left != left) & (right != right))).all())
    if isinstance(left, dict) and isinstance(right, dict):
        return set(left) == set(right) and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return type(left) is type(right) and bool(left == right)
