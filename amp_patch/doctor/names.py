"""`Names` resolves a name in a script to the dotted names that it may stand for: `relu` to `torch.nn.ReLU`, after
`import torch.nn as nn` and `relu = nn.ReLU`.
"""

import ast

_PREFIXES = (
    ("amp_patch.apex.", "apex."),
    ("amp_patch.amp.", "amp."),
    ("amp_patch.", "amp."),
    ("apex.amp.frontend.", "amp."),
    ("apex.amp._amp_state.", "amp."),
    ("apex.amp.", "amp."),
    ("torch.nn.utils.clip_grad.", "torch.nn.utils."),
)
"""Prefixes of dotted names, each with its replacement in the spelling of the doctor's rules.

`canonical` replaces the first prefix that fits, until none fits. So a longer prefix stands before a shorter one. The
functions of Apex's amp and of amp_patch both become `amp.name`.
"""


def canonical(dotted: str) -> str:
    """Return a dotted name in the spelling of the doctor's rules."""
    for prefix, spelling in _PREFIXES:
        if dotted.startswith(prefix):
            return canonical(spelling + dotted[len(prefix) :])
    return dotted


class Names:
    """The imports and aliases of one script, without regard to scopes.

    A name may mean several dotted names: scripts import one thing in `try`, and another in `except ImportError`.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._targets: dict[str, set[str]] = {}
        aliases: list[tuple[str, ast.expr]] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name.partition(".")[0]
                    self._targets.setdefault(alias.asname or root, set()).add(alias.name if alias.asname else root)
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                for alias in node.names:
                    self._targets.setdefault(alias.asname or alias.name, set()).add(f"{module}.{alias.name}")
            elif isinstance(node, ast.Assign) and isinstance(node.value, (ast.Name, ast.Attribute)):
                aliases += [(target.id, node.value) for target in node.targets if isinstance(target, ast.Name)]
        # after all imports: an alias in one function may stand above the import in another that it uses
        for name, value in aliases:
            self._targets.setdefault(name, set()).update(self.dotted(value))

    def dotted(self, node: ast.AST) -> frozenset[str]:
        """Return the dotted names that a name or a chain of attributes may mean, in the spelling of the imports."""
        if isinstance(node, ast.Attribute):
            return frozenset(f"{base}.{node.attr}" for base in self.dotted(node.value))
        if isinstance(node, ast.Name):
            return frozenset(self._targets.get(node.id, ()))
        return frozenset()

    def resolve(self, node: ast.AST) -> frozenset[str]:
        """Return the dotted names that a name or a chain may mean, in the spelling of the doctor's rules."""
        return frozenset(canonical(name) for name in self.dotted(node))
