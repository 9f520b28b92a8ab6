"""Module rules at the levels that patch functions: a region around the forward of each module that a rule covers.

Scripts swap modules, add them and wrap them between one call and the next. So the rules are applied again when
a module is called that its model did not hold before, and when a model is called that holds other modules than before.
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
        rules: later ones win.
        switch: opens the regions.
        low: the dtype of `run: low`.
        find_root: returns the model of a module that the script calls by itself, whose names the rules use.
            None: rules choose by name only in the models that are added, and elsewhere by type.

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
        self._in_models: set[ModuleRule] = set()  # rules that have chosen some module of a model
        self._is_stale = False
        self._warned_of: set[ModuleRule] = set()  # because they cover scripted modules
        self._rules = rules
        self._switch = switch
        self._low = low
        self._find_root = find_root
        self._models: list[_Model] = []
        self._entries: weakref.WeakKeyDictionary[nn.Module, _Model] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._here = _ThreadCalls()
        self._lock = threading.RLock()  # threads may call a new model at once
        self._hooks: weakref.WeakKeyDictionary[nn.Module, RegionHooks] = weakref.WeakKeyDictionary()

    # ---- models ------------------------------------------------------------------------------------------------------

    def add(self, model: nn.Module) -> None:
        """Apply the rules in a model, by the names of its modules. Harmless twice."""
        self._add(model, self._rules, by_name=True)

    def _add(self, root: nn.Module, rules: Sequence[ModuleRule], *, by_name: bool) -> "_Model":
        with self._lock:
            for known in self._models:
                if known.root() is root:
                    return known
            model = _Model(weakref.ref(root), rules, by_name)
            self._models.append(model)
            self._entries[root] = model
            self._update(model)
            return model

    def remove(self, model: nn.Module) -> None:
        """Remove the hooks that `add` has set for a model."""
        for known in self._models:
            if known.root() is model:
                for module in list(known.hooked):
                    self._unhook(module)
        self._models = [known for known in self._models if known.root() is not model]

    def remove_all(self) -> None:
        """Remove every hook. Harmless twice."""
        for module in list(self._hooks):
            self._unhook(module)
        self._models.clear()
        self._entries.clear()
        self._known.clear()

    def find(self, module: nn.Module) -> ModuleRule | None:
        """Return the rule that decides how a module runs, or None: the last rule that covers it in some model."""
        latest: ModuleRule | None = None
        for model in self._models:
            rule = model.decided.get(module)
            if rule is not None and (latest is None or self._rules.index(rule) > self._rules.index(latest)):
                latest = rule
        return latest

    # ---- calls -------------------------------------------------------------------------------------------------------

    def watch(self, undo: UndoStack) -> None:
        """Follow the modules that the script adds to the models, until it is undone.

        A hook on the calls of all modules slows each of them, and torch.compile warns of it. So there is one only from
        the time at which a model gets another module until the next call, and while some rule by type chooses no module
        of the models: the script may call one by itself, such as a criterion.
        """
        undo.callback(remove_global_hooks, self._on_registration, self._on_call)
        register_module_module_registration_hook(self._on_registration)
        if self._find_root is None and self._awaits_type():
            self._watch_calls()

    def _awaits_type(self) -> bool:
        return any(rule.pattern is None and rule not in self._in_models for rule in self._rules)

    def _watch_calls(self) -> None:
        remove_global_hooks(self._on_call)
        hook: Callable[..., Any] = self._on_call
        register_module_forward_pre_hook(hook)

    def _on_registration(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if parent in self._known:
            self._is_stale = True
            if self._find_root is None:  # else the caller sees all calls
                self._watch_calls()

    def _on_call(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if compiling.is_dynamo_compiling():
            return None
        given = self.begin_call(module, args, sys._getframe(1))
        if not self._awaits_type():
            remove_global_hooks(self._on_call)
        return given

    def look_again(self) -> None:
        """Let the next call of a module check whether the models hold other modules than before."""
        self._is_stale = True

    def begin_call(self, module: nn.Module, args: tuple[Any, ...], frame: types.FrameType) -> tuple[Any, ...] | None:
        """Bring the rules up to date for a call of any module, run by `frame`, before its forward.

        Returns the positional arguments to use instead, or None.
        """
        model = self._entries.get(module)
        if model is not None and self._belongs_elsewhere(module, model):
            self._known.discard(module)
        elif not self._is_stale and module in self._here.known:
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
            self.meet(module)
            hooks = self._hooks.get(module)
        self._here.known.add(module)
        if hooks is None:
            return None
        # torch has begun to call the hooks of the module, and calls none that was set since, here or in another thread
        return hooks.catch_up(module, args, frame)

    def _belongs_elsewhere(self, module: nn.Module, model: "_Model") -> bool:
        """Return whether a module that the script called by itself is now called by a model that holds it.

        Asked only while a rule awaits a module of its name: it looks through all calls that are under way.
        """
        if self._find_root is None or not any(rule.pattern and rule not in self.used for rule in self._rules):
            return False
        return self._find_root(module) is not model.root()

    def _forget_dead(self) -> None:
        """Remove the hooks of models that are gone, such as a temporary wrapper, from the modules that they held."""
        dead = [model for model in self._models if model.root() is None]
        if dead:
            self._models = [model for model in self._models if model.root() is not None]
            for model in dead:
                for module in list(model.hooked):
                    self._unhook(module)
            for model in self._models:
                self._update(model)

    def join_call(self, module: nn.Module, frame: types.FrameType) -> None:
        """Open the region of a module whose forward is under way in `frame`, and began before the rules were there."""
        self.meet(module)
        if module in self._hooks:
            self._hooks[module].join(frame)

    def meet(self, module: nn.Module) -> None:
        """Apply the rules to a module that the script calls by itself, if no model holds it."""
        with self._lock:
            if module not in self._known:
                self._meet(module)

    def _meet(self, module: nn.Module) -> None:
        root = module if self._find_root is None else self._find_root(module)
        inside = [self._entries[part] for part in root.modules() if part in self._entries]
        if self._find_root is not None:
            self._entries[module] = self._add(root, self._rules, by_name=True)
        elif inside:  # a wrapper around a model
            self._entries[module] = inside[0]
        else:
            self._add(root, [rule for rule in self._rules if rule.pattern is None], by_name=False)
        self._known.add(module)

    def update_model(self, root: nn.Module) -> None:
        """Decide anew if a model that is called holds other modules than before. `begin_call` does so, too."""
        for model in self._models if self._find_root is None else ():  # else `begin_call` sees every call
            if model.root() is root:
                self._update_if_changed(model)

    def _update_if_changed(self, model: "_Model") -> None:
        root = model.root()
        if root is not None and model.children != _children_in(root):
            with self._lock:
                self._update(model)

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def _update(self, model: "_Model") -> None:
        """Decide the rules of a model anew, and set and remove hooks accordingly."""
        root = model.root()
        if root is None:
            return
        decided, used = decide_rules(root, model.rules)
        runs = {module: rule.run for module, rule in decided.items()}
        borders = find_borders(root, runs)
        wanted = {module: (run, module not in borders) for module, run in runs.items() if _takes_hooks(module)}
        self._warn_of_scripted(decided[module] for module in borders if isinstance(module, torch.jit.ScriptModule))
        for module in list(model.hooked):
            if wanted.get(module) != model.hooked[module]:
                self._unhook(module)
                del model.hooked[module]
        model.decided = weakref.WeakKeyDictionary(decided)
        for module, how in wanted.items():
            if module in self._hooks and module not in model.hooked and self.find(module) is decided[module]:
                self._give_up(module)  # the script has called a part before the whole, whose later rule wins
            if module not in self._hooks:
                model.hooked[module] = how
                self._hook(module, *how)
        if model.by_name:
            for module in root.modules():
                self._remove_copied_hooks(module)
        model.children = _children_in(root)
        self.used |= used
        if model.by_name:
            self._in_models |= used
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

    def _give_up(self, module: nn.Module) -> None:
        """Remove the hooks of a module that another model has set."""
        for model in self._models:
            model.hooked.pop(module, None)
        self._unhook(module)

    def _hook(self, module: nn.Module, run: str, is_inside: bool) -> None:
        if run == "low":
            hooks = RegionHooks(self._switch, Mode.LOW, self._low, is_inside=is_inside)
        else:
            hooks = RegionHooks(self._switch, Mode.FLOAT32, torch.float32, is_inside=is_inside)
        self._hooks[module] = hooks  # before the change that it undoes
        module.register_forward_pre_hook(hooks.enter, with_kwargs=True, prepend=True)
        module.register_forward_hook(hooks.leave, always_call=True)

    def _unhook(self, module: nn.Module) -> None:
        hooks = self._hooks.get(module)
        if hooks is not None:
            remove_hook(module, hooks.enter)
            remove_hook(module, hooks.leave)
            del self._hooks[module]

    def _remove_copied_hooks(self, module: nn.Module) -> None:
        """Remove the hooks of a module that was copied: it has another name here."""
        for hook in list(get_forward_pre_hooks(module).values()):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, RegionHooks) and owner is not self._hooks.get(module):
                remove_hook(module, owner.enter)
                remove_hook(module, owner.leave)


class UpdateRules(SessionHook):
    """Forward pre-hook of a model: decide its rules anew if it holds other modules than before."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        regions: RuleRegions | None = self._target()
        if regions is not None and not compiling.is_compiling():
            regions.update_model(module)


