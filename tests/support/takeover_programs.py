"""Scripts with torch.autocast, drawn at random, and op lists with module rules that are laid over them.

A program has two texts. The script is what people write, and knows nothing of lists. By hand the same lines call ops
and modules through a `ByHand` of `hand_lists.py`, which does what the lists say. Where the two differ, `both` puts them
side by side, and `render` takes one of them.

Some programs have no autocast at all, and the takeover runs the whole script in one bfloat16 region (`everywhere`). By
hand the region stands around what is computed between optimizer steps and backward passes.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

LOWS = ("torch.bfloat16", "torch.float16")


def both(script: str, by_hand: str) -> str:
    """A piece of a program: what stands in the script, and what stands there by hand."""
    return f"«{script}¦{by_hand}»"


def render(text: str, *, is_by_hand: bool) -> str:
    """One of the two texts of a program."""
    innermost = re.compile("«([^«»¦]*)¦([^«»¦]*)»")
    while innermost.search(text):
        text = innermost.sub(lambda found: found[1 + is_by_hand], text)
    return text


def indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def lines(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


# ---- a program -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A part of the model.

    Attributes:
        attributes: lines of `__init__`.
        forward: lines that give x another value.
        classes: what the attributes need.
    """

    attributes: str = ""
    forward: str = ""
    classes: str = ""


@dataclass(frozen=True)
class Program:
    """A script, and what is laid over it.

    Attributes:
        seed: what it was drawn from.
        lists: the ops that are on each list.
        rules: the entries of `modules`.
        level: None, or "O4": then `lists` lie over those of torch.autocast, and bfloat16 is the level's.
        everywhere: there is no autocast in the script.
        pieces: the parts of the model.
        decorated: the decorator of the model's forward, or nothing.
        setup: what comes before the first snippet, with the model's class left out.
        snippets: what the script does.
    """

    seed: int
    lists: dict[str, list[str]]
    rules: tuple[dict[str, str], ...]
    level: str | None
    everywhere: bool
    pieces: tuple[Piece, ...]
    decorated: str
    setup: str
    snippets: tuple[str, ...]

    def texts(self, *, is_by_hand: bool) -> list[str]:
        """The program, part by part, as one of the sides runs it."""
        parts = [self.setup.replace("MODEL", make_model(self.pieces, self.decorated)), *self.snippets]
        made = f"hand = ByHand({self.lists}, {list(self.rules)})" if is_by_hand else ""
        return [render(part, is_by_hand=is_by_hand).replace("HAND", made) for part in parts]

    def yaml(self) -> str:
        """The list in a file."""
        parts = [f"{kind}: {json.dumps(ops)}" for kind, ops in self.lists.items() if ops]
        if self.rules:
            parts += ["modules:", *(f"  - {json.dumps(rule)}" for rule in self.rules)]
        return "\n".join(parts) + "\n" if parts else "modules: []\n"

    def options(self) -> dict[str, Any]:
        """What `install` is given beside the file."""
        given: dict[str, Any] = {"everywhere": True} if self.everywhere else {}
        return {**given, "opt_level": self.level, "compute": "native"} if self.level else given

    def smaller(self) -> Iterator["Program"]:
        """The same with something left out."""
        for index in reversed(range(len(self.snippets))):
            yield replace(self, snippets=without(self.snippets, index))
        for index in reversed(range(len(self.pieces))):
            yield replace(self, pieces=without(self.pieces, index))
        for index in reversed(range(len(self.rules))):
            yield replace(self, rules=without(self.rules, index))
        for kind, ops in self.lists.items():
            for index in range(len(ops)):
                yield replace(self, lists={**self.lists, kind: list(without(ops, index))})

    def as_script(self, *, is_by_hand: bool) -> str:
        """The whole text of a side, to be kept in a file and run."""
        return "\n\n".join(self.texts(is_by_hand=is_by_hand))

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        head = f"# mine.yaml, for install(lists={self.names()}{options and ', '}{options})\n{self.yaml()}"
        return f"{head}\n# the script\n{self.as_script(is_by_hand=False)}"

    def names(self) -> list[str]:
        """The lists that `install` is given: "mine.yaml" is that of the program, "nothing.yaml" takes those of a level
        away.
        """
        return ["nothing.yaml", "autocast-cpu", "mine.yaml"] if self.level else ["mine.yaml"]


def without(parts: Sequence[Any], index: int) -> tuple[Any, ...]:
    return (*parts[:index], *parts[index + 1 :])


def make_model(pieces: Sequence[Piece], decorated: str) -> str:
    """The class of the model: every batch has eight rows of eight."""
    classes = lines(*(f"{piece.classes}\n\n" for piece in pieces if piece.classes))
    attributes = lines(
        "self.first, self.middle = «nn¦hand».Linear(8, 8), «nn¦hand».Linear(8, 8)",
        *(piece.attributes for piece in pieces),
        "self.head = «nn¦hand».Linear(8, 8)",
    )
    forward = lines("x = self.encode(x)", *(piece.forward for piece in pieces), f"return {call('self.head', 'x')}")
    return f"""{classes}class Net(nn.Module):
    def __init__(self):
        super().__init__()
{indent(indent(attributes))}

    def encode(self, x):
        x = {call("self.first", "x")}
        return {call("self.middle", "x")}

{decorated}    def forward(self, x):
{indent(indent(forward))}

    def predict(self, x):
        return {call("self", "x")}"""


# ---- ops and modules -------------------------------------------------------------------------------------------------


