"""`amp-patch explain`: which op of a script ran in which precision, by which rule and line, and what was cast for it.

The script runs unmodified, as under `amp-patch run`, up to the end of the steps that are recorded.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ..errors import AmpError
from . import run as runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own options; what follows the script's name is the script's."""
    parser.usage = (
        "%(prog)s [--steps A:B] [--by module|op|entry] [--all] [--json FILE] [--opt-level LEVEL] [--lists LIST] [--]"
        " (SCRIPT | -m MODULE) [ARGUMENT ...]\n       %(prog)s --from FILE [--by module|op|entry] [--all]"
    )
    parser.add_argument(
        "--steps", type=_steps, default=(1, 2), metavar="A:B", help="optimizer steps to record, from 0 (default: 1:2)"
    )
    parser.add_argument(
        "--by", choices=("module", "op", "entry"), default="module", help="a row for each (default: %(default)s)"
    )
    parser.add_argument("--all", action="store_true", help="every layer by itself, and ops that run as in plain torch")
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write the records too, a line of JSON each")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="print a file that --json wrote")
    runs.add_script(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the script, print what was recorded; return 0, or 1 if the script failed. Raises AmpError for nothing."""
    from ..insight import Recording, format_recording

    if arguments.source is not None:
        print(format_recording(Recording.read(arguments.source), arguments.by, with_all=arguments.all))
        return 0
    with tempfile.TemporaryDirectory(prefix="amp-patch-") as folder:
        first, last = arguments.steps
        line, environment = runs.prepare(arguments, explain={"folder": folder, "first": first, "last": last})
        code = _call([sys.executable, *line], environment)
        files = sorted(Path(folder).iterdir(), key=lambda path: [int(part) for part in path.stem.split("-")])
        if not files:
            reason = f"it ended with exit code {code}" if code else "it never called amp.initialize"
            raise _NothingRecordedError(f"nothing to explain: {reason} before a step was recorded")
        recording = Recording.read(files[0])
        if arguments.json is not None:
            shutil.copyfile(files[0], arguments.json)
            for number, file in enumerate(files[1:], 1):
                shutil.copyfile(file, arguments.json.with_suffix(f".{number}{arguments.json.suffix}"))
    if not recording.ops:
        steps = int(files[0].stem.split("-")[2])
        raise _NothingRecordedError(
            f"nothing to explain: the script took {steps} optimizer step{'' if steps == 1 else 's'}, and steps"
            f" {first}:{last} were to be recorded; give --steps 0:1"
        )
    print(format_recording(recording, arguments.by, with_all=arguments.all))
    if len(files) > 1:
        print(f"\nof {len(files)} processes; this is the first")
    if len(recording.steps) < last - first:
        print(f"\nthe script ended after {len(recording.steps)} of {last - first} steps")
    return 1 if code else 0


class _NothingRecordedError(AmpError):
    """The script gave nothing to explain."""


def _call(command: list[str], environment: dict[str, str]) -> int:
    """Run a process to its end, through Ctrl-C, which it gets too."""
    sys.stdout.flush()
    with subprocess.Popen(command, env=environment) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                pass


def _new_file(text: str) -> Path:
    """A path in a folder that exists: it is written when the script has run."""
    path = Path(text).absolute()
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be a file in a folder that exists")
    return path


def _steps(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    first = int(found[1]) if found else 0
    last = int(found[2]) if found and found[2] else first + 1
    if found is None or last <= first:
        raise argparse.ArgumentTypeError(f"{text!r} is no window of steps: write 1:3 for steps 1 and 2, or 1 for one")
    return first, last
