"""Run the programs of `training_programs.py` with amp_patch and by hand (`hand_training.py`), and compare bit by bit.

Both sides run the same text; `amp` in it is amp_patch, or `ByHand`. After each snippet every variable, weight,
gradient, state of an optimizer and loss scale must be the same. A program that fails is printed, after the snippets
have been left out without which it fails as well.

    python tests/support/run_programs.py 17                    run the program of seed 17 and print it
    python tests/support/run_programs.py --count 2000          run many
    python tests/support/run_programs.py --count 50 --first 900
"""

import argparse
import contextlib
import copy
import linecache
import math
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from hand_training import ByHand, equal, loss_of, make_by_hand, make_inputs, make_model
from training_programs import Program, draw

import amp_patch


class Difference(AssertionError):
    """The two sides of a program are not the same."""


class WrongProgram(Exception):
    """A program that plain torch does not run either."""


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
    given = set(namespace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, snippet in enumerate(program.snippets):
            name = f"<snippet {index} of program {program.seed}>"
            linecache.cache[name] = len(snippet.text), None, snippet.text.splitlines(keepends=True), name
            exec(compile(snippet.text, name, "exec"), namespace)
            asks = program.asks or index == len(program.snippets) - 1
            variables = {name: value for name, value in namespace.items() if name not in given and name[0] != "_"}
            yield take_snapshot(variables, namespace["amp"], asks=asks, has_edits=snippet.is_edit)


def take_snapshot(variables: dict[str, Any], amp: Any, *, asks: bool, has_edits: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in variables.items():
        if isinstance(value, torch.nn.Module):
            parameters = list(value.parameters())
            found[f"{name}'s buffers"] = keep(list(value.buffers()))
            found[f"{name}'s gradients"] = keep([p.grad for p in parameters])
            if not has_edits:
                found[f"{name}'s weights"] = keep(parameters)
        elif isinstance(value, torch.optim.Optimizer):
            stepped = [parameter for group in value.param_groups for parameter in group["params"]]
            found[f"{name}'s gradients"] = keep([parameter.grad for parameter in stepped])
            found[f"{name}'s state"] = keep([dict(value.state.get(parameter, {})) for parameter in stepped])
            found[f"{name}'s rates"] = [group["lr"] for group in value.param_groups]
            found[f"{name} skipped"] = bool(getattr(value, "step_was_skipped", False))
            if not has_edits:
                found[f"{name}'s weights"] = keep(stepped)
        elif is_data(value):
            found[name] = keep(value)
    if asks and (not isinstance(amp, ByHand) or amp.casts.level) and (amp is not amp_patch or amp.stats().opt_level):
        found["the loss scales"] = amp.state_dict()
    return found


def is_data(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(is_data, value))
    if isinstance(value, dict):
        return all(map(is_data, value.values()))
    return value is None or isinstance(value, (torch.Tensor, float, int, str))


def keep(value: Any) -> Any:
    """A copy of a tree of tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: keep(item) for key, item in value.items()}
    return [keep(item) for item in value] if isinstance(value, (list, tuple)) else value


def check(program: Program) -> None:
    """Run a program on both sides. Raises Difference where they part, and whatever the package raises."""
    try:
        expected = list(play(program, is_by_hand=True))
    except Exception as error:
        raise WrongProgram(f"it fails by hand, too: {error}") from error
    try:
        for index, ours in enumerate(play(program, is_by_hand=False)):
            theirs = expected[index]
            if set(ours) != set(theirs):
                raise Difference(f"after snippet {index}: there is {sorted(set(ours) ^ set(theirs))} on one side only")
            for name, value in theirs.items():
                if ours.get("order") != theirs.get("order"):
                    return  # autograd has run hooks that step in another order, and an overflow skips later ones only
                if not equal(ours[name], value):
                    raise Difference(f"after snippet {index}, {name}:\n{ours[name]}\nby hand:\n{value}")
    finally:
        with contextlib.suppress(amp_patch.SessionError):
            amp_patch.reset()


def find_failure(program: Program) -> str | None:
    """Return how the package fails at a program, or None. A program that is wrong by itself does not count."""
    try:
        check(program)
    except WrongProgram:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def shrink(program: Program) -> Program:
    """Leave out every snippet without which the program still fails."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for index in reversed(range(1, len(program.snippets))):
            snippets = program.snippets[:index] + program.snippets[index + 1 :]
            smaller = replace(program, snippets=snippets)
            if find_failure(smaller) is not None:
                program, is_smaller = smaller, True
    return program


def check_seed(seed: int) -> None:
    """Run the program of a seed. Raises Difference with the shortest program that fails like it."""
    program = draw(seed)
    try:
        check(program)
    except WrongProgram as error:
        raise WrongProgram(f"seed {seed}\n{program}\n\n{error}") from error
    except Exception as error:
        smaller = shrink(program)
        told = find_failure(smaller) or f"{type(error).__name__}: {error}"
        raise Difference(f"seed {seed}\n{smaller}\n\n{told}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seed", type=int, nargs="?", help="of one program, which is printed")
    parser.add_argument("--count", type=int, default=50, help="how many programs to run")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.seed is not None:
        print(draw(options.seed))
    seeds = range(options.first, options.first + options.count) if options.seed is None else [options.seed]
    failed = []
    start = time.process_time()
    for seed in seeds:
        try:
            check_seed(seed)
        except Exception as error:
            failed.append(seed)
            print(f"{'-' * 80}\n{error}", flush=True)
            if not isinstance(error, Difference):
                traceback.print_exc()
    print(f"{len(seeds)} programs, {len(failed)} failed: {failed}; {time.process_time() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
