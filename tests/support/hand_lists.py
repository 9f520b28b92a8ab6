"""Op lists and module rules over `torch.autocast`, done by hand: what amp_patch.native does, without amp_patch.

A script by hand calls each op, and each module, through a `ByHand`:

    hand = ByHand({"blacklist": ["softmax"]}, [{"match": "head", "run": "float32"}])
    with torch.autocast("cpu", torch.bfloat16):
        y = hand.op("torch.softmax", hand.call(net, x), -1)

Its layers (`hand.Linear`) run their op that way, too. An op on no list of the script's is left to torch.autocast.
Nothing is kept: neither casts of weights, nor what a rule chose.
"""

import contextlib
import fnmatch
import importlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FLOATING = (torch.float16, torch.bfloat16, torch.float32)

OWN = {
    "linear": "whitelist",
    "matmul": "whitelist",
    "conv1d": "whitelist",
    "scaled_dot_product_attention": "whitelist",
    "mse_loss": "blacklist",
    "smooth_l1_loss": "blacklist",
    "cat": "promote",
}
"""What torch.autocast does with the ops of `takeover_programs.py` on a CPU."""


CALLS = {"torch.nn.functional.softmax": "torch.Tensor.softmax"}
"""Functions that torch wrote in Python, and the ops that they call."""


class State(NamedTuple):
    """Where a thread is.

    Attributes:
        calls: the modules that are being called, or have a method under way, outermost first.
        run: as what the rules run the innermost: "low", "float32" or, where none covers it, None.
        is_held: autocast is disabled because a rule says float32, and not because the script says so.
    """

    calls: tuple[nn.Module, ...] = ()
    run: str | None = None
    is_held: bool = False


class _OfThread(threading.local):
    state = State()


