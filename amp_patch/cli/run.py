"""`amp-patch run`: a script, unmodified, at another level or with other op lists. One written for NVIDIA Apex finds the
stand-in for `apex`; in one with torch.autocast, lists are laid over what that does.

Python is started anew in the place of this process, with a folder in front of PYTHONPATH whose `sitecustomize`
installs the stand-in: in the script's process, and in every Python that it starts in turn (launchers, spawned workers,
data loaders). The script runs as `python script.py` runs it, and no code of this package is below it.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from ..errors import did_you_mean
from .values import check_lists, oplist, opt_level

IS_WINDOWS = os.name == "nt"

KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1073741824", "MALLOC_MMAP_MAX_": "0"}
"""What the GNU C library reads before Python starts: give back nothing below 1 GiB, and map no large block by itself,
which would be given back when it is freed.
"""

STARTUP = Path(__file__).with_name("startup")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own options; what follows the script's name, or `-m`'s module, is the script's."""
    parser.usage = (
        "%(prog)s [--opt-level LEVEL] [--lists LIST] [--everywhere] [--force] [--malloc keep] [--]"
        " (SCRIPT | -m MODULE) [ARGUMENT ...]"
    )
    add_settings(parser)
    parser.add_argument(
        "--everywhere",
        action="store_true",
        help="run a script without mixed precision in one bfloat16 region of torch.autocast",
    )
    parser.add_argument(
        "--malloc",
        choices=["keep"],
        help="keep: the GNU C library keeps freed memory instead of returning it to the system, which shortens small"
        " steps on a CPU, with amp and without",
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, as python -m does"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the script and its arguments")


def add_settings(parser: argparse.ArgumentParser, *, has_level: bool = True) -> None:
    """Declare what is laid over a script. Without `has_level`, no help tells of --opt-level, which is to be refused."""
    text = (
        "use this level instead of the script's: O0 to O5 (O0, O1 or O4 for torch.autocast)"
        if has_level
        else argparse.SUPPRESS
    )
    parser.add_argument("--opt-level", type=opt_level, metavar="LEVEL", help=text)
    parser.add_argument(
        "--lists",
        type=oplist,
        action="append",
        default=[],
        metavar="LIST",
        help=(
            "an op list (a shipped name or a .yaml file) that changes the lists of the script, of torch.autocast or of"
            " Apex; may be repeated, later ones win; O2, O3 and O5 use only its modules"
        ),
    )
    parser.add_argument("--force", action="store_true", help="use the stand-in even if an installed apex has amp")


def run(arguments: argparse.Namespace) -> NoReturn:
    """Become the interpreter that runs the script; on Windows, where processes cannot, exit as it does."""
    if arguments.everywhere:
        _check_everywhere(arguments)
    line, environment = prepare(arguments)
    check_lists(arguments.parser, "--lists", *arguments.lists)
    for option in find_options_behind(arguments.module or arguments.script):
        note = f"{option} after the script was passed to the script; for amp-patch, write it before the script"
        print(f"{arguments.parser.prog}: note: {note}", file=sys.stderr)
    if arguments.malloc is not None and not keeps_on_request():
        print(f"{arguments.parser.prog}: note: --malloc has no effect without the GNU C library", file=sys.stderr)
    elif arguments.malloc is not None:
        environment = KEEP_MEMORY | environment
    start(line, environment)


def _check_everywhere(arguments: argparse.Namespace) -> None:
    """Leave as for bad usage where no region can be made of the whole script."""
    if arguments.opt_level is None and not arguments.lists:
        arguments.parser.error("--everywhere needs --opt-level O4 or --lists")
    if arguments.opt_level == "O1":
        arguments.parser.error(
            "--everywhere with O1: float16 gradients need a loss scale, and a script without amp scales no loss;"
            " use O4, which is bfloat16"
        )
    if arguments.opt_level not in (None, "O4"):
        arguments.parser.error(f"--everywhere with {arguments.opt_level}: no op in the region would be cast; use O4")


def keeps_on_request() -> bool:
    """Tell whether malloc is the GNU C library's, which reads `KEEP_MEMORY`."""
    return platform.libc_ver()[0] == "glibc"


def find_options_behind(command: list[str]) -> list[str]:
    """Return which of our options a script gets that other commands take there; a `--` in front means it to.

    Scripts of Apex have an `--opt-level` of their own, and name it or read sys.argv.
    """
    if command[:1] == ["--"]:
        return []
    given = {one.partition("=")[0] for one in command[1:]}
    found = ["--lists"] if "--lists" in given else []
    script = Path(command[0]) if command else Path()
    if "--opt-level" in given and script.is_file():
        source = script.read_text(encoding="utf-8", errors="replace")
        if not any(word in source for word in ("opt-level", "argv")):
            found.append("--opt-level")
    return found


def prepare(
    arguments: argparse.Namespace, *, needs_region: bool = False, **more: object
) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of `python`, and its environment, that run the script. `more` goes to sitecustomize.

    With `needs_region`, a script without amp is refused even where nothing is to be changed.
    """
    script = arguments.script[1:] if arguments.script[:1] == ["--"] else arguments.script
    command = script if arguments.module is None else ["-m", *arguments.module, *arguments.script]
    if command in ([], ["-m"]):
        arguments.parser.error("name a script, or a module with -m")
    if arguments.module is None and not os.path.exists(command[0]):
        path = Path(command[0]).absolute()
        beside = [one.name for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
        meant = did_you_mean(path.name, beside)
        arguments.parser.error(f"can't open file {str(path)!r}: no such file{meant and f'.{meant}'}")
    for flag, is_set in (("-I", sys.flags.isolated), ("-E", sys.flags.ignore_environment), ("-S", sys.flags.no_site)):
        if is_set:
            arguments.parser.error(
                f"python {flag} ignores PYTHONPATH or sitecustomize, which amp-patch needs to reach the script and the"
                f" processes that it starts: leave {flag} out"
            )
    options = {"opt_level": arguments.opt_level, "lists": arguments.lists, "force": arguments.force}
    everywhere = getattr(arguments, "everywhere", False)
    is_watched = "watch" in more
    if is_watched or everywhere or arguments.opt_level is not None or arguments.lists:
        own = {"opt_level": arguments.opt_level, "lists": arguments.lists, "everywhere": everywhere}
        more = {**more, "native": {**own, "needs_region": needs_region, "is_watched": is_watched}}
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [*flags, *command], make_environment(options, **more)


def make_environment(options: dict[str, object], **more: object) -> dict[str, str]:
    """Return the environment of this process, in which Python installs the stand-in with these options of `install`."""
    inherited = os.environ.get("PYTHONPATH")
    entries = inherited.split(os.pathsep) if inherited else []  # an empty one among others is the working directory
    others = [entry for entry in entries if not entry or os.path.abspath(entry) != str(STARTUP)]
    settings = {"root": str(STARTUP.parent.parent.parent), "options": options, **more}
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(STARTUP), *others]),
        "AMP_PATCH_RUN": json.dumps(settings),
    }


def start(arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """Run `python` with these arguments in the place of this process."""
    command = [sys.executable, *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    if IS_WINDOWS:  # a process there would start another and end
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)
    os.execve(sys.executable, command, environment)
