"""Training scripts drawn at random: what people write between `initialize` and the end of training.

A program is a list of snippets of Python by the public names of amp_patch. `run_programs.py` runs them. The first
snippet makes models and optimizers; any of the others can be left out.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

LEVELS = ("O1", "O2", "O4", "O5")


@dataclass(frozen=True)
class Snippet:
    """Some lines of a script.

    Attributes:
        text: the lines.
        is_edit: weights and masters were edited by hand: they are alike again after the next forward or step.
    """

    text: str
    is_edit: bool = False


@dataclass(frozen=True)
class Program:
    """A script.

    Attributes:
        seed: what it was drawn from.
        snippets: its parts; the first makes models and optimizers.
        asks: whether the loss scales are asked for after each snippet, and not only at the end.
    """

    seed: int
    snippets: tuple[Snippet, ...]
    asks: bool

    def smaller(self) -> Iterator["Program"]:
        """The same with a snippet left out, but for the first."""
        for index in reversed(range(1, len(self.snippets))):
            yield replace(self, snippets=self.snippets[:index] + self.snippets[index + 1 :])

    def __str__(self) -> str:
        parts = [f"# {index}\n{snippet.text}" for index, snippet in enumerate(self.snippets)]
        return "\n".join(parts)


def draw(seed: int) -> Program:
    """The program of a seed."""
    draft = Draft(random.Random(seed))
    snippets = [Snippet(draft.setup())]
    for _ in range(draft.random.randint(9, 16)):
        (make,) = draft.random.choices(list(VOCABULARY), list(VOCABULARY.values()))
        snippets += make(draft)
    return Program(seed, tuple(snippets), asks=draft.random.random() < 0.7)


# ---- what a program is about -----------------------------------------------------------------------------------------

MODELS = {
    "mlp": ['model("mlp", {seed})'],
    "conv": ['model("conv", {seed})'],
    "attention": ['model("attention", {seed})', 'model("attention", {seed}, max_norm=0.75)'],
}
PARAMETERS = {"mlp": 6, "conv": 6, "attention": 5}
OPTIMIZERS = [
    "SGD({}, lr=0.125)",
    "SGD({}, lr=0.125, momentum=0.5)",
    "SGD({}, lr=0.125, momentum=0.5, nesterov=True, foreach=True, weight_decay=0.25)",
    "SGD({}, lr=0.125, fused=True)",
    "Adam({}, lr=0.0625)",
    "Adam({}, lr=0.0625, amsgrad=True, foreach=True)",
    "Adam({}, lr=0.0625, fused=True)",
    "AdamW({}, lr=0.0625)",
    "AdamW({}, lr=0.0625, weight_decay=0.25, fused=True)",
    "RMSprop({}, lr=0.0625, momentum=0.5, centered=True)",
    "Adagrad({}, lr=0.125)",
    "Adagrad({}, lr=0.125, fused=True)",
    "NAdam({}, lr=0.0625)",
    "Adamax({}, lr=0.0625)",
]


class Draft:
    """The choices that a program has made so far.

    Attributes:
        random: where choices come from.
        splits: where it is chosen whether masters are split.
        level, is_dynamic, losses: the level, whether steps can be skipped, and how many loss scalers there are.
        models: the kind of each, by its name, which is the same.
        optimizers: names of the models whose parameters each holds, by its name.
        later: lines that have changed the groups since, to be run again where all is built anew.
        is_shared: two optimizers have parameters in common, so that each block is for both.
        has_stale_state: an optimizer has a state of parameters that left it, which torch cannot save.
    """

    def __init__(self, source: random.Random) -> None:
        self.random = source
        self.splits = random.Random(repr(source.getstate()))
        self.models: list[str] = []
        self.optimizers: dict[str, list[str]] = {}
        self.construction: list[tuple[str, str]] = []
        self.later: list[str] = []
        self.is_shared = self.has_stale_state = False
        self.seeds = 0
        self.names = 0
        self.averages: list[tuple[str, str]] = []
        self.frozen: set[str] = set()

    def setup(self) -> str:
        self.choose_level()
        count = self.random.choice([1, 1, 2])
        self.models = self.random.sample(list(MODELS), count)
        self.sources = {model: self.random.choice(MODELS[model]) for model in self.models}
        if "split_masters" in self.options:  # edits in a forward pass leave the low half of a master
            self.sources = {model: MODELS[model][0] for model in self.models}
        self.losses = self.random.choice([1, 2, 2])
        layouts = ["own", "own", "joint", "halves", "common", "groups", "each"]
        self.layout = self.random.choice(layouts)
        self.choose_optimizers()
        return self.build()

    def choose_level(self) -> None:
        self.level = self.random.choice(LEVELS)
        self.is_dynamic = self.is_likely(0.75 if self.level in ("O1", "O2") else 0.4)
        self.options = {"opt_level": repr(self.level), "compute": self.random.choice(['"native"', '"float32"'])}
        if self.level == "O5" and self.splits.random() < 0.5:
            self.options["split_masters"] = "True"
        if not self.is_dynamic:
            self.options["loss_scale"] = self.random.choice(["1.0", "128.0", "1.0"])
        elif self.is_likely(0.3):
            self.options["loss_scale"] = '"dynamic"'
        else:
            knobs = {
                "init": 2.0 ** self.random.choice([4, 8, 12, 16, 20]),
                "growth_interval": self.random.choice([1, 2, 3]),
            }
            if self.is_likely(0.3):
                knobs["hysteresis"] = 2
            self.options["loss_scale"] = str(knobs)
            if self.is_likely(0.3):
                self.options["min_loss_scale"] = str(knobs["init"] / 2)
                self.options["max_loss_scale"] = str(knobs["init"] * 2)

    def choose_optimizers(self) -> None:
        first, *others = self.models
        kinds = [self.random.choice(OPTIMIZERS) for _ in range(3)]
        self.construction = []
        if self.layout == "joint":
            parameters = ", ".join(f"*{model}.parameters()" for model in self.models)
            self.add_optimizer("both", self.models, kinds[0].format(f"[{parameters}]"))
            return
        if self.layout in ("halves", "common"):
            self.is_shared = self.layout == "common"
            chosen = 'not n.startswith("last")' if self.is_shared else 'n.startswith("first")'
            front = f"[p for n, p in {first}.named_parameters() if {chosen}]"
            back = f'[p for n, p in {first}.named_parameters() if not n.startswith("first")]'
            self.add_optimizer("front", [first], kinds[0].format(front))
            self.add_optimizer("back", [first], kinds[1].format(back))
        elif self.layout == "each":
            for index in range(PARAMETERS[first]):
                chosen = f"[list({first}.parameters())[{index}]]"
                self.add_optimizer(f"each{index}", [first], kinds[index % 3].format(chosen))
        elif self.layout == "groups":
            weights = f'{{"params": [p for n, p in {first}.named_parameters() if n.endswith("weight")]}}'
            biases = f'{{"params": [p for n, p in {first}.named_parameters() if n.endswith("bias")], "lr": 0.25}}'
            self.add_optimizer("both", [first], kinds[0].format(f"[{weights}, {biases}]"))
        else:
            self.add_optimizer(f"{first}_opt", [first], kinds[0].format(f"{first}.parameters()"))
        for model in others:
            self.add_optimizer(f"{model}_opt", [model], kinds[2].format(f"{model}.parameters()"))

    def add_optimizer(self, name: str, models: list[str], source: str) -> None:
        self.optimizers[name] = list(models)
        self.construction.append((name, source))

    def build(self) -> str:
        """The lines that make everything and initialize it."""
        lines = []
        for model in self.models:
            self.seeds += 1
            lines.append(f"{model} = {self.sources[model].format(seed=self.seeds)}")
        lines += [f"{name} = {source}" for name, source in self.construction]
        return "\n".join([*lines, self.initialize(), *self.later])

    def initialize(self) -> str:
        models, optimizers = (f"[{', '.join(names)}]" for names in (self.models, self.optimizers))
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"amp.initialize({models}, {optimizers}, num_losses={self.losses}, verbosity=0, {options})"

    # ---- choices of a snippet ----------------------------------------------------------------------------------------

    def name(self, word: str) -> str:
        self.names += 1
        return f"{word}{self.names}"

    def is_likely(self, chance: float) -> bool:
        return self.random.random() < chance

    def pick_model(self) -> str:
        return self.random.choice(self.models)

    def optimizers_of(self, *models: str) -> list[str]:
        return [name for name, reached in self.optimizers.items() if set(models) & set(reached)]

    def loss_id(self) -> int:
        return self.random.randrange(self.losses)

    def loss(self, model: str, *, bad: bool = False) -> str:
        """The text of a loss; a bad one overflows."""
        batch = self.random.randrange(8)
        if bad:
            return f"loss({model}, {batch}, {self.random.choice(['inf', 'nan', '1e38'])})"
        factor = self.random.choice(["", "", "", ", 0.5", ", 256.0"])
        return f"loss({model}, {batch}{factor})"

    def bad(self, chance: float = 0.25) -> bool:
        """Whether a pass is to overflow: only where its step would be skipped."""
        return self.is_dynamic and self.is_likely(chance)

    def is_renormed(self, model: str) -> bool:
        """Whether each forward edits a weight, after which the graph of an earlier one cannot go backward."""
        return "max_norm" in self.sources[model]

    def zero(self, optimizers: list[str]) -> str:
        """A line for each optimizer that zeroes its gradients."""
        how = self.random.choice(["()", "()", "(set_to_none=False)", "model"])
        if how != "model":
            return lines(f"{optimizer}.zero_grad{how}" for optimizer in optimizers)
        models = dict.fromkeys(model for optimizer in optimizers for model in self.optimizers[optimizer])
        if len(models) > 1 or self.optimizers_of(*models) != optimizers:
            return lines(f"{optimizer}.zero_grad()" for optimizer in optimizers)
        return lines(f"{model}.zero_grad()" for model in models)

    def block(self, loss: str, optimizers: list[str], loss_id: int | None = None, *, delay: bool = False) -> str:
        """A block around a loss, with its backward pass."""
        passed = optimizers[0] if len(optimizers) == 1 and self.is_likely(0.7) else f"[{', '.join(optimizers)}]"
        number = self.loss_id() if loss_id is None else loss_id
        options = f", loss_id={number}" if number or self.is_likely(0.1) else ""
        options += ", delay_unscale=True" if delay else ""
        return f"with amp.scale_loss({loss}, {passed}{options}) as scaled:\n    scaled.backward()"

    def step(self, optimizers: list[str]) -> str:
        order = self.random.sample(optimizers, len(optimizers))
        return lines(f"{optimizer}.step()" for optimizer in order)

    def around(self, optimizers: list[str], *middle: str) -> str:
        """An iteration: zeroing before or after, and a step."""
        if self.is_likely(0.7):
            return lines([self.zero(optimizers), *middle, self.step(optimizers)])
        return lines([*middle, self.step(optimizers), self.zero(optimizers)])


def lines(parts: object) -> str:
    return "\n".join(part for part in parts if part)  # type: ignore[attr-defined]


def indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


Maker = Callable[[Draft], list[Snippet]]


# ---- one iteration ---------------------------------------------------------------------------------------------------


def iteration(draft: Draft) -> list[Snippet]:
    model = draft.pick_model()
    optimizers = draft.optimizers_of(model)
    return [Snippet(draft.around(optimizers, draft.block(draft.loss(model, bad=draft.bad()), optimizers)))]


def one_of_the_optimizers(draft: Draft) -> list[Snippet]:
    """The loss reaches more than the optimizer that it is passed with, as a GAN's does."""
    model = draft.pick_model()
    optimizers = draft.optimizers_of(model)
    if draft.is_shared:
        return []
    chosen = [draft.random.choice(optimizers)]
    rest = [optimizer for optimizer in optimizers if optimizer not in chosen]
    passes = draft.block(draft.loss(model, bad=draft.bad(0.2)), chosen)
    text = lines([draft.zero(optimizers), passes, draft.step(chosen)])
    if draft.is_likely(0.5):  # what it left in the others counts for the next pass
        again = draft.block(draft.loss(model), optimizers)
        return [Snippet(lines([text, again, draft.step(optimizers), draft.zero(optimizers)]))]
    return [Snippet(lines([text, *[f"{optimizer}.zero_grad()" for optimizer in rest]]))]


