"""Break the package on purpose, one small edit at a time, and report which edits the tests notice.

    python tests/mutations.py                     30 edits chosen by seed 0
    python tests/mutations.py --list              show them and run nothing
    python tests/mutations.py --only 7 --jobs 2   one of them, in two processes
    python tests/mutations.py --near              only the tests that guard the broken module, then those of its wing
    python tests/mutations.py --tests OTHER       the same edits against another folder of tests
    python tests/mutations.py --wings casting,training --count 60 --save edits.json
    python tests/mutations.py --load edits.json   the same edits again, later, wherever their text stands by then

Edits are made from the syntax tree: a comparison or a condition turned round, `and` for `or`, a constant off by one, a
statement left out. Each is applied to a copy of the tree. The test files that name the broken module in their `Guards:`
line run first, then those of its wing, then all others: each group only if the groups before it pass. A run that hangs
counts as noticed. A test that fails on the whole package too does not count. Messages, reports and the command line are
left alone: what they say is for people to judge.
"""

import argparse
import ast
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))

from guards import find_guards

ROOT = Path(__file__).resolve().parent.parent
NOT_COPIED = shutil.ignore_patterns(
    *(".git", ".venv*", ".*cache", ".hypothesis"), *("__pycache__", "*.egg-info", "build", "dist", "site")
)

CORE = {"config": 5, "casting": 6, "training": 6, "session": 4, "patching": 4, "apex/amp": 3, "apex": 2, "": 1}
"""How often an edit falls into a folder of the package."""

WEIGHTS = CORE | {"native": 1, "insight": 1, "doctor": 1, "cli": 1}
"""The same with the folders into which none falls unless `--wings` names them."""

LEFT_OUT = {"errors.py", "reporting.py", "config/explain.py", "apex/_gone.py"}
"""Modules of prose."""

FOLDERS = (
    "session",
    "training",
    "patching",
    "config",
    "casting",
    "system",
    "apex",
    "native",
    "cli",
    "doctor",
    "insight",
)
"""The folders of tests, in the order in which they are tried; files beside them come first."""

SILENT = re.compile(
    r"(^|_)(describe|explain|explanation|message|repr|str|warn|warning|log|logger|info|debug|print)(_|$)"
)
COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")}

HANGS = 240  # seconds for one test, several times what the slowest takes on a busy machine
NEVER_ENDS = 3600  # seconds for a whole run


@dataclass(frozen=True)
class Edit:
    """One edit: bytes `start` to `end` of a module, in a function of this name, become `new`."""

    path: str
    line: int
    function: str
    kind: str
    start: int
    end: int
    old: str
    new: str

    @property
    def wing(self) -> str:
        """The folder of the package that the module is weighed with."""
        parent = str(Path(self.path).parent)
        return parent if parent in WEIGHTS else parent.partition("/")[0].replace(".", "")

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.path}:{self.line}  {self.kind}:  {old}  ->  {new}"


