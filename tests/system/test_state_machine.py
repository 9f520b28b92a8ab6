"""Random sequences of everything a training script may do, against the same training written out by hand.

`Reference` is plain torch: weights cast with `.to(low)` in each forward (O1, O4), explicit float32 masters (O2,
O5), or neither (O0, O3). It never scales a loss, so its gradients are the true sums; its scalers are a few lines of
Python. Every scale is a power of two, so that the package must agree with it bit by bit: in bfloat16, whose
range is that of float32, and without a scale in float16, where it would decide what overflows and what vanishes.
Products of 16-bit values are computed natively or in float32, on both sides alike.
"""

import contextlib
import copy
import itertools
import math
import os

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, event, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn
from torch_state import find_changes

import amp_patch as amp
from amp_patch.casting import weight_cache
from amp_patch.training.steps import Outcome

LOWS = (torch.float16, torch.bfloat16)
LINEAR = (F.linear,)  # the original: in a tuple, where no patch by name finds it
PATCHING = ("O1", "O4")
WITH_MASTERS = ("O2", "O5")
INTERVAL = 2000

OPTIMIZERS = {  # an eps of 1e-8 is 0 in float16
    "sgd": lambda params: torch.optim.SGD(params, lr=0.25, momentum=0.5),
    "sgd foreach": lambda params: torch.optim.SGD(params, lr=0.25, momentum=0.5, nesterov=True, foreach=True),
    "sgd fused": lambda params: torch.optim.SGD(params, lr=0.25, momentum=0.5, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.125, eps=1e-4),
    "adam fused": lambda params: torch.optim.Adam(params, lr=0.125, eps=1e-4, fused=True),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.125, eps=1e-4, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.125, eps=1e-4, fused=True),
}


class Net(nn.Module):
    """Linear 3 -> 4 -> 2 with a norm of some kind between. Nothing saves a float32 weight where there is none."""

    def __init__(self, norm):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d, "none": nn.Identity}[norm](*[4] * (norm != "none"))
        self.last = nn.Linear(4, 2)

    def forward(self, inputs):
        return self.last(torch.tanh(self.norm(self.first(inputs))))


