"""Random sequences of everything a training script may do, with the package and by hand (`hand_training.py`): both
sides do the same, and hold the same bits after each action.
"""

import contextlib
import copy
import itertools
import math
import os

import hypothesis.strategies as st
import pytest
import torch
from hand_training import WITH_MASTERS, ByHand, equal, loss_of, make_by_hand, make_inputs, make_model
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch_state import find_changes

import amp_patch
from amp_patch.casting import weight_cache
from amp_patch.training.step_log import Outcome

PATCHING = ("O1", "O4")
INTERVAL = 2000

MODELS = {
    "mlp": ("mlp", {}),
    "mlp without a norm": ("mlp", {"has_norm": False}),
    "conv": ("conv", {}),
    "attention": ("attention", {}),
}
OPTIMIZERS = {  # an eps of 1e-8 is 0 in float16
    "sgd": (torch.optim.SGD, {"lr": 0.25, "momentum": 0.5}),
    "sgd foreach": (torch.optim.SGD, {"lr": 0.25, "momentum": 0.5, "nesterov": True, "foreach": True}),
    "sgd fused": (torch.optim.SGD, {"lr": 0.25, "fused": True}),  # torch's goes wrong with momentum in 16 bits
    "adam": (torch.optim.Adam, {"lr": 0.125, "eps": 1e-4}),
    "adam fused": (torch.optim.Adam, {"lr": 0.125, "eps": 1e-4, "fused": True}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 0.125, "eps": 1e-4, "foreach": True}),
    "adamw fused": (torch.optim.AdamW, {"lr": 0.125, "eps": 1e-4, "fused": True}),
}

BATCHES = 8
KINDS = st.sampled_from(list(MODELS))
LEVELS = st.sampled_from(["O0", "O1", "O2", "O3", "O4", "O5"])
SCALES = st.sampled_from(["dynamic", "dynamic", "dynamic", 1.0, 256.0])
SUBSETS = st.sampled_from([(0,), (1,), (0, 1), (1, 0)])
BATCH = st.integers(0, BATCHES - 1)
NUM_LOSSES = st.integers(1, 2)
BOUNDS = st.sampled_from([(None, 2.0**24), (2.0**15, 2.0**17), (2.0**10, 2.0**12)])
COMPUTE = st.sampled_from(["native", "float32"])
THEN = st.sampled_from(["nothing", "step", "step and zero"])

EXAMPLES = int(os.environ.get("AMP_PATCH_EXAMPLES", "100"))


class Boom(Exception):
    pass