def accumulation(draft: Draft) -> list[Snippet]:
    model = draft.pick_model()
    optimizers, number = draft.optimizers_of(model), draft.loss_id()
    count, delay, bad = draft.random.choice([2, 3]), draft.is_likely(0.5), draft.random.randrange(6)
    blocks = [
        draft.block(
            draft.loss(model, bad=draft.is_dynamic and index == bad),
            optimizers,
            number,
            delay=delay and index < count - 1,
        )
        for index in range(count)
    ]
    return [Snippet(draft.around(optimizers, *blocks))]


def two_losses(draft: Draft) -> list[Snippet]:
    """A block for each, in any order, and one step."""
    model = draft.pick_model()
    optimizers = draft.optimizers_of(model)
    bad = draft.random.randrange(4) if draft.is_dynamic else 4
    blocks = [draft.block(draft.loss(model, bad=index == bad), optimizers, index % draft.losses) for index in range(2)]
    if draft.is_dynamic and draft.is_likely(0.1):
        blocks = [draft.block(draft.loss(model, bad=True), optimizers, index % draft.losses) for index in range(2)]
    draft.random.shuffle(blocks)
    return [Snippet(draft.around(optimizers, *blocks))]


def sum_of_losses(draft: Draft) -> list[Snippet]:
    """One block for the losses of two models, and the optimizers of both."""
    if len(draft.models) < 2:
        return []
    optimizers = draft.optimizers_of(*draft.models)
    total = " + ".join(draft.loss(model, bad=draft.bad(0.1)) for model in draft.models)
    return [Snippet(draft.around(optimizers, draft.block(total, optimizers)))]


