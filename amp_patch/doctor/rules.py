"""The rules: what each is called, why it is there, an example with its fault and one without, and what finds it.

A rule is a generator of faults with the decorator `rule`; its docstring says why. The examples are its test: the lines
of `bad` that end in its code are found, `good` has no finding, and where there are edits they make `good` of `bad`.
A code is for good: people select it, and silence it by `# amp-patch: ignore[CODE]`.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import indent

from ..errors import SettingsError, did_you_mean
from .context import Context
from .findings import Fault

Find = Callable[[Context], Iterator[Fault]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. Those without `find` come from reading a file and from the look at the machine.

    `mends`: it makes `good` of `bad`. `is_for_all`: for scripts that do not run under amp, too.
    """

    code: str
    summary: str
    why: str
    bad: str = ""
    good: str = ""
    find: Find | None = None
    mends: bool = False
    is_for_all: bool = False


RULES: dict[str, Rule] = {
    rule.code: rule
    for rule in (
        Rule("AMP001", "a file that cannot be read or parsed", "What cannot be parsed is not checked."),
        Rule("AMP002", "an ignore comment with an unknown code", "Such a comment silences nothing."),
        Rule("AMP901", "another package under the name apex", "`from apex import amp` would fail, or find it."),
        Rule("AMP902", "a torch, wrapt or PyYAML that is too old", "No test runs amp_patch with it."),
    )
}

_SAYS_SO = "the run says so itself"
RETIRED = {
    **dict.fromkeys(("AMP202", "AMP205", "AMP209", "AMP903"), _SAYS_SO),
    "AMP306": "torch's clip functions take masters where they are given the model's parameters",
    "AMP311": "step(closure) works under a dynamic loss scale",
    "AMP401": f"initialize replaces functions in tables, defaults, closures and layers; of the rest {_SAYS_SO}",
}
"""Codes of rules that are gone, with the reason."""


def rule(
    code: str, summary: str, *, bad: str, good: str, mends: bool = False, is_for_all: bool = False
) -> Callable[[Find], Find]:
    """Enter a function into the rules; its docstring says why there is one."""

    def enter(find: Find) -> Find:
        examples = inspect.cleandoc(bad), inspect.cleandoc(good)
        RULES[code] = Rule(code, summary, inspect.cleandoc(find.__doc__ or ""), *examples, find, mends, is_for_all)
        return find

    return enter


def sorted_rules() -> list[Rule]:
    """Return all rules by code."""
    return [RULES[code] for code in sorted(RULES)]


def explain(code: str) -> str:
    """Return what a rule is for, with its examples; raises SettingsError for a code of none."""
    if code in RETIRED:
        return f"{code} is gone: {RETIRED[code]}."
    if code not in RULES:
        raise SettingsError(f"{code!r} is no code of a rule.{did_you_mean(code, RULES)}")
    one = RULES[code]
    parts = [f"{code}: {one.summary}", one.why]
    if one.bad:
        mended = " (what --fix makes of it)" if one.mends else ""
        parts += [f"Bad:\n{indent(one.bad, '    ')}", f"Good{mended}:\n{indent(one.good, '    ')}"]
    return "\n\n".join([*parts, f"Silence it on a line by `# amp-patch: ignore[{code}]`."])


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rules to follow: of a code's prefixes in `select` and `ignore` the longest decides, `ignore` at a tie.

    Raises SettingsError for a prefix of no code.
    """

    select: Sequence[str] = ("AMP",)
    ignore: Sequence[str] = ()

    def __post_init__(self) -> None:
        for prefix in (*self.select, *self.ignore):
            if not prefix or not any(code.startswith(prefix) for code in (*RULES, *RETIRED)):
                hint = did_you_mean(prefix, {code[: len(prefix)] for code in RULES})
                raise SettingsError(f"{prefix!r} is no code of a rule, and begins none.{hint}")

    def has(self, code: str) -> bool:
        """Tell whether a rule is to be followed."""
        return _longest(code, self.select) > _longest(code, self.ignore)


def _longest(code: str, prefixes: Sequence[str]) -> int:
    return max((len(prefix) for prefix in prefixes if code.startswith(prefix)), default=0)


_IMPORTS = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\nimport amp_patch as amp\n\n"
_SETUP = 'model, optimizer = amp.initialize(model, optimizer, opt_level="O1")\n'


def complete(example: str) -> str:
    """Return an example with the imports, and the call of `initialize`, that it leaves out."""
    if example.startswith(("import ", "from ")):
        return f"{example}\n"
    return f"{_IMPORTS}{'' if 'initialize' in example else _SETUP}{example}\n"