def op(path: str, *args: str) -> str:
    """A call of an op, as its dotted name is written."""
    given = ", ".join(args)
    owner, _, name = path.rpartition(".")
    script = f"{'F' if owner == 'torch.nn.functional' else owner}.{name}({given})"
    if name == "__matmul__":
        script = f"({args[0]} @ {args[1]})"
    elif owner == "torch.Tensor":
        script = f"{args[0]}.{name}({', '.join(args[1:])})"
    return both(script, f'hand.op("{path}", {given})')


def call(module: str, *args: str) -> str:
    """A call of a module."""
    given = ", ".join(args)
    return both(f"{module}({given})", f"hand.call({module}, {given})")


SPELLINGS = {
    "softmax": ["torch.softmax", "torch.nn.functional.softmax", "torch.Tensor.softmax"],
    "tanh": ["torch.tanh", "torch.Tensor.tanh"],
    "sigmoid": ["torch.sigmoid", "torch.Tensor.sigmoid"],
    "exp": ["torch.exp", "torch.Tensor.exp"],
    "gelu": ["torch.nn.functional.gelu"],
    "mean": ["torch.mean", "torch.Tensor.mean"],
    "sum": ["torch.sum", "torch.Tensor.sum"],
    "matmul": ["torch.matmul", "torch.Tensor.matmul", "torch.Tensor.__matmul__"],
    "mse_loss": ["torch.nn.functional.mse_loss"],
    "smooth_l1_loss": ["torch.nn.functional.smooth_l1_loss"],
    "cat": ["torch.cat"],
    "layer_norm": ["torch.nn.functional.layer_norm"],
    "linear": ["torch.nn.functional.linear"],
    "conv1d": ["torch.nn.functional.conv1d"],
    "scaled_dot_product_attention": ["torch.nn.functional.scaled_dot_product_attention"],
}

ENTERED = ['torch.autocast("cpu", ', 'torch.amp.autocast("cpu", dtype=', "torch.cpu.amp.autocast(dtype="]
"""How scripts write what enters a region."""

LISTED = {
    "softmax": ["whitelist", "blacklist"],
    "tanh": ["whitelist", "blacklist"],
    "sigmoid": ["whitelist", "blacklist"],
    "exp": ["whitelist", "blacklist"],
    "gelu": ["whitelist", "blacklist"],
    "mean": ["whitelist", "blacklist"],
    "sum": ["blacklist"],
    "matmul": ["whitelist", "blacklist", "neutral"],
    "mse_loss": ["whitelist", "neutral"],
    "smooth_l1_loss": ["whitelist", "neutral"],
    "cat": ["whitelist", "blacklist"],
    "layer_norm": ["whitelist", "blacklist"],
    "linear": ["whitelist", "whitelist", "blacklist"],
    "conv1d": ["whitelist", "blacklist"],
    "scaled_dot_product_attention": ["blacklist"],
}
"""On which lists an op may be. `linear` on none would get inputs and weights of two dtypes."""


WEIGHTED = ("linear", "conv1d", "layer_norm")
"""Those that are given weights."""

KINDS = [
    "torch.nn.Linear",
    "torch.nn.LayerNorm",
    "torch.nn.GELU",
    "torch.nn.MSELoss",
    "__main__.Criterion",
    "__main__.Distance",
    "__main__.Lora",
    "__main__.Net",
]
"""Classes that rules may choose."""


