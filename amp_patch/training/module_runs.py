"""What the module rules of the lists come to for one model: how each module runs, and where that changes."""

from collections.abc import Sequence

from torch import nn

from ..config import ModuleRule


def decide_rules(model: nn.Module, rules: Sequence[ModuleRule]) -> tuple[dict[nn.Module, ModuleRule], set[ModuleRule]]:
    """Return the rule that each covered module is to run by, and the rules that choose some module of this model."""
    decided: dict[nn.Module, int] = {}
    used: set[ModuleRule] = set()

    def visit(module: nn.Module, name: str, inherited: int) -> None:
        chosen = [index for index, rule in enumerate(rules) if rule.chooses(name, module)]
        used.update(rules[index] for index in chosen)
        last = max((*chosen, inherited))
        decided[module] = max(last, decided.get(module, -1))  # a module with several names
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, last)

    if rules:
        visit(model, "", -1)
    return {module: rules[index] for module, index in decided.items() if index >= 0}, used


def find_borders(model: nn.Module, runs: dict[nn.Module, str]) -> dict[nn.Module, str]:
    """Return those of `runs` whose module is to run otherwise than a module that holds it."""
    borders = {model: runs[model]} if model in runs else {}
    for module in model.modules():
        for child in module.children():
            if child in runs and runs[child] != runs.get(module):
                borders[child] = runs[child]
    return borders
