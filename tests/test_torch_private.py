"""`torch_private` and its two neighbours have every name of torch that is not public, and nobody else uses one."""

import ast
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import amp_patch
from amp_patch import torch_dispatch, torch_private

PACKAGE = Path(amp_patch.__file__).parent
PRIVATE = {PACKAGE / f"{name}.py" for name in ("torch_private", "torch_distributed", "torch_dispatch")}
MODULES = sorted(set(PACKAGE.rglob("*.py")) - PRIVATE)
HOT_PATHS = {"wrappers.py", "weight_cache.py"}  # may use READ_IN_PLACE
NOT_OF_TORCH = {
    "_amp_stash",
    "_args_from_interpreter_flags",
    "_DummyThread",
    "_SubParsersAction",
    "_actions",
    "_getframe",
    "_initializing",
    "_keep_in_fp32_modules",
    "_keep_in_fp32_modules_strict",
    "_make",
    "_name_",
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
        allowed = torch_private.READ_IN_PLACE if path.name in HOT_PATHS else frozenset()
        if found := find_private_uses(TREES[path], OWN - OF_OBJECTS) - allowed:
            uses[str(path.relative_to(PACKAGE))] = found
    assert uses == {}


def test_a_planted_use_is_found() -> None:
    for source, found in [
        ("import torch\ntorch._foreach_mul_([], 2)", {"torch._foreach_mul_"}),
        (
            "import torch\ndef f():\n    return torch._C._get_tracing_state()",
            {"torch._C", "torch._C._get_tracing_state"},
        ),
        ("import torch._dynamo.trace_rules", {"torch._dynamo.trace_rules"}),
        ("from torch._guards import TracingContext", {"torch._guards.TracingContext"}),
        ("from torch.nn.modules.batchnorm import _BatchNorm as B", {"torch.nn.modules.batchnorm._BatchNorm"}),
        ("from torch import Tensor as T\nT._make_wrapper_subclass", {"torch.Tensor._make_wrapper_subclass"}),
        ("import torch.nn as nn\nnn.modules.batchnorm._BatchNorm", {"torch.nn.modules.batchnorm._BatchNorm"}),
        ("def f(x):\n    return x.grad._values()", {"_values"}),
        ("def f(x):\n    return x._version", {"_version"}),
        ("def f(optimizer):\n    optimizer._opt_called = True", {"_opt_called"}),
        ("def f(step):\n    return hasattr(step, '_wrapped_by_lr_sched')", {"_wrapped_by_lr_sched"}),
        ("import operator\nf = operator.attrgetter('_parameters')", {"_parameters"}),
        ("def f(x, flag):\n    return getattr(x, f'_is_{flag}_supported')", {"_is_"}),
        ("import torch\ntorch.relu\ndef f(self, x):\n    self._own\n    x._own\n    x.__class__\n    x.data", set()),
    ]:
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


# ---- each name exists ------------------------------------------------------------------------------------------------


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def scheduled_step() -> Callable[..., Any]:
    optimizer = sgd()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer.step


def find_marks(function: Callable[[Any], None]) -> set[str]:
    """The attributes that a function sets."""
    marked = types.SimpleNamespace()
    function(marked)
    return set(vars(marked))


def leave_a_mode_below_another() -> list[object]:
    """What is said of a mode that is not entered, and of one below another, which is left alone and still seen."""
    seen: list[str] = []

    class Seeing(torch_dispatch.TorchDispatchMode):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(self.name)
            return func(*args, **(kwargs or {}))

    below, above = Seeing("below"), Seeing("above")
    found: list[object] = [torch_dispatch.leave_mode(below)]
    below.__enter__()
    with above:
        found.append(torch_dispatch.leave_mode(below))
        torch.ones(1).neg_()
    assert torch_private.count_dispatch_modes() == 0
    return [*found, sorted(set(seen))]


READINGS: dict[str, tuple[Callable[[], object], object]] = {
    "view_negated": (lambda: torch_private.view_negated(torch.tensor([1j]).conj().imag).is_neg(), False),
    "get_local_tensor": (lambda: torch_private.get_local_tensor(torch.zeros(1)), None),
    "remove_hook": (lambda: hooks_left_by(torch_private.remove_hook), 0),
    "remove_step_hook": (lambda: step_hooks_left_by(torch_private.remove_step_hook), 0),
    "reads_found_inf": (
        lambda: torch_private.reads_found_inf(torch.optim.Adam([torch.zeros(1)], lr=1.0, fused=True)),
        True,
    ),
    "is_wrapped_by_scheduler": (lambda: torch_private.is_wrapped_by_scheduler(scheduled_step()), True),
    "mark_step_called": (lambda: find_marks(torch_private.mark_step_called), {"_opt_called"}),
    "has_cpu_flag": (lambda: torch_private.has_cpu_flag("no_such_thing"), False),
    "onednn_takes_bfloat16": (lambda: torch_private.onednn_takes_bfloat16() in (True, False), True),
    "leave_mode": (lambda: leave_a_mode_below_another(), [False, True, ["above"]]),
    "is_autocast_state_guarded": (lambda: torch_private.is_autocast_state_guarded("xpu") in (True, False), True),
    "mark_constant": (lambda: find_marks(torch_private.mark_constant), {"_dynamo_marked_constant"}),
}
"""What each that takes its name by `getattr`, or does more than to pass a name on, answers. A missing name of another
fails the import of its module.
"""


def hooks_left_by(remove: Callable[[nn.Module, object], None]) -> int:
    """How many entries a module has more than before, once a hook was registered in every way and removed."""

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
    remove(module, hook)
    remove(module, hook)
    return count() - before


def step_hooks_left_by(remove: Callable[[None, Callable[..., None]], None]) -> int:
    def hook(*_: object) -> None:
        return None

    register_optimizer_step_post_hook(hook)
    assert hook in torch_private.GLOBAL_POST_HOOKS.values()
    remove(None, hook)
    remove(None, hook)
    return sum(value is hook for value in torch_private.GLOBAL_POST_HOOKS.values())


def test_what_is_asked_of_torch_is_answered() -> None:
    answers = {name: read() for name, (read, _) in READINGS.items()}
    assert answers == {name: expected for name, (_, expected) in READINGS.items()}


def test_a_function_on_all_steps_is_seen() -> None:
    optimizer = sgd()
    for register, is_seen in (
        (optimizer.register_step_pre_hook, lambda: bool(torch_private.get_step_hooks(optimizer))),
        (optimizer.register_step_post_hook, lambda: bool(torch_private.get_step_hooks(optimizer))),
        (register_optimizer_step_pre_hook, lambda: bool(torch_private.GLOBAL_PRE_HOOKS)),
        (register_optimizer_step_post_hook, lambda: bool(torch_private.GLOBAL_POST_HOOKS)),
    ):
        hook = register(lambda *_: None)
        assert is_seen()
        hook.remove()
        assert not is_seen()


def test_a_hook_that_is_put_first_runs_first() -> None:
    optimizer, model, ran = sgd(), torch.nn.Linear(2, 2), []
    for owner, hooks, register in (
        (optimizer, torch_private.STEP_POST_HOOKS, optimizer.register_step_post_hook),
        (model, torch_private.STATE_DICT_HOOKS, model.register_state_dict_post_hook),
    ):
        register(lambda *_: ran.append("second"))
        torch_private.put_first(register(lambda *_: ran.append("first")), hooks, owner)
    optimizer.step()
    model.state_dict()
    assert ran == ["first", "second"] * 2