class Draft:
    """The choices that a program has made so far.

    Attributes:
        random: where choices come from.
        everywhere: the script has no autocast.
        low: the dtype of its regions.
        lists, rules: what is laid over it.
        is_net_decorated: the model enters a region in its own forward.
        casts_weights: some weights are cast to the low dtype by our lists, and not by torch. Whether uses of one in
            one region share a copy, nobody promises, nor when an edit is seen that torch would not see: each region
            with torch's cache enabled then has one forward.
        has_reentrant: the model has a checkpoint that torch.autograd.grad refuses.
        weights: where the weights of the layers are, which snippets may have wrapped.
        averages: copies of the model as it is now.
        parts: names that rules may choose.
        sequences: the names of Sequentials.
        reuses_weights: the model uses one twice; then lists and rules cast none. See `casts_weights`.
        has_scaler: losses are scaled.
    """

    def __init__(self, source: random.Random) -> None:
        self.random = source
        self.everywhere = self.is_likely(0.25)
        self.low = LOWS[0] if self.everywhere or self.is_likely(0.6) else LOWS[1]
        self.level = "O4" if self.low == LOWS[0] and self.is_likely(0.3) else None
        if self.level and not self.everywhere and self.is_likely(0.3):
            self.low = both(LOWS[1], LOWS[0])  # the level is bfloat16, whatever the script says
        self.is_net_decorated = not self.everywhere and self.is_likely(0.2)
        self.has_scaler = not self.everywhere and self.is_likely(0.7 if LOWS[1] in self.low else 0.2)
        self.lists: dict[str, list[str]] = {}
        self.rules: list[dict[str, str]] = []
        self.weights = {name: f"net.{name}.weight" for name in ("first", "middle", "head")}
        self.averages: list[str] = []
        self.sequences: list[str] = []
        self.has_reentrant = self.reuses_weights = False
        self.names = 0
        self.parts: list[str] = ["first", "middle", "head", "head", "distance"]

    def is_likely(self, chance: float) -> bool:
        return self.random.random() < chance

    def name(self, word: str) -> str:
        self.names += 1
        return f"{word}{self.names}"

    def seed(self) -> int:
        return self.random.randrange(100)

    def move_weight(self, name: str, place: str) -> None:
        """Take note that what had a name is in some place of what has the name now."""
        self.weights[name] = f"net.{name}{place}{self.weights[name].removeprefix(f'net.{name}')}"

    def op(self, name: str, *args: str) -> str:
        return op(self.random.choice(SPELLINGS[name]), *args)

    def weight(self) -> str:
        return self.random.choice(list(self.weights.values()))

    # ---- lists and rules ---------------------------------------------------------------------------------------------

    def choose_lists(self) -> None:
        for name in self.random.sample(list(LISTED), self.random.choice([0, 1, 2, 3, 4])):
            kind = self.random.choice(LISTED[name])
            if self.reuses_weights and name in WEIGHTED:
                kind = "blacklist"
            spelled = name if self.is_likely(0.8) or name == "matmul" else self.random.choice(SPELLINGS[name])
            self.lists.setdefault(kind, []).append(spelled)

    def choose_rules(self) -> None:
        for _ in range(self.random.choice([0, 1, 1, 2, 2, 3])):
            run = self.random.choice(["float32", "float32", "low"])
            if self.is_likely(0.7):
                chosen = self.random.choice(self.parts)
                chosen = f"re:^{chosen.partition('.')[0]}" if self.is_likely(0.1) else chosen
                self.rules.append({"match": chosen, "run": run})
            else:
                self.rules.append({"type": self.random.choice(KINDS), "run": run})
            exception = f"{self.rules[-1].get('match')}.inner"
            if exception in self.parts and self.is_likely(0.3):
                self.rules.append({"match": exception, "run": "low" if run == "float32" else "float32"})
        if self.reuses_weights:
            self.rules = [rule for rule in self.rules if rule["run"] == "float32"]

    @property
    def casts_weights(self) -> bool:
        white = " ".join(self.lists.get("whitelist", []))
        return any(name in white for name in WEIGHTED) or any(rule["run"] == "low" for rule in self.rules)

    # ---- regions -----------------------------------------------------------------------------------------------------

    def region(self, body: str, *, reuses: bool = False) -> str:
        """Lines that run in a region. `reuses`: they use weights more than once; where our lists cast some, torch's
        cache is disabled then.
        """
        if self.everywhere:
            return both(body, f'with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):\n{indent(body)}')
        uncached = ", cache_enabled=False"
        cache = uncached if (reuses and self.casts_weights) or self.is_likely(0.2) else ""
        entered = f"{self.random.choice(ENTERED)}{self.low}{cache})"
        kind = self.random.randrange(8)
        if kind == 0:
            name = self.name("_region")
            return lines(f"{name} = {entered}", f"with {name}:", indent(body))
        if kind == 1:
            return f"with {entered}:\n    with {entered}:\n{indent(indent(body))}"
        if kind == 2:
            name = self.name("_decorated")
            given = ", ".join(sorted(set(re.findall(r"^(?:\s*)(\w+) [+]?= ", body, re.MULTILINE))))
            declared = f"    global {given}" if given else ""
            return lines(f"@{entered}", f"def {name}():", declared, indent(body), f"{name}()")
        if kind == 3:
            name = self.name("_region")
            leave = f"{name}.__exit__(None, None, None)"
            return lines(f"{name} = {entered}", f"{name}.__enter__()", "try:", indent(body), f"finally:\n    {leave}")
        return f"with {entered}:\n{indent(body)}"

    def other_region(self, body: str) -> str:
        """A region in the dtype that is not that of the first; a level has one dtype only."""
        if self.everywhere or self.level:
            return self.region(body)
        (other,) = set(LOWS) - {self.low}
        return f'with torch.autocast("cpu", {other}):\n{indent(body)}'

    # ---- forwards and losses -----------------------------------------------------------------------------------------

    def forward(self, net: str = "net") -> str:
        """The text of an output."""
        x = f"data({self.seed()})"
        kind = self.random.randrange(7) if net == "net" else 0
        if kind == 1:
            return both(f"net.predict({x})", f'hand.call_method(net, "predict", {x})')
        if kind == 2:
            reentrant = self.random.choice(["True", "False"])
            x = f"{x}.requires_grad_()"
            run = both("net", "hand.remembered(lambda _x: hand.call(net, _x))")
            return f"checkpoint({run}, {x}, use_reentrant={reentrant})"
        if kind == 3:
            wrapped = "net" if torch.cuda.is_available() else "nn.DataParallel(net)"  # which would go to the GPUs
            return both(f"{wrapped}({x})", f"hand.call(net, {x})")
        return call(net, x)

    def loss(self, output: str | None = None) -> str:
        """The text of a loss."""
        output, target = output or self.forward(), f"target({self.seed()})"
        kind = self.random.randrange(5)
        if kind == 0:
            return self.op("mean", self.op("exp", f"({output} * 0.125)"))
        if kind == 1:
            return op("torch.nn.functional.smooth_l1_loss", output, target)
        criterion = self.random.choice(["criterion", "mse", "criterion"])
        return call(criterion, output, target)

    def backward(self, *losses: str) -> str:
        """A backward pass of the sum of losses, of which the values are left."""
        loss = f"({' + '.join(losses)})" if losses[1:] else losses[0]
        scaled = f"scaler.scale({loss})" if self.has_scaler else loss
        return lines(f"{scaled}.backward()", *(f"{name} = {name}.detach()" for name in losses))

    def step(self) -> str:
        zero = self.random.choice(
            ["optimizer.zero_grad()", "net.zero_grad()", "optimizer.zero_grad(set_to_none=False)"]
        )
        if not self.has_scaler:
            clip = "nn.utils.clip_grad_norm_(net.parameters(), 0.5)" if self.is_likely(0.2) else ""
            return lines(clip, "optimizer.step()", zero)
        clip = "scaler.unscale_(optimizer)\nnn.utils.clip_grad_norm_(net.parameters(), 0.5)"
        return lines(clip if self.is_likely(0.4) else "", "scaler.step(optimizer)", "scaler.update()", zero)

    def computed(self, source: str, word: str = "seen") -> tuple[str, str]:
        """A name and the line that gives it a value."""
        name = self.name(word)
        return name, f"{name} = {source}"


