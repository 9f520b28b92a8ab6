"""`amp-patch demo`: handwritten digits at every opt_level, as a table and, if asked for, a picture.

scikit-learn brings the data, tqdm the progress bar, matplotlib the picture: the extra `amp_patch[demo]`.
"""

import argparse
from pathlib import Path

import torch

import amp_patch as amp

from ..dtypes import dtype_name
from ..errors import did_you_mean
from ..hardware import explain_products, has_low_products
from ..tables import format_table
from .demo_picture import save_plot
from .demo_training import TrainResult, load_digits_tensors, require_extras, train
from .demo_training import build_model as build_model

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
COLUMNS = (
    "level",
    "low dtype",
    "accuracy",
    "final loss",
    "ms/step",
    "skipped",
    "loss scale",
    "names patched",
    "params low",
    "params float32",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's options on `parser`."""
    parser.add_argument(
        "--opt-level", dest="levels", action="extend", type=_levels, metavar="LEVEL[,LEVEL]", help="default: all six"
    )
    parser.add_argument("--device", type=_device, default=None, help="default: cuda where there is one, else cpu")
    parser.add_argument("--steps", type=_positive, default=300, help="optimizer steps per level (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    parser.add_argument(
        "--plot", type=_png, metavar="FILE.png", help="write the loss curves of all levels into one picture"
    )


def run(arguments: argparse.Namespace) -> None:
    """Train at each level asked for, in order; print the table, write the picture, close amp's session."""
    require_extras(["sklearn", "tqdm", *(["matplotlib"] if arguments.plot else [])])
    from tqdm import tqdm

    device = arguments.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    levels = list(dict.fromkeys(arguments.levels or LEVELS))
    digits = load_digits_tensors(device)
    results = []
    try:
        with tqdm(total=len(levels) * arguments.steps, unit="step", leave=False, disable=None) as bar:
            for level in levels:
                bar.set_description(level)
                results.append(train(level, digits, steps=arguments.steps, seed=arguments.seed, on_step=bar.update))
    finally:
        amp.reset()
    print(format_table(COLUMNS, map(_cells, results), left=2))
    for low in dict.fromkeys(result.low_dtype for result in results):
        if low is not None and not has_low_products(device.type, low):
            print(f"\n{explain_products(device.type, low)}; for speed here, use O0")
    if arguments.plot:
        save_plot(results, arguments.plot)
        print(f"\nloss curves: {arguments.plot}")


def _cells(result: TrainResult) -> tuple[str, ...]:
    """The cells of one level, in the order of `COLUMNS`."""
    return (
        result.level,
        dtype_name(result.low_dtype),
        f"{result.accuracy:.2f} %",
        f"{result.final_loss:.4f}",
        f"{result.ms_per_step:.2f}",
        str(result.steps_skipped),
        f"{result.loss_scale:g}",
        str(result.names_patched),
        f"{result.parameters_low:,}",
        f"{result.parameters_float32:,}",
    )


def _levels(text: str) -> list[str]:
    """`O1` or `O1,O4` as a list of known levels."""
    levels = [level.strip() for level in text.split(",")]
    for level in levels:
        if level not in LEVELS:
            raise argparse.ArgumentTypeError(
                f"{level!r} is not an opt_level ({', '.join(LEVELS)}).{did_you_mean(level, LEVELS)}"
            )
    return levels


def _positive(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _device(text: str) -> torch.device:
    """A device that this machine can put a tensor on."""
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise argparse.ArgumentTypeError(f"device {text!r} cannot be used here: {reason}") from error
    return device


def _png(text: str) -> Path:
    """A path that ends in .png, in a folder that exists."""
    path = Path(text)
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be a .png file in a folder that exists")
    return path
