"""`amp-patch doctor`: read scripts, look the machine over, report.

Exit codes: 0 no errors, 1 at least one finding of severity error, 2 the command line cannot be used.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the doctor's arguments on `parser`."""
    parser.add_argument("paths", nargs="*", type=_path, metavar="SCRIPT_OR_DIRECTORY", help="default: only the machine")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--list", action="store_true", help="list the checks by code and leave")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; return 1 if there is an error in it, else 0."""
    from ..doctor import (
        CHECKS,
        as_json,
        as_text,
        diagnose_files,
        find_files,
        get_coverage,
        get_machine,
        machine_findings,
    )

    if arguments.list:
        print("\n".join(f"{check.code}  {check.summary}" for check in CHECKS))
        return 0
    files = find_files(arguments.paths)
    machine = get_machine()
    findings = [*machine_findings(machine), *diagnose_files(files, get_coverage())]
    report = as_json if arguments.json else as_text
    print(report(machine, findings, len(files)))
    return 1 if any(finding.severity == "error" for finding in findings) else 0


def _path(text: str) -> Path:
    """A file or a directory that exists."""
    path = Path(text)
    if not path.is_file() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a file nor a directory")
    return path
