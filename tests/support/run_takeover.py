"""Runs the programs of `takeover_programs.py`: as scripts under amp_patch.native, and by hand."""

import contextlib
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from program_kinds import Kind, run_snippets, take_values
from takeover_programs import Program, draw

from amp_patch import native


def play(program: Program, *, is_by_hand: bool) -> Iterator[dict[str, Any]]:
    """Run a program and yield what there is after each of its snippets."""
    with as_main() as namespace, contextlib.nullcontext() if is_by_hand else installed(program):
        for variables in run_snippets(program.texts(is_by_hand=is_by_hand), namespace, str(program.seed)):
            found = take_values(variables)
            if "scaler" in variables:
                found["scaler"] = variables["scaler"].state_dict()
            found["autocast"] = torch.is_autocast_enabled("cpu") and not program.everywhere
            yield found


@contextlib.contextmanager
def as_main() -> Iterator[dict[str, Any]]:
    """The namespace of a script that is run: rules by type find its classes."""
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        yield vars(sys.modules["__main__"])
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def installed(program: Program) -> Iterator[None]:
    """The takeover, with the list of a program."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {"mine.yaml": program.yaml(), "nothing.yaml": "extends: null\n"}.items():
            (Path(folder) / name).write_text(text)
        names = [str(Path(folder) / name) if name.endswith(".yaml") else name for name in program.names()]
        with native.install(lists=names, **program.options()):
            yield


def show(program: Program) -> str:
    """Both sides, each to be kept in a file and run."""
    by_hand = program.as_script(is_by_hand=True)
    return f"{program}\n\n# by hand, with tests/support in PYTHONPATH\n{by_hand}\n"


TAKEOVER = Kind(draw, play, show)