Maker = Callable[[Draft], list[str]]


def draw(seed: int) -> Program:
    """The program of a seed."""
    draft = Draft(random.Random(seed))
    pieces = [draft.random.choice(PIECES)(draft) for _ in range(draft.random.choice([1, 2, 2, 3]))]
    draft.choose_lists()
    draft.choose_rules()
    setup = make_setup(draft)
    cache = ", cache_enabled=False" if draft.casts_weights else ""  # a region of the script's may have two forwards
    pieces = [replace(piece, classes=piece.classes.replace("CACHE", cache)) for piece in pieces]
    snippets: list[str] = []
    for _ in range(draft.random.randint(5, 9)):
        (make,) = draft.random.choices(list(VOCABULARY), list(VOCABULARY.values()))
        snippets += make(draft)
    return Program(
        seed,
        draft.lists,
        tuple(draft.rules),
        draft.level,
        draft.everywhere,
        tuple(pieces),
        f'    @torch.autocast("cpu", {draft.low}{cache})\n' if draft.is_net_decorated else "",
        setup,
        tuple(snippets),
    )


def make_setup(draft: Draft) -> str:
    optimizer = draft.random.choice(
        [
            "torch.optim.SGD(net.parameters(), lr=0.125)",
            "torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5)",
            "torch.optim.AdamW(net.parameters(), lr=0.0625)",
            "torch.optim.AdamW(net.parameters(), lr=0.0625, fused=True)",
        ]
    )
    scale = draft.random.choice(["1024.0", "1024.0", "2.0**24"])
    scaler = 'scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)' if draft.has_scaler else ""
    fixed = SETUP.replace("CRITERION", op("torch.mean", op("torch.exp", call("self.distance", "x", "y"))))
    fixed = fixed.replace("DISTANCE", op("torch.tanh", "x - y"))
    fixed = fixed.replace("BASE", call("self.base", "x")).replace("ADDED", call("self.up", call("self.down", "x")))
    made = MADE.replace("OPTIMIZER", optimizer)
    return lines(fixed, "\nMODEL\n\n", made, scaler.replace("SCALE", scale))


SETUP = """import copy
import threading
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
«¦from hand_lists import ByHand»
«¦HAND»


class Distance(nn.Module):
    def forward(self, x, y):
        return DISTANCE


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.distance = Distance()

    def forward(self, x, y):
        return CRITERION


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = «nn¦hand».Linear(8, 2, bias=False), «nn¦hand».Linear(2, 8, bias=False)

    def forward(self, x):
        return BASE + ADDED


class Scaled(nn.Module):
    def forward(self, weight):
        return weight * 0.5


def data(seed):
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))


def target(seed):
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(100 + seed))

"""

MADE = """torch.manual_seed(0)
net = Net()
criterion, mse = Criterion(), «nn¦hand».MSELoss()
optimizer = OPTIMIZER"""


# ---- parts of models -------------------------------------------------------------------------------------------------


def layer(draft: Draft) -> Piece:
    name = draft.name("layer")
    draft.parts.append(name)
    kind = draft.random.choice(["Linear(8, 8)", "LayerNorm(8)", "GELU()", "Softmax(-1)", "Conv1d(8, 8, 1)", "Tanh()"])
    return Piece(f"self.{name} = «nn¦hand».{kind}", f"x = {call(f'self.{name}', 'x')}")


def sequence(draft: Draft) -> Piece:
    name = draft.name("sequence")
    draft.parts += [name, f"{name}.0", f"{name}.1", f"{name}.3", f"{name}.*"]
    draft.sequences.append(name)
    made = "«nn¦hand».Sequential(«nn¦hand».Linear(8, 8), «nn¦hand».LayerNorm(8), «nn¦hand».GELU())"
    return Piece(f"self.{name} = {made}", f"x = {call(f'self.{name}', 'x')}")


def bare_op(draft: Draft) -> Piece:
    name = draft.random.choice(["tanh", "sigmoid", "gelu", "softmax", "cat"])
    if name == "cat":
        joined = f"[x, {draft.op('tanh', 'x')}]"
        return Piece("", f"x = {op('torch.cat', joined)}[:8]")
    return Piece("", f"x = {draft.op(name, 'x', *(['-1'] if name == 'softmax' else []))}")


def block(draft: Draft, name: str, body: str, *, decorated: str = "") -> Piece:
    """A module of a class of its own: of x it computes y, with a layer `inner`."""
    draft.parts += [name, f"{name}.inner"]
    kind = name.capitalize()
    made = f"""class {kind}(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = «nn¦hand».Linear(8, 8)

{decorated}    def forward(self, x):
{indent(indent(body))}
        return y"""
    return Piece(f"self.{name} = {kind}()", f"x = {call(f'self.{name}', 'x')}", made)


def attention(draft: Draft) -> Piece:
    name = draft.name("attention")
    product = op("torch.nn.functional.scaled_dot_product_attention", "q[None]", "q[None]", "q[None]") + "[0]"
    if draft.is_likely(0.7):
        scores = draft.op("softmax", draft.op("matmul", "q", "q.T"), "-1")
        product = draft.op("matmul", f"{scores}.to(q.dtype)", "q")
    return block(draft, name, lines(f"q = {call('self.inner', 'x')}", f"y = {product}"))