def one_after_the_other(draft: Draft) -> list[Snippet]:
    """Losses of two models, each with its optimizers; all step in the end."""
    if len(draft.models) < 2:
        return []
    optimizers = draft.optimizers_of(*draft.models)
    blocks = [draft.block(draft.loss(m, bad=draft.bad(0.2)), draft.optimizers_of(m)) for m in draft.models]
    draft.random.shuffle(blocks)
    return [Snippet(draft.around(optimizers, *blocks))]


def delayed_sets(draft: Draft) -> list[Snippet]:
    """Delayed passes, each with optimizers of its own; some step before the last pass."""
    blocks, passed = [], []
    for index in range(draft.random.choice([2, 3])):
        model = draft.pick_model()
        optimizers = draft.optimizers_of(model)
        others = [name for name in draft.optimizers if name not in optimizers and draft.is_likely(0.3)]
        chosen = draft.random.sample([*optimizers, *others], len(optimizers) + len(others))
        passed += [name for name in chosen if name not in passed]
        bad, delay = draft.bad(0.15), draft.is_likely(0.7)
        blocks.append(draft.block(draft.loss(model, bad=bad), chosen, index % draft.losses, delay=delay))
        if draft.is_likely(0.2):
            early = draft.random.choice(passed)
            blocks.append(draft.random.choice([draft.step([early]), draft.zero([early])]))
    return [Snippet(draft.around(passed, *blocks))]


