"""Kinds of programs that are drawn at random: how one is run by amp_patch and by hand, and how both are compared."""

import contextlib
import linecache
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hand_training import equal


class Difference(AssertionError):
    """The two sides of a program are not the same."""


class WrongProgram(Exception):
    """A program that plain torch does not run either."""


# ---- what there is after a snippet -----------------------------------------------------------------------------------


def run_snippets(texts: Sequence[str], namespace: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Run the parts of a program in one namespace, and yield the variables that there are after each."""
    given = set(namespace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, text in enumerate(texts):
            file = f"<snippet {index} of program {name}>"
            linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
            exec(compile(text, file, "exec"), namespace)
            yield {name: value for name, value in namespace.items() if name not in given and name[0] != "_"}


def take_values(variables: dict[str, Any], *, has_edits: bool = False) -> dict[str, Any]:
    """Copies of all that is in variables; `has_edits`: but for weights."""
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


# ---- running and comparing -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of programs.

    Attributes:
        draw: makes the program of a seed, which can yield `smaller` ones.
        play: runs one, by hand or not, and yields what there is after each of its snippets.
        show: the whole text of one.
    """

    draw: Callable[[int], Any]
    play: Callable[..., Iterator[dict[str, Any]]]
    show: Callable[[Any], str] = str

    def check(self, program: Any) -> None:
        """Run a program on both sides. Raises Difference where they part, and whatever the package raises."""
        try:
            expected = list(self.play(program, is_by_hand=True))
        except Exception as error:
            raise WrongProgram(f"it fails by hand, too: {error}") from error
        with contextlib.closing(self.play(program, is_by_hand=False)) as sides:
            for index, ours in enumerate(sides):
                theirs = expected[index]
                if set(ours) != set(theirs):
                    alone = sorted(set(ours) ^ set(theirs))
                    raise Difference(f"after snippet {index}: there is {alone} on one side only")
                if ours.get("order") != theirs.get("order"):
                    return  # autograd has run hooks that step in another order; an overflow skips later ones only
                names = [name for name, value in theirs.items() if not equal(ours[name], value)]
                if names:
                    shown = f"{ours[names[-1]]}\nby hand:\n{theirs[names[-1]]}"
                    raise Difference(f"after snippet {index}, {', '.join(names)}:\n{shown}")

    def find_failure(self, program: Any) -> str | None:
        """Return how the package fails at a program, or None. A program that is wrong by itself does not count."""
        try:
            self.check(program)
        except WrongProgram:
            return None
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def shrink(self, program: Any) -> Any:
        """Leave out everything without which the program still fails."""
        is_smaller = True
        while is_smaller:
            is_smaller, index = False, 0
            while index < len(smaller := list(program.smaller())):
                if self.find_failure(smaller[index]) is None:
                    index += 1
                else:
                    program, is_smaller = smaller[index], True
        return program

    def check_seed(self, seed: int) -> None:
        """Run the program of a seed. Raises Difference with the shortest program that fails like it."""
        program = self.draw(seed)
        try:
            self.check(program)
        except WrongProgram as error:
            raise WrongProgram(f"seed {seed}\n{program}\n\n{error}") from error
        except Exception as error:
            smaller = self.shrink(program)
            told = self.find_failure(smaller) or f"{type(error).__name__}: {error}"
            raise Difference(f"seed {seed}\n{smaller}\n\n{told}") from error