def island(draft: Draft) -> Piece:
    """A part that its author protects."""
    inside = lines(f"y = {draft.op('matmul', 'h.float()', 'h.float().T')}", f"y = {draft.op('softmax', 'y', '-1')}")
    entered = both('torch.autocast("cpu", enabled=False)', "hand.island()")
    body = lines(f"h = {call('self.inner', 'x')}", f"with {entered}:", indent(inside), "y = y.to(h.dtype)")
    return block(draft, draft.name("island"), body)


def island_with_layer(draft: Draft) -> Piece:
    """A layer that is called in float32."""
    entered = both('torch.autocast("cpu", enabled=False)', "hand.island()")
    inside = f"y = {call('self.inner', 'x.float()')}"
    return block(draft, draft.name("protected"), lines(f"with {entered}:", indent(inside), "y = y.to(x.dtype)"))


def entering(draft: Draft) -> Piece:
    """A module that enters a region in its own forward."""
    if draft.everywhere:
        return attention(draft)
    name, inside = draft.name("entering"), f"y = {draft.op('tanh', call('self.inner', 'x'))}"
    entered = f'torch.autocast("cpu", {draft.low}CACHE)'
    if draft.is_likely(0.5):
        made = block(draft, name, inside, decorated=f"    @{entered}\n")
    else:
        made = block(draft, name, lines(f"with {entered}:", indent(inside)))
    return replace(made, forward=f"{made.forward}.to(x.dtype)")


def checkpointed(draft: Draft) -> Piece:
    inside = f"lambda z: {draft.op('tanh', call('self.inner', 'z'))}"
    reentrant = draft.random.choice(["True", "False"])
    draft.has_reentrant |= reentrant == "True"
    y = f"y = checkpoint({both(inside, f'hand.remembered({inside})')}, x, use_reentrant={reentrant})"
    return block(draft, draft.name("checkpointed"), y)


def custom_function(draft: Draft) -> Piece:
    """An autograd function of the script's, with or without the decorators of torch.amp."""
    name = draft.name("own")
    kind = draft.random.randrange(3)
    forward, backward = {
        0: ("", ""),
        1: ('    @torch.amp.custom_fwd(device_type="cpu")\n', '    @torch.amp.custom_bwd(device_type="cpu")\n'),
        2: (
            '    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)\n',
            '    @torch.amp.custom_bwd(device_type="cpu")\n',
        ),
    }[kind]
    made = f"""class Function{name}(torch.autograd.Function):
    @staticmethod
{forward}    def forward(ctx, x):
        y = {draft.op("softmax", draft.op("matmul", "x", "x.T"), "-1")}
        ctx.save_for_backward(y)
        return y.to(x.dtype)

    @staticmethod
{backward}    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return {draft.op("matmul", "gradient", "y.to(gradient.dtype)")}.to(gradient.dtype)"""
    return Piece("", f"x = Function{name}.apply(x)", made)


def container(draft: Draft) -> Piece:
    """Layers in a list, which is never called itself."""
    name = draft.name("parts")
    draft.parts += [name, f"{name}.0", f"{name}.*"]
    made = f"self.{name} = nn.ModuleList([«nn¦hand».Linear(8, 8), «nn¦hand».LayerNorm(8), «nn¦hand».Tanh()])"
    return Piece(made, f"for part in self.{name}:\n    x = {call('part', 'x')}")


def layer_inside_another(draft: Draft) -> Piece:
    """The model calls a layer of a module, and not the module."""
    name = draft.name("holder")
    made = block(draft, name, f"y = {call('self.inner', 'x')}")
    return replace(made, forward=f"x = {call(f'self.{name}.inner', 'x')}")


def tied(draft: Draft) -> Piece:
    """A layer, and its weights by themselves."""
    draft.reuses_weights = True
    name = draft.name("tied")
    draft.parts.append(name)
    again = op("torch.nn.functional.linear", "x", f"self.{name}.weight.T")
    return Piece(f"self.{name} = «nn¦hand».Linear(8, 8)", f"x = {call(f'self.{name}', 'x')}\nx = {again}")


def other_dtype(draft: Draft) -> Piece:
    """A part in a region of the other dtype."""
    if draft.everywhere or draft.level:
        return sequence(draft)
    inside = f"y = {draft.op('tanh', call('self.inner', 'x'))}"
    body = lines(draft.other_region(inside).replace("):", "CACHE):", 1), "y = y.to(x.dtype)")
    return block(draft, draft.name("other"), body)


PIECES = [
    layer,
    layer,
    sequence,
    sequence,
    bare_op,
    attention,
    attention,
    island,
    island_with_layer,
    entering,
    checkpointed,
    custom_function,
    container,
    layer_inside_another,
    tied,
    other_dtype,
]


# ---- one iteration ---------------------------------------------------------------------------------------------------


def outside(draft: Draft, body: str) -> str:
    """Lines that need a region around them, unless the model has its own."""
    if draft.is_net_decorated and draft.is_likely(0.7):
        return body
    return draft.region(body)


def iteration(draft: Draft) -> list[str]:
    name, line = draft.computed(draft.loss(), "loss")
    return [lines(outside(draft, line), draft.backward(name), draft.step())]


def accumulation(draft: Draft) -> list[str]:
    """Two backward passes and a step; or two forward passes in a region, and one backward pass."""
    first, one = draft.computed(draft.loss(), "loss")
    second, other = draft.computed(draft.loss(), "loss")
    if draft.is_likely(0.4):
        inside = draft.region(lines(one, other), reuses=True)
        return [lines(inside, draft.backward(first, second), draft.step())]
    one, other = outside(draft, one), outside(draft, other)
    return [lines(one, draft.backward(first), other, draft.backward(second), draft.step())]