class Finder(ast.NodeVisitor):
    """Collects the edits of one module."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source, self.edits = path, source, list[Edit]()
        self.function = ""
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node begins and ends, in bytes."""
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def add(self, node: ast.AST, kind: str, new: str, span: tuple[int, int] | None = None) -> None:
        start, end = span or self.span(node)
        line = self.source.count(b"\n", 0, start) + 1
        old = self.source[start:end].decode()
        self.edits.append(Edit(self.path, line, self.function, kind, start, end, old, new))

    def add_operator(self, whole: ast.AST, left: ast.AST, right: ast.AST, kind: str, old: str, new: str) -> None:
        """Exchange the operator between two nodes, and show the expression around it."""
        gap_start, gap_end = self.span(left)[1], self.span(right)[0]
        gap = self.source[gap_start:gap_end].decode()
        if "#" in gap or gap.count(old) != 1:
            return
        start, end = self.span(whole)
        new_gap = gap.replace(old, new)
        text = self.source[start:gap_start].decode() + new_gap + self.source[gap_end:end].decode()
        self.add(whole, kind, text)

    # ---- what is passed over: prose, annotations, decorators ---------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if SILENT.search(node.name.strip("_")):
            return
        outer, self.function = self.function, node.name
        for child in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
            self.visit(child)
        self.function = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for child in node.body:
            self.visit(child)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    visit_JoinedStr = visit_Assert = visit_Import = visit_ImportFrom = visit_Raise  # type: ignore[assignment]

    def visit_Call(self, node: ast.Call) -> None:
        if not is_prose(node):
            self.generic_visit(node)

    # ---- edits -------------------------------------------------------------------------------------------------------

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1 and "TYPE_CHECKING" not in self.text(node):
            old, new = COMPARISONS[type(node.ops[0])]
            self.add_operator(node, node.left, node.comparators[0], "comparison", old, new)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        if len(node.values) == 2:
            self.add_operator(node, *node.values, "and/or", f"{old} ", f"{new} ")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_number = not any(
            isinstance(part, (ast.JoinedStr, ast.Tuple, ast.List))
            or (isinstance(part, ast.Constant) and isinstance(part.value, str))
            for part in ast.walk(node)
        )
        if is_number and type(node.op) in ARITHMETIC:
            self.add_operator(node, node.left, node.right, "arithmetic", *ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add(node, "negation", f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if self.text(node.test) == "TYPE_CHECKING":
            return
        if not is_only_prose(node):
            kind = "branches" if isinstance(node, ast.IfExp) or node.orelse else "condition"
            self.add(node.test, kind, f"not ({self.text(node.test)})")
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add(node, "constant", str(not value))
        elif isinstance(value, int):
            self.add(node, "constant", str(value + 1))
        elif isinstance(value, float):
            self.add(node, "constant", repr(value * 2 or 1.0))

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not is_prose(node.value):
            self.add(node, "dropped", "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign | ast.AugAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if isinstance(node, ast.AugAssign) or all(isinstance(item, (ast.Attribute, ast.Subscript)) for item in targets):
            self.add(node, "dropped", "pass")
        self.visit(node.value)

    visit_AugAssign = visit_Assign

    def visit_Delete(self, node: ast.Delete) -> None:
        self.add(node, "dropped", "pass")

    visit_Continue = visit_Break = visit_Delete  # type: ignore[assignment]

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self.add(node, "dropped", "pass")
        else:
            self.visit(node.value)


def is_prose(node: ast.AST) -> bool:
    """Tell whether a call only tells somebody something."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return bool(SILENT.search(name))


def is_only_prose(node: ast.If | ast.While | ast.IfExp) -> bool:
    """Tell whether a condition decides about messages alone."""
    body = node.body if isinstance(node.body, list) else []
    return bool(body) and all(
        isinstance(step, ast.Expr) and isinstance(step.value, ast.Call) and is_prose(step.value) for step in body
    )


def find_edits() -> list[Edit]:
    """Every edit of the package, in a fixed order."""
    edits = []
    for path in sorted((ROOT / "amp_patch").rglob("*.py")):
        name = path.relative_to(ROOT / "amp_patch").as_posix()
        if name not in LEFT_OUT:
            finder = Finder(name, path.read_bytes())
            finder.visit(ast.parse(finder.source))
            edits += [edit for edit in finder.edits if edit.wing in WEIGHTS]
    return edits


def choose(edits: list[Edit], wings: list[str], seed: int, count: int) -> list[Edit]:
    """A folder by weight, a kind of edit in it, and one of those; no line twice."""
    generator, chosen = random.Random(seed), dict[tuple[str, int], Edit]()
    weights = [WEIGHTS[wing] for wing in wings]
    while len(chosen) < count:
        wing = generator.choices(wings, weights)[0]
        there = [edit for edit in edits if edit.wing == wing]
        kind = generator.choice(sorted({edit.kind for edit in there}))
        edit = generator.choice([edit for edit in there if edit.kind == kind])
        chosen.setdefault((edit.path, edit.line), edit)
    return list(chosen.values())


def load(path: Path, edits: list[Edit]) -> list[Edit | str]:
    """Saved edits as they are made today: the same text in the same module, or in a function of the same name anywhere,
    nearest to the line of then. A description stands for those whose text is gone.
    """
    found: list[Edit | str] = []
    for row in json.loads(path.read_text()):
        saved = Edit(**row)
        same = [edit for edit in edits if (edit.kind, edit.old, edit.new) == (saved.kind, saved.old, saved.new)]
        there = [edit for edit in same if edit.path == saved.path or edit.function == saved.function]
        there.sort(
            key=lambda edit: (edit.function != saved.function, edit.path != saved.path, abs(edit.line - saved.line))
        )
        found.append(there[0] if there else str(saved))
    return found


def order_tests(edit: Edit, tests: Path) -> Iterator[list[str]]:
    """The test files in three groups: those that guard the broken module, then those of its wing, then all others."""
    wing = Path(edit.path).parts[0]
    files = sorted(
        tests.rglob("test_*.py"),
        key=lambda path: FOLDERS.index(path.parent.name) if path.parent.name in FOLDERS else -1,
    )
    home = {"api.py": "session"}.get(edit.path, wing)
    guards = find_guards(edit.path.removesuffix(".py"), tests)
    of_wing = [path for path in files if path.parent.name == home and path not in guards]
    others = [path for path in files if path not in guards and path not in of_wing]
    for group in (guards, of_wing, others):
        yield [path.relative_to(tests.parent).as_posix() for path in group]


def run_tests(folder: Path, names: list[str], jobs: int) -> str | None:
    """Run tests up to the first that fails; return its name, or None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-n", str(jobs)]
    command += ["-o", f"faulthandler_timeout={HANGS}", "-o", "faulthandler_exit_on_timeout=true", *names]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output = process.communicate(timeout=NEVER_ENDS)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "a run that does not end"
    if process.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+?\.py(?:::[^\n]*?)?)(?: - |$)", output, re.MULTILINE)
    return found[1] if found else "no test: " + output[-2000:]


def copy_tree(target: Path, tests: Path) -> Path:
    """Copy the repository, with this folder of tests."""
    shutil.copytree(ROOT, target, ignore=lambda folder, names: {*NOT_COPIED(folder, names), "tests"})
    shutil.copytree(tests, target / "tests", ignore=NOT_COPIED)
    return target


def find_notice(edit: Edit, tests: Path, jobs: int, is_near: bool) -> str | None:
    """The first test that fails on the broken package and passes on the whole one, or None."""
    with tempfile.TemporaryDirectory() as scratch:
        broken = copy_tree(Path(scratch) / "broken", tests)
        module = broken / "amp_patch" / edit.path
        source = module.read_bytes()
        module.write_bytes(source[: edit.start] + edit.new.encode() + source[edit.end :])
        groups = list(order_tests(edit, broken / "tests"))
        for group in groups[:2] if is_near else groups:
            names = group
            while names and (failed := run_tests(broken, names, jobs)) is not None:
                if not failed.startswith("tests/"):
                    return failed
                whole = copy_tree(Path(scratch) / "whole", tests)
                if run_tests(whole, [failed], 0) is None:
                    return failed if group is groups[0] else f"{failed}, which does not guard the module"
                shutil.rmtree(whole)
                print(f"       fails on the whole package, too, and so is left out: {failed}", flush=True)
                names = [*(name for name in names if name != failed), "--deselect", failed]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--list", action="store_true", help="show the edits and run nothing")
    parser.add_argument("--only", type=int, action="append", metavar="N", help="run this one; may be given repeatedly")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", metavar="DIR", help="another folder of tests")
    parser.add_argument("--wings", default=",".join(CORE), help="folders of the package, with commas between")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the edits there")
    parser.add_argument("--load", type=Path, metavar="FILE", help="make the edits that were saved there")
    parser.add_argument(
        "--near", action="store_true", help="run only the tests that guard the broken module, and those of its wing"
    )
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="processes of pytest (default: its own)")
    arguments = parser.parse_args()
    edits = find_edits()
    if arguments.load:
        chosen = load(arguments.load, edits)
    else:
        chosen = choose(edits, arguments.wings.split(","), arguments.seed, arguments.count)
    if arguments.save:
        arguments.save.write_text(json.dumps([dataclasses.asdict(edit) for edit in chosen], indent=1))
    noticed = survived = 0
    for number, edit in enumerate(chosen):
        if arguments.only and number not in arguments.only:
            continue
        print(f"{number:3}  {edit}", flush=True)
        if isinstance(edit, str):
            print("       is gone")
            continue
        if not arguments.list:
            notice = find_notice(edit, arguments.tests.resolve(), arguments.jobs, arguments.near)
            noticed, survived = noticed + (notice is not None), survived + (notice is None)
            print(f"       noticed by {notice}" if notice else "       NOT NOTICED", flush=True)
    if not arguments.list:
        print(f"{noticed} noticed, {survived} not")


if __name__ == "__main__":
    main()
