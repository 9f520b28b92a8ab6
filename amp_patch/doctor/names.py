"""`Names` finds the dotted names that a name in a script may stand for: `torch.nn.ReLU` for `relu`, after
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
"""Prefixes of dotted names, each with its replacement.

In the rules of the doctor, `amp.initialize` stands for Apex's function and for amp_patch's. The function `canonical`
replaces the first prefix that fits, and repeats this until none fits. So a longer prefix stands before a shorter one.
"""


def canonical(dotted: str) -> str:
    """Return a dotted name in the spelling of the rules: "amp.initialize" for "apex.amp.initialize"."""
    for prefix, spelling in _PREFIXES:
        if dotted.startswith(prefix):
            return canonical(spelling + dotted[len(prefix) :])
    return dotted


class Names:
    """The imports and aliases of one script. A name is taken to mean the same in all functions.

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
        # after all imports: an alias may stand above the import of its value, which may be in another function
        for name, value in aliases:
            self._targets.setdefault(name, set()).update(self.dotted(value))

    def dotted(self, node: ast.AST) -> frozenset[str]:
        """Return the dotted names that a name, or a chain such as `nn.ReLU`, may mean, as the script imports them.

        Returns an empty set for a name that is neither an import nor an alias of one, and for other expressions.
        """
        if isinstance(node, ast.Attribute):
            return frozenset(f"{base}.{node.attr}" for base in self.dotted(node.value))
        if isinstance(node, ast.Name):
            return frozenset(self._targets.get(node.id, ()))
        return frozenset()

    def resolve(self, node: ast.AST) -> frozenset[str]:
        """Return the result of `dotted` in the spelling of the doctor's rules (see `canonical`)."""
        return frozenset(canonical(name) for name in self.dotted(node))