class ByHand:
    """Some lists and rules, by hand.

    Args:
        lists: the ops of each list, by their names or their dotted names.
        rules: of modules, as in a list's `modules`; the last that covers a module counts.
    """

    def __init__(self, lists: dict[str, list[str]], rules: list[dict[str, str]]) -> None:
        self.lists = lists
        self.rules = rules
        self.low: torch.dtype | None = None  # of the first region; regions in another are torch's own
        self._local = _OfThread()
        for kind in (Linear, Conv1d, LayerNorm, GELU, Softmax, Tanh, MSELoss, Sequential):
            setattr(self, kind.__name__, type(kind.__name__, (kind,), {"hand": self}))

    # ---- where we are ------------------------------------------------------------------------------------------------

    def acts(self) -> bool:
        """Tell whether lists and rules act here."""
        if not torch.is_autocast_enabled("cpu"):
            return self._local.state.is_held
        self.low = self.low or torch.get_autocast_dtype("cpu")
        return torch.get_autocast_dtype("cpu") is self.low

    @contextlib.contextmanager
    def _at(self, state: State) -> Iterator[None]:
        before, self._local.state = self._local.state, state
        try:
            yield
        finally:
            self._local.state = before

    @contextlib.contextmanager
    def island(self) -> Iterator[None]:
        """The script's own `torch.autocast("cpu", enabled=False)`."""
        with self._at(self._local.state._replace(is_held=False)), torch.autocast("cpu", enabled=False):
            yield

    def remembered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that a checkpoint runs again in the backward pass, where it is to find what it finds here."""
        state = self._local.state

        def again(*args: Any, **kwargs: Any) -> Any:
            with self._at(state):
                return function(*args, **kwargs)

        return again

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def op(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Run an op of torch, by its dotted name."""
        function, name = find_op(path), path.rpartition(".")[2].strip("_")
        listed = self._find_list(path, name)
        run = self._local.state.run
        if not self.acts() or (listed is None and run is None):
            return function(*args, **kwargs)
        kind = listed or OWN.get(name)
        dtype = {"whitelist": self.low, "blacklist": torch.float32}.get(kind or "")
        if dtype is None and kind != "neutral":  # left to torch
            return function(*args, **kwargs)
        if dtype is not None and run is not None:
            dtype = self.low if run == "low" else torch.float32
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs) if dtype is None else function(*cast(args, dtype), **cast(kwargs, dtype))

    def _find_list(self, path: str, name: str) -> str | None:
        for spelling in (path, CALLS.get(path)):
            for kind, ops in self.lists.items():
                if name in ops or spelling in ops:
                    return kind
        return None

    # ---- modules -----------------------------------------------------------------------------------------------------

    def call(self, module: nn.Module, *args: Any) -> Any:
        """Call a module."""
        return self._call(module, module, args)

    def functional_call(self, module: nn.Module, weights: dict[str, Tensor], *args: Any) -> Any:
        """Call a module with other weights."""
        return self._call(module, lambda *given: torch.func.functional_call(module, weights, given), args)

    def call_method(self, module: nn.Module, name: str, *args: Any) -> Any:
        """Call a method: modules that it calls have the names that they have in there."""
        before = self._local.state
        with self._at(before._replace(calls=(*before.calls, module))):
            return getattr(module, name)(*args)

    def _call(self, module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        before = self._local.state
        run = self._find_run(module, before.calls) or before.run
        state = before._replace(calls=(*before.calls, module), run=run)
        acts = self.acts()
        if run == before.run or not acts:
            with self._at(state):
                return function(*args)
        if run == "float32":
            with self._at(state._replace(is_held=True)), torch.autocast("cpu", enabled=False):
                return function(*cast(args, torch.float32))
        assert self.low is not None
        caches = torch.is_autocast_cache_enabled()
        with self._at(state._replace(is_held=False)), torch.autocast("cpu", self.low, cache_enabled=caches):
            return function(*cast(args, self.low))

    def _find_run(self, module: nn.Module, calls: tuple[nn.Module, ...]) -> str | None:
        root = next((one for one in calls if any(part is module for part in one.modules())), module)
        name = next(name for name, part in root.named_modules() if part is module)
        parts = name.split(".") if name else []
        around = [(".".join(parts[:count]), root.get_submodule(".".join(parts[:count]))) for count in range(len(parts))]
        for rule in reversed(self.rules):
            if any(chooses(rule, *one) for one in (*around, (name, module))):
                return rule["run"]
        return None


def find_op(path: str) -> Callable[..., Any]:
    """The function of a dotted name."""
    owner, _, name = path.rpartition(".")
    found: Any = torch.Tensor if owner == "torch.Tensor" else importlib.import_module(owner)
    return getattr(found, name)


def chooses(rule: dict[str, str], name: str, module: nn.Module) -> bool:
    """Tell whether a rule names a module itself."""
    if "type" in rule:
        owner, _, kind = rule["type"].rpartition(".")
        return isinstance(module, getattr(sys.modules[owner], kind))
    match = rule["match"]
    if match.startswith("re:"):
        return re.search(match[3:], name) is not None
    parts, patterns = name.split("."), match.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors in a value."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in FLOATING else value
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    return type(value)(cast(item, dtype) for item in value) if type(value) in (list, tuple) else value


# ---- layers ----------------------------------------------------------------------------------------------------------


class Linear(nn.Linear):
    hand: ByHand

    def forward(self, x: Tensor) -> Tensor:
        return self.hand.op("torch.nn.functional.linear", x, self.weight, self.bias)


class Conv1d(nn.Conv1d):
    hand: ByHand

    def forward(self, x: Tensor) -> Tensor:
        return self.hand.op("torch.nn.functional.conv1d", x, self.weight, self.bias, self.stride, self.padding)


class LayerNorm(nn.LayerNorm):
    hand: ByHand

    def forward(self, x: Tensor) -> Tensor:
        path, shape = "torch.nn.functional.layer_norm", self.normalized_shape
        return self.hand.op(path, x, shape, self.weight, self.bias, self.eps)


class GELU(nn.GELU):
    hand: ByHand

    def forward(self, x: Tensor) -> Tensor:
        return self.hand.op("torch.nn.functional.gelu", x)


class Softmax(nn.Softmax):
    hand: ByHand

    def forward(self, x: Tensor) -> Tensor:
        return self.hand.op("torch.nn.functional.softmax", x, self.dim)


class Tanh(nn.Tanh):
    hand: ByHand

    def forward(self, x: Tensor) -> Tensor:
        return self.hand.op("torch.tanh", x)


class MSELoss(nn.MSELoss):
    hand: ByHand

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.hand.op("torch.nn.functional.mse_loss", x, target)


class Sequential(nn.Sequential):
    hand: ByHand

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = self.hand.call(module, x)
        return x