class _ThreadCalls(threading.local):
    """The modules that one thread has called. In the first call of each, its hooks may be newer than the call."""

    def __init__(self) -> None:
        self.known: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Model:
    """A module whose parts are covered by rules.

    Attributes:
        root: refers to it weakly.
        rules: that may choose in it.
        by_name: rules choose by the names of this module.
        decided: the rule of each covered module.
        hooked: for each module with hooks of this model, how it runs, and whether the module around it runs alike.
        children: see `_children_in`, when the rules were decided.
    """

    def __init__(self, root: "weakref.ref[nn.Module]", rules: Sequence[ModuleRule], by_name: bool) -> None:
        self.root = root
        self.rules = rules
        self.by_name = by_name
        self.decided: Mapping[nn.Module, ModuleRule] = {}
        self.hooked: weakref.WeakKeyDictionary[nn.Module, tuple[str, bool]] = weakref.WeakKeyDictionary()
        self.children: list[object] = []


def _children_in(root: nn.Module) -> list[object]:
    """Return the names of all modules, and references to them: they change if a module is added, replaced or moved."""
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
        contents.append(None)
    return contents


# These visit without functions that refer to themselves: such a circle would keep the model alive for a while.


def decide_rules(model: nn.Module, rules: Sequence[ModuleRule]) -> tuple[dict[nn.Module, ModuleRule], set[ModuleRule]]:
    """Return the rule of each covered module, and the rules that choose some module of this model."""
    decided: dict[nn.Module, int] = {}
    used: set[ModuleRule] = set()
    waiting = [(model, "", -1)] if rules else []
    while waiting:
        module, name, inherited = waiting.pop()
        chosen = [index for index, rule in enumerate(rules) if rule.chooses(name, module)]
        used.update(rules[index] for index in chosen)
        last = max((*chosen, inherited))
        decided[module] = max(last, decided.get(module, -1))  # a module with several names
        for child_name, child in module.named_children():
            waiting.append((child, f"{name}.{child_name}" if name else child_name, last))
    return {module: rules[index] for module, index in decided.items() if index >= 0}, used


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called: containers such as ModuleList cannot."""
    classes = [kind for kind in type(module).__mro__ if kind is not nn.Module]  # asked so: scripted ones raise
    return any("forward" in vars(owner) for owner in (module, *classes))


def _takes_hooks(module: nn.Module) -> bool:
    return has_forward(module) and not isinstance(module, torch.jit.ScriptModule)


def find_borders(model: nn.Module, runs: Mapping[nn.Module, str]) -> dict[nn.Module, str]:
    """Return the entries of `runs` whose module runs differently from the module that calls it.

    Containers such as ModuleList are never called: the module that holds one calls its parts.
    """
    borders: dict[nn.Module, str] = {}
    seen: set[tuple[nn.Module, str | None]] = set()
    waiting: list[tuple[nn.Module, str | None]] = [(model, None)]
    while waiting:
        visited = waiting.pop()
        if visited in seen:
            continue
        seen.add(visited)
        module, run_of_caller = visited
        if has_forward(module):
            run = runs.get(module)
            if run is not None and run != run_of_caller:
                borders[module] = run
            run_of_caller = run
        waiting += [(child, run_of_caller) for child in module.children()]
    return borders