def nested(draft: Draft) -> list[Snippet]:
    """A block inside another: of the same scale, or refused. The inner optimizers may step at once."""
    outer, inner = draft.pick_model(), draft.pick_model()
    if outer == inner and draft.is_renormed(outer):
        return []
    number, delay = draft.loss_id(), draft.is_likely(0.3)
    first, second = draft.optimizers_of(outer), draft.optimizers_of(inner)
    optimizers = list(dict.fromkeys([*first, *second]))
    inside = draft.block("second", second, number, delay=delay)
    if not set(first) & set(second) and draft.is_likely(0.5):
        inside = lines([inside, draft.step(second), draft.zero(second) if draft.is_likely(0.5) else ""])
    elif draft.losses > 1 and draft.is_likely(0.2):
        refused = draft.block("second", second, 1 - number)
        told = f"    {draft.name('refused')} = type(_error).__name__"
        inside = lines(["try:", indent(refused), "except RuntimeError as _error:", told])
    parts = draft.random.sample([inside, "outer.backward()"], 2)
    text = lines(
        [
            f"first, second = {draft.loss(outer, bad=draft.bad())}, {draft.loss(inner, bad=draft.bad(0.2))}",
            f"with amp.scale_loss(first, [{', '.join(first)}], loss_id={number}) as outer:",
            indent(lines(parts)),
        ]
    )
    return [Snippet(draft.around(optimizers, text))]


def step_inside(draft: Draft) -> list[Snippet]:
    """Optimizers that step before the block ends."""
    model = draft.pick_model()
    optimizers = draft.optimizers_of(model)
    early = [optimizer for optimizer in optimizers if draft.is_likely(0.7)]
    late = [optimizer for optimizer in optimizers if optimizer not in early]
    inside = lines([draft.step(early), draft.zero(early) if draft.is_likely(0.5) else ""])
    block = lines([draft.block(draft.loss(model, bad=draft.bad()), optimizers), indent(inside)])
    before = [draft.block(draft.loss(model, bad=draft.bad(0.2)), optimizers)] if draft.is_likely(0.3) else []
    return [Snippet(lines([draft.zero(optimizers), *before, block, draft.step(late), draft.zero(optimizers)]))]


def step_in_backward(draft: Draft) -> list[Snippet]:
    """Each parameter is stepped on as soon as it has its gradient."""
    model = draft.models[0]
    if draft.layout != "each":
        return []
    optimizers = draft.optimizers_of(model)
    zeroed = draft.random.choice([".zero_grad()", ".zero_grad()", ".zero_grad(set_to_none=False)"])
    chosen = draft.random.choice(["p.requires_grad", "p.requires_grad", "p.requires_grad and p.ndim > 1"])
    blocks = [draft.block(draft.loss(model, bad=draft.bad(0.2)), optimizers) for _ in range(2)]
    text = [
        draft.zero(optimizers),
        f"_owners = dict(zip({model}.parameters(), [{', '.join(optimizers)}]))",
        "order = []",
        "def _step_now(p):\n    order.append(list(map(id, _owners)).index(id(p)))\n    _owners[p].step()",
        f"    _owners[p]{zeroed}",
        f"_chosen = [p for p in {model}.parameters() if {chosen}]",
        "_handles = [p.register_post_accumulate_grad_hook(_step_now) for p in _chosen]",
        *blocks,
        "for _handle in _handles:\n    _handle.remove()",
        draft.step(optimizers) if draft.is_likely(0.5) else draft.zero(optimizers),
    ]
    return [Snippet(lines(text))]


