"""`amp-patch demo`: the technique of that name as a run, with a table and, if asked for, a picture.

The demos themselves are in `amp_patch.demos`; theirs and torch's import wait until the command line has been read.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import amp_patch as amp

from ..demos import DEMOS, Demo, Options, find_demo, require_packages
from ..tables import align
from .values import levels, new_file, positive

if TYPE_CHECKING:
    import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the name and the options on `parser`; options that a demo does not take are refused by `run`."""
    parser.usage = "%(prog)s [NAME] [options]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "the demos:\n" + "\n".join(f"  {line}" for line in align(map(_describe, DEMOS)))
    parser.add_argument(
        "demo", nargs="?", type=_demo, default=DEMOS[0].name, metavar="NAME", help=f"default: {DEMOS[0].name}"
    )
    parser.add_argument(
        "--opt-level", dest="levels", action="extend", type=levels, metavar="LEVEL[,LEVEL]", help="default: see below"
    )
    parser.add_argument("--device", default=None, help="default: cuda where there is one, else cpu")
    parser.add_argument("--steps", type=positive, help="optimizer steps of each run (default: see below)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--seeds", type=positive, help="how many, from --seed on (default: see below)")
    parser.add_argument("--plot", type=_png, metavar="FILE.png", help="draw what was measured into one picture")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="write a report: one page, for any browser")
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> None:
    """Run the demo, and close amp's session. Raises MissingExtraError before torch is imported."""
    demo: Demo = arguments.demo
    for option in ("levels", "seeds"):
        if getattr(arguments, option) and getattr(demo, option) in ((), 1):
            arguments.refuse(f"the demo {demo.name} takes no {'--opt-level' if option == 'levels' else '--seeds'}")
    if arguments.html and not demo.has_report:
        arguments.refuse(f"the demo {demo.name} takes no --html")
    require_packages([*demo.packages, *(["matplotlib"] if arguments.plot else [])], demo.extra)
    device = _device(arguments)
    try:
        demo.load().run(
            Options(
                levels=tuple(dict.fromkeys(arguments.levels or demo.levels)),
                device=device,
                steps=arguments.steps or demo.steps,
                seed=arguments.seed,
                seeds=arguments.seeds or demo.seeds,
                plot=arguments.plot,
                html=arguments.html,
                may_shorten=arguments.steps is None and arguments.seeds is None,
            )
        )
    finally:
        amp.reset()


def _describe(demo: Demo) -> tuple[str, str]:
    """The cells of the help: name, and what it shows with the defaults of its options."""
    defaults = [f"--steps {demo.steps}"]
    if demo.levels:
        defaults.append(f"--opt-level {','.join(demo.levels)}")
    if demo.seeds > 1:
        defaults.append(f"--seeds {demo.seeds}")
    return demo.name, f"{demo.summary} ({' '.join(defaults)})"


def _demo(text: str) -> Demo:
    """The demo of that name."""
    try:
        return find_demo(text)
    except KeyError as error:
        raise argparse.ArgumentTypeError(error.args[0]) from None


def _device(arguments: argparse.Namespace) -> "torch.device":
    """The device asked for, if this machine can put a tensor on it."""
    import torch

    if arguments.device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(arguments.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        arguments.refuse(f"device {arguments.device!r} cannot be used here: {reason}")
    return device


def _png(text: str) -> Path:
    """A path that ends in .png, in a folder that exists."""
    path = Path(text)
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be a .png file in a folder that exists")
    return path