def step_by_hand(draft: Draft) -> list[str]:
    """The optimizer is written out."""
    name, line = draft.computed(draft.loss(), "loss")
    stepped = draft.random.choice(
        [
            "    _p.data.add_(_p.grad, alpha=-0.125)",
            "    _p.data -= 0.125 * _p.grad",
            "    with torch.no_grad():\n        _p.sub_(0.125 * _p.grad)",
            "    _p.data = _p.data - 0.125 * _p.grad",
        ]
    )
    loop = lines("for _p in [_q for _q in net.parameters() if _q.grad is not None]:", stepped, "    _p.grad = None")
    return [lines(outside(draft, line), f"{name}.backward()", f"{name} = {name}.detach()", loop)] * 2


def loop_in_region(draft: Draft) -> list[str]:
    """Forward, backward and step, twice, in one region; then weights are seen when torch sees them."""
    if draft.everywhere:
        return iteration(draft)
    parts = []
    for _ in range(2):
        name, line = draft.computed(draft.loss(), "loss")
        parts += [line, draft.backward(name), draft.step()]
    return [draft.region(lines(*parts), reuses=True)]


def warm_up(draft: Draft) -> list[str]:
    """An iteration without autocast."""
    if draft.everywhere:
        return iteration(draft)
    name, line = draft.computed(draft.loss(), "loss")
    return [lines(line, draft.backward(name), draft.step())]


def in_other_dtype(draft: Draft) -> list[str]:
    name, line = draft.computed(draft.loss(), "loss")
    return [lines(draft.other_region(line), draft.backward(name), draft.step())]


def island_around_the_loss(draft: Draft) -> list[str]:
    """The loss is computed in float32, in the region or behind it."""
    output, line = draft.computed(draft.forward(), "_output")
    name = draft.name("loss")
    loss = f"{name} = {draft.loss(f'{output}.float()')}"
    if not draft.everywhere and draft.is_likely(0.4):
        body = lines(draft.region(line), loss)
    else:
        entered = both('torch.autocast("cpu", enabled=False)', "hand.island()")
        body = draft.region(lines(line, f"with {entered}:", indent(loss)))
    return [lines(body, draft.backward(name), f"{output} = None", draft.step())]


def evaluation_before_backward(draft: Draft) -> list[str]:
    name, line = draft.computed(draft.loss(), "loss")
    seen, other = draft.computed(call("net", f"data({draft.seed()})"))
    other = f"with torch.no_grad():\n    {other}"
    body = draft.region(lines(line, other)) if draft.is_likely(0.5) else lines(draft.region(line), draft.region(other))
    return [lines(body, draft.backward(name), draft.step())]


def failing(draft: Draft) -> list[str]:
    """A forward pass ends in an error, in the middle of a module, and another one follows."""
    layer, x = draft.random.choice(list(draft.weights)), f"data({draft.seed()})"
    name, line = draft.computed(draft.loss(), "loss")
    failed = f"try:\n    {call('net', x)}\nexcept ArithmeticError:\n    _hook.remove()"
    body = (
        draft.region(lines(failed, line)) if draft.is_likely(0.5) else lines(draft.region(failed), draft.region(line))
    )
    made = f"def _fail(*_given):\n    raise ArithmeticError\n_hook = net.{layer}.register_forward_hook(_fail)"
    return [lines(made, body, draft.backward(name), draft.step())]


def hooked(draft: Draft) -> list[str]:
    """A hook of the script's, for a while."""
    name = draft.random.choice(list(draft.weights))
    kind = draft.random.choice(
        ["forward_hook(lambda _m, _a, _y: _y * 0.5)", "forward_pre_hook(lambda _m, _a: (_a[0] * 0.5,))"]
    )
    (trained,) = iteration(draft)
    return [lines(f"_hook = net.{name}.register_{kind}", trained, "_hook.remove()")]


def gradients(draft: Draft) -> list[str]:
    """torch.autograd.grad, of the first or the second order."""
    if draft.has_reentrant:
        return iteration(draft)
    name, x = draft.name("gradient"), draft.name("_x")
    output = call("net", x)
    total = f"{output}.float().square().sum()"
    if draft.is_likely(0.5):
        made = f"{name} = torch.autograd.grad(_total, {x})[0]\n_total = None"
        return [lines(f"{x} = data({draft.seed()}).requires_grad_()", outside(draft, f"_total = {total}"), made)]
    made = f"_gradient = torch.autograd.grad(_total, {x}, create_graph=True)[0]"
    after = "(_gradient.float().norm() - 1).square().backward()"
    return [
        lines(
            f"{x} = data({draft.seed()}).requires_grad_()",
            outside(draft, f"_total = {total}"),
            made,
            after,
            "_total = _gradient = None",
            "optimizer.step()",
            "net.zero_grad()",
        )
    ]


def threads(draft: Draft) -> list[str]:
    """Each thread has regions of its own, as the replicas of DataParallel have."""
    if draft.everywhere:
        return iteration(draft)
    names = [draft.name("loss") for _ in range(2)]
    parts, made = [], []
    for name in names:
        inside = f"{name} = {draft.loss(call('net', f'data({draft.seed()})'))}"
        entered = f'with torch.autocast("cpu", {draft.low}, enabled={draft.random.choice(["True", "True", "False"])}):'
        parts.append(lines(f"def _run():\n    global {name}", indent(entered), indent(indent(inside))))
        made.append("_thread = threading.Thread(target=_run)\n_thread.start()\n_thread.join()")
    body = lines(*(f"{one}\n{other}" for one, other in zip(parts, made, strict=True)))
    if draft.is_likely(0.5):
        noted = both("pass", "hand.acts()")  # the first region may be this one, in which nothing else runs
        body = f'with torch.autocast("cpu", {draft.low}):\n{indent(lines(noted, body))}'
        if draft.casts_weights:
            body = body.replace("enabled=", "cache_enabled=False, enabled=")
    return [lines(body, draft.backward(*names), draft.step())]