class Side:
    """Models, optimizers and what a script calls: `amp` is the package, or a `ByHand`.

    What an action appends to `seen` must be the same on both sides.
    """

    def __init__(self, amp, kinds, optimizer):
        self.amp, self.is_by_hand = amp, isinstance(amp, ByHand)
        self.kinds, self.optimizer = kinds, optimizer
        self.seen, self.saved = [], None

    def make_fresh(self, seed):
        self.models = []
        for index, name in enumerate(self.kinds):
            kind, options = MODELS[name]
            self.models.append(make_model(kind, seed + index, is_by_hand=self.is_by_hand, **options))
        kind, options = OPTIMIZERS[self.optimizer]
        kind = make_by_hand(kind) if self.is_by_hand else kind
        self.optimizers = [kind(model.parameters(), **options) for model in self.models]

    def initialize(self, *, adopt, replace, **options):
        """Bring everything under a session: in one call, or a model at a time."""
        if self.is_by_hand:
            if replace:
                self.amp.reset()
            self.amp.initialize(self.models, self.optimizers, **options)
        elif adopt and not replace:
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                self.amp.initialize([model], [optimizer], **options)
        else:
            self.amp.initialize(self.models, self.optimizers, replace=replace, **options)

    def loss(self, reached, batch, factors=(1.0, 1.0), casts=True):
        with contextlib.nullcontext() if casts else self.amp.disable_casts():
            losses = [loss_of(self.models[index], batch, factors[place]) for place, index in enumerate(reached)]
        self.seen.append([loss.detach().clone() for loss in losses])
        return sum(losses)

    def run_pass(self, loss, passed, loss_id=0, delay=False, inside=None, inside_first=True, error=None):
        """One block. `inside` is called, and `error` raised, before or after the backward pass."""
        optimizers = [self.optimizers[index] for index in passed]
        optimizers = optimizers if len(optimizers) > 1 else optimizers[0]
        try:
            with self.amp.scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay) as scaled:
                self.seen.append(scaled.detach().clone())
                if inside is not None and inside_first:
                    inside()
                if error == "before":
                    raise Boom
                scaled.backward()
                if inside is not None and not inside_first:
                    inside()
                if error == "after":
                    raise Boom
        except Boom:
            pass
        except self.amp.SessionError:
            self.seen.append("refused inside a block of another scale")

    def evaluate(self, batch, casts=True):
        for model in self.models:
            model.eval()
            with torch.no_grad(), contextlib.nullcontext() if casts else self.amp.disable_casts():
                self.seen.append(model(make_inputs(model.kind, batch)))
            model.train()

    def save(self):
        parts = [*self.models, *self.optimizers, self.amp]
        self.saved = copy.deepcopy([part.state_dict() for part in parts])

    def load(self):
        parts = [*self.models, *self.optimizers, self.amp]
        try:
            for part, state in zip(parts, copy.deepcopy(self.saved), strict=True):
                part.load_state_dict(state)
        except self.amp.CheckpointError:
            self.seen.append("another number of losses")


