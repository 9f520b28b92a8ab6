"""`amp-patch run`: runs a script unmodified, at another level or with other op lists.

In a script that was written for NVIDIA Apex, `import apex` finds amp_patch's stand-in, unless an installed apex has
`amp` and --force is not given. In a script with torch.autocast, levels and op lists change the dtypes of ops in its
regions.

The command replaces its own process by a new Python (on Windows, it starts one and waits), and puts the folder
`startup` at the front of PYTHONPATH. Python imports the `sitecustomize` in this folder first, which sets all of
this up: in the script's process, and in a Python that the script starts (launchers, spawned workers, data loaders).
The script is the main program, as under `python script.py`. When it begins, no frame of this package is on its stack.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import NoReturn

from .. import config
from ..errors import did_you_mean
from . import armed
from .values import check_lists, get_level, new_file, oplist, opt_level

IS_WINDOWS = os.name == "nt"

STARTUP = Path(__file__).with_name("startup")
"""The folder that contains `sitecustomize.py`."""

EXAMPLES = (
    "amp-patch run train.py  # a script that imports apex",
    "amp-patch run --everywhere --opt-level O4 train.py  # a script without mixed precision",
)
"""Command lines that the help shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options. Arguments after SCRIPT, or after `-m MODULE`, belong to the script or module."""
    parser.usage = (
        "%(prog)s [--opt-level LEVEL] [--lists LIST] [--everywhere] [--force]"
        f" [--quiet] {armed.USAGE} [--json FILE] [--] (SCRIPT | -m MODULE) [ARGUMENT ...]"
    )
    add_settings(parser)
    armed.add_options(parser)
    parser.add_argument(
        "--json", type=new_file, metavar="FILE", help="with --armed: also write what was recorded as JSON lines"
    )
    parser.add_argument("--quiet", action="store_true", help="do not print to stderr what was changed in the script")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, as python -m does"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the script and its arguments")


def add_settings(parser: argparse.ArgumentParser, *, has_level: bool = True) -> None:
    """Declare the options that change how a script runs.

    Without `has_level`, --opt-level is accepted but hidden from the help, so that the command can refuse it with a
    better message than argparse's.
    """
    text = "use this level instead of the script's: O0 to O5 (O0, O1 or O4 for torch.autocast)"
    if not has_level:
        text = argparse.SUPPRESS
    parser.add_argument("--opt-level", type=opt_level, metavar="LEVEL", help=text)
    parser.add_argument(
        "--lists",
        type=oplist,
        action="append",
        default=[],
        metavar="LIST",
        help=(
            "an op list (a shipped name or a .yaml file) that changes the lists of the script, of torch.autocast or of"
            " Apex; may be repeated, later ones win; O2, O3 and O5 use only the rules under its key modules"
        ),
    )
    parser.add_argument(
        "--everywhere",
        action="store_true",
        help="for a script that uses no mixed precision: run all of it in one bfloat16 region of torch.autocast; needs"
        " --opt-level O4 or --lists, except under compare",
    )
    parser.add_argument("--force", action="store_true", help="use the stand-in even if an installed apex has amp")


def run(arguments: argparse.Namespace) -> NoReturn:
    """Replace this process by a Python that runs the script. On Windows, run that Python, and exit with its code."""
    parser = arguments.parser
    if arguments.everywhere:
        check_everywhere(parser, arguments.opt_level, arguments.lists)
    command = arguments.script
    if arguments.module is not None:
        command = ["-m", *arguments.module, *arguments.script]
    is_explicit = command[:1] == ["--"]
    if is_explicit:
        command = command[1:]
    check_command(parser, command)
    python_arguments, environment = prepare(
        command,
        opt_level=arguments.opt_level,
        lists=arguments.lists,
        force=arguments.force,
        everywhere=arguments.everywhere,
        is_quiet=arguments.quiet,
        watch=armed.watch_in_place(arguments),
    )
    check_lists(parser, "--lists", *arguments.lists)
    # after an explicit `--`, options are surely meant for the script
    if not is_explicit:
        for option in _find_options_behind(command):
            note = f"{option} after the script was passed to the script; for amp-patch, write it before the script"
            print(f"{parser.prog}: note: {note}", file=sys.stderr)
    start(python_arguments, environment)


def check_everywhere(parser: argparse.ArgumentParser, opt_level: str | None, lists: list[str]) -> None:
    """Report a usage error if --everywhere has nothing to apply, or if the level cannot run a whole script."""
    if opt_level is None and not lists:
        parser.error("--everywhere needs --opt-level O4 or --lists")
    if opt_level is None:
        return
    level = get_level(opt_level)
    if level.fits_whole_script:
        return
    remedy = f"use {config.levels.find_patching_level('bfloat16').name}"
    if level.patches_functions:
        parser.error(
            f"--everywhere with {opt_level}: float16 gradients need a loss scale, and a script without amp scales no"
            f" loss; {remedy}, which is bfloat16"
        )
    parser.error(f"--everywhere with {opt_level}: no op in the region would be cast; {remedy}")


def _find_options_behind(command: list[str]) -> list[str]:
    """Return options after the script that the user probably meant for this command.

    --opt-level and --everywhere may be options of the script, as in many scripts for Apex. So each is returned only if
    the script is a file, and its source contains neither the option's name nor "argv".
    """
    given = {argument.partition("=")[0] for argument in command}
    misplaced = []
    if "--lists" in given:
        misplaced.append("--lists")
    script = Path(command[0])
    if "--opt-level" in given and script.is_file():
        source = script.read_text(encoding="utf-8", errors="replace")
        if "opt-level" not in source and "argv" not in source:
            misplaced.append("--opt-level")
    if "--everywhere" in given and script.is_file():
        source = script.read_text(encoding="utf-8", errors="replace")
        if "everywhere" not in source and "argv" not in source:
            misplaced.append("--everywhere")
    return misplaced


def check_command(parser: argparse.ArgumentParser, command: list[str]) -> None:
    """Report a usage error unless `command` begins with `-m MODULE`, or with a script that exists."""
    if command in ([], ["-m"]):
        parser.error("name a script, or a module with -m")
    path = Path(command[0]).absolute()
    if command[0] != "-m" and not path.exists():
        beside = [script.name for script in path.parent.glob("*.py")]
        parser.error(f"can't open file {str(path)!r}: no such file.{did_you_mean(path.name, beside)}")


def prepare(
    command: list[str],
    *,
    opt_level: str | None,
    lists: list[str],
    force: bool,
    everywhere: bool = False,
    needs_region: bool = False,
    in_float32: bool = False,
    refuses_regions: bool = False,
    is_quiet: bool = False,
    watch: dict[str, object] | None = None,
    scratch: dict[str, object] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment of a `python` that runs a script or module.

    Args:
        command: the script, or `-m` and a module, followed by the arguments of the script.
        needs_region: wait for the script to use mixed precision: amp, torch.autocast or 16-bit weights. Nothing is
            recorded before that. A script that takes steps and never uses mixed precision fails at its end.
        in_float32: give the script float32 wherever it asks for a 16-bit dtype.
        refuses_regions: end the script with an error where it enters torch.autocast itself.
        is_quiet: do not print to stderr how the script was changed.
        watch: the arguments of `recording.record`, which `sitecustomize` calls; None records nothing. Its "folder" is
            where the waiting command reads the recordings, or None if no command waits.
        scratch: the arguments of `scratch.redirect`, which `sitecustomize` calls; None redirects no files.
    """
    settings: dict[str, object] = {
        "root": str(STARTUP.parent.parent.parent),
        # lets `sitecustomize` recognize a Python of another installation
        "python": [sys.prefix, *sys.version_info[:2]],
        "is_first": True,
        "options": {"opt_level": opt_level, "lists": lists, "force": force},
    }
    if scratch is not None:
        settings["scratch"] = scratch
    if watch is not None:
        settings["watch"] = watch
    if watch is not None or everywhere or opt_level is not None or lists:
        # A script may start several processes. The first that reports how the script was changed creates this file; the
        # others then stay silent.
        marker = None
        if not is_quiet:
            marker = os.path.join(tempfile.gettempdir(), f"amp-patch-{uuid.uuid4().hex}.reported")
            if watch is not None and watch["folder"] is not None:
                marker = os.path.join(str(watch["folder"]), "reported")
        settings["native"] = {
            "marker": marker,
            "opt_level": opt_level,
            "lists": lists,
            "everywhere": everywhere,
            "needs_region": needs_region,
            "in_float32": in_float32,
            "refuses_regions": refuses_regions,
            "folder": None if watch is None else watch["folder"],
            "is_watched": watch is not None,
        }
    # the options with which this Python was started, such as -W and -X
    interpreter_options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [*interpreter_options, *command], _make_environment(settings)


def _make_environment(settings: dict[str, object]) -> dict[str, str]:
    """Return the environment of this process, with the variables by which `sitecustomize` is found and configured."""
    path = [str(STARTUP)]
    inherited = os.environ.get("PYTHONPATH")
    if inherited:
        # keep an empty entry, which means the working directory, but not `startup` itself, if this is a nested command
        path += [entry for entry in inherited.split(os.pathsep) if not entry or os.path.abspath(entry) != path[0]]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "AMP_PATCH_RUN": json.dumps(settings)}


def start(arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """Replace this process by `python` with these arguments. On Windows, run it, and exit with its code."""
    command = [sys.executable, *arguments]
    # exec discards output that the buffers still hold
    sys.stdout.flush()
    sys.stderr.flush()
    if IS_WINDOWS:  # exec on Windows starts another process and ends this one, so the shell would not wait
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)
    os.execve(sys.executable, command, environment)
