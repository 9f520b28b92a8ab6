"""`amp-patch doctor`: read scripts and notebooks, mend them if asked to, report; without any, look the machine over.

Exit codes: 0 nothing found (notes aside), 1 something found, 2 the command line or `pyproject.toml` cannot be used.
"""

import argparse
import difflib
import re
import sys
from functools import partial
from pathlib import Path

from .. import doctor
from ..errors import SettingsError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the doctor's arguments on `parser`."""
    parser.add_argument("paths", nargs="*", type=_path, metavar="PATH", help="scripts, notebooks, folders of them")
    for option, summary in (("--select", "follow these rules only"), ("--ignore", "leave these rules out")):
        about = f"{summary}: codes or their beginnings, with commas"
        parser.add_argument(option, type=_codes, action="extend", default=[], metavar="CODES", help=about)
    mending = parser.add_mutually_exclusive_group()
    mending.add_argument("--fix", action="store_true", help="mend what can be mended in its place, and report the rest")
    mending.add_argument("--diff", action="store_true", help="print what --fix would change, and change nothing")
    parser.add_argument("--output-format", choices=("text", "json", "github", "sarif"), default="text")
    parser.add_argument("--notes", action="store_true", help="show notes, too, which are counted otherwise")
    parser.add_argument("--no-advice", action="store_true", help="no word on the level to use here (imports torch)")
    parser.add_argument("--explain", metavar="CODE", help="say what a rule is for, with examples, and leave")
    parser.add_argument("--list", action="store_true", help="list the rules by code and leave")


def run(arguments: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    if arguments.diff and arguments.output_format != "text":
        arguments.parser.error(f"--diff prints a diff, and takes no --output-format {arguments.output_format}")
    try:
        if arguments.list:
            print("\n".join(f"{rule.code}  {rule.summary}" for rule in doctor.sorted_rules()))
        elif arguments.explain:
            print(doctor.explain(arguments.explain))
        else:
            return _judge(arguments)
        return 0
    except SettingsError as error:
        arguments.parser.error(str(error))
        return 2
    except BrokenPipeError:
        raise
    except OSError as error:  # of a file that cannot be written
        print(f"{arguments.parser.prog}: error: {error}", file=sys.stderr)
        return 2


def _judge(arguments: argparse.Namespace) -> int:
    """Read, mend and report."""
    files, whole = {}, doctor.settings_for(Path.cwd()).selection_for(Path.cwd(), arguments.select, arguments.ignore)
    for path in doctor.find_files(arguments.paths):
        settings = doctor.settings_for(path)
        if not settings.excludes(path):
            files[path] = settings.selection_for(path, arguments.select, arguments.ignore)
    project = doctor.Project(list(files), doctor.get_coverage())
    findings = [one for one in [*doctor.machine_findings(), *project.unreadable] if whole.has(one.code)]
    fixed = 0
    for path, selection in files.items():
        script = project.scripts.get(str(path))
        if script is None:
            continue
        mended, count = project.fix(script, selection) if arguments.fix or arguments.diff else (script, 0)
        if arguments.diff and count:
            print(_diff(path, project.documents[script.path].encode(mended.text)), end="")
        elif count:
            path.write_bytes(project.documents[script.path].encode(mended.text))
            fixed += count
        findings += project.diagnose(script if arguments.diff else mended, selection)
    if not arguments.diff:
        machine = None if arguments.paths else doctor.get_machine()
        report = doctor.Report(findings, len(files), fixed, machine)
        formats = {"json": report.as_json, "github": report.as_github, "sarif": report.as_sarif}
        print(formats.get(arguments.output_format, partial(report.as_text, with_notes=arguments.notes))(), flush=True)
        if arguments.output_format == "text" and project.uses_amp and not arguments.no_advice:
            print(doctor.get_advice())
    return 1 if any(finding.severity != "note" for finding in findings) else 0


def _diff(path: Path, mended: bytes) -> str:
    """Return the difference between a file and what it would be, as `patch -p0` takes it."""
    texts = (data.decode(errors="replace") for data in (path.read_bytes(), mended))
    before, after = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in texts)
    lines = difflib.unified_diff(before, after, str(path), str(path))
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _codes(text: str) -> list[str]:
    """Codes, or their beginnings, with commas between them."""
    codes = [code.strip() for code in text.split(",") if code.strip()]
    if not codes:
        raise argparse.ArgumentTypeError(
            f"{text!r} names no rule: write codes or their beginnings, such as AMP3,AMP401"
        )
    return codes


def _path(text: str) -> Path:
    """A file or a folder that exists."""
    path = Path(text)
    if not path.is_file() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a file nor a directory")
    return path
