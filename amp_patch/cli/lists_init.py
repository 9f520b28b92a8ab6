"""`amp-patch lists init`: writes a new list file, whose comments explain each rule, and its schema for editors."""

import argparse
import json
import re
from pathlib import Path

from .. import config
from ..errors import OpListError
from ..files import write_file
from .lists_printing import LIST, print_lines

SUMMARY = "write a list to start from, which explains every key, and a schema for editors"
SCHEMA = "lists.schema.json"

_START = """\
# yaml-language-server: $schema={schema}
description: a list of my own
extends: {base}  # read first, so this file wins; null: start from nothing

# amp-patch lists check {name}: every fault, with its place
# amp-patch lists diff {base} {name}: what it changes
# amp_patch.initialize(model, optimizer, opt_level="{level}", lists="{name}"): train with it

# An entry is a name, or a mapping: {{op: softmax, why: range, since: "2.12", until: "2.14", optional: true}}.
# A bare name (softmax) means every spelling of the op; a dotted name (torch.Tensor.softmax) means only that one.

{rules}
# Parts of a model that run in one dtype, whatever the rules for ops say; the last rule that matches wins.
# Quote what begins with *.
modules:
  # - {{match: "encoder.layers.*.norm", run: float32}}
  # - {{type: torch.nn.LayerNorm, run: low}}
"""

EXAMPLES = (
    "amp-patch lists init mine.yaml",
    "amp-patch lists init mine_bf16.yaml --extends bfloat16",
)
"""Command lines that the help shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the task."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to write (.yaml or .yml)")
    about = f"{LIST}, relative to the new file (default: float16)"
    parser.add_argument("--extends", default="float16", metavar="NAME|FILE", help=about)


def run(arguments: argparse.Namespace) -> int:
    """Write the list, and a schema for editors beside it unless there is one. Return 0.

    Never overwrites a file. Raises OpListError if the list file exists or cannot be written, and for a wrong base.
    """
    path, base = arguments.file, arguments.extends
    files = _check(path, base)
    beside = path.parent / SCHEMA
    try:
        if path.exists():
            raise FileExistsError
        write_file(path, _render(path.name, base, "bfloat16" if "bfloat16.yaml" in files else "float16"))
        print_lines([f"{path}: a list that extends {base}"])
        if not beside.exists():
            write_file(beside, (config.shipped.lists_dir() / "schema.json").read_bytes())
            print_lines([f"{beside}: its schema, for editors"])
    except FileExistsError:
        raise OpListError(f"{path} exists already; give another name, or remove it first") from None
    except OSError as error:
        raise OpListError(f"{error.filename or path} cannot be written: {error.strerror}") from error
    return 0


def _check(path: Path, base: str) -> list[str]:
    """Return the names of the base's file and of the files that it extends.

    Raises OpListError for a path without the suffix of a list, and for a base that has faults or does not exist.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise OpListError(f"{str(path)!r} does not end in .yaml or .yml; give a name that does")
    report = config.op_lists.check_oplists(config.op_lists.locate(base, path.parent))
    if report.errors:
        raise OpListError(str(report.errors[0]))
    return [file.name for file in report.files]


def _render(name: str, base: str, low: str) -> str:
    """Return the text of a list file that extends `base`. `low`: the 16-bit dtype of `base`, such as "float16"."""
    rules = [f"# {rule.meaning}\n{rule}:\n  # - {rule.example}\n" for rule in config.op_rules.RULE_KEYS]
    level = config.levels.find_patching_level(low).name
    if not re.fullmatch(r"[\w./-]+", base):
        base = json.dumps(base)  # YAML reads a quoted text of JSON, with its escapes, as JSON does
    return _START.format(schema=SCHEMA, base=base, level=level, name=name, rules="\n".join(rules))
