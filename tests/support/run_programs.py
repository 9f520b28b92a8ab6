"""Run programs drawn at random with amp_patch and by hand, and compare bit by bit.

Two kinds: `training_programs.py` by amp_patch.initialize, against `hand_training.py`; `takeover_programs.py` under
amp_patch.native, against `hand_lists.py`. After each snippet every variable, weight, gradient, state of an optimizer
and loss scale must be the same. A program that fails is printed, after everything has been left out without which it
fails as well.

    python tests/support/run_programs.py 17                    run the program of seed 17 and print it
    python tests/support/run_programs.py --count 2000          run many
    python tests/support/run_programs.py --count 50 --first 900
    python tests/support/run_programs.py --kind takeover --count 2000
"""

import argparse
import contextlib
import copy
import math
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from hand_training import ByHand, loss_of, make_by_hand, make_inputs, make_model
from program_kinds import Difference, Kind, run_snippets, take_values
from run_takeover import TAKEOVER
from training_programs import Program, draw

import amp_patch

OPTIMIZERS = [
    getattr(torch.optim, name) for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)
]
CONSTANTS = {"torch": torch, "inf": math.inf, "nan": math.nan, "copy": copy, "inputs": make_inputs, "loss": loss_of}


def make_namespace(*, is_by_hand: bool) -> dict[str, Any]:
    """The names that a script starts with."""

    def model(kind: str, seed: int, **options: Any) -> Any:
        return make_model(kind, seed, is_by_hand=is_by_hand, **options)

    hand = ByHand()
    optimizers = {kind.__name__: make_by_hand(kind) if is_by_hand else kind for kind in OPTIMIZERS}
    clip = hand.clip_grad_norm_ if is_by_hand else clip_grad_norm_
    own = {"amp": hand if is_by_hand else amp_patch, "model": model, "clip_grad_norm_": clip}
    return {**CONSTANTS, **optimizers, **own}


def clip_grad_norm_(*args: Any) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(*args)  # looked up at each call: amp replaces it


def play(program: Program, *, is_by_hand: bool) -> Iterator[dict[str, Any]]:
    """Run a program and yield what there is after each of its snippets."""
    namespace = make_namespace(is_by_hand=is_by_hand)
    texts = [snippet.text for snippet in program.snippets]
    try:
        for index, variables in enumerate(run_snippets(texts, namespace, str(program.seed))):
            asks = program.asks or index == len(program.snippets) - 1
            has_edits = program.snippets[index].is_edit
            yield take_snapshot(variables, namespace["amp"], asks=asks, has_edits=has_edits)
    finally:
        if not is_by_hand:
            with contextlib.suppress(amp_patch.SessionError):
                amp_patch.reset()


def take_snapshot(variables: dict[str, Any], amp: Any, *, asks: bool, has_edits: bool) -> dict[str, Any]:
    found = take_values(variables, has_edits=has_edits)
    if asks and (not isinstance(amp, ByHand) or amp.casts.level) and (amp is not amp_patch or amp.stats().opt_level):
        found["the loss scales"] = amp.state_dict()
    return found


TRAINING = Kind(draw, play)
KINDS = {"training": TRAINING, "takeover": TAKEOVER}
check, check_seed = TRAINING.check, TRAINING.check_seed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seed", type=int, nargs="?", help="of one program, which is printed")
    parser.add_argument("--count", type=int, default=50, help="how many programs to run")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first")
    parser.add_argument("--kind", choices=list(KINDS), default="training", help="which programs")
    options = parser.parse_args()
    kind = KINDS[options.kind]
    torch.set_num_threads(1)
    if options.seed is not None:
        print(kind.show(kind.draw(options.seed)))
    seeds = range(options.first, options.first + options.count) if options.seed is None else [options.seed]
    failed = []
    start = time.process_time()
    for seed in seeds:
        try:
            kind.check_seed(seed)
        except Exception as error:
            failed.append(seed)
            print(f"{'-' * 80}\n{error}", flush=True)
            if not isinstance(error, Difference):
                traceback.print_exc()
    print(f"{len(seeds)} programs, {len(failed)} failed: {failed}; {time.process_time() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
