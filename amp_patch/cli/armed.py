"""The option --armed of `amp-patch trace` and `amp-patch run`, and the options that go with it."""

import argparse
import functools
import os
from typing import Any

from .values import at_least, positive

PROBE = "arming.probe:Armed"
USAGE = "[--armed] [--then stop|skip|go] [--every N] [--record N]"

_DEFAULTS = {"then": "stop", "every": 1, "record": 50}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare --armed and its options."""
    group = parser.add_argument_group("options of --armed")
    group.add_argument(
        "--armed",
        action="store_true",
        help="train at full speed; a step whose loss or gradients are not finite is repeated under trace, before its"
        " weights change",
    )
    group.add_argument(
        "--then",
        choices=("stop", "skip", "go"),
        help="what follows such a step: stop the script, skip the step, or go on as the script would (default: stop)",
    )
    group.add_argument(
        "--every",
        type=positive,
        metavar="N",
        help="without a dynamic loss scale, look at the gradients of one step in N (default: 1)",
    )
    group.add_argument(
        "--record",
        type=functools.partial(at_least, 0),
        metavar="N",
        help="record the magnitudes of modules and gradients in one step of N; 0 records none (default: 50)",
    )


def read_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the probe. Report a usage error for options that do not go together."""
    given = {name: getattr(arguments, name) for name in _DEFAULTS if getattr(arguments, name) is not None}
    if given and not arguments.armed:
        arguments.parser.error(f"--{next(iter(given))} needs --armed")
    options = {**_DEFAULTS, **given}
    # a rank with a bad loss skips at once; with N above 1, the other ranks may not look in that step, and take it
    if options["then"] == "skip" and options["every"] > 1:
        arguments.parser.error("--then skip needs --every 1: ranks have to skip the same steps")
    return options


def watch_in_place(arguments: argparse.Namespace) -> dict[str, object] | None:
    """Return the arguments of `recording.record` for `run --armed`; None without --armed. Report usage errors."""
    options = read_options(arguments)
    if not arguments.armed:
        if arguments.json is not None:
            arguments.parser.error("--json needs --armed")
        return None
    file = None if arguments.json is None else os.fspath(arguments.json)
    return {"folder": None, "file": file, "probe": PROBE, "options": options, "seed": None}