def make_net(norm, seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(norm)


def make_data(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)


DATA = [make_data(seed) for seed in range(8)]


def loss_of(output, targets):
    return ((output.float() - targets) ** 2).sum()


def equal(left, right):
    if left is None or right is None:
        return left is right
    return (
        left.dtype is right.dtype
        and left.shape == right.shape
        and bool(((left == right) | ((left != left) & (right != right))).all())
    )


def is_finite(gradient):
    return gradient is None or bool(torch.isfinite(gradient).all())


def assert_same_tree(left, right, where=""):
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor) and equal(left, right), f"{where}: {left} is not {right}"
    elif isinstance(left, dict):
        assert set(left) == set(right), f"{where}: {list(left)} is not {list(right)}"
        for key in left:
            assert_same_tree(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same_tree(a, b, f"{where}[{index}]")
    else:
        assert left == right, f"{where}: {left} is not {right}"


# ---- the reference ---------------------------------------------------------------------------------------------------


class Pass:
    """One pass of scale_loss: whose steps an overflow skips, and whether there was one."""

    def __init__(self, scaler, owners, window):
        self.scaler, self.owners, self.window = scaler, owners, window
        self.is_overflow = self.has_failed = False
        self.stepped = []  # owners that have stepped before all was looked at


class Scaler:
    def __init__(self, loss_scale, minimum, maximum):
        self.is_dynamic = loss_scale == "dynamic"
        self.minimum, self.maximum = minimum, maximum
        self.scale = min(maximum, 2.0**16) if self.is_dynamic else loss_scale
        self.unskipped = 0
        self.found = None  # whether passes that no decision has counted overflowed; None: there are none
        self.scale_in_use = object()  # another one whenever the scale may have changed

    def is_identity(self):
        return not self.is_dynamic and self.scale == 1.0

    @property
    def window(self):
        return None if self.is_identity() else self.scale_in_use

    def after_decision(self):
        if self.found is None:
            return self.scale, self.unskipped
        if not self.is_dynamic:
            return self.scale, self.unskipped + 1
        scale, unskipped = self.scale, self.unskipped + 1
        if self.found:
            scale, unskipped = scale / 2, 0
        elif unskipped == INTERVAL:
            scale, unskipped = scale * 2, 0
        return min(max(scale, self.minimum), self.maximum), unskipped

    def decide(self):
        if self.found is not None:
            self.scale, self.unskipped = self.after_decision()
            self.found, self.scale_in_use = None, object()

    def state_dict(self):
        scale, unskipped = self.after_decision()
        return {"loss_scale": scale, "unskipped": unskipped}

    def load_state_dict(self, state):
        self.found = None
        if self.is_dynamic:
            self.scale, self.unskipped = state["loss_scale"], min(state["unskipped"], INTERVAL - 1)
            self.scale_in_use = object()
        else:
            self.unskipped = state["unskipped"]


class Owner:
    """An optimizer of the reference, with the gradients of what it steps on."""

    def __init__(self, net, masters, make_optimizer):
        self.net = net
        self.masters = masters  # of each name that has one
        self.names = [name for name, _ in net.named_parameters()]
        self.low = {name: parameter for name, parameter in net.named_parameters() if name in masters}
        self.stepped = [masters.get(name, parameter) for name, parameter in net.named_parameters()]
        self.optimizer = make_optimizer(self.stepped)
        self.reference = None
        self.found = {}  # by scaler: what may skip the next step
        self.zeroed = set()  # dynamic scalers of passes whose gradients were zeroed before a step
        self.has_overflowed = False  # since the last step or zeroing
        self.was_skipped = False
        self.steps = self.skips = 0
        self.copied = {name: master.detach().clone() for name, master in masters.items()}  # to the low weights

    def fold(self):
        """Low gradients go to the masters; tell whether one of them was not finite."""
        is_bad = False
        for name, low in self.low.items():
            if low.grad is not None:
                full, low.grad = low.grad.float(), None
                is_bad = is_bad or not is_finite(full)
                master = self.masters[name]
                master.grad = full if master.grad is None else master.grad + full
        return is_bad

    def look(self):
        """Tell whether there is inf or NaN that was not there before; in a sum that had one, nobody can tell."""
        plain = [parameter.grad for name, parameter in self.net.named_parameters() if name not in self.masters]
        is_bad = not all(is_finite(gradient) for gradient in plain) and not self.has_overflowed
        is_bad = self.fold() or is_bad
        self.has_overflowed = self.has_overflowed or is_bad
        return is_bad

    def note(self, scaler, is_overflow):
        self.found[scaler] = self.found.get(scaler, False) or is_overflow

    def end_window(self):
        self.found, self.zeroed, self.has_overflowed = {}, set(), False

    def step(self):
        self.reference.prepare_step(self)
        found = dict(self.found)
        is_bad = not all(is_finite(parameter.grad) for parameter in self.stepped)
        for scaler in self.zeroed:  # somebody may have put a sum together by hand
            found[scaler] = found.get(scaler, False) or is_bad
        for scaler in found:
            scaler.decide()
        self.was_skipped = any(scaler.is_dynamic and is_overflow for scaler, is_overflow in found.items())
        self.end_window()
        for one in self.reference.passes_of(self):
            one.stepped.append(self)
        if self.was_skipped:
            self.skips += 1
        else:
            self.steps += 1
            self.optimizer.step()
            self.copy_masters()
        for master in self.masters.values():
            master.grad = None

    def copy_masters(self):
        with torch.no_grad():
            for name, low in self.low.items():
                low.copy_(self.masters[name])
        self.copied = {name: master.detach().clone() for name, master in self.masters.items()}

    def abandon(self):
        """The gradients are gone: an overflow in them is for the loss scale, and a step looks at what is there."""
        if self.reference.waiting:
            self.reference.finish_waiting(self)
        if self.found:
            found, zeroed = self.found, self.zeroed | {scaler for scaler in self.found if scaler.is_dynamic}
            self.end_window()
            self.zeroed = zeroed
            for scaler in found:
                scaler.decide()

    def abandon_if_empty(self):
        gradients = [holder.grad for holder in (*self.net.parameters(), *self.masters.values())]
        if self.found and all(gradient is None for gradient in gradients):
            self.abandon()

    def copy_to_master(self, name):
        """An edit of low weights reaches the elements that it changes; one that is taken back leaves no trace."""
        if name in self.masters:
            low, master, copied = self.low[name], self.masters[name], self.copied[name]
            with torch.no_grad():
                edited = torch.where(low == master.to(low.dtype), master, low.float())
                master.copy_(torch.where(low == copied.to(low.dtype), copied, edited))

    def zero_grad(self, set_to_none):
        self.abandon()
        for low in self.low.values():
            low.grad = None
        self.optimizer.zero_grad(set_to_none)

    def zero_grad_of_model(self, set_to_none):
        self.net.zero_grad(set_to_none)
        for master in self.masters.values():
            master.grad = None
        self.abandon()

    def state_dict(self):
        state = self.net.state_dict()
        state.update({name: master.detach() for name, master in self.masters.items()})
        return {name: value.float() if value.dtype in LOWS else value for name, value in state.items()}

    def load_state_dict(self, state):
        self.net.load_state_dict(state)
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(state[name])


class Reference:
    """Training at one level, or at none (None), with casts and masters by hand."""

    def __init__(self, level, nets, make_optimizer, scalers, compute="native", low=None):
        self.level, self.scalers, self.compute, self.low = level, scalers, compute, low
        self.open = []  # passes whose block runs, outermost first
        self.waiting = []  # those whose block has ended, and nobody has looked at their gradients
        self.window, self.carried = None, 1.0  # the scale that all gradients carry
        self.owners = []
        for net in nets:
            masters = {}
            if level in WITH_MASTERS:
                for prefix, module in net.named_modules():
                    if not isinstance(module, nn.BatchNorm1d):
                        for name, parameter in module.named_parameters(prefix, recurse=False):
                            masters[name] = parameter.detach().clone().requires_grad_()
                            parameter.data = parameter.data.to(self.low)
            if level == "O3":
                net.to(self.low)
            self.owners.append(Owner(net, masters, make_optimizer))
            self.owners[-1].reference = self

    def switch(self, level, make_optimizer, scalers, keep_state, compute="native", low=None):
        """The same weights, optimizer state and gradients at another level."""
        nets = []
        for owner in self.owners:
            net = copy.deepcopy(owner.net).float()
            net.load_state_dict(owner.state_dict())
            nets.append(net)
        new = Reference(level, nets, make_optimizer, scalers, compute, low)
        for old, owner in zip(self.owners, new.owners, strict=True):
            if keep_state:
                owner.optimizer.load_state_dict(copy.deepcopy(old.optimizer.state_dict()))
            for before, after in zip(old.stepped, owner.stepped, strict=True):
                if before.grad is not None:
                    after.grad = before.grad.to(after.dtype)
                    owner.zeroed = {scaler for scaler in scalers if scaler.is_dynamic}  # nobody has judged it
        return new

    def load_scalers(self, states):
        for scaler, state in zip(self.scalers, states, strict=True):
            scaler.load_state_dict(state)

    def forward(self, index, inputs, casts=True):
        net = self.owners[index].net
        if self.level in PATCHING and casts:
            hidden = self.product(inputs.to(self.low), net.first.weight.to(self.low), net.first.bias.to(self.low))
            hidden = torch.tanh(net.norm(hidden.float() if isinstance(net.norm, nn.LayerNorm) else hidden))
            return self.product(hidden.to(self.low), net.last.weight.to(self.low), net.last.bias.to(self.low))
        dtype = net.first.weight.dtype
        hidden = torch.tanh(net.norm(self.product(inputs.to(dtype), net.first.weight, net.first.bias)))
        return self.product(hidden, net.last.weight, net.last.bias).float()

    def product(self, *operands):
        """A linear layer; where products are computed in float32, its operands are widened and its result rounded."""
        if self.compute == "native" or operands[0].dtype is not self.low:
            return LINEAR[0](*operands)
        return LINEAR[0](*[operand.float() for operand in operands]).to(self.low)

    def fits_inside(self, loss_id):
        """Whether a block may be entered where others are open: only one of the same scale."""
        return not self.open or self.open[-1].window is self.scalers[loss_id].window

    def enter(self, loss_id, passed):
        scaler, chosen = self.scalers[loss_id], [self.owners[index] for index in passed]
        for owner in chosen:
            owner.abandon_if_empty()
        if self.window is not scaler.window or (self.window is None and not self.waiting):
            self.settle()
        self.window, self.carried = scaler.window, scaler.scale
        self.open.append(Pass(scaler, chosen, self.window))

    def leave(self, delay, failed=False):
        one = self.open.pop()
        one.has_failed = failed
        self.waiting.append(one)
        if failed or not delay:
            window, carried = self.window, self.carried
            self.settle()
            if self.open:
                self.window, self.carried = window, carried
        elif self.window is None and self.level not in WITH_MASTERS:
            self.waiting = []  # there is nothing to wait for

    def settle(self):
        """All gradients are true sums again, and every pass that waits gets its answer."""
        judged, self.waiting = [one for one in self.waiting if one.window is not None], []
        looked_at = [*judged, *[one for one in self.open if one.window is not None]]
        found = {owner: owner.look() for owner in dict.fromkeys(owner for one in looked_at for owner in one.owners)}
        for owner in self.owners:
            owner.fold()
        self.window, self.carried = None, 1.0
        for one in self.open:
            one.is_overflow = one.is_overflow or any(found.get(owner) for owner in one.owners)
        for one in judged:
            one.is_overflow = one.is_overflow or any(found[owner] for owner in one.owners)
            if not one.has_failed or (one.is_overflow and one.scaler.is_dynamic):
                self.judge(one, found)

    @staticmethod
    def judge(one, found):
        for owner in one.owners:
            if owner not in one.stepped:
                owner.note(one.scaler, one.is_overflow)
            elif any(parameter.grad is not None for parameter in owner.stepped):
                owner.note(one.scaler, found[owner])
        one.scaler.found = bool(one.scaler.found) or one.is_overflow
        if all(owner in one.stepped for owner in one.owners):
            one.scaler.decide()

    def passes_of(self, owner):
        return [one for one in (*self.waiting, *self.open) if owner in one.owners]

    def prepare_step(self, owner):
        if not self.open:
            self.settle()
        elif self.window is None:
            owner.fold()
        else:
            is_overflow = owner.look()
            for one in self.passes_of(owner):
                one.is_overflow = one.is_overflow or is_overflow
                owner.note(one.scaler, is_overflow if owner in one.stepped else one.is_overflow)

    def finish_waiting(self, owner):
        if not self.open:
            self.settle()
            return
        self.prepare_step(owner)
        for one in self.waiting:
            one.stepped.append(owner)


# ---- the machine -----------------------------------------------------------------------------------------------------

NORMS = st.sampled_from(["none", "layer", "batch"])
LEVELS = st.sampled_from(["O0", "O1", "O2", "O3", "O4", "O5"])
SCALES = st.sampled_from(["dynamic", "dynamic", "dynamic", 1.0, 256.0])
SUBSETS = st.sampled_from([(0,), (1,), (0, 1), (1, 0)])
BATCH = st.integers(0, len(DATA) - 1)
NUM_LOSSES = st.integers(1, 2)
BOUNDS = st.sampled_from([(None, 2.0**24), (2.0**15, 2.0**17), (2.0**10, 2.0**12)])

EXAMPLES = int(os.environ.get("AMP_PATCH_EXAMPLES", "150"))
COMPUTE = st.sampled_from(["native", "float32"])
THEN = st.sampled_from(["nothing", "step", "step and zero"])


class Boom(Exception):
    pass


class TrainingMachine(RuleBasedStateMachine):
    """What the package holds (models, optimizers, the session) and the reference, which does the same by hand."""

    @initialize(
        norms=st.tuples(NORMS, NORMS),
        is_pair=st.booleans(),
        kind=st.sampled_from(sorted(OPTIMIZERS)),
        level=LEVELS,
        scale=SCALES,
        compute=COMPUTE,
        num_losses=NUM_LOSSES,
        bounds=BOUNDS,
        adopt=st.booleans(),
        is_like_a_gpu=st.booleans(),
    )
    def start(self, norms, is_pair, kind, level, scale, compute, num_losses, bounds, adopt, is_like_a_gpu):
        amp.reset()
        # as where launches are dear and the host runs ahead: copies are kept, flags arrive late, fused optimizers skip
        # by themselves
        self.patches, self.is_like_a_gpu, self.turns = pytest.MonkeyPatch(), is_like_a_gpu, itertools.count()
        if is_like_a_gpu:
            self.patches.setattr(weight_cache, "are_refreshed_on", lambda device_type: True)
            self.patches.setattr(Outcome, "is_known", lambda outcome: outcome.is_read)
        self.norms, self.kind, self.level = norms[: 1 + is_pair], kind, None
        self.seeds = itertools.count()
        self.saved = None
        self.make_fresh()
        self.open_session(level, scale, compute, num_losses, bounds, adopt=adopt)

    @property
    def asks(self):
        """Whether to ask what became of steps now: as on a GPU, that is only known for sure to who waits, and so nobody
        asks all the time.
        """
        return not self.is_like_a_gpu or next(self.turns) % 5 == 0

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def make_fresh(self):
        seeds = [next(self.seeds) for _ in self.norms]
        self.models = [make_net(norm, seed) for norm, seed in zip(self.norms, seeds, strict=True)]
        self.optimizers = [OPTIMIZERS[self.kind](model.parameters()) for model in self.models]
        self.reference = Reference(
            None,
            [make_net(norm, seed) for norm, seed in zip(self.norms, seeds, strict=True)],
            OPTIMIZERS[self.kind],
            scalers=[],
        )

    def make_scalers(self, scale, num_losses, bounds):
        minimum, maximum = bounds
        return [Scaler(scale, minimum or torch.finfo(torch.float32).tiny, maximum) for _ in range(num_losses)]

    def open_session(self, level, scale, compute, num_losses, bounds, *, replace=False, adopt=False, keep_state=True):
        options = {
            "opt_level": level,
            "loss_scale": scale,
            "compute": compute,
            "min_loss_scale": bounds[0],
            "max_loss_scale": bounds[1],
            "verbosity": 0,
        }
        low = torch.float16 if level in ("O1", "O2", "O3") and scale == 1.0 else torch.bfloat16
        if level != "O0":
            options["patch_torch_functions_type" if level in PATCHING else "cast_model_type"] = low
        groups = [[index] for index in range(len(self.models))] if adopt and not replace else [range(len(self.models))]
        for group in groups:
            models, optimizers = [self.models[index] for index in group], [self.optimizers[index] for index in group]
            amp.initialize(models, optimizers, num_losses=num_losses, replace=replace, **options)
        self.level = level
        self.reference = self.reference.switch(
            level, OPTIMIZERS[self.kind], self.make_scalers(scale, num_losses, bounds), keep_state, compute, low
        )
        event(f"initialize {level}")
        event(f"scale {scale}")
        event(f"products: {compute}")

    def choose(self, subset):
        return tuple(index for index in subset if index < len(self.models)) or (0,)

    def loss_id(self, number):
        return number % len(self.reference.scalers)

    def compute(self, reached, batch, factors, casts=True):
        """The loss of some models, of the package and of the reference."""
        inputs, targets = DATA[batch]
        with contextlib.nullcontext() if casts else amp.disable_casts():
            outputs = [self.models[index](inputs) for index in reached]
        expected = [self.reference.forward(index, inputs, casts) for index in reached]
        for output, other in zip(outputs, expected, strict=True):
            assert equal(output, other)
        pairs = (outputs, expected)
        return [
            sum(loss_of(output, targets) * factor for output, factor in zip(side, factors, strict=True))
            for side in pairs
        ]

    def run_pass(
        self, loss, other, passed, loss_id=0, delay=False, inside=None, inside_first=True, error=None, error_first=False
    ):
        """One scale_loss block. `inside` is called before or after the backward pass; so is `error` raised."""
        optimizers = [self.optimizers[index] for index in passed]
        optimizers = optimizers if len(optimizers) > 1 else optimizers[0]
        if not self.reference.fits_inside(loss_id):
            with pytest.raises(amp.SessionError, match="inside one with another"):
                amp.scale_loss(loss, optimizers, loss_id=loss_id).__enter__()
            event("refused inside another")
            return
        scaler = self.reference.scalers[loss_id]
        self.reference.enter(loss_id, passed)
        scale = scaler.scale
        with contextlib.suppress(Boom) if error else contextlib.nullcontext():
            with amp.scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay) as scaled:
                assert equal(scaled, loss.float() * scale)
                if inside is not None and inside_first:
                    inside()
                if not (error and error_first):
                    scaled.backward()
                    other.backward()
                if inside is not None and not inside_first:
                    inside()
                if error:
                    raise Boom
            assert not error
        self.reference.leave(delay, failed=bool(error))

    def zero_masters_before_reset(self):
        """Gradients in masters end with the masters; those that a delayed pass left scaled must be settled first."""
        for optimizer, owner in zip(self.optimizers, self.reference.owners, strict=True):
            if owner.masters:
                optimizer.zero_grad()
                owner.zero_grad(True)
        self.reference.settle()

    def is_finite(self):
        return all(
            bool(torch.isfinite(value).all())
            for owner in self.reference.owners
            for value in owner.state_dict().values()
        )

    # ---- passes ------------------------------------------------------------------------------------------------------

    @rule(
        reached=SUBSETS,
        passed=SUBSETS,
        batch=BATCH,
        number=NUM_LOSSES,
        delay=st.booleans(),
        casts=st.booleans(),
        then=THEN,
    )
    def forward_and_backward(self, reached, passed, batch, number, delay, casts, then):
        reached, passed, loss_id = self.choose(reached), self.choose(passed), self.loss_id(number)
        loss, other = self.compute(reached, batch, [1.0] * len(reached), casts)
        self.run_pass(loss, other, passed, loss_id, delay)
        event(f"pass, {'delayed' if delay else 'plain'}, {len(passed)} optimizers")
        if not casts and self.level in PATCHING:
            event("pass inside disable_casts")
        self.go_on(passed, then)

    def go_on(self, passed, then):
        for index in passed if then != "nothing" else ():
            self.step_one(index)
            if then == "step and zero":
                self.zero_one(index, True)

    @rule(batches=st.lists(BATCH, min_size=2, max_size=3), reached=SUBSETS, number=NUM_LOSSES, delay=st.booleans())
    def accumulate_and_step(self, batches, reached, number, delay):
        """The training loop as it should be written, for all the optimizers that the loss reaches."""
        reached, loss_id = self.choose(reached), self.loss_id(number)
        for index in reached:
            self.zero_one(index, True)
        for batch in batches:
            loss, other = self.compute(reached, batch, [1.0] * len(reached))
            self.run_pass(loss, other, reached, loss_id, delay and batch is not batches[-1])
        for index in reached:
            self.step_one(index)
        event("whole iteration")

    @rule(
        reached=SUBSETS,
        bad=st.integers(0, 1),
        factor=st.sampled_from([math.inf, math.nan]),
        batch=BATCH,
        number=NUM_LOSSES,
        delay=st.booleans(),
        then=THEN,
    )
    def overflow(self, reached, bad, factor, batch, number, delay, then):
        """One of the losses in the sum overflows; all the optimizers it reaches are passed, and all must be skipped."""
        reached, loss_id = self.choose(reached), self.loss_id(number)
        if not self.reference.scalers[loss_id].is_dynamic and (self.saved is None or batch % 2):
            return  # nothing is skipped, so the weights are lost: only where they can be loaded again
        loss, other = self.compute(
            reached, batch, [factor if index == bad % len(reached) else 1.0 for index in range(len(reached))]
        )
        self.run_pass(loss, other, reached, loss_id, delay)
        event(f"overflow, {'delayed' if delay else 'plain'}")
        self.go_on(reached, then)

    @rule(
        outer=SUBSETS,
        inner=SUBSETS,
        batch=BATCH,
        numbers=st.tuples(NUM_LOSSES, NUM_LOSSES),
        delays=st.tuples(st.booleans(), st.booleans()),
        factors=st.sampled_from([(1.0, 1.0), (1.0, 1.0), (math.inf, 1.0), (1.0, math.inf)]),
        inside_first=st.booleans(),
    )
    def nested(self, outer, inner, batch, numbers, delays, factors, inside_first):
        outer, inner = self.choose(outer), self.choose(inner)
        if not all(scaler.is_dynamic for scaler in self.reference.scalers):
            factors = 1.0, 1.0
        loss, other = self.compute(outer, batch, factors[:1] * len(outer))
        inner_loss, inner_other = self.compute(inner, (batch + 1) % len(DATA), factors[1:] * len(inner))
        self.run_pass(
            loss,
            other,
            outer,
            self.loss_id(numbers[0]),
            delays[0],
            inside=lambda: self.run_pass(inner_loss, inner_other, inner, self.loss_id(numbers[1]), delays[1]),
            inside_first=inside_first,
        )
        event(f"nested, {'before' if inside_first else 'after'} the backward pass")

    @rule(batch=BATCH, number=NUM_LOSSES, before=st.booleans(), is_nested=st.booleans(), passed=SUBSETS)
    def exception_in_the_body(self, batch, number, before, is_nested, passed):
        passed, loss_id = self.choose(passed), self.loss_id(number)
        loss, other = self.compute(passed, batch, [1.0] * len(passed))
        if is_nested:
            outer, outer_other = self.compute(passed, (batch + 1) % len(DATA), [1.0] * len(passed))
            self.run_pass(
                outer,
                outer_other,
                passed,
                0,
                inside=lambda: self.run_pass(loss, other, passed, loss_id, error=True, error_first=before),
            )
        else:
            self.run_pass(loss, other, passed, loss_id, error=True, error_first=before)
        event(f"exception {'before' if before else 'after'} backward{', nested' if is_nested else ''}")

    @rule(batch=BATCH, number=NUM_LOSSES, set_to_none=st.booleans())
    def zero_grad_inside(self, batch, number, set_to_none):
        loss, other = self.compute((0,), batch, [1.0])

        self.run_pass(loss, other, (0,), self.loss_id(number), inside=lambda: self.zero_one(0, set_to_none))
        event("zero_grad inside scale_loss")

    @rule(batch=BATCH, number=NUM_LOSSES, delay=st.booleans(), between=st.sampled_from(["nothing", "step", "pass"]))
    def backward_later(self, batch, number, delay, between):
        """A graph of old weights: made before a step, gone backward through after it.

        Plain torch allows it only where casts saved copies.
        """
        if between == "step" and (self.level not in PATCHING or self.norms[0] != "none"):
            between = "pass"
        held = self.compute((0,), batch, [1.0])
        loss_id = self.loss_id(number)
        if between != "nothing":
            self.run_pass(*self.compute((0,), (batch + 1) % len(DATA), [1.0]), (0,), loss_id, delay)
        if between == "step":
            self.step_one(0)
            self.run_pass(*self.compute((0,), (batch + 1) % len(DATA), [1.0]), (0,), loss_id, delay)
        self.run_pass(*held, (0,), loss_id, delay)
        event(f"backward later, {between} between")

    # ---- steps and zeroing -------------------------------------------------------------------------------------------

    def step_one(self, index):
        self.optimizers[index].step()
        self.reference.owners[index].step()
        if self.level is not None:
            event("step skipped" if self.reference.owners[index].was_skipped else "step taken")

    def zero_one(self, index, set_to_none):
        self.optimizers[index].zero_grad(set_to_none=set_to_none)
        self.reference.owners[index].zero_grad(set_to_none)

    @rule(chosen=SUBSETS)
    def step(self, chosen):
        for index in self.choose(chosen):
            self.step_one(index)

    @rule(chosen=SUBSETS, set_to_none=st.booleans())
    def zero_grad_of_optimizer(self, chosen, set_to_none):
        for index in self.choose(chosen):
            self.zero_one(index, set_to_none)
        event(f"optimizer.zero_grad({set_to_none})")

    @rule(chosen=SUBSETS, set_to_none=st.booleans())
    def zero_grad_of_model(self, chosen, set_to_none):
        for index in self.choose(chosen):
            self.models[index].zero_grad(set_to_none=set_to_none)
            self.reference.owners[index].zero_grad_of_model(set_to_none)
        event(f"model.zero_grad({set_to_none})")

    # ---- weights -----------------------------------------------------------------------------------------------------

    @rule(
        how=st.sampled_from(["mul_", "copy_", "data =", "data.mul_"]),
        which=st.integers(0, 5),
        chosen=SUBSETS,
        is_master=st.booleans(),
    )
    def edit_weights(self, how, which, chosen, is_master):
        for index in self.choose(chosen):
            owner = self.reference.owners[index]
            ours = list(amp.master_params(self.optimizers[index]) if is_master else self.models[index].parameters())
            theirs = owner.stepped if is_master else list(owner.net.parameters())
            for parameter in (ours[which % len(ours)], theirs[which % len(ours)]):
                with torch.no_grad():
                    if how == "mul_":
                        parameter.mul_(0.5)
                    elif how == "copy_":
                        parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
                    elif how == "data =":
                        parameter.data = parameter.data * 0.75
                    else:
                        parameter.data.mul_(0.75)
            if (
                how == "data.mul_"
            ):  # leaves no trace, so it must be said; of a parameter that has a master only the master counts
                amp.refresh()
            if is_master or how == "data.mul_":
                owner.copy_masters()
            else:
                owner.copy_to_master(owner.names[which % len(ours)])
        event(f"edit: {how}")

    @rule(batch=BATCH, casts=st.booleans())
    def evaluate(self, batch, casts):
        for index, model in enumerate(self.models):
            net = self.reference.owners[index].net
            model.eval(), net.eval()
            with torch.no_grad(), contextlib.nullcontext() if casts else amp.disable_casts():
                output = model(DATA[batch][0])
            with torch.no_grad():
                assert equal(output, self.reference.forward(index, DATA[batch][0], casts))
            model.train(), net.train()
        event("evaluation")

    @rule(batch=BATCH)
    def copy_the_model(self, batch):
        for index, model in enumerate(self.models):
            twin = copy.deepcopy(model)
            with torch.no_grad():
                expected = self.reference.forward(index, DATA[batch][0])
            twin.train()
            assert equal(twin(DATA[batch][0]).detach(), expected)
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.zero_()
            assert not twin(DATA[batch][0]).detach().any()
            with torch.no_grad():
                model(DATA[batch][0])  # BatchNorm counts this one too, as the reference did above
        event("deepcopy")

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save(self):
        ours = (
            [model.state_dict() for model in self.models],
            [optimizer.state_dict() for optimizer in self.optimizers],
            amp.state_dict(),
        )
        theirs = (
            [owner.state_dict() for owner in self.reference.owners],
            [owner.optimizer.state_dict() for owner in self.reference.owners],
            [scaler.state_dict() for scaler in self.reference.scalers],
        )
        self.saved = copy.deepcopy(ours), copy.deepcopy(theirs)
        event("save")

    def load_saved(self):
        (weights, states, amp_state), (their_weights, their_states, their_amp_state) = copy.deepcopy(self.saved)
        for index, model in enumerate(self.models):
            model.load_state_dict(weights[index])
            self.optimizers[index].load_state_dict(states[index])
            self.reference.owners[index].load_state_dict(their_weights[index])
            self.reference.owners[index].optimizer.load_state_dict(their_states[index])
        if len(their_amp_state) == len(self.reference.scalers):
            amp.load_state_dict(amp_state)
            self.reference.load_scalers(their_amp_state)
        else:
            with pytest.raises(amp.CheckpointError):
                amp.load_state_dict(amp_state)
            event("load refused")

    @rule(action=st.sampled_from(["save", "load"]))
    def save_or_load(self, action):
        if action == "load" and self.saved is not None:
            self.load_saved()
            event("load")
        elif self.is_finite():
            self.save()

    @rule(power=st.integers(9, 17), unskipped=st.sampled_from([0, INTERVAL - 2, INTERVAL - 1, INTERVAL + 5]))
    def load_scalers(self, power, unskipped):
        """Near the end of the growth interval, so that growth is seen."""
        states = [
            {"loss_scale": 2.0 ** (power + index), "unskipped": unskipped}
            for index in range(len(self.reference.scalers))
        ]
        amp.load_state_dict({f"loss_scaler{index}": state for index, state in enumerate(states)})
        self.reference.load_scalers(states)
        event("load scalers")

    # ---- sessions ----------------------------------------------------------------------------------------------------

    def make_reset(self):
        if self.level is not None:
            self.zero_masters_before_reset()
        amp.reset()
        assert find_changes() == []
        for optimizer in self.optimizers:
            assert not {"step", "zero_grad", "add_param_group", "_amp_stash"} & set(vars(optimizer))
        if self.level == "O3":  # the optimizer's state stays in 16 bits, and so does not fit the weights any more
            for optimizer, owner in zip(self.optimizers, self.reference.owners, strict=True):
                optimizer.state.clear(), owner.optimizer.state.clear()
        self.reference = self.reference.switch(None, OPTIMIZERS[self.kind], [], keep_state=True)
        self.level = None

    @rule(
        how=st.sampled_from(["reset", "replace", "new objects", "checkpoint into new objects"]),
        level=LEVELS,
        scale=SCALES,
        compute=COMPUTE,
        num_losses=NUM_LOSSES,
        bounds=BOUNDS,
        adopt=st.booleans(),
        train=st.booleans(),
    )
    def change_level(self, how, level, scale, compute, num_losses, bounds, adopt, train):
        if how == "replace":
            self.zero_masters_before_reset()
            self.clear_state_for(level)
            self.open_session(level, scale, compute, num_losses, bounds, replace=True)
            event("replace")
            return
        if how == "checkpoint into new objects" and self.saved is None and self.is_finite():
            self.save()
        self.make_reset()
        self.check_everything()
        event("reset")
        if train:
            for side in self.compute((0,), 0, [1.0]):
                side.backward()
            self.step_one(0)
            self.check_everything()
            event("training without a session")
        if how in ("new objects", "checkpoint into new objects"):
            self.make_fresh()
        self.clear_state_for(level)
        self.open_session(level, scale, compute, num_losses, bounds, adopt=adopt)
        if how == "checkpoint into new objects" and self.saved is not None:
            self.load_saved()
            event("load into new objects")

    def clear_state_for(self, level):
        if "O3" in (level, self.level):  # torch's optimizers do not mix a float32 state with 16-bit weights
            for optimizer, owner in zip(self.optimizers, self.reference.owners, strict=True):
                optimizer.state.clear(), owner.optimizer.state.clear()

    # ---- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def weights_are_those_of_the_reference(self):
        if not hasattr(self, "models"):
            return
        for model, owner in zip(self.models, self.reference.owners, strict=True):
            assert_same_tree(model.state_dict(), owner.state_dict(), "weights")
            for ours, theirs in zip(model.parameters(), owner.net.parameters(), strict=True):
                assert equal(ours, theirs)

    @invariant()
    def optimizers_are_those_of_the_reference(self):
        if not hasattr(self, "models"):
            return
        for optimizer, owner in zip(self.optimizers, self.reference.owners, strict=True):
            ours, theirs = optimizer.state_dict()["state"], owner.optimizer.state_dict()["state"]
            if self.is_like_a_gpu:  # a first step that skips by itself has made its zeros before
                ours = {
                    key: state
                    for key, state in ours.items()
                    if key in theirs or any(value.any() for value in state.values())
                }
            assert_same_tree(ours, theirs, "state")
            assert self.level is None or not self.asks or optimizer.step_was_skipped is owner.was_skipped

    @invariant()
    def gradients_are_the_true_sums(self):
        if not hasattr(self, "models"):
            return
        carried = self.reference.carried  # what a delayed pass leaves is scaled still
        for model, optimizer, owner in zip(self.models, self.optimizers, self.reference.owners, strict=True):
            stepped = list(amp.master_params(optimizer))
            for ours, theirs, name in zip(stepped, owner.stepped, owner.names, strict=True):
                scale = 1.0 if name in owner.masters else carried
                assert equal(ours.grad, None if theirs.grad is None else theirs.grad * scale), name
            for ours, theirs in zip(model.parameters(), owner.net.parameters(), strict=True):
                assert equal(ours.grad, None if theirs.grad is None else theirs.grad * carried)

    @invariant()
    def scalers_are_those_of_the_reference(self):
        if getattr(self, "level", None) is None:
            return
        expected = {f"loss_scaler{index}": scaler.state_dict() for index, scaler in enumerate(self.reference.scalers)}
        assert amp.state_dict() == expected, f"{amp.state_dict()} is not {expected}"
        if not self.asks:
            return
        stats, owners = amp.stats(), self.reference.owners
        assert (stats.opt_level, stats.steps, stats.steps_skipped) == (
            self.level,
            sum(o.steps for o in owners),
            sum(o.skips for o in owners),
        )
        assert stats.loss_scales == tuple(entry["loss_scale"] for entry in expected.values())

    def check_everything(self):
        self.weights_are_those_of_the_reference()
        self.optimizers_are_those_of_the_reference()
        self.gradients_are_the_true_sums()
        self.scalers_are_those_of_the_reference()

    def teardown(self):
        amp.reset()
        if hasattr(self, "models"):
            self.patches.undo()
            assert find_changes() == []


TrainingMachine.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=12,
    deadline=None,
    derandomize="AMP_PATCH_EXAMPLES"
    not in os.environ,  # the same in every run of the suite; others by asking for a number
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestTrainingMachine = pytest.mark.slow(pytest.mark.filterwarnings("ignore")(TrainingMachine.TestCase))