def clipping(draft: Draft) -> list[Snippet]:
    model = draft.pick_model()
    optimizers = draft.optimizers_of(model)
    norm, kind = draft.name("norm"), draft.random.randrange(3)
    clipped = {
        0: lines(f"{norm} = clip_grad_norm_(amp.master_params({optimizer}), 0.5)" for optimizer in optimizers),
        1: f"{norm} = clip_grad_norm_({model}.parameters(), 0.5)",
        2: lines(f"torch.nn.utils.clip_grad_value_(amp.master_params({optimizer}), 0.125)" for optimizer in optimizers),
    }[kind]
    middle = [draft.block(draft.loss(model, bad=draft.bad(0.2)), optimizers), clipped]
    if kind != 2 and draft.is_likely(0.3):  # a loop that skips by itself
        skip = f"if torch.isfinite({norm}):\n{indent(draft.step(optimizers))}"
        return [Snippet(lines([draft.zero(optimizers), *middle, skip, draft.zero(optimizers)]))]
    return [Snippet(draft.around(optimizers, *middle))]


def penalty(draft: Draft) -> list[Snippet]:
    """A gradient penalty: the gradient of the gradient's norm."""
    model = draft.pick_model()
    if model == "attention":
        return []
    optimizers, number = draft.optimizers_of(model), draft.loss_id()
    text = lines(
        [
            f'x = inputs("{model}", {draft.random.randrange(8)}).requires_grad_()',
            f"output = {model}(x).float().sum()",
            f"scaled = amp.scale(output, {number})",
            "(gradient,) = torch.autograd.grad(scaled, x, create_graph=True)",
            f"(gradient,) = amp.unscale((gradient,), {number})",
            "total = output + (gradient.flatten(1).norm(dim=1) - 1).pow(2).mean()",
            draft.block("total", optimizers, number),
        ]
    )
    return [Snippet(draft.around(optimizers, text))]


def gradients_by_hand(draft: Draft) -> list[Snippet]:
    """torch.autograd.grad inside the block, and gradients put in their places."""
    model = draft.pick_model()
    optimizers, number = draft.optimizers_of(model), draft.loss_id()
    loss = draft.loss(model, bad=draft.bad(0.2))
    text = lines(
        [
            f"with amp.scale_loss({loss}, [{', '.join(optimizers)}], {number}) as scaled:",
            f"    _chosen = [p for p in {model}.parameters() if p.requires_grad]",
            "    for _p, _g in zip(_chosen, torch.autograd.grad(scaled, _chosen)):",
            "        _p.grad = _g",
        ]
    )
    return [Snippet(lines([draft.zero(optimizers), text, draft.step(optimizers)]))]


def dropped_gradients(draft: Draft) -> list[Snippet]:
    """`p.grad = None` by hand, for one or for all, or what is not finite made so."""
    model = draft.pick_model()
    optimizers = draft.optimizers_of(model)
    block = draft.block(draft.loss(model, bad=draft.bad(0.2)), optimizers)
    if draft.is_likely(0.5):
        drop = f"next(amp.master_params({optimizers[0]})).grad = None"
        mend = lines(
            f"for _p in amp.master_params({optimizer}):\n    if _p.grad is not None:\n        _p.grad.nan_to_num_()"
            for optimizer in optimizers
        )
        return [Snippet(draft.around(optimizers, block, draft.random.choice([drop, mend])))]
    every = lines(f"for _p in amp.master_params({optimizer}):\n    _p.grad = None" for optimizer in optimizers)
    again = draft.block(draft.loss(model), optimizers)
    return [Snippet(lines([draft.zero(optimizers), block, every, again, draft.step(optimizers)]))]


def no_block(draft: Draft) -> list[Snippet]:
    """A backward pass of a loss that is not scaled, beside one that is, or by itself, or given up."""
    model = draft.pick_model()
    optimizers = draft.optimizers_of(model)
    plain = f"loss({model}, {draft.random.randrange(8)}).backward()"
    block = draft.block(draft.loss(model), optimizers)
    middle = draft.random.choice([[plain], [plain, block], [block, plain], [plain, draft.zero(optimizers), block]])
    return [Snippet(draft.around(optimizers, *middle))]