class TrainingMachine(RuleBasedStateMachine):
    """Whatever rules draw is done on both sides; the invariants compare these."""

    @initialize(
        kinds=st.tuples(KINDS, KINDS),
        is_pair=st.booleans(),
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        level=LEVELS,
        scale=SCALES,
        compute=COMPUTE,
        num_losses=NUM_LOSSES,
        bounds=BOUNDS,
        adopt=st.booleans(),
        is_like_a_gpu=st.booleans(),
    )
    def start(self, kinds, is_pair, optimizer, level, scale, compute, num_losses, bounds, adopt, is_like_a_gpu):
        amp_patch.reset()
        # as where launches are dear and the host runs ahead: copies are kept, flags arrive late, fused optimizers skip
        # by themselves
        self.patches, self.is_like_a_gpu, self.turns = pytest.MonkeyPatch(), is_like_a_gpu, itertools.count()
        if is_like_a_gpu:
            self.patches.setattr(weight_cache, "are_refreshed_on", lambda device_type: True)
            self.patches.setattr(Outcome, "is_known", lambda outcome: outcome.is_read)
        self.kinds, self.level, self.seeds = kinds[: 1 + is_pair], None, itertools.count(step=2)
        self.theirs = Side(ByHand(), self.kinds, optimizer)
        self.ours = Side(amp_patch, self.kinds, optimizer)
        self.make_fresh()
        self.open_session(level, scale, compute, num_losses, bounds, adopt=adopt)

    @property
    def asks(self):
        """Whether to ask what became of steps now: as on a GPU, that is only known for sure to who waits, and so nobody
        asks all the time.
        """
        return not self.is_like_a_gpu or next(self.turns) % 5 == 0

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def do(self, action):
        self.theirs.seen, self.ours.seen = [], []
        with amp_patch.disable_casts():  # torch is patched for both
            action(self.theirs)
        action(self.ours)
        assert equal(self.ours.seen, self.theirs.seen), f"{self.ours.seen} is not {self.theirs.seen}"

    def make_fresh(self):
        seed = next(self.seeds)
        self.do(lambda side: side.make_fresh(seed))

    def open_session(self, level, scale, compute, num_losses, bounds, *, replace=False, adopt=False):
        options = {
            "opt_level": level,
            "loss_scale": scale,
            "compute": compute,
            "num_losses": num_losses,
            "min_loss_scale": bounds[0],
            "max_loss_scale": bounds[1],
            "verbosity": 0,
        }
        self.do(lambda side: side.initialize(adopt=adopt, replace=replace, **options))
        self.level, self.is_dynamic, self.num_losses = level, scale == "dynamic", num_losses
        self.steps = self.skips = 0

    def choose(self, subset):
        return tuple(index for index in subset if index < len(self.kinds)) or (0,)

    def loss_id(self, number):
        return number % self.num_losses

    def step_one(self, index):
        self.do(lambda side: side.optimizers[index].step())
        if self.level is not None:
            is_skipped = self.theirs.optimizers[index].step_was_skipped
            self.skips += is_skipped
            self.steps += not is_skipped

    def zero_one(self, index, set_to_none):
        self.do(lambda side: side.optimizers[index].zero_grad(set_to_none=set_to_none))

    def go_on(self, passed, then):
        for index in passed if then != "nothing" else ():
            self.step_one(index)
            if then == "step and zero":
                self.zero_one(index, True)

    def zero_masters_before_reset(self):
        """Gradients in masters end with the masters."""
        if self.level in WITH_MASTERS:
            for index in range(len(self.kinds)):
                self.zero_one(index, True)

    def is_finite(self):
        values = [value for model in self.theirs.models for value in model.state_dict().values()]
        return all(bool(torch.isfinite(value).all()) for value in values)

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
        self.do(lambda side: side.run_pass(side.loss(reached, batch, casts=casts), passed, loss_id, delay))
        self.go_on(passed, then)

    @rule(batches=st.lists(BATCH, min_size=2, max_size=3), reached=SUBSETS, number=NUM_LOSSES, delay=st.booleans())
    def accumulate_and_step(self, batches, reached, number, delay):
        """The training loop as it should be written, for all the optimizers that the loss reaches."""
        reached, loss_id = self.choose(reached), self.loss_id(number)
        for index in reached:
            self.zero_one(index, True)

        def run(side):
            for count, batch in enumerate(batches, start=1):
                side.run_pass(side.loss(reached, batch), reached, loss_id, delay and count < len(batches))

        self.do(run)
        for index in reached:
            self.step_one(index)

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
        if not self.is_dynamic and (self.ours.saved is None or batch % 2):
            return  # nothing is skipped, so the weights are lost: only where they can be loaded again
        factors = [factor if index == bad % len(reached) else 1.0 for index in range(len(reached))]
        self.do(lambda side: side.run_pass(side.loss(reached, batch, factors), reached, loss_id, delay))
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
        if not self.is_dynamic:
            factors = 1.0, 1.0

        def run(side):
            loss = side.loss(outer, batch, factors[:1] * 2)
            inner_loss = side.loss(inner, (batch + 1) % BATCHES, factors[1:] * 2)
            side.run_pass(
                loss,
                outer,
                self.loss_id(numbers[0]),
                delays[0],
                inside=lambda: side.run_pass(inner_loss, inner, self.loss_id(numbers[1]), delays[1]),
                inside_first=inside_first,
            )

        self.do(run)

    @rule(
        batch=BATCH,
        number=NUM_LOSSES,
        error=st.sampled_from(["before", "after"]),
        is_nested=st.booleans(),
        passed=SUBSETS,
        factor=st.sampled_from([1.0, 1.0, math.inf]),
    )
    def exception_in_the_body(self, batch, number, error, is_nested, passed, factor):
        passed, loss_id = self.choose(passed), self.loss_id(number)
        factor = factor if self.is_dynamic else 1.0

        def run(side):
            loss = side.loss(passed, batch, [factor] * 2)
            if not is_nested:
                side.run_pass(loss, passed, loss_id, error=error)
                return
            outer = side.loss(passed, (batch + 1) % BATCHES)
            side.run_pass(outer, passed, inside=lambda: side.run_pass(loss, passed, loss_id, error=error))

        self.do(run)

    @rule(batch=BATCH, number=NUM_LOSSES, set_to_none=st.booleans())
    def zero_grad_inside(self, batch, number, set_to_none):
        def run(side):
            loss = side.loss((0,), batch)
            zero = side.optimizers[0].zero_grad
            side.run_pass(loss, (0,), self.loss_id(number), inside=lambda: zero(set_to_none=set_to_none))

        self.do(run)

    @rule(batch=BATCH, number=NUM_LOSSES, delay=st.booleans(), between=st.sampled_from(["nothing", "step", "pass"]))
    def backward_later(self, batch, number, delay, between):
        """A graph of old weights: made before a step, gone backward through after it.

        Plain torch allows it only where casts saved copies.
        """
        if between == "step" and (self.level not in PATCHING or self.kinds[0] != "mlp without a norm"):
            between = "pass"
        loss_id, held = self.loss_id(number), {}
        self.do(lambda side: held.update({side: side.loss((0,), batch)}))
        if between != "nothing":
            self.do(lambda side: side.run_pass(side.loss((0,), (batch + 1) % BATCHES), (0,), loss_id, delay))
        if between == "step":
            self.step_one(0)
            self.do(lambda side: side.run_pass(side.loss((0,), (batch + 1) % BATCHES), (0,), loss_id, delay))
        self.do(lambda side: side.run_pass(held[side], (0,), loss_id, delay))

    # ---- steps and zeroing -------------------------------------------------------------------------------------------

    @rule(chosen=SUBSETS)
    def step(self, chosen):
        for index in self.choose(chosen):
            self.step_one(index)

    @rule(chosen=SUBSETS, set_to_none=st.booleans(), is_by_model=st.booleans())
    def zero_grad(self, chosen, set_to_none, is_by_model):
        for index in self.choose(chosen):
            if is_by_model:
                self.do(lambda side, index=index: side.models[index].zero_grad(set_to_none=set_to_none))
            else:
                self.zero_one(index, set_to_none)

    # ---- weights -----------------------------------------------------------------------------------------------------

    @rule(
        how=st.sampled_from(["mul_", "copy_", "data =", "data.mul_"]),
        which=st.integers(0, 5),
        chosen=SUBSETS,
        is_master=st.booleans(),
    )
    def edit_weights(self, how, which, chosen, is_master):
        def edit(side, index):
            if is_master or how == "data.mul_":
                parameters = list(side.amp.master_params(side.optimizers[index]))
            else:
                parameters = list(side.models[index].parameters())
            parameter = parameters[which % len(parameters)]
            with torch.no_grad():
                if how == "mul_":
                    parameter.mul_(0.5)
                elif how == "copy_":
                    parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
                elif how == "data =":
                    parameter.data = parameter.data * 0.75
                else:
                    parameter.data.mul_(0.75)
            if how == "data.mul_":  # leaves no trace, so it must be said
                side.amp.refresh()

        for index in self.choose(chosen):
            self.do(lambda side, index=index: edit(side, index))

    @rule(batch=BATCH, casts=st.booleans())
    def evaluate(self, batch, casts):
        self.do(lambda side: side.evaluate(batch, casts))

    @rule(batch=BATCH)
    def copy_the_model(self, batch):
        for model, by_hand in zip(self.ours.models, self.theirs.models, strict=True):
            inputs = make_inputs(model.kind, batch)
            twin = copy.deepcopy(model)
            with torch.no_grad():
                expected = by_hand(inputs)
            assert equal(twin(inputs).detach(), expected)
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.zero_()
            assert not twin(inputs).detach().any()
            with torch.no_grad():
                model(inputs)  # a batch norm counts this one too, as that by hand did

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @rule(action=st.sampled_from(["save", "load"]))
    def save_or_load(self, action):
        if action == "load" and self.ours.saved is not None:
            self.do(lambda side: side.load())
        elif self.is_finite():
            self.do(lambda side: side.save())

    @rule(power=st.integers(9, 17), unskipped=st.sampled_from([0, INTERVAL - 2, INTERVAL - 1, INTERVAL + 5]))
    def load_scalers(self, power, unskipped):
        """Near the end of the growth interval, so that growth is seen."""
        state = {
            f"loss_scaler{index}": {"loss_scale": 2.0 ** (power + index), "unskipped": unskipped}
            for index in range(self.num_losses)
        }
        self.do(lambda side: side.amp.load_state_dict(state))

    # ---- sessions ----------------------------------------------------------------------------------------------------

    def make_reset(self):
        self.zero_masters_before_reset()
        self.do(lambda side: side.amp.reset())
        assert find_changes() == []
        for optimizer in self.ours.optimizers:
            assert not {"step", "zero_grad", "add_param_group", "_amp_stash"} & set(vars(optimizer))
        self.clear_state_for(self.level)
        self.level = None

    def clear_state_for(self, level):
        """Torch's optimizers do not mix a float32 state with 16-bit weights, nor the other way round."""
        if level == "O3":
            self.do(lambda side: [optimizer.state.clear() for optimizer in side.optimizers])

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
            self.clear_state_for(self.level)
            self.clear_state_for(level)
            self.open_session(level, scale, compute, num_losses, bounds, replace=True)
            return
        if how == "checkpoint into new objects" and self.ours.saved is None and self.is_finite():
            self.do(lambda side: side.save())
        self.make_reset()
        self.check_everything()
        if train:
            self.do(lambda side: side.loss((0,), 0).backward())
            self.step_one(0)
            self.check_everything()
        if how in ("new objects", "checkpoint into new objects"):
            self.make_fresh()
        self.clear_state_for(level)
        self.open_session(level, scale, compute, num_losses, bounds, adopt=adopt)
        if how == "checkpoint into new objects" and self.ours.saved is not None:
            self.do(lambda side: side.load())

    # ---- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def both_sides_hold_the_same(self):
        if hasattr(self, "ours"):
            self.check_everything()

    def check_everything(self):
        for model, by_hand in zip(self.ours.models, self.theirs.models, strict=True):
            assert equal(model.state_dict(), by_hand.state_dict()), (model.state_dict(), by_hand.state_dict())
            for (name, ours), theirs in zip(model.named_parameters(), by_hand.parameters(), strict=True):
                assert equal(ours.detach(), theirs.detach()), f"{name}: {ours} is not {theirs}"
                assert equal(ours.grad, theirs.grad), f"gradient of {name}: {ours.grad} is not {theirs.grad}"
        for optimizer, by_hand in zip(self.ours.optimizers, self.theirs.optimizers, strict=True):
            for ours, theirs in zip(amp_patch.master_params(optimizer), by_hand.stepped(), strict=True):
                assert equal(ours.grad, theirs.grad), f"gradient of a master: {ours.grad} is not {theirs.grad}"
            ours, theirs = optimizer.state_dict()["state"], by_hand.state_dict()["state"]
            if self.is_like_a_gpu:  # a first step that skips by itself has made its zeros before
                ours = {
                    key: state
                    for key, state in ours.items()
                    if key in theirs or any(value.any() for value in state.values())
                }
            assert equal(ours, theirs), f"state: {ours} is not {theirs}"
        if self.level is not None:
            self.check_session()

    def check_session(self):
        expected = self.theirs.amp.state_dict()
        assert equal(amp_patch.state_dict(), expected), f"{amp_patch.state_dict()} is not {expected}"
        if not self.asks:
            return
        for optimizer, by_hand in zip(self.ours.optimizers, self.theirs.optimizers, strict=True):
            assert optimizer.step_was_skipped is by_hand.step_was_skipped
        stats = amp_patch.stats()
        assert (stats.opt_level, stats.steps, stats.steps_skipped) == (self.level, self.steps, self.skips)
        assert stats.loss_scales == tuple(entry["loss_scale"] for entry in expected.values())

    def teardown(self):
        amp_patch.reset()
        if hasattr(self, "ours"):
            self.patches.undo()
            assert find_changes() == []


TrainingMachine.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=12,
    deadline=None,
    derandomize="AMP_PATCH_EXAMPLES" not in os.environ,  # the same in every run of the suite
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestTrainingMachine = pytest.mark.slow(pytest.mark.filterwarnings("ignore")(TrainingMachine.TestCase))
