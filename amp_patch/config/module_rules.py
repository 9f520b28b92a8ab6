"""Reads module rules. A module rule runs a part of a model in the session's 16-bit dtype (`low`), or in float32.

Inputs are cast to the rule's dtype where they enter the part. At O1 and O4, whitelisted and blacklisted ops in the
part run in that dtype. At the levels that cast the model, the weights of the part have that dtype.

Rules stand under the key `modules` of list files (docs/lists.md). A rule chooses modules by name or by class, and
covers these modules and everything inside them. If several rules cover a module, the last one counts; rules of later
files come later. Looking up a class imports nothing: a class whose package is not imported has no instances in a model.
"""

import difflib
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ..errors import OpListError, did_you_mean
from .list_file import Diagnostics, check_keys, error_at, read_choice, read_text
from .op_names import check_import_may_define, count_imported, is_installed
from .yaml_nodes import Node

RUNS = ("low", "float32")
"""The values of the key `run`: the dtypes in which a rule runs modules."""

MODULE_KEYS = ("match", "type", "run", "why")
TYPE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


@dataclass(frozen=True, slots=True)
class ModuleRule:
    """One entry of `modules`.

    Attributes:
        chooser: the value of `match` or `type`, as written, such as "encoder.*.norm" or "torch.nn.LayerNorm".
        run: "low" or "float32".
        pattern: `match` as a regular expression; None for a rule by `type`.
        why: the reason, in free text.
        path, line, column: the location where the entry starts.
    """

    chooser: str
    run: str
    pattern: "re.Pattern[str] | None"
    why: str
    path: str
    line: int
    column: int

    def chooses(self, name: str, module: nn.Module) -> bool:
        """Return whether the rule chooses this module. (It covers the modules inside, whether it chooses them or not.)

        `name` is the qualified name of the module, such as "encoder.0.norm"; "" for the model itself.
        """
        if self.pattern is None:
            chosen = _find_value(_split(self.chooser))
            return isinstance(chosen, type) and isinstance(module, chosen)
        if self.chooser.startswith("re:"):
            return self.pattern.search(name) is not None
        if name:
            name += "."  # patterns of globs expect a dot after every part
        return self.pattern.fullmatch(name) is not None

    def find_problem(self) -> str | None:
        """Return the text of an error if `type` names no module class, and no later import can define it. Else None."""
        if self.pattern is not None:
            return None
        return _find_problem(self.chooser)


def read_module_rule(node: Node, path: Path, diagnostics: Diagnostics) -> ModuleRule | None:
    """Return the rule that an entry of `modules` states. Raises OpListError with its location.

    Returns None if the entry has unknown keys and `diagnostics` has collected the error.
    """
    if not isinstance(node.value, dict):
        example = '{match: "encoder.*.norm", run: float32}'
        raise error_at(f"an entry of modules must be a mapping; write one such as {example}", path, node)
    fields = check_keys(node, MODULE_KEYS, path, diagnostics)
    if not set(fields) <= set(MODULE_KEYS):
        return None
    if ("match" in fields) == ("type" in fields):
        needed = "either 'match' (a qualified name) or 'type' (a class), and not both"
        raise error_at(f"an entry of modules needs {needed}; give one", path, node)
    if "run" not in fields:
        raise error_at(f"an entry of modules needs the key 'run'; write run: {' or run: '.join(RUNS)}", path, node)
    run = read_choice(fields["run"], path, "run", RUNS)
    why = ""
    if "why" in fields:
        why = read_text(fields["why"], path, "why")
    if "match" in fields:
        chooser = read_text(fields["match"], path, "match")
        pattern = _compile(chooser, fields["match"], path)
    else:
        chooser, pattern = read_text(fields["type"], path, "type"), None
        problem = _find_problem(chooser)
        if problem is not None:
            raise error_at(problem, path, fields["type"])
        warning = find_warning(chooser)
        if warning is not None:
            diagnostics.warn(
                f"{chooser!r} has no effect: {warning}", str(path), fields["type"].line, fields["type"].column
            )
    return ModuleRule(chooser, run, pattern, why, str(path), node.line, node.column)


