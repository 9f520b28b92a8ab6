"""What the names of a script stand for: dotted names, followed through imports and plain aliases."""

import ast

_SPELLINGS = (
    ("amp_patch.apex.amp.", "apex.amp."),
    ("amp_patch.apex.", "apex."),
    ("amp_patch.amp.", "amp."),
    ("amp_patch.", "amp."),
    ("apex.amp.amp.", "amp."),
    ("apex.amp.frontend.", "amp."),
    ("apex.amp.handle.", "amp."),
    ("apex.amp._amp_state.", "amp."),
    ("apex.amp.", "amp."),
    ("torch.nn.utils.clip_grad.", "torch.nn.utils."),
    ("torch.nn.parallel.distributed.", "torch.nn.parallel."),
    ("torch.nn.parallel.data_parallel.", "torch.nn."),
    ("torch.nn.parallel.DataParallel", "torch.nn.DataParallel"),
    ("torch.nn.modules.loss.", "torch.nn."),
    ("torch.amp.autocast_mode.", "torch.amp."),
    ("torch.amp.grad_scaler.", "torch.amp."),
    ("torch.cuda.amp.autocast_mode.", "torch.cuda.amp."),
    ("torch.cuda.amp.grad_scaler.", "torch.cuda.amp."),
)
"""Second spellings of one thing. The functions of Apex's amp and of amp_patch both become `amp.name`."""


LOW = frozenset({"torch.float16", "torch.half", "torch.bfloat16"})
AUTOCASTS = {"torch.autocast": 2, "torch.amp.autocast": 2, "torch.cuda.amp.autocast": 0, "torch.cpu.amp.autocast": 0}
SCALERS = {f"torch.{name}GradScaler": at for name, at in {"": 5, "amp.": 5, "cuda.amp.": 4, "cpu.amp.": 4}.items()}
"""Both with the position of `enabled` among the arguments."""


def canonical(dotted: str) -> str:
    """Return the one spelling under which the checks know a dotted name."""
    for prefix, spelling in _SPELLINGS:
        if dotted.startswith(prefix):
            return canonical(spelling + dotted[len(prefix) :])
    return dotted


class Names:
    """The imports and aliases of one script, all scopes together.

    A name may stand for several things (`try`/`except ImportError`).
    """

    def __init__(self, tree: ast.Module) -> None:
        self._targets: dict[str, set[str]] = {}
        self._stars: set[str] = set()
        self._bound: set[str] = set()
        assignments: list[ast.Assign] = []
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._add_import(node)
            elif isinstance(node, ast.Assign):
                assignments.append(node)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self._bound.add(node.name)
            elif isinstance(node, ast.arg):
                self._bound.add(node.arg)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._bound.add(node.id)
        for assignment in assignments:
            target = assignment.targets[0]
            if (
                len(assignment.targets) == 1
                and isinstance(target, ast.Name)
                and isinstance(assignment.value, (ast.Name, ast.Attribute))
            ):
                self._targets.setdefault(target.id, set()).update(self.dotted(assignment.value))

    def _add_import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                self._targets.setdefault(name, set()).add(alias.name if alias.asname else name)
            return
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            if alias.name == "*":
                self._stars.add(module)
            else:
                self._targets.setdefault(alias.asname or alias.name, set()).add(
                    f"{module.rstrip('.') or '.'}.{alias.name}"
                )

    def find_amp(self) -> str | None:
        """Return what the script calls the module amp, Apex's or this package; None if it imports functions only."""
        for name, targets in self._targets.items():
            if targets <= {"apex.amp", "amp_patch", "amp_patch.amp", "amp_patch.apex.amp"}:
                return name
        return "apex.amp" if self._targets.get("apex") == {"apex"} else None

    def dotted(self, node: ast.AST) -> frozenset[str]:
        """Return the dotted names, as imported, that a name or a chain of attributes may stand for.

        None for any other expression.
        """
        if isinstance(node, ast.Attribute):
            return frozenset(f"{base}.{node.attr}" for base in self.dotted(node.value))
        if not isinstance(node, ast.Name):
            return frozenset()
        if node.id in self._targets:
            return frozenset(self._targets[node.id])
        if node.id in self._bound:
            return frozenset()
        return frozenset(f"{module}.{node.id}" for module in self._stars)

    def resolve(self, node: ast.AST) -> frozenset[str]:
        """Return what an expression may stand for, in the checks' spelling."""
        return frozenset(canonical(name) for name in self.dotted(node))
