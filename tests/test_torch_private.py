"""Only `torch_private` and its two neighbours use names of torch that are not public, and each such name is answered.

Guards: torch_private, torch_dispatch, torch_distributed.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import amp_patch
from amp_patch import torch_dispatch, torch_distributed, torch_private

PACKAGE = Path(amp_patch.__file__).parent
PRIVATE = {PACKAGE / f"{name}.py" for name in ("torch_private", "torch_distributed", "torch_dispatch")}
MODULES = sorted(set(PACKAGE.rglob("*.py")) - PRIVATE)
HOT_PATHS = {"wrappers.py", "weight_cache.py"}  # may use HOT_PATH_ATTRIBUTES
NOT_OF_TORCH = {
    "_amp_stash",
    "_args_from_interpreter_flags",
    "_DummyThread",
    "_NormalAccessor",
    "_SubParsersAction",
    "_TemporaryFileCloser",
    "_actions",
    "_current_frames",
    "_exit",
    "_getframe",
    "_initializing",
    "_keep_in_fp32_modules",
    "_keep_in_fp32_modules_strict",
    "_make",
    "_name_",
    "_value_",
}
REFLECTION = {"attrgetter", "delattr", "getattr", "hasattr", "setattr"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def find_own_names(tree: ast.AST) -> Iterator[str]:
    """Private names that a module of ours gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def dotted(node: ast.AST) -> str:
    """`a.b` for a chain of names, "" for anything else."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return owner and f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def find_torch_names(tree: ast.AST) -> dict[str, str]:
    """What a module calls torch and what it imports from it, by its own name for it."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "torch":
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def find_imported(tree: ast.AST) -> Iterator[str]:
    """The full names of all that a module imports from torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "torch")
    yield from find_torch_names(tree).values()


def text_of(node: ast.AST) -> str:
    """A string, or the beginning of one that is put together."""
    if isinstance(node, ast.JoinedStr) and node.values:
        return text_of(node.values[0])
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def find_private_uses(tree: ast.AST, own: frozenset[str]) -> set[str]:
    """The private names of torch that a module uses. `own` are those that the package itself has given."""
    torch_names = find_torch_names(tree)
    uses = {name for name in find_imported(tree) if any(map(is_private, name.split(".")))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            first, _, rest = dotted(node).partition(".")
            if first in torch_names and rest:
                uses.add(f"{torch_names[first]}.{rest}")
            elif not is_self(node.value) and node.attr not in own:
                uses.add(node.attr)
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in REFLECTION:
            for argument in node.args:
                uses |= {text for text in [text_of(argument)] if is_private(text) and text not in own}
    return uses


TREES = {path: ast.parse(path.read_text()) for path in MODULES}
OWN = frozenset(filter(is_private, (name for tree in TREES.values() for name in find_own_names(tree)))) | NOT_OF_TORCH
OF_OBJECTS = {  # what torch's objects have shall not be taken for ours because of a name in common
    name
    for thing in (torch.Tensor, nn.LSTM(1, 1), torch.optim.SGD([torch.zeros(1)], lr=1.0))
    for name in dir(thing)
    if is_private(name)
}


def test_only_torch_private_uses_private_names_of_torch() -> None:
    uses = {}
    for path in MODULES:
        allowed = torch_private.HOT_PATH_ATTRIBUTES if path.name in HOT_PATHS else frozenset()
        if found := find_private_uses(TREES[path], OWN - OF_OBJECTS) - allowed:
            uses[str(path.relative_to(PACKAGE))] = found
    assert uses == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C._get_tracing_state()", {"torch._C", "torch._C._get_tracing_state"}),
        ("from torch._guards import TracingContext", {"torch._guards.TracingContext"}),
        ("from torch import Tensor as T\nT._make_wrapper_subclass", {"torch.Tensor._make_wrapper_subclass"}),
        ("import torch.nn as nn\nnn.modules.batchnorm._BatchNorm", {"torch.nn.modules.batchnorm._BatchNorm"}),
        ("def f(x):\n    return x.grad._values()", {"_values"}),
        ("def f(x, flag):\n    return getattr(x, f'_is_{flag}_supported')", {"_is_"}),
        ("import torch\ntorch.relu\ndef f(self, x):\n    self._own\n    x._own\n    x.__class__\n    x.data", set()),
    ],
)
def test_a_planted_use_is_found(source: str, found: set[str]) -> None:
    assert find_private_uses(ast.parse(source), frozenset({"_own"})) == found


def find_uses_of_dynamo(tree: ast.AST) -> set[str]:
    """What a module takes of `torch.compiler` and of the names that are there for Dynamo."""
    chains = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    return (FOR_DYNAMO & imported) | {
        chain for chain in chains if chain.startswith("torch.compiler.") or chain.rpartition(".")[2] in FOR_DYNAMO
    }


FOR_DYNAMO = {"DYNAMO", "IDLE_DEVICE_TYPES", "build_dynamo_tables", "mark_constant"}
FOR_DYNAMO |= {"is_autocast_state_guarded", "pass_keys_through", "set_keys"}


def test_only_compiling_touches_dynamo() -> None:
    users = {str(path.relative_to(PACKAGE)) for path, tree in TREES.items() if find_uses_of_dynamo(tree)}
    assert users == {"casting/compiling.py"}
    assert find_uses_of_dynamo(TREES[PACKAGE / "casting/compiling.py"]) >= FOR_DYNAMO | {"torch.compiler.reset"}


# ---- what is asked of torch ------------------------------------------------------------------------------------------


def test_what_a_cpu_has_is_answered() -> None:
    assert torch_private.has_cpu_flag("no_such_thing") is False
    assert torch_private.onednn_takes_bfloat16() in (True, False)


def test_a_mode_below_another_is_left_alone_and_the_other_still_sees() -> None:
    seen: list[str] = []

    class Seeing(torch_dispatch.TorchDispatchMode):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(self.name)
            return func(*args, **(kwargs or {}))

    below, above = Seeing("below"), Seeing("above")
    assert not torch_dispatch.leave_mode(below)
    below.__enter__()
    with above:
        assert torch_dispatch.leave_mode(below)
        torch.ones(1).neg_()
    assert torch_private.count_dispatch_modes() == 0 and set(seen) == {"above"}


def test_a_hook_is_removed_wherever_it_is_registered() -> None:
    def count() -> int:
        return sum(len(value) for name, value in vars(module).items() if "hook" in name and value is not None)

    def hook(*_: object) -> None:
        return None

    module = nn.Linear(2, 1)
    module.register_forward_hook(lambda *_: None)
    before = count()
    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    module.register_forward_hook(hook, with_kwargs=True, always_call=True)
    module.register_state_dict_post_hook(hook)
    module.register_load_state_dict_pre_hook(hook)
    assert count() == before + 7
    torch_private.remove_hook(module, hook)
    torch_private.remove_hook(module, hook)
    assert count() == before


@pytest.mark.parametrize("is_old", [False, True], ids=["groups", "one group"])
def test_unsharded_gradients_are_found_in_every_version(is_old: bool) -> None:
    gradient = torch.ones(2)
    parameter = SimpleNamespace(unsharded_accumulated_grad=gradient, _unsharded_param=SimpleNamespace(grad=gradient))
    group = SimpleNamespace(fsdp_params=[parameter])
    state = SimpleNamespace(_fsdp_param_group=group) if is_old else SimpleNamespace(_fsdp_param_groups=[group])
    module = SimpleNamespace(_get_fsdp_state=lambda: state)
    (found,) = torch_distributed.get_unsharded_gradients(module)
    assert found is gradient
