"""One training script, read and never run: its tree, its names, its lines, and the calls of amp in it."""

import ast
import io
import re
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property

from .names import Names
from .places import Places
from .structure import Atoms, Structure, contradict, end, position, text_of

AMP_FUNCTIONS = frozenset(
    f"amp.{name}"
    for name in (
        "initialize",
        "scale_loss",
        "master_params",
        "init",
        "session",
        "state_dict",
        "load_state_dict",
        "disable_casts",
    )
)
_CORE = ("amp.initialize", "amp.scale_loss", "amp.master_params", "amp.init")
_IGNORE = re.compile(r"#\s*(?:amp-patch:\s*ignore(?:\[([^\]]*)\])?|noqa(?::\s*([A-Z]+\d+(?:[,\s]+[A-Z]+\d+)*)|(?!:)))")
_AMP_WORD = re.compile(r"\b(amp|apex|amp_patch)\b")  # a script that calls amp has one of these somewhere
_EVERY_CODE = "*"


class Script(Places):
    """A parsed script.

    Args:
        path: as it is to be shown.
        text: the source. Raises SyntaxError, ValueError, RecursionError or MemoryError if it cannot be parsed.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        super().__init__(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in somebody else's strings
            self.tree = ast.parse(text)

    # Cached properties, because most files of a directory need none of them.

    @cached_property
    def names(self) -> Names:
        """What the names stand for."""
        return Names(self.tree)

    @cached_property
    def structure(self) -> Structure:
        """Where the nodes stand."""
        return Structure(self.tree)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node that has a place, in the order of the text."""
        return sorted((node for node in ast.walk(self.tree) if hasattr(node, "lineno")), key=position)

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Every call, in the order of the text."""
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def ignored(self) -> dict[int, frozenset[str]]:
        """The codes that comments silence, by line."""
        return _read_ignore_comments(self.text) if _IGNORE.search(self.text) else {}

    # ---- calls -------------------------------------------------------------------------------------------------------

    def calls_of(self, *names: str) -> list[ast.Call]:
        """Return the calls of functions of these canonical names, in the order of the text."""
        found = [call for name in dict.fromkeys(names) for call in self._calls_by_name.get(name, ())]
        return sorted(dict.fromkeys(found), key=position)

    @cached_property
    def _calls_by_name(self) -> dict[str, list[ast.Call]]:
        by_name: dict[str, list[ast.Call]] = {}
        for call in self.calls:
            for name in self.names.resolve(call.func):
                by_name.setdefault(name, []).append(call)
        return by_name

    def is_call_of(self, node: ast.AST | None, names: Iterable[str]) -> bool:
        """Tell whether `node` is a call of a function of these canonical names."""
        return isinstance(node, ast.Call) and not self.names.resolve(node.func).isdisjoint(names)

    def method_calls(self, *names: str) -> Iterator[tuple[ast.Call, ast.expr]]:
        """Yield (call, receiver) for each call of a method of these names; functions of imported modules are none."""
        for call in self.calls:
            if (
                isinstance(call.func, ast.Attribute)
                and call.func.attr in names
                and not self.names.dotted(call.func.value)
            ):
                yield call, call.func.value

    @cached_property
    def uses_amp(self) -> bool:
        """Whether the script calls amp, Apex's or this package's."""
        return bool(_AMP_WORD.search(self.text)) and bool(self.calls_of(*AMP_FUNCTIONS))

    @cached_property
    def initializations(self) -> list[ast.Call]:
        """The calls of `amp.initialize`."""
        return self.calls_of("amp.initialize")

    @cached_property
    def _core_calls(self) -> list[ast.Call]:
        return self.calls_of(*_CORE)

    @cached_property
    def _core_atoms(self) -> list[Atoms]:
        return [self.structure.atoms(call) for call in self._core_calls]

    def is_without_amp(self, node: ast.AST) -> bool:
        """Tell whether a node runs only where amp is switched off.

        It is on the other arm of an `if`, behind the negation of the same flag, or behind `amp.reset()`.
        """
        is_before = self.structure.is_before
        for reset in self.calls_of("amp.reset"):
            again = (one for one in self.initializations if is_before(reset, one) and is_before(one, node))
            if is_before(reset, node) and next(again, None) is None:
                return True
        if any(self.structure.are_exclusive(node, call) for call in self._core_calls):
            return True
        return contradict(self.structure.atoms(node), self._core_atoms)

    @cached_property
    def imported_modules(self) -> frozenset[str]:
        """The dotted names of modules and their members that the script imports; relative ones start with dots."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                found.add(module)
                found.update(f"{module}{'' if module.endswith('.') else '.'}{alias.name}" for alias in node.names)
        return frozenset(found)

    def has_flag_of_its_own(self, node: ast.AST) -> bool:
        """Tell whether a node runs only under a condition on something that no condition on amp speaks of."""
        known = {text for atoms in self._core_atoms for text in atoms}
        return any(text not in known for text in self.structure.atoms(node))

    # ---- bindings ----------------------------------------------------------------------------------------------------

    @cached_property
    def assignments(self) -> list[tuple[str, ast.expr, ast.stmt]]:
        """Every `target = value` as (target's text, value, statement); tuples of equal length are taken apart."""
        found: list[tuple[str, ast.expr, ast.stmt]] = []
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    found.extend((text_of(one), value, node) for one, value in _pairs(target, node.value))
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                found.append((text_of(node.target), node.value, node))
        return found

    def assigned_before(self, name: str, node: ast.AST) -> ast.expr | None:
        """Return what `name` was assigned last, in the scope of `node` and before it; None if nothing was."""
        for value, statement in reversed(self._assignments_by_target.get(name, ())):
            if self.structure.is_before(statement, node):
                return value
        return None

    @cached_property
    def _assignments_by_target(self) -> dict[str, list[tuple[ast.expr, ast.stmt]]]:
        by_target: dict[str, list[tuple[ast.expr, ast.stmt]]] = {}
        for target, value, statement in self.assignments:
            by_target.setdefault(target, []).append((value, statement))
        return by_target

    def constant(self, name: str) -> ast.expr | None:
        """Return the value of a name that is assigned once in the whole script; None for any other."""
        values = [value for value, _ in self._assignments_by_target.get(name, ())]
        return values[0] if len(values) == 1 and self._binding_counts[name] == 1 else None

    @cached_property
    def _binding_counts(self) -> Counter[str]:
        """How often each name is bound by a statement or as an argument."""
        stores = (node.id for node in self.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        return Counter(stores) + Counter(node.arg for node in self.nodes if isinstance(node, ast.arg))

    # ---- places ------------------------------------------------------------------------------------------------------

    @cached_property
    def lines_in_strings(self) -> frozenset[int]:
        """The lines that start inside a string, or between parts of one."""
        strings = [node for node in self.nodes if isinstance(node, ast.JoinedStr | ast.Constant)]
        return frozenset(line for node in strings for line in range(position(node)[0] + 1, end(node)[0] + 1))

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that a node is or stands in."""
        return next(one for one in (node, *self.structure.around(node)) if isinstance(one, ast.stmt))

    def siblings(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements of the body that one stands in."""
        parent = self.structure.parent(statement)
        found: list[ast.stmt] = getattr(parent, self.structure.field(statement), [])
        return found

    def ancestor_beside(self, statement: ast.stmt, node: ast.AST) -> ast.stmt | None:
        """Return the statement that holds a node among the siblings of another; None if none does."""
        siblings = self.siblings(statement)
        around = [one for one in (node, *self.structure.around(node)) if isinstance(one, ast.stmt)]
        return next((one for one in around if one in siblings), None)

    def indentation(self, statement: ast.stmt) -> str:
        """Return what stands before a statement on its first line."""
        return self.text[self.offset(statement.lineno) : self.span(statement)[0]]

    def lines_of(self, statement: ast.stmt) -> tuple[int, int] | None:
        """Return the span of a statement's lines with their ends; None if something else stands on them."""
        start, last = self.span(statement)
        first = self.offset(min(position(one)[0] for one in (statement, *getattr(statement, "decorator_list", []))))
        stop = self.offset((statement.end_lineno or 0) + 1)
        behind = self.text[last:stop].strip()
        is_alone = not self.indentation(statement).strip() and (not behind or behind.startswith("#"))
        return (first, stop) if is_alone else None

    def is_ignored(self, code: str, node: ast.AST) -> bool:
        """Tell whether a comment on a line of this node silences the code.

        For a node with a body only its first line counts.
        """
        first = position(node)[0]
        last = first if hasattr(node, "body") else getattr(node, "end_lineno", None) or first
        return any({code, _EVERY_CODE} & self.ignored.get(line, frozenset()) for line in range(first, last + 1))


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, (ast.Tuple, ast.List)):
        values = (
            value.elts
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
            else [value] * len(target.elts)
        )
        for one, part in zip(target.elts, values, strict=True):
            yield from _pairs(one, part)
    else:
        yield target, value


def _read_ignore_comments(text: str) -> dict[int, frozenset[str]]:
    """Return the codes that `# amp-patch: ignore[CODE, ...]` and `# noqa: CODE, ...` name, by line.

    A comment without codes means all; of those in noqa, only ours are looked at.
    """
    found: dict[int, frozenset[str]] = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            comment = _IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
            if comment:
                ours, shared = comment[1], comment[2]
                codes = set(re.split(r"[,\s]+", ours)) if ours is not None else {_EVERY_CODE}
                if shared is not None:
                    codes = {code for code in re.split(r"[,\s]+", shared) if code.startswith("AMP")}
                found[token.start[0]] = frozenset(codes - {""})
    except (tokenize.TokenError, SyntaxError):
        pass  # what ast accepts and tokenize does not has no comments worth reading
    return found
