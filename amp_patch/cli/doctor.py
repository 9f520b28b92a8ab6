"""`amp-patch doctor`: checks the installed packages, and the scripts and notebooks at given paths.

Without a path, it describes the machine.

Exit codes: 0 no errors or warnings (there may be notes), 1 errors or warnings, 2 the command line cannot be used.
"""

import argparse
from pathlib import Path

from .. import doctor
from ..errors import SettingsError
from ..terminal import print_verdict

EXAMPLES = (
    "amp-patch doctor train.py",
    "amp-patch doctor --explain AMP501",
)
"""Command lines that the help shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("paths", nargs="*", type=_path, metavar="PATH", help="scripts, notebooks, or folders with them")
    for option, summary in (("--select", "follow these rules only"), ("--ignore", "leave these rules out")):
        about = f"{summary}: codes or prefixes, separated by commas"
        parser.add_argument(option, type=_codes, action="extend", default=[], metavar="CODES", help=about)
    parser.add_argument(
        "--output-format", choices=("text", "json"), default="text", help="what to print (default: text)"
    )
    parser.add_argument("--notes", action="store_true", help="print notes instead of only counting them")
    parser.add_argument(
        "--no-advice", action="store_true", help="with PATH: do not advise on a level (which imports torch)"
    )
    parser.add_argument("--explain", metavar="CODE", help="explain a rule with examples, and exit")
    parser.add_argument("--list", action="store_true", help="list all rules, and exit")


def run(arguments: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    try:
        if arguments.list:
            print("\n".join(f"{rule.code}  {rule.summary}" for rule in doctor.sorted_rules()))
        elif arguments.explain:
            print(doctor.explain_rule(arguments.explain))
        else:
            return _report(arguments)
        return 0
    except SettingsError as error:
        arguments.parser.error(str(error))
        return 2  # not reached: `error` exits


def _report(arguments: argparse.Namespace) -> int:
    """Read the files, print the report, and return the exit code."""
    selection = doctor.Selection(arguments.select or ("AMP",), arguments.ignore)
    files = doctor.find_files(arguments.paths)
    project = doctor.Project(files)
    findings = [finding for finding in doctor.machine_findings() if selection.has(finding.code)]
    findings += project.diagnose(selection)
    machine = None
    if not arguments.paths:
        machine = doctor.get_machine()
    is_faulty = any(finding.severity != "note" for finding in findings)
    report = doctor.Report(findings, len(files), machine)
    if arguments.output_format == "json":
        print(report.as_json(), flush=True)
    else:
        # for scripts that do not use amp yet, notes say how to begin
        with_notes = arguments.notes or not project.uses_amp
        verdict, *lines = report.as_text(with_notes=with_notes).split("\n")
        print_verdict(verdict, not is_faulty)
        for line in lines:
            print(line, flush=True)
        if arguments.paths and not arguments.no_advice:
            print(f"advice: {doctor.get_advice().text}")
    return int(is_faulty)


def _codes(text: str) -> list[str]:
    """Return codes and prefixes of codes, from a text with commas between them."""
    codes = [code.strip() for code in text.split(",") if code.strip()]
    if not codes:
        raise argparse.ArgumentTypeError(f"{text!r} names no rule: write codes or prefixes, such as AMP3,AMP501")
    return codes


def _path(text: str) -> Path:
    """Return the path of a file or a folder that exists."""
    path = Path(text)
    if not path.is_file() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a file nor a directory")
    return path