def surgery(draft: Draft) -> list[Snippet]:
    """Gradients of two tasks, each by itself, and a step on what is made of them."""
    model = draft.pick_model()
    optimizers = draft.optimizers_of(model)
    if len(optimizers) > 1:
        return []
    (optimizer,) = optimizers
    bad = draft.random.choice([0, 1, 2, 2]) if draft.is_dynamic else 2
    text = ["_kept = []"]
    for index in range(2):
        text += [
            draft.zero(optimizers),
            draft.block(draft.loss(model, bad=index == bad), optimizers, index % draft.losses),
        ]
        text.append(
            f"_kept.append([None if p.grad is None else p.grad.clone() for p in amp.master_params({optimizer})])"
        )
    text += [
        f"for _p, _a, _b in zip(amp.master_params({optimizer}), *_kept):",
        "    _p.grad = None if _a is None or _b is None else _a + 0.5 * _b",
    ]
    if bad == 0 and draft.is_likely(0.3):  # finite again: GradScaler steps
        text.append("    _p.grad = _b")
    text += [draft.step(optimizers)]
    return [Snippet(lines(text))]


def hooks(draft: Draft) -> list[Snippet]:
    """A hook that puts another tensor into .grad, or changes a gradient on its way."""
    model = draft.pick_model()
    optimizers = draft.optimizers_of(model)
    if draft.bad(0.4):
        hooked = f"_handle = {model}.first.weight.register_hook(lambda g: g * {draft.random.choice(['inf', 'nan'])})"
        middle = [hooked, draft.block(draft.loss(model), optimizers), "_handle.remove()"]
    else:
        bad = draft.bad(0.3)
        chosen = f"{model}.parameters() if p.requires_grad"
        hooked = f"_handles = [p.register_post_accumulate_grad_hook(_halve) for p in {chosen}]"
        blocks = [draft.block(draft.loss(model, bad=bad and index == 0), optimizers) for index in range(2)]
        remove = "for _handle in _handles:\n    _handle.remove()"
        middle = ["def _halve(p):\n    p.grad = p.grad / 2", hooked, *blocks, remove]
    return [Snippet(draft.around(optimizers, *middle))]


def closure(draft: Draft) -> list[Snippet]:
    model = draft.pick_model()
    (optimizer, *_) = optimizers = draft.optimizers_of(model)
    if len(optimizers) > 1 or draft.is_shared:
        return []
    loss = f"_loss = {draft.loss(model, bad=draft.bad(0.2))}"
    body = lines([f"{optimizer}.zero_grad()", loss, draft.block("_loss", optimizers), "return _loss"])
    text = lines(["def _closure():", indent(body), f"{draft.name('value')} = {optimizer}.step(_closure)"])
    return [Snippet(text)]


# ---- weights ---------------------------------------------------------------------------------------------------------


def edit(draft: Draft) -> list[Snippet]:
    model = draft.pick_model()
    layer = draft.random.choice(["first.weight", "last.weight", "last.bias"])
    changed = draft.random.choice(
        [
            f"{model}.{layer}.clamp_(-0.25, 0.25)",
            f"{model}.{layer}.copy_(torch.linspace(-1, 1, {model}.{layer}.numel()).view_as({model}.{layer}))",
            f"{model}.{layer}.mul_(0.75)",
            f"{model}.{layer}.data = {model}.{layer}.data * 0.75",
            f"for _p in {model}.parameters():\n    _p.clamp_(-0.5, 0.5)",
            f"for _p in amp.master_params({draft.optimizers_of(model)[0]}):\n    _p.mul_(0.9375)",
        ]
    )
    text = f"with torch.no_grad():\n{indent(changed)}"
    return [Snippet(text, is_edit=True), *(iteration(draft) if draft.is_likely(0.5) else [])]


def adversarial(draft: Draft) -> list[Snippet]:
    """FGM: climb, go backward again, come back, step."""
    model = draft.pick_model()
    optimizers = draft.optimizers_of(model)
    weight = f"{model}.first.weight"
    if draft.is_likely(0.5):
        climb, back = f"{weight}.data.add_(0.125)", f"{weight}.data = _backup"
    else:
        climb, back = (
            f"with torch.no_grad():\n    {weight}.add_(0.125)",
            f"with torch.no_grad():\n    {weight}.copy_(_backup)",
        )
    middle = [
        draft.block(draft.loss(model), optimizers),
        f"_backup = {weight}.data.clone()",
        climb,
        draft.block(draft.loss(model, bad=draft.bad(0.1)), optimizers),
        back,
    ]
    return [Snippet(draft.around(optimizers, *middle))]