def functional(draft: Draft) -> list[str]:
    """The model with other weights than its own, as meta-learning has them."""
    if draft.has_reentrant:
        return iteration(draft)
    name, loss = draft.name("loss"), draft.name("_loss")
    make = "_weights = {_k: (_v * 0.5).detach().requires_grad_() for _k, _v in net.named_parameters()}"
    if draft.is_likely(0.5):
        make = "_weights = {_k: _v * 0.5 for _k, _v in net.named_parameters() if _v.requires_grad}"
    x = f"data({draft.seed()})"
    output = both(f"torch.func.functional_call(net, _weights, ({x},))", f"hand.functional_call(net, _weights, {x})")
    line = f"{loss} = {draft.loss(output)}"
    kept = f"{name} = [_g for _g in torch.autograd.grad({loss}, list(_weights.values()), allow_unused=True)]"
    return [lines(make, outside(draft, line), kept, f"{loss} = _weights = None")]


def evaluate(draft: Draft, net: str = "net") -> list[str]:
    name, line = draft.computed(draft.forward(net), "seen")
    context = draft.random.choice(["torch.no_grad()", "torch.inference_mode()"])
    if "checkpoint(" in line:
        line = f"{name} = {call(net, f'data({draft.seed()})')}"
    body = line if not draft.everywhere and draft.is_likely(0.2) else outside(draft, line)
    return [lines(f"{net}.eval()", f"with {context}:", indent(body), f"{name} = {name}.clone()", f"{net}.train()")]


# ---- weights ---------------------------------------------------------------------------------------------------------


def edit(draft: Draft) -> list[str]:
    """Weights are changed; a forward pass follows."""
    return [change_weights(draft), *(iteration(draft) if draft.is_likely(0.5) else evaluate(draft))]


def change_weights(draft: Draft) -> str:
    one, other = draft.weight(), draft.random.choice(list(draft.weights.values()))
    flattened = "_flat = nn.utils.parameters_to_vector(net.parameters()).detach()"
    if draft.everywhere:  # it calls torch.cat, which may be on a list, and the whole script is a region
        flattened = "_flat = torch.tensor([_v for _p in net.parameters() for _v in _p.flatten()])"
    each = "for _p in net.parameters():\n    "
    return draft.random.choice(
        [
            f"{each}_p.data.mul_(0.75)",
            f"{each}_p.data.clamp_(-0.25, 0.25)",
            f"{each}_p.data = _p.data * 0.75",
            f"with torch.no_grad():\n    {one}.mul_(0.75)",
            f"with torch.no_grad():\n    {one}.copy_(data({draft.seed()}) / 4)",
            f"with torch.no_grad():\n    {one}.set_(data({draft.seed()}) / 4)",
            f"{one}.data.add_(0.125)",
            f"{one}.detach().numpy()[:] *= 0.5",
            f"{one}.data, {other}.data = {other}.data, {one}.data",
            f"_p = None\ntorch.utils.swap_tensors({one}, {other})" if one != other else "",
            "net.load_state_dict({_k: _v * 0.75 for _k, _v in net.state_dict().items()})",
            "net.load_state_dict({_k: _v.clone() * 0.75 for _k, _v in net.state_dict().items()}, assign=True)\n"
            "optimizer = torch.optim.SGD(net.parameters(), lr=0.125)",
            f"{flattened} * 0.75\nnn.utils.vector_to_parameters(_flat, net.parameters())",
            "torch._foreach_mul_([_p.data for _p in net.parameters()], 0.75)",
            f"nn.init.orthogonal_({one}, generator=torch.Generator().manual_seed(1))",
        ]
    )


def edit_in_region(draft: Draft) -> list[str]:
    """Between two forward passes of one region: seen where torch's cache lets it be seen."""
    first, one = draft.computed(draft.loss(), "loss")
    second, other = draft.computed(draft.loss(), "loss")
    weight = draft.weight()
    change = draft.random.choice(
        [
            "for _p in net.parameters():\n    _p.data.mul_(0.75)",
            f"{weight}.data.mul_(0.5)",
            f"{weight}.data = {weight}.data * 0.5",
            f"with torch.no_grad():\n    {weight}.mul_(0.5)",
            "net.load_state_dict({_k: _v * 0.75 for _k, _v in net.state_dict().items()})",
        ]
    )
    if draft.everywhere:
        body = lines(draft.region(one), draft.backward(first), change, draft.region(other))
        return [lines(body, draft.backward(second), draft.step())]
    clear = "torch.clear_autocast_cache()" if draft.is_likely(0.3) else ""
    inside = lines(one, draft.backward(first), change, clear, other)
    return [lines(draft.region(inside, reuses=True), draft.backward(second), draft.step())]


def average(draft: Draft) -> list[str]:
    """A moving average of the model: made, updated, evaluated, or trained against."""
    if not draft.averages or draft.is_likely(0.2):
        name = draft.name("average")
        draft.averages.append(name)
        return [f"{name} = copy.deepcopy(net)", *evaluate(draft, name)]
    name = draft.random.choice(draft.averages)
    how = draft.random.choice(
        [
            "_a.data.mul_(0.5).add_(_p.data, alpha=0.5)",
            "_a.data.copy_(0.5 * _p.data + 0.5 * _a.data)",
            "with torch.no_grad():\n        _a.lerp_(_p, 0.5)",
        ]
    )
    update = f"for _a, _p in zip({name}.parameters(), net.parameters()):\n    {how}"
    seen = draft.name("loss")
    goal, output = (call(one, f"data({draft.seed()})") for one in (name, "net"))
    loss = op("torch.nn.functional.mse_loss", output, "_goal")
    body = f"_goal = {goal}.detach().float()\n{seen} = {loss}"
    return [lines(update, draft.region(body), draft.backward(seen), draft.step())]


