"""`amp-patch check`: writes a contract of precision for a script, and checks the script against it.

The script runs unmodified, as under `amp-patch run`. It runs more than once, for some steps each time.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__, config
from ..errors import AmpError
from ..files import write_file
from ..script_settings import NoRegionError, Settings
from ..terminal import print_error, print_report
from .scripts import ScriptRunner, add_script, check_is_named, describe_command
from .values import at_least, new_file, oplist, opt_level

if TYPE_CHECKING:
    from ..insight.checking import Contract, Question, Verdict

STEPS = 20
"""The number of optimizer steps of a run, unless the command line or the contract names another."""

EXAMPLES = (
    "amp-patch check train.py --write numerics.json",
    "amp-patch check train.py --against numerics.json  # in CI",
)
"""Command lines that the help shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    contract = parser.add_mutually_exclusive_group(required=True)
    contract.add_argument("--write", type=new_file, metavar="FILE", help="measure the script, and write the contract")
    contract.add_argument("--against", type=Path, metavar="FILE", help="check the script against this contract")
    parser.add_argument(
        "--update",
        action="store_true",
        help="with --against: after printing what differs, measure again and write the contract; numbers of other"
        " hardware are kept only if no promise is broken",
    )
    parser.add_argument(
        "--steps", type=_steps, metavar="N", help=f"optimizer steps of a run (default: {STEPS}, or the contract's)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of each run (default: 0, or the contract's)")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="with --against: also write the verdict as JSON")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="with --against: write a report as one HTML page")
    add_script(
        parser,
        usage="(--write FILE | --against FILE) [--update] [--json FILE] [--html FILE] [--steps N] [--seed N]",
        has_report=True,
    )


def run(arguments: argparse.Namespace) -> int:
    """Write or check a contract, and return the exit code.

    0: the contract was written, or it holds. 1: it does not hold, or it could not be written. 2: it could not be judged
    or updated, for example because the contract cannot be read, the script fails, or the contract is for another
    script. With --update, 0 also if the contract did not hold and was written anew.
    """
    check_is_named(arguments)
    if arguments.update and arguments.against is None:
        arguments.parser.error("--update needs --against FILE: --write makes a contract anew")
    if arguments.against is None:
        for option in ("json", "html"):
            if getattr(arguments, option) is not None:
                arguments.parser.error(f"--{option} needs --against FILE")
        return _write(arguments)
    try:
        return _check(arguments)
    except AmpError as error:
        print_error(arguments.parser.prog, "not judged", str(error))
        return 2


def _write(arguments: argparse.Namespace) -> int:
    """Measure the script, and write and print a contract."""
    from ..insight.checking import describe_contract

    question = _ask(arguments, None)
    contract = _measure(arguments, question, is_new=True)
    contract.write(arguments.write)
    print_report(describe_contract(contract), [None])
    print(f"written: {arguments.write}", file=sys.stderr)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    """Check the script against a contract, print and write the verdict, and return the exit code."""
    from ..insight.checking import Break, Contract, Verdict, is_other_script, judge, write_page

    contract = Contract.read(arguments.against)
    question = _ask(arguments, contract)
    try:
        measured = _measure(arguments, question, is_new=False)
    except NoRegionError as error:
        if not contract.about.low:
            raise
        # the contract promises 16 bits, and the script has no mixed precision any more
        verdict = Verdict([Break("region", str(error))])
        _tell(verdict, arguments)
        if arguments.html is not None:
            print(f"not written: {arguments.html}, because there are no numbers to show", file=sys.stderr)
        return 1
    if is_other_script(contract, measured):
        raise AmpError(
            f"{arguments.against} is a contract of {contract.about.script}, and {question.script} calls other ops:"
            " give its own contract, or make one with --write"
        )
    verdict = judge(contract, measured)
    _tell(verdict, arguments)
    if arguments.html is not None:
        write_page(arguments.html, contract, measured, verdict, command=describe_command(arguments))
    if arguments.update:
        _update(arguments, question, contract, verdict)
        return 0
    return int(not verdict.holds)


