"""Which demos there are, what each shows, needs and runs by default. Nothing here imports torch."""

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MissingExtraError, did_you_mean

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Options:
    """What a demo is asked for: optimizer steps of each run, the first seed and how many, and where to draw, and to
    write a report. `may_shorten`: whether to take fewer steps, and seeds, where those would take minutes.
    """

    levels: tuple[str, ...]
    device: "torch.device"
    steps: int
    seed: int
    seeds: int
    plot: Path | None
    html: Path | None = None
    may_shorten: bool = False


@dataclass(frozen=True, slots=True)
class Demo:
    """A demo, in the module of its name: `run(options)` prints its table and writes its picture.

    `steps`, `levels` and `seeds` are what it runs by default; without `levels` it chooses them itself, and with one
    seed it takes no more. `packages` are modules that the extra `extra` of this package installs. `has_report`: it
    writes HTML, too.
    """

    name: str
    summary: str
    steps: int
    levels: tuple[str, ...] = ()
    seeds: int = 1
    packages: tuple[str, ...] = ("sklearn", "tqdm")
    extra: str = "demo"
    has_report: bool = False

    def load(self) -> Any:
        """Import its module, and torch with it, and return it."""
        return importlib.import_module(f"{__package__}.{self.name}")


LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")

DEMOS: tuple[Demo, ...] = (
    Demo("digits", "a small network on handwritten digits at each opt_level", 100, LEVELS, seeds=3, has_report=True),
    Demo("mlp", "a table of measurements classified, float32 against mixed", 200, ("O0", "O1", "O2", "O4"), seeds=5),
    Demo(
        "checkpointing",
        "activations computed again in backward: memory against time",
        10,
        ("O0", "O1", "O2", "O4", "O5"),
    ),
    Demo("paper", "what master weights and loss scaling are for, as the paper on mixed precision found it", 500),
    Demo(
        "qlora",
        "a language model in 4 bits, fine-tuned by adapters at O4",
        120,
        packages=("bitsandbytes", "peft", "tqdm"),
        extra="qlora",
    ),
)
"""The first is the one that `amp-patch demo` runs without a name."""


def find_demo(name: str) -> Demo:
    """Return the demo of that name. Raises KeyError with the names there are."""
    for demo in DEMOS:
        if demo.name == name:
            return demo
    names = [demo.name for demo in DEMOS]
    raise KeyError(f"{name!r} is not a demo ({', '.join(names)}).{did_you_mean(name, names)}")


def require_packages(names: Sequence[str], extra: str = "demo") -> None:
    """Raise `MissingExtraError`, which names the extra, if a module of `names` is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f'the demo needs {", ".join(missing)}, not installed here; run: pip install "amp_patch[{extra}]"'
        )