def _compile(match: str, node: Node, path: Path) -> "re.Pattern[str]":
    """Compile `match`, which is a glob, or "re:" and a regular expression. Raises OpListError if it is not valid."""
    try:
        if match.startswith("re:"):
            return re.compile(match.removeprefix("re:"))
        return re.compile(_translate(match))
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        remedy = "write one such as encoder.*.norm, or re: and a regular expression"
        raise error_at(f"{match!r} is not a pattern: {error}; {remedy}", path, node) from None


def _translate(glob: str) -> str:
    """Return a regular expression for a glob. The names to match must have a dot at the end: `encoder.0.norm.`.

    So every part of a name has a dot after it, and `**` can match any number of parts, also none.
    """
    translated = ""
    for part in glob.split("."):
        if not part:
            raise ValueError("a part of the name is empty")
        if part == "**":
            translated += r"(?:[^.]+\.)*"
            continue
        for character in part:
            translated += {"*": "[^.]*", "?": "[^.]"}.get(character, re.escape(character))
        translated += r"\."
    return translated


def _find_problem(chooser: str) -> str | None:
    """Return the text of an error if a value of `type` is no module class, and cannot become one later, else None."""
    if not TYPE_NAME.fullmatch(chooser):
        return f"{chooser!r} does not say in which Python module the class is; {_find_remedy(chooser)}"
    names = _split(chooser)
    value = _find_value(names)
    if isinstance(value, type) and issubclass(value, nn.Module):
        return None
    if value is not None:
        return f"{chooser!r} is not a module class; name one such as torch.nn.LayerNorm, or list an op by its name"
    if names[0] == "__main__" or _may_be_defined_later(names):
        return None
    imported = count_imported(names)
    hint = did_you_mean(names[-1], _torch_modules(), prefix="torch.nn.")
    missing = f"{'.'.join(names[:imported])!r} has no {names[imported]!r}"
    return f"{missing}; name a class of modules, such as torch.nn.LayerNorm.{hint}"


def _find_remedy(chooser: str) -> str:
    """Return the advice for a class name without its module, such as "write torch.nn.LayerNorm ..." for `LayerNorm`.

    It suggests a class of torch only if the name is almost equal, because `Attention` or `Dense` is usually a class of
    the script.
    """
    by_folded = {name.casefold(): f"torch.nn.{name}" for name in _torch_modules()}
    alike = difflib.get_close_matches(chooser.casefold(), by_folded, n=1, cutoff=0.8)
    in_script = f"__main__.{chooser}"
    if not chooser.isidentifier():
        in_script = "__main__.Attention"
    if not alike or _find_value(in_script.split(".")) is not None:
        return f"write {in_script} for a class of your script, or a name such as torch.nn.LayerNorm"
    return f"write {by_folded[alike[0]]}, or {in_script} for a class of your script"


def find_warning(chooser: str) -> str | None:
    """Return the text of a warning if the package of a class is not installed, or None. Imports nothing."""
    names = _split(chooser)
    if names[0] in ("__main__", "torch") or count_imported(names) or is_installed(names[0]):
        return None
    return f"there is no package {names[0]!r} installed"


def _may_be_defined_later(names: list[str]) -> bool:
    """Return whether a later import may define a class that is missing now."""
    try:
        check_import_may_define(names)
    except OpListError:
        return False
    # A name directly in torch, such as torch.LayerNorm, stays undefined: later imports add only submodules to torch.
    return names[0] != "torch" or len(names) > 2


def _torch_modules() -> list[str]:
    """Return the names of the module classes in torch.nn."""
    return [name for name, value in vars(nn).items() if isinstance(value, type) and issubclass(value, nn.Module)]


def _split(chooser: str) -> list[str]:
    """Return the parts of a dotted class name: ["torch", "nn", "LayerNorm"] for "nn.LayerNorm", as scripts write it."""
    names = chooser.split(".")
    return ["torch", *names] if names[0] == "nn" else names


def _find_value(names: list[str]) -> object:
    """Return the value of a dotted name in an imported package, or None. Runs no code of the package."""
    length = count_imported(names)
    value: object = sys.modules.get(".".join(names[:length]))
    for name in names[length:]:
        value = inspect.getattr_static(value, name, None)
    return value
