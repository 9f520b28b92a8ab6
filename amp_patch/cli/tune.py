"""`amp-patch tune`: searches for a list that keeps few modules or ops of a script in float32, and meets a tolerance.

The script runs unmodified, as under `amp-patch run`, and many times: once in float32, once with each list to try, and
under a tracer. Each run takes a limited number of steps.
"""

import argparse
import sys
from dataclasses import fields

from ..terminal import print_report
from .scripts import ScriptRunner, add_script
from .values import at_least, check_lists, new_file, oplist, positive

EXAMPLES = (
    "amp-patch tune train.py --out mine.yaml",
    "amp-patch tune train.py --units both --tolerance 0.05",
)
"""Command lines that the help shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        default=0.1,
        metavar="T",
        help="largest relative error of each parameter's gradient (default: %(default)s); a fifth of it for the loss",
    )
    parser.add_argument(
        "--units",
        choices=("modules", "ops", "both"),
        default="modules",
        help="what to keep in float32; both: modules, and ops outside of modules (default: %(default)s)",
    )
    parser.add_argument("--extends", type=oplist, metavar="LIST", help="the list to start from (default: the script's)")
    parser.add_argument("--out", type=new_file, metavar="FILE", help="write the list (default: print it)")
    parser.add_argument(
        "--steps", type=positive, default=2, metavar="N", help="optimizer steps to compare (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of each run (default: %(default)s)")
    parser.add_argument(
        "--max-runs",
        type=_runs,
        default=40,
        metavar="N",
        help="limit on runs of the search; up to 4 that trace its result come on top (default: %(default)s)",
    )
    add_script(
        parser,
        usage="[--tolerance T] [--units modules|ops|both] [--extends LIST] [--out FILE] [--steps N] [--seed N]"
        " [--max-runs N]",
    )


def run(arguments: argparse.Namespace) -> int:
    """Tune, and write or print the list.

    Return 0 if the result met the tolerance and passed its traced runs (see `TuneResult.is_reached`). Otherwise
    return 1.

    After Ctrl-C, write or print the best list so far, if there is one, and return 130. Ctrl-C in the run in float32
    raises KeyboardInterrupt.
    """
    from ..insight import TuneOptions, Tuner

    runner = ScriptRunner(arguments, is_quiet=True, is_repeated=True)
    check_lists(arguments.parser, "--extends", *filter(None, [arguments.extends]))
    # the options of the command have the names of the fields of TuneOptions
    names = {field.name for field in fields(TuneOptions)}
    options = {name: value for name, value in vars(arguments).items() if name in names}
    tuner = Tuner(runner, **options, log=_tell)
    try:
        result = tuner.run()
    except KeyboardInterrupt:  # only in the run in float32: later, `Tuner.run` returns a result
        _tell("interrupted before a list was tried; nothing is written")
        raise
    finally:
        runner.print_files()
    lines = f"{result.message}; {result.runs} runs".split("; ")
    print_report("\n".join(lines), [result.is_reached])
    if result.text and arguments.out is None:
        print(f"\n{result.text.rstrip()}", flush=True)
    elif result.text:
        result.to_yaml(arguments.out)
        use = "the best list so far"
        if result.is_reached:
            use = "pass it to initialize as lists=..., or to amp-patch run as --lists"
        print(f"written to {arguments.out}: {use}", flush=True)
    elif arguments.out is not None:
        print(f"nothing is written to {arguments.out}: there is no list to write", flush=True)
    if result.is_interrupted:
        return 130
    return int(not result.is_reached)


def _tell(line: str) -> None:
    """Print a line about a run."""
    print(f"amp-patch tune: {line}", file=sys.stderr, flush=True)


def _tolerance(text: str) -> float:
    """Return a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a tolerance: give a number above 0, such as 0.1")
    return value


def _runs(text: str) -> int:
    """Return a number of runs: at least 2, the run in float32 and one with a list."""
    return at_least(2, text)