def _tell(verdict: "Verdict", arguments: argparse.Namespace) -> None:
    """Print the verdict, in GitHub Actions also as annotations. With --json, write it as JSON."""
    from ..insight.checking import format_verdict

    print_report(format_verdict(verdict, str(arguments.against)), [verdict.holds])
    if os.environ.get("GITHUB_ACTIONS") == "true":
        _annotate(verdict, arguments.script)
    if arguments.json is not None:
        write_file(arguments.json, json.dumps(verdict.as_json(), indent=1) + "\n")


def _update(arguments: argparse.Namespace, question: "Question", contract: "Contract", verdict: "Verdict") -> None:
    """Measure again, and write the contract. Keep its numbers of other hardware only if no promise is broken."""
    new = _measure(arguments, question, is_new=True)
    if verdict.holds:
        new.numbers = {**contract.numbers, **new.numbers}
    new.write(arguments.against)
    print(f"written: {arguments.against}", file=sys.stderr)


def _ask(arguments: argparse.Namespace, contract: "Contract | None") -> "Question":
    """Return what to run, from the options of the command line, then the contract's, then the defaults.

    Puts the options of the contract into `arguments`, from which the runner takes them.
    """
    from ..insight.checking import Question

    path = arguments.write if contract is None else arguments.against
    folder = path.resolve().parent
    if contract is not None:
        about = contract.about
        try:
            if arguments.opt_level is None and about.opt_level:
                arguments.opt_level = opt_level(about.opt_level)
            if not arguments.lists:
                arguments.lists = [oplist(_from_folder(name, folder)) for name in about.lists]
        except argparse.ArgumentTypeError as error:
            raise AmpError(f"{path} names a level or a list that is not there: {error}") from None
        arguments.everywhere = arguments.everywhere or about.everywhere
        arguments.steps = arguments.steps or about.steps
        arguments.seed = about.seed if arguments.seed is None else arguments.seed
    script = f"-m {arguments.module}" if arguments.module else Path(arguments.script or "").name
    return Question(
        script=script,
        settings=Settings(arguments.opt_level, ()),
        everywhere=arguments.everywhere,
        lists=tuple(_to_folder(name, folder) for name in arguments.lists),
        steps=arguments.steps or STEPS,
        seed=arguments.seed or 0,
        version=__version__,
    )


def _to_folder(name: str, folder: Path) -> str:
    """Return the name of an op list in a contract in `folder`: a shipped name, or the path relative to `folder`."""
    if config.list_names.is_shipped(name):
        return name
    return Path(os.path.relpath(name, folder)).as_posix()


def _from_folder(name: str, folder: Path) -> str:
    """Return the shipped name or the absolute path of a list that a contract in `folder` names."""
    if config.list_names.is_shipped(name):
        return name
    return os.path.abspath(folder / name)


def _measure(arguments: argparse.Namespace, question: "Question", *, is_new: bool) -> "Contract":
    """Run the script, and return its numbers as a contract. If `is_new`, the contract also has *bands*: how far the
    numbers of a later run may differ. They come from several runs.
    """
    from ..insight.checking import Measurer

    prefix = arguments.parser.prog
    runner = ScriptRunner(arguments, is_quiet=True, is_repeated=True)
    measurer = Measurer(runner, question, lambda line: print(f"{prefix}: {line}", file=sys.stderr))
    try:
        return measurer.write() if is_new else measurer.measure_again()
    finally:
        runner.print_files()


def _annotate(verdict: "Verdict", script: str | None) -> None:
    """Print the broken promises as commands of GitHub Actions, with the line of the script if it is known."""
    for broken in verdict.breaks:
        place = ""
        file, _, line = broken.site.rpartition(":")
        if script and file == Path(script).name and line.isdecimal():
            place = f"file={script},line={line},"
        # GitHub ends a message at the end of a line
        text = f"{broken.kind}: {broken.text}".replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        print(f"::error {place}title=amp-patch check::{text}")


def _steps(text: str) -> int:
    """Return a number of steps: at least two, because the ops of the second step are recorded."""
    return at_least(2, text)
