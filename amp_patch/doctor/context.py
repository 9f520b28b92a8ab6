"""What a check gets to know: one script, what amp may do in it, and what the stand-in covers."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from .coverage import Coverage
from .levels import Expected, arguments_of
from .script import Script
from .structure import argument_of, function_of, text_of

WRAPPERS = frozenset(
    {"torch.nn.DataParallel", "torch.nn.parallel.DistributedDataParallel", "apex.parallel.DistributedDataParallel"}
)


@dataclass(frozen=True, slots=True)
class Context:
    """One script to check.

    Attributes:
        script: the script.
        expected: what `initialize` may do: the script's own calls, or those of the scripts that were given along with
            it.
        runs_under_amp: the script uses amp, or is imported by one that does; most checks are for such scripts alone.
        coverage: what the stand-in for `apex` has.
    """

    script: Script
    expected: Expected
    runs_under_amp: bool
    coverage: Coverage

    def models(self, call: ast.Call) -> Iterator[ast.expr]:
        """Yield the models in a call of `initialize`."""
        yield from parts(arguments_of(call).get("models"))

    def optimizers(self, call: ast.Call) -> Iterator[ast.expr]:
        """Yield the optimizers in a call of `initialize`."""
        yield from parts(arguments_of(call).get("optimizers"))

    def is_amp_on(self, node: ast.AST) -> bool:
        """Tell whether `initialize` has surely run when a node runs: before it, under no other condition.

        Where another script calls it, that is taken for granted.
        """
        calls = self.script.initializations
        holders = {getattr(self.script.structure.frame(call), "name", "") for call in calls} - {""}
        openers = [*calls, *(one for one in self.script.calls if function_of(one) in holders)]
        return not calls or (self._is_switched_on(node) and self._is_behind(openers, node))

    def _is_switched_on(self, node: ast.AST) -> bool:
        """Whether every `initialize` is under no condition that a node is not under."""
        return all(self._runs_wherever(call, node) for call in self.script.initializations)

    def _is_behind(self, openers: list[ast.Call], node: ast.AST, depth: int = 3) -> bool:
        """Whether `initialize`, or a function that calls it, runs before a node, or before all calls around it."""
        script, structure = self.script, self.script.structure
        frame = structure.frame(node)
        if any(structure.is_before(one, node) for one in openers):
            return True
        if not isinstance(frame, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        owner = structure.parent(frame)
        if isinstance(owner, ast.ClassDef) and any(structure.is_inside(call, owner) for call in script.initializations):
            return True
        name = owner.name if isinstance(owner, ast.ClassDef) else frame.name
        callers = [one for one in script.calls if function_of(one) == name and structure.frame(one) is not frame]
        return bool(depth and callers) and all(self._is_behind(openers, one, depth - 1) for one in callers)

    def find_amp(self, node: ast.AST) -> str | None:
        """Return what the module amp is called where a node stands; None if it is not imported there."""
        script, name = self.script, self.script.names.find_amp()
        imports = (one for one in script.nodes if isinstance(one, (ast.Import, ast.ImportFrom)))
        frames = {
            script.structure.frame(one)
            for one in imports
            if name and name.partition(".")[0] in {(each.asname or each.name).partition(".")[0] for each in one.names}
        }
        return name if frames & {script.structure.frame(node), script.tree} else None

    def is_beside_amp(self, node: ast.AST) -> bool:
        """Tell whether amp is switched on where a node runs, and called in the same function or module."""
        frame, calls = self.script.structure.frame, self.script.calls_of("amp.initialize", "amp.scale_loss")
        beside = (call for call in calls if frame(call) is frame(node) and self._runs_wherever(call, node))
        return self._is_switched_on(node) and next(beside, None) is not None

    def _runs_wherever(self, call: ast.Call, node: ast.AST) -> bool:
        """Whether a call is under no condition that a node is not under."""
        atoms = self.script.structure.atoms(node)
        return all(values <= atoms.get(text, set()) for text, values in self.script.structure.atoms(call).items())

    def model_texts(self) -> frozenset[str]:
        """Return the expressions that stand for a model in some call of `initialize`."""
        return frozenset(text_of(model) for call in self.script.initializations for model in self.models(call))

    def optimizer_texts(self) -> frozenset[str]:
        """Return the expressions that stand for an optimizer in a call of `initialize` or `scale_loss`, or get one."""
        found = {text_of(optimizer) for call in self.script.initializations for optimizer in self.optimizers(call)}
        for call in self.script.initializations:
            statement = self.script.statement(call)
            targets = statement.targets[0] if isinstance(statement, ast.Assign) and statement.value is call else None
            if isinstance(targets, ast.Tuple) and len(targets.elts) == 2:
                found.update(map(text_of, parts(targets.elts[1])))
        for call in self.script.calls_of("amp.scale_loss"):
            found.update(text_of(optimizer) for optimizer in scaled_optimizers(call))
        return frozenset(found)

    def is_optimizer(self, node: ast.AST) -> bool:
        """Tell whether an expression stands for an optimizer: amp was given it, or its name holds `optim`."""
        text = text_of(node)
        return text in self.optimizer_texts() or "optim" in text.rpartition(".")[2].lower()


def parts(node: ast.expr | None) -> list[ast.expr]:
    """Return the elements of a list or tuple, or the one expression itself; none for None."""
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        return []
    return list(node.elts) if isinstance(node, (ast.List, ast.Tuple)) else [node]


def scaled_optimizers(call: ast.Call) -> list[ast.expr]:
    """Return the optimizers in a call of `scale_loss`."""
    return parts(argument_of(call, "optimizers", 1))