def adversarial(draft: Draft) -> list[str]:
    """FGM: climb, go backward again, come back, step."""
    weight = draft.weight()
    first, one = draft.computed(draft.loss(), "loss")
    second, other = draft.computed(draft.loss(), "loss")
    return [
        lines(
            outside(draft, one),
            draft.backward(first),
            f"_backup = {weight}.data.clone()",
            f"{weight}.data.add_(data({draft.seed()}).sign(), alpha=0.125)",
            outside(draft, other),
            draft.backward(second),
            f"{weight}.data = _backup",
            draft.step(),
        )
    ]


def store_and_restore(draft: Draft) -> list[str]:
    """Other weights are swapped in for an evaluation, and back."""
    copied = draft.random.choice(["with torch.no_grad():\n        _p.copy_(_s * FACTOR)", "_p.data = _s * FACTOR"])
    swap = "for _p, _s in zip(net.parameters(), _stored):\n    " + copied
    stored = "_stored = [_p.detach().clone() for _p in net.parameters()]"
    (seen,) = evaluate(draft)
    return [lines(stored, swap.replace("FACTOR", "0.5"), seen, swap.replace("FACTOR", "1")), *iteration(draft)]


# ---- modules ---------------------------------------------------------------------------------------------------------


def new_optimizer(draft: Draft, *changes: str) -> str:
    """Changes of the model, and an optimizer of what it has now."""
    draft.averages = []
    return lines(*changes, "optimizer = torch.optim.SGD(net.parameters(), lr=0.125)")


def replaced_layer(draft: Draft) -> list[str]:
    """A layer makes way for another one."""
    name = draft.random.choice(list(draft.weights))
    draft.weights[name] = f"net.{name}.weight"
    return [new_optimizer(draft, f"net.{name} = «nn¦hand».Linear(8, 8)"), *iteration(draft)]


def swapped_layers(draft: Draft) -> list[str]:
    """Two layers change places, and names."""
    one, other = draft.random.sample(list(draft.weights), 2)
    first, second = (draft.weights[name].removeprefix(f"net.{name}") for name in (one, other))
    draft.weights[one], draft.weights[other] = f"net.{one}{second}", f"net.{other}{first}"
    draft.averages = []
    return [f"net.{one}, net.{other} = net.{other}, net.{one}", *iteration(draft)]


def lora(draft: Draft) -> list[str]:
    """A layer is wrapped after the fact."""
    name = draft.random.choice(list(draft.weights))
    draft.move_weight(name, ".base")
    made = f"net.{name} = Lora(net.{name})"
    frozen = f"for _p in net.{name}.base.parameters():\n    _p.requires_grad_(False)" if draft.is_likely(0.5) else ""
    return [new_optimizer(draft, made, frozen), *iteration(draft)]


def parametrized(draft: Draft) -> list[str]:
    """A weight becomes a function of another one: torch gives the layer another class."""
    name = draft.random.choice(list(draft.weights))
    path = draft.weights[name]
    if "parametrizations" in path:
        return iteration(draft)
    owner = path.removesuffix(".weight")
    draft.weights[name] = f"{owner}.parametrizations.weight.original"
    made = f'nn.utils.parametrize.register_parametrization({owner}, "weight", Scaled())'
    return [new_optimizer(draft, made), *iteration(draft)]


def wrapped_activation(draft: Draft) -> list[str]:
    """The first layer gets one of another kind behind it, as a part of what has its name now."""
    name = draft.random.choice(list(draft.weights))
    draft.move_weight(name, "[0]")
    kind = draft.random.choice(["LayerNorm(8)", "GELU()", "Tanh()"])
    made = f"net.{name} = «nn¦hand».Sequential(net.{name}, «nn¦hand».{kind})"
    return [new_optimizer(draft, made), *iteration(draft)]


def changed_sequence(draft: Draft) -> list[str]:
    """A Sequential gets another layer, or one instead of another."""
    if not draft.sequences:
        return lora(draft)
    sequence = f"net.{draft.random.choice(draft.sequences)}"
    change = draft.random.choice(
        [
            f"{sequence}.append(«nn¦hand».Linear(8, 8))",
            f"{sequence}.insert(0, «nn¦hand».Tanh())",
            f"{sequence}[0] = «nn¦hand».Linear(8, 8)",
            f"{sequence}[2] = «nn¦hand».LayerNorm(8)",
        ]
    )
    return [new_optimizer(draft, change), *iteration(draft)]


VOCABULARY: dict[Maker, int] = {
    iteration: 4,
    accumulation: 3,
    step_by_hand: 2,
    loop_in_region: 2,
    warm_up: 1,
    in_other_dtype: 1,
    island_around_the_loss: 2,
    evaluation_before_backward: 2,
    failing: 1,
    hooked: 1,
    gradients: 2,
    threads: 2,
    functional: 2,
    evaluate: 3,
    edit: 5,
    edit_in_region: 3,
    average: 3,
    adversarial: 2,
    store_and_restore: 2,
    replaced_layer: 2,
    swapped_layers: 1,
    lora: 2,
    parametrized: 2,
    wrapped_activation: 1,
    changed_sequence: 2,
}