def average(draft: Draft) -> list[Snippet]:
    """An average of the weights: made, updated, or swapped in for an evaluation."""
    if not draft.averages or draft.is_likely(0.3):
        model, optimizer = draft.pick_model(), draft.random.choice(list(draft.optimizers))
        source = draft.random.choice([f"{model}.parameters()", f"amp.master_params({optimizer})"])
        name = draft.name("average")
        draft.averages.append((name, source))
        return [Snippet(f"{name} = [p.detach().clone() for p in {source}]")]
    name, source = draft.random.choice(draft.averages)
    if draft.is_likely(0.4):
        update = f"for _p, _a in zip({source}, {name}):\n    _a.lerp_(_p.detach().to(_a.dtype), 0.25)"
        return [Snippet(update)]
    stored = f"_stored = [p.detach().clone() for p in {source}]"
    kinds = ["with torch.no_grad():\n        _p.copy_({})", "_p.data = {}.clone()"]
    events = ["amp.load_state_dict(amp.state_dict())", "amp.refresh()", save(draft)]
    is_hidden = "master" not in source and draft.is_likely(0.3)
    if is_hidden:  # nothing shows it: a file lacks it, and a refresh undoes it
        kinds, events = ["_p.data.copy_({})"], events[:1]
    copied = draft.random.choice(kinds)
    text = lines(
        [
            stored,
            f"for _p, _a in zip({source}, {name}):\n    {copied.format('_a')}",
            "amp.refresh()" if "master" in source else "",  # whoever edits masters and parameters says so in between
            *within_swap(draft, events),
            f"for _p, _a in zip({source}, _stored):\n    {copied.format('_a')}",
            "amp.refresh()" if "master" in source or is_hidden else "",
        ]
    )
    return [Snippet(text, is_edit=True)]


def within_swap(draft: Draft, events: list[str]) -> list[str]:
    """Evaluations while other weights are in place, before or after something else."""
    chosen = draft.random.sample(events, min(len(events), draft.random.choice([0, 0, 1, 1, 2])))
    chosen += [snippet.text for _ in range(draft.random.choice([0, 1, 1, 2])) for snippet in evaluate(draft)]
    draft.random.shuffle(chosen)
    return chosen


def save(draft: Draft) -> str:
    return f"{draft.name('saved')} = copy.deepcopy({draft.pick_model()}.state_dict())"


def swap_by_loading(draft: Draft) -> list[Snippet]:
    """Other weights are loaded for an evaluation, and those of before after it."""
    model = draft.pick_model()
    other = f"{{_k: _v * 0.75 if _v.is_floating_point() else _v for _k, _v in {model}.state_dict().items()}}"
    events = ["amp.load_state_dict(amp.state_dict())", "amp.refresh()", save(draft)]
    text = lines(
        [
            f"_stored = copy.deepcopy({model}.state_dict())",
            f"{model}.load_state_dict({other})",
            *within_swap(draft, events),
            f"{model}.load_state_dict(_stored)",
        ]
    )
    swapped = [Snippet(text, is_edit=True)]
    if draft.averages and draft.is_likely(0.7):
        swapped += average(draft)
    return swapped


def freezing(draft: Draft) -> list[Snippet]:
    model = draft.pick_model()
    layer = "first" if draft.is_likely(0.5) else "last"
    if model == "attention" and layer == "last":
        layer = "value"
    freeze = f"for _p in {model}.{layer}.parameters():\n    _p.requires_grad_(False)"
    thaw = f"for _p in {model}.{layer}.parameters():\n    _p.requires_grad_(True)"
    return [Snippet(freeze), *iteration(draft), Snippet(thaw)]


def evaluate(draft: Draft) -> list[Snippet]:
    model = draft.pick_model()
    context = "torch.no_grad()" + (", amp.disable_casts()" if draft.is_likely(0.3) else "")
    value = f"with {context}:\n    {draft.name('seen')} = {draft.loss(model)}"
    return [Snippet(lines([f"{model}.eval()", value, f"{model}.train()"]))]


# ---- sessions, checkpoints, groups -----------------------------------------------------------------------------------


def resume(draft: Draft) -> list[Snippet]:
    """Save, forget everything, build it anew, load."""
    if draft.has_stale_state:
        return []
    parts = [*draft.models, *draft.optimizers, "amp"]
    saved = f"saved = copy.deepcopy([{', '.join(f'{part}.state_dict()' for part in parts)}])"
    loads = [f"{part}.load_state_dict(saved[{index}])" for index, part in enumerate(parts)]
    zero = lines(f"{model}.zero_grad()" for model in draft.models)
    draft.averages = []
    return [Snippet(lines([zero, saved, "amp.reset()", draft.build(), *loads]))]


def rollback(draft: Draft) -> list[Snippet]:
    """Load earlier weights, or their half, into the session at hand; with the states of the optimizers, or without."""
    if draft.has_stale_state:
        return []
    model = draft.pick_model()
    parts = [model]
    if draft.is_likely(0.5):
        parts += draft.optimizers_of(model)
    name = draft.name("kept")
    keep = f"{name} = copy.deepcopy([{', '.join(f'{part}.state_dict()' for part in parts)}])"
    halve = ""
    if draft.is_likely(0.3):
        halve = f"{name}[0] = {{_k: _v * 0.5 if _v.is_floating_point() else _v for _k, _v in {name}[0].items()}}"
    loads = [f"{part}.load_state_dict({name}[{index}])" for index, part in enumerate(parts)]
    trained = iteration(draft) if draft.is_likely(0.7) else []
    edited = edit(draft) if draft.is_likely(0.4) else []
    return [Snippet(keep), *trained, Snippet(lines([halve, *loads]), is_edit=True), *edited]


