"""`RuleRegions`: opens regions around the forward of modules that a module rule covers, at levels that patch functions.

A region runs whitelisted and blacklisted ops in the dtype of the rule. Scripts replace, add and wrap modules between
calls. So which rule covers which module is decided again when a module is called that was not in its model before, and
when a model is called whose modules have changed.
"""

import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook, register_module_module_registration_hook

from ..casting import Mode, Switch, compiling
from ..config import ModuleRule
from ..interrupts import UndoStack
from ..reporting import warn
from ..torch_private import get_forward_pre_hooks, get_own_children, is_replica, remove_global_hooks, remove_hook
from .model_hooks import RegionHooks, SessionHook


class RuleRegions:
    """The module rules of one session, and the regions that they open.

    Args:
        rules: the module rules. A rule chooses modules by name (`match` in a list) or by type (a class), and covers
            also the modules inside them. If several rules cover a module, the last one wins.
        switch: opens the regions.
        low: the dtype of `run: low`.
        find_root: returns the model that a called module belongs to, for a session that was given no models
            (`amp_patch.native`). Rules use the names of modules in that model. None: in the models that `add` was
            called with, rules choose by name and by type; in other modules that the script calls, only by type.

    Attributes:
        used: the rules that have chosen some module.
    """

    def __init__(
        self,
        rules: Sequence[ModuleRule],
        switch: Switch,
        low: torch.dtype,
        find_root: Callable[[nn.Module], nn.Module] | None,
    ) -> None:
        self.used: set[ModuleRule] = set()
        self._used_in_models: set[ModuleRule] = set()  # like `used`, but counts only models with `by_name`
        self._is_stale = False  # whether the modules of some model may have changed since its rules were decided
        self._warned_of: set[ModuleRule] = set()  # rules for scripted modules
        self._rules = rules
        self._switch = switch
        self._low = low
        self._find_root = find_root
        self._models: list[_Model] = []
        # for the root of each model, and for modules that the script has called: their model
        self._model_of: weakref.WeakKeyDictionary[nn.Module, _Model] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules of some model
        self._thread_calls = _ThreadCalls()
        self._lock = threading.RLock()  # threads may call a new model at once
        self._hooks: weakref.WeakKeyDictionary[nn.Module, RegionHooks] = weakref.WeakKeyDictionary()

    # ---- models ------------------------------------------------------------------------------------------------------

    def add(self, model: nn.Module) -> None:
        """Apply the rules to the modules of a model, by their names and types. A second call does nothing."""
        self._add(model, self._rules, by_name=True)

    def _add(self, root: nn.Module, rules: Sequence[ModuleRule], *, by_name: bool) -> "_Model":
        with self._lock:
            for model in self._models:
                if model.root() is root:
                    if by_name and not model.by_name:  # the script has called it before it passed it to `initialize`
                        model.rules, model.by_name = rules, True
                        self._update(model)
                    return model
            model = _Model(weakref.ref(root), rules, by_name)
            self._models.append(model)
            self._model_of[root] = model
            self._update(model)
            return model

    def remove(self, model: nn.Module) -> None:
        """Remove the hooks that were added for a model."""
        for added in self._models:
            if added.root() is model:
                for module in list(added.hooked):
                    self._unhook(module)
        self._models = [added for added in self._models if added.root() is not model]

    def remove_all(self) -> None:
        """Remove the hooks of all modules, and forget the models. A second call does nothing."""
        for module in list(self._hooks):
            self._unhook(module)
        self._models.clear()
        self._model_of.clear()
        self._known.clear()

    def find(self, module: nn.Module) -> ModuleRule | None:
        """Return the rule that decides how a module runs, or None if no rule covers it.

        Of several rules that cover it, perhaps in several models, the last one in the lists decides.
        """
        latest: ModuleRule | None = None
        for model in self._models:
            rule = model.decided.get(module)
            if rule is not None and (latest is None or self._rules.index(rule) > self._rules.index(latest)):
                latest = rule
        return latest

    # ---- calls -------------------------------------------------------------------------------------------------------

    def watch(self, undo: UndoStack) -> None:
        """Notice modules that the script adds to the models, until `undo` is closed.

        A hook on the calls of all modules slows each call, and torch.compile warns about it. So it is registered only
        in two cases: from the moment at which a model gets another module until the next call, and while some rule by
        type has chosen no module of the models. In the second case, the rule may be for a module that is in no model,
        for example a criterion. With `find_root`, the hook is never registered: `amp_patch.native` calls `begin_call`.
        """
        undo.callback(remove_global_hooks, self._on_registration, self._on_call)
        register_module_module_registration_hook(self._on_registration)
        if self._find_root is None and self._awaits_type():
            self._watch_calls()

    def _awaits_type(self) -> bool:
        """Return whether some rule by type has not chosen any module of the added models."""
        return any(rule.pattern is None and rule not in self._used_in_models for rule in self._rules)

    def _watch_calls(self) -> None:
        remove_global_hooks(self._on_call)
        hook: Callable[..., Any] = self._on_call
        register_module_forward_pre_hook(hook)

    def _on_registration(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if parent in self._known:
            self._is_stale = True
            if self._find_root is None:  # otherwise, `amp_patch.native` calls `begin_call`
                self._watch_calls()

    def _on_call(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if compiling.is_dynamo_compiling():
            return None
        replaced_args = self.begin_call(module, args, sys._getframe(1))
        if not self._awaits_type():
            remove_global_hooks(self._on_call)
        return replaced_args

    def mark_stale(self) -> None:
        """Let the next call of a module check whether the modules of the models have changed."""
        self._is_stale = True

    def begin_call(self, module: nn.Module, args: tuple[Any, ...], frame: types.FrameType) -> tuple[Any, ...] | None:
        """Bring the rules up to date for a call of any module, before its forward. torch makes the call in `frame`.

        If the module may have new hooks, which torch does not run in this call, open its region. Returns the positional
        arguments to use instead of `args`, or None to use `args`.
        """
        model = self._model_of.get(module)
        if model is not None and self._belongs_elsewhere(module, model):
            self._known.discard(module)  # so that `_apply_to_called` looks for its model again
        elif not self._is_stale and module in self._thread_calls.known:
            if model is not None:
                self._update_if_changed(model)
            return None
        if is_replica(module):
            return None
        with self._lock:
            self._is_stale = False
            self._forget_dead()
            for model in self._models:
                self._update_if_changed(model)
            self.apply_to_called(module)
            hooks = self._hooks.get(module)
        self._thread_calls.known.add(module)
        if hooks is None:
            return None
        # torch calls only the hooks that the module had when this call began, so call a newer one here
        return hooks.catch_up(module, args, frame)

    def _belongs_elsewhere(self, module: nn.Module, model: "_Model") -> bool:
        """Return whether a module that counts as one of `model` is now called as a module of another model.

        For example, the script called it directly before, and now calls a model that holds it. `find_root` searches all
        calls that are under way, which is slow. So once every rule by name has chosen a module, this returns False
        without a search.
        """
        if self._find_root is None or not any(rule.pattern and rule not in self.used for rule in self._rules):
            return False
        return self._find_root(module) is not model.root()

    def _forget_dead(self) -> None:
        """Remove the hooks of models that no longer exist, such as a temporary wrapper, from modules that still do."""
        dead = [model for model in self._models if model.root() is None]
        if dead:
            self._models = [model for model in self._models if model.root() is not None]
            for model in dead:
                for module in list(model.hooked):
                    self._unhook(module)
            for model in self._models:
                self._update(model)

    def join_call(self, module: nn.Module, frame: types.FrameType) -> None:
        """If a rule covers a module whose forward began before the session opened, open its region.

        The forward is under way in `frame`.
        """
        self.apply_to_called(module)
        if module in self._hooks:
            self._hooks[module].join(frame)

    def apply_to_called(self, module: nn.Module) -> None:
        """Apply the rules to a module that is called, unless it is known to belong to a model."""
        with self._lock:
            if module not in self._known:
                self._apply_to_called(module)

    def _apply_to_called(self, module: nn.Module) -> None:
        root = module if self._find_root is None else self._find_root(module)
        inner_models = [self._model_of[part] for part in root.modules() if part in self._model_of]
        if self._find_root is not None:
            self._model_of[module] = self._add(root, self._rules, by_name=True)
        elif inner_models:  # the module is a wrapper around a model
            self._model_of[module] = inner_models[0]
        else:
            self._add(root, [rule for rule in self._rules if rule.pattern is None], by_name=False)
        self._known.add(module)

    def update_model(self, root: nn.Module) -> None:
        """Decide the rules again if the modules of a model have changed."""
        if self._find_root is not None:  # `begin_call` does this at each call of a model
            return
        for model in self._models:
            if model.root() is root:
                self._update_if_changed(model)

    def _update_if_changed(self, model: "_Model") -> None:
        root = model.root()
        if root is not None and model.children != _children_in(root):
            with self._lock:
                self._update(model)

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def _update(self, model: "_Model") -> None:
        """Decide the rules of a model again, and add and remove hooks accordingly."""
        root = model.root()
        if root is None:
            return
        decided, used = decide_rules(root, model.rules)
        runs = {module: rule.run for module, rule in decided.items()}
        borders = find_borders(root, runs)
        wanted: dict[nn.Module, tuple[str, bool]] = {}  # as `_Model.hooked`
        for module, run in runs.items():
            if _takes_hooks(module):
                wanted[module] = (run, module not in borders)
        self._warn_of_scripted(decided[module] for module in borders if isinstance(module, torch.jit.ScriptModule))
        for module in list(model.hooked):
            if wanted.get(module) != model.hooked[module]:
                self._unhook(module)
                del model.hooked[module]
        model.decided = weakref.WeakKeyDictionary(decided)
        for module, (run, is_inside) in wanted.items():
            if module in self._hooks and module not in model.hooked and self.find(module) is decided[module]:
                # another model has hooked the module, perhaps by an earlier rule; this model's rule decides now
                self._unhook_from_all(module)
            if module not in self._hooks:
                model.hooked[module] = run, is_inside
                self._hook(module, run, is_inside)
        if model.by_name:
            for module in root.modules():
                self._remove_copied_hooks(module)
        model.children = _children_in(root)
        self.used |= used
        if model.by_name:
            self._used_in_models |= used
        self._known.update(root.modules())

    def _warn_of_scripted(self, rules: Iterable[ModuleRule]) -> None:
        for rule in rules:
            if rule not in self._warned_of:
                self._warned_of.add(rule)
                warn(
                    f"{rule.path}:{rule.line}:{rule.column}: the rule for {rule.chooser!r} has no effect in a module"
                    " that torch.jit has scripted, because it takes no hooks. Put that module into another one, and"
                    " write the rule for that."
                )

    def _unhook_from_all(self, module: nn.Module) -> None:
        """Remove the hooks of a module, whichever model has added them."""
        for model in self._models:
            model.hooked.pop(module, None)
        self._unhook(module)

    def _hook(self, module: nn.Module, run: str, is_inside: bool) -> None:
        if run == "low":
            hooks = RegionHooks(self._switch, Mode.LOW, self._low, is_inside=is_inside)
        else:
            hooks = RegionHooks(self._switch, Mode.FLOAT32, torch.float32, is_inside=is_inside)
        self._hooks[module] = hooks  # first: if an interrupt comes next, `_unhook` finds the hooks
        module.register_forward_pre_hook(hooks.enter, with_kwargs=True, prepend=True)
        module.register_forward_hook(hooks.leave, always_call=True)

    def _unhook(self, module: nn.Module) -> None:
        hooks = self._hooks.get(module)
        if hooks is not None:
            remove_hook(module, hooks.enter)
            remove_hook(module, hooks.leave)
            del self._hooks[module]

    def _remove_copied_hooks(self, module: nn.Module) -> None:
        """Remove the hooks that a copied module has from its original, because other rules may apply to the copy."""
        for hook in list(get_forward_pre_hooks(module).values()):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, RegionHooks) and owner is not self._hooks.get(module):
                remove_hook(module, owner.enter)
                remove_hook(module, owner.leave)


class UpdateRules(SessionHook):
    """Forward pre-hook of a model: decide its rules again if its modules have changed."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        regions: RuleRegions | None = self._target()
        if regions is not None and not compiling.is_compiling():
            regions.update_model(module)


class _ThreadCalls(threading.local):
    """The modules that one thread has called.

    The first call of a module may add hooks to it, which torch does not run in that call. `begin_call` runs them then.
    """

    def __init__(self) -> None:
        self.known: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Model:
    """A model or another module that the script calls, with the rules for the modules in it.

    Attributes:
        root: a weak reference to this module.
        rules: the rules that may choose modules in it.
        by_name: whether rules may choose by the names that modules have in it.
        decided: the rule of each covered module.
        hooked: for each module with hooks of this model, how it runs (`run` of its rule), and whether its parent runs
            in the same way.
        children: the result of `_children_in` when the rules were decided.
    """

    def __init__(self, root: "weakref.ref[nn.Module]", rules: Sequence[ModuleRule], by_name: bool) -> None:
        self.root = root
        self.rules = rules
        self.by_name = by_name
        self.decided: Mapping[nn.Module, ModuleRule] = {}
        self.hooked: weakref.WeakKeyDictionary[nn.Module, tuple[str, bool]] = weakref.WeakKeyDictionary()
        self.children: list[object] = []


def _children_in(root: nn.Module) -> list[object]:
    """Return the names of all modules inside `root`, and weak references to them.

    A list made later differs if a module was added, removed, replaced or moved in between.
    """
    contents: list[object] = []
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        for name, child in get_own_children(waiting.pop()).items():
            if child is not None:
                contents += (name, weakref.ref(child))
                if id(child) not in seen:
                    seen.add(id(child))
                    waiting.append(child)
        contents.append(None)  # the end of one module's children
    return contents


# `decide_rules` and `find_borders` keep a list of modules to visit. A nested function that calls itself would be a
# reference cycle, which keeps the model alive until the next garbage collection.


def decide_rules(model: nn.Module, rules: Sequence[ModuleRule]) -> tuple[dict[nn.Module, ModuleRule], set[ModuleRule]]:
    """Return the rule of each covered module, and the rules that choose some module of this model.

    A rule also covers the modules inside a module that it chooses. Of several rules for a module, the last one decides.
    """
    decided: dict[nn.Module, int] = {}
    used: set[ModuleRule] = set()
    waiting = [(model, "", -1)] if rules else []
    while waiting:
        module, name, inherited = waiting.pop()
        chosen = [index for index, rule in enumerate(rules) if rule.chooses(name, module)]
        used.update(rules[index] for index in chosen)
        last = max((*chosen, inherited))
        decided[module] = max(last, decided.get(module, -1))  # a module may have several names in the model
        # `named_children` would leave out the second name of a module that has two in its parent
        for child_name, child in get_own_children(module).items():
            if child is not None:
                waiting.append((child, f"{name}.{child_name}" if name else child_name, last))
    return {module: rules[index] for module, index in decided.items() if index >= 0}, used


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called: containers such as ModuleList cannot."""
    # not by `getattr`: nn.Module defines a `forward` that raises, and scripted modules raise when they are asked for it
    classes = [kind for kind in type(module).__mro__ if kind is not nn.Module]
    return any("forward" in vars(owner) for owner in (module, *classes))


def _takes_hooks(module: nn.Module) -> bool:
    return has_forward(module) and not isinstance(module, torch.jit.ScriptModule)


def find_borders(model: nn.Module, runs: Mapping[nn.Module, str]) -> dict[nn.Module, str]:
    """Return the entries of `runs` whose module runs differently from its parent.

    `runs`: "low" or "float32" for each module that a rule covers.

    A container such as ModuleList has no forward. The parent of its parts is the module that holds the container.
    """
    borders: dict[nn.Module, str] = {}
    seen: set[tuple[nn.Module, str | None]] = set()
    waiting: list[tuple[nn.Module, str | None]] = [(model, None)]
    while waiting:
        visit = waiting.pop()
        if visit in seen:
            continue
        seen.add(visit)
        module, run_of_caller = visit
        if has_forward(module):
            run = runs.get(module)
            if run is not None and run != run_of_caller:
                borders[module] = run
            run_of_caller = run
        waiting += [(child, run_of_caller) for child in module.children()]
    return borders