def another_level(draft: Draft) -> list[Snippet]:
    """Reset, train without a session, and go on at another level."""
    draft.choose_level()
    plain = []
    if draft.is_likely(0.5):
        model = draft.pick_model()
        optimizers = draft.optimizers_of(model)
        plain = [f"{draft.loss(model)}.backward()", draft.step(optimizers)]
    zero = [f"{optimizer}.zero_grad()" for optimizer in draft.optimizers]
    zero += [f"{model}.zero_grad()" for model in draft.models]
    left = []
    if plain and draft.is_likely(0.3):
        left = [plain[0]]
    edited = []
    if draft.is_likely(0.3):
        edited = [f"with torch.no_grad():\n    {draft.pick_model()}.first.weight.mul_(0.5)"]
    draft.averages = []
    return [Snippet(lines([*zero, *edited, "amp.reset()", *plain, *zero, *left, draft.initialize()]))]


def near_growth(draft: Draft) -> list[Snippet]:
    state = {
        f"loss_scaler{index}": {"loss_scale": 2.0 ** draft.random.randint(6, 12), "unskipped": 1999}
        for index in range(draft.losses)
    }
    return [Snippet(f"amp.load_state_dict({state})")]


def schedule(draft: Draft) -> list[Snippet]:
    """The rate is lowered: by hand, or by a scheduler of torch."""
    optimizer = draft.random.choice(list(draft.optimizers))
    if draft.is_likely(0.5):
        return [Snippet(f'for _group in {optimizer}.param_groups:\n    _group["lr"] *= 0.5')]
    model = draft.optimizers[optimizer][0]
    inside = lines(
        [
            draft.around(
                draft.optimizers_of(model),
                draft.block(draft.loss(model, bad=draft.bad(0.2)), draft.optimizers_of(model)),
            ),
            f"if not {optimizer}.step_was_skipped:\n    _schedule.step()",
        ]
    )
    made = f"_schedule = torch.optim.lr_scheduler.StepLR({optimizer}, 1, gamma=0.5)"
    return [Snippet(lines([made, inside]))]


def groups(draft: Draft) -> list[Snippet]:
    """The optimizer steps on other parameters: layer by layer, as LISA does."""
    model = draft.models[0]
    optimizers = draft.optimizers_of(model)
    if len(optimizers) > 1 or draft.optimizers[optimizers[0]] != [model]:
        return []
    (optimizer,) = optimizers
    layer = draft.random.choice(["first", "last"])
    params = draft.random.choice([f"list({model}.{layer}.parameters())", f"list({model}.parameters())"])
    kind = draft.random.randrange(3)
    if kind == 0:
        change = lines(
            [
                f"{optimizer}.param_groups.clear()",
                f"{optimizer}.state.clear()",
                f'{optimizer}.add_param_group({{"params": {params}}})',
            ]
        )
    elif kind == 1:
        change = f'del {optimizer}.param_groups[1:]\n{optimizer}.param_groups[0]["params"] = {params}'
    else:
        change = f'{optimizer}.param_groups = [{{**{optimizer}.param_groups[0], "params": {params}}}]'
    text = lines([f"{model}.zero_grad()", change])
    draft.later.append(text)
    draft.averages = []  # of other parameters
    draft.has_stale_state |= kind > 0
    trained = lines([text, draft.block(draft.loss(model, bad=draft.bad(0.2)), optimizers), draft.step(optimizers)])
    return [Snippet(trained)]


VOCABULARY: dict[Maker, int] = {
    iteration: 4,
    one_of_the_optimizers: 2,
    accumulation: 3,
    two_losses: 3,
    sum_of_losses: 2,
    one_after_the_other: 2,
    delayed_sets: 2,
    nested: 3,
    step_inside: 2,
    step_in_backward: 6,
    clipping: 2,
    penalty: 2,
    gradients_by_hand: 1,
    dropped_gradients: 1,
    no_block: 1,
    surgery: 3,
    hooks: 3,
    closure: 1,
    edit: 2,
    adversarial: 3,
    average: 6,
    swap_by_loading: 3,
    freezing: 2,
    evaluate: 2,
    resume: 2,
    rollback: 3,
    another_level: 1,
    near_growth: 1,
    schedule: 1,
    groups: 1,
}
