"""`ScalerFlow`: the calls of a script on its GradScaler, and the order in which they run."""

import ast
import re
from collections.abc import Iterator
from functools import cached_property

from .rules import Severity
from .script import Script
from .tree import argument_of, end, function_of, names_in, position, text_of

_SCALER = re.compile(r"scaler$", re.IGNORECASE)
_CONDITION = re.compile(r"scal|amp|fp16|half|mixed|precision|autocast|enabled", re.IGNORECASE)
"""Names in the condition of an `if` that may decide whether losses are scaled."""

_BRANCHES = (ast.If, ast.IfExp, ast.Try, ast.Match, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler)
"""Nodes whose parts may run seldom, never, or several times. An *arm* is such a node with the field of one part."""


class ScalerFlow:
    """The calls on GradScalers in a script. The order of two calls is known only within one function."""

    def __init__(self, script: Script) -> None:
        self._script = script

    # ---- scalers -----------------------------------------------------------------------------------------------------

    @cached_property
    def makers(self) -> list[ast.Call]:
        """The calls that make a GradScaler of torch."""
        made = []
        for call in self._script.calls:
            names = self._script.names.resolve(call.func)
            if any(name.startswith("torch.") and name.endswith(".GradScaler") for name in names):
                made.append(call)
        return made

    @cached_property
    def _scaler_names(self) -> frozenset[str]:
        """The names and attributes to which the script assigns a GradScaler that it makes."""
        return frozenset(
            assignment.target
            for assignment in self._script.assignments
            if any(node in self.makers for node in ast.walk(assignment.value))
        )

    @cached_property
    def is_used(self) -> bool:
        """Whether the script may use a GradScaler that is not disabled for good."""
        if "scaler" not in self._script.text.lower():
            return False
        return not self.makers or not all(map(_is_disabled, self.makers))

    @cached_property
    def is_always_enabled(self) -> bool:
        """Whether each GradScaler is enabled in every run."""
        return bool(self.makers) and all(map(_is_enabled, self.makers))

    def is_scaler(self, node: ast.expr) -> bool:
        """Return whether an expression seems to be a GradScaler: the script makes it, or it is named so."""
        text = text_of(node)
        return text in self._scaler_names or bool(_SCALER.search(text.rpartition(".")[2]))

    def _calls_of(self, method: str) -> list[ast.Call]:
        """Return the calls of a method of a GradScaler."""
        return [call for call, receiver in self._script.method_calls(method) if self.is_scaler(receiver)]

    # ---- calls -------------------------------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> list[ast.Call]:
        """The calls `scaler.step(optimizer)`."""
        return [call for call in self._calls_of("step") if call.args]

    @cached_property
    def unscales(self) -> list[ast.Call]:
        """The calls `scaler.unscale_(optimizer)`."""
        return self._calls_of("unscale_")

    @cached_property
    def updates(self) -> list[ast.Call]:
        """The calls `scaler.update()`."""
        return self._calls_of("update")

    @cached_property
    def _scaled_names(self) -> frozenset[str]:
        """The names that hold a scaled loss, or a value that is computed from one."""
        scaled = set[str]()
        for assignment in self._script.assignments:
            if self._has_scale(assignment.value) or names_in(assignment.value) & scaled:
                scaled.add(assignment.target)
        return frozenset(scaled)

    def is_scaled(self, value: ast.expr) -> bool:
        """Return whether an expression is a scaled loss, or is computed from one."""
        return self._has_scale(value) or bool(names_in(value) & self._scaled_names)

    def _has_scale(self, value: ast.AST) -> bool:
        """Return whether an expression contains a call `scaler.scale(loss)`."""
        return any(call in self._scale_calls for call in ast.walk(value))

    @cached_property
    def _scale_calls(self) -> frozenset[ast.AST]:
        """The calls `scaler.scale(loss)`."""
        return frozenset(self._calls_of("scale"))

    @cached_property
    def _backwards(self) -> list[tuple[ast.Call, bool]]:
        """The backward passes: the call `loss.backward()`, and whether the loss is surely scaled."""
        passes = []
        for call, loss in self._script.method_calls("backward"):
            if call.args or text_of(loss) in ("self", "cls", "ctx", "super()"):
                continue
            passes.append((call, self.is_scaled(loss)))
        return passes

    @cached_property
    def scaled_backwards(self) -> list[ast.Call]:
        """The backward passes of scaled losses."""
        return [call for call, is_scaled in self._backwards if is_scaled]

    @cached_property
    def plain_backwards(self) -> list[ast.Call]:
        """The backward passes of losses that nothing scales. A name with "scal" in the loss counts as a scale."""
        plain = []
        for call, is_scaled in self._backwards:
            loss = call.func.value if isinstance(call.func, ast.Attribute) else call
            values = [loss, *self._script.values_of(text_of(loss))]
            if not is_scaled and not any("scal" in name.lower() for value in values for name in names_in(value)):
                plain.append(call)
        return plain

    # ---- calls, also through functions of the script --------------------------------------------------------------

    @cached_property
    def _functions(self) -> dict[str, list[ast.AST]]:
        """The functions of the script that call a GradScaler or run a backward pass, by name."""
        functions: dict[str, list[ast.AST]] = {}
        for call in (*self.scaled_backwards, *self.plain_backwards, *self.unscales, *self.steps, *self.updates):
            frame = self._script.frame(call)
            if isinstance(frame, (ast.FunctionDef, ast.AsyncFunctionDef)):
                functions.setdefault(frame.name, []).append(frame)
        return functions

    def _calls_doing(self, calls: list[ast.Call], *excluded: list[ast.Call]) -> list[ast.Call]:
        """Return these calls, and calls of functions of the script that contain one of them, and none of `excluded`."""
        frames = {self._script.frame(call) for call in calls}
        frames -= {self._script.frame(call) for group in excluded for call in group}
        names = {frame.name for frame in frames if isinstance(frame, (ast.FunctionDef, ast.AsyncFunctionDef))}
        # a name that another function has, too, does not tell which one is called
        names = {name for name in names if set(self._functions.get(name, ())) <= frames}
        return [*calls, *(call for call in self._script.calls if call not in calls and _is_call_of(call, names))]

    @cached_property
    def scaled_backwards_and_callers(self) -> list[ast.Call]:
        """The backward passes of scaled losses, and calls of functions with one, but no unscale, step or update."""
        return self._calls_doing(self.scaled_backwards, self.unscales, self.steps, self.updates)

    @cached_property
    def _steps_and_callers(self) -> list[ast.Call]:
        """The calls `scaler.step(optimizer)`, and calls of functions with one, but no backward pass or unscale."""
        return self._calls_doing(self.steps, self.unscales, self.scaled_backwards, self.plain_backwards)

    @cached_property
    def _endings(self) -> list[ast.Call]:
        """The calls after which gradients may no longer be scaled, and calls of functions with such a call."""
        return self._calls_doing([*self.updates, *self.steps, *self.zeroings, *self.unscales])

    @cached_property
    def own_steps(self) -> list[ast.Call]:
        """The calls `optimizer.step()`."""
        return [call for call, receiver in self._script.method_calls("step") if self._script.is_optimizer(receiver)]

    @cached_property
    def zeroings(self) -> list[ast.Call]:
        """The calls `zero_grad()`."""
        return [call for call, _ in self._script.method_calls("zero_grad")]

    def is_on_scaled(self, node: ast.AST) -> bool:
        """Return whether a node runs between a scaled backward pass and its step, and nothing unscales before it."""
        for loss in self.scaled_backwards_and_callers:
            for step in self._steps_and_callers:
                if not self.are_in_order(loss, node, step) or self.unscales_before(loss, node):
                    continue
                # after one of these, the gradients of the loss are no longer scaled, or no longer there
                if any(self.between(self._endings, loss, node)):
                    continue
                if not self.may_be_without_scale(node, loss, step):
                    return True
        return False

    # ---- order -------------------------------------------------------------------------------------------------------

    def are_in_order(self, *nodes: ast.AST) -> bool:
        """Return whether one pass through a function may run these nodes in this order."""
        pairs = list(zip(nodes, nodes[1:], strict=False))
        return all(
            self._script.is_before(first, second) and not self._script.leaves(first, second) for first, second in pairs
        )

    def arms_of(self, node: ast.AST) -> set[tuple[ast.AST, str]]:
        """Return the arms around a node in its function: each branch or loop, with its field that holds the node."""
        frame = self._script.frame(node)
        arms = set[tuple[ast.AST, str]]()
        for outer, field in self._script.around(node):
            if outer is frame:
                break
            if isinstance(outer, _BRANCHES) and field != "test":
                arms.add((outer, field))
        return arms

    def surely_runs(self, first: ast.AST, second: ast.AST) -> bool:
        """Return whether the first node runs whenever the second does: its arms are also around the second."""
        return self.arms_of(first) <= self.arms_of(second)

    def is_rarer(self, first: ast.AST, second: ast.AST) -> bool:
        """Return whether the first node runs only in some of the iterations in which the second runs.

        It does so under an `if` with a modulo in its test, such as `if (i + 1) % k == 0`.
        """
        for outer, _ in self.arms_of(first) - self.arms_of(second):
            if isinstance(outer, ast.If) and any(isinstance(part, ast.Mod) for part in ast.walk(outer.test)):
                return not self._script.are_exclusive(first, second)
        return False

    def may_be_without_scale(self, node: ast.AST, *others: ast.AST) -> bool:
        """Return whether a node may run without a loss scale, although the others run with one.

        That is so if it is on an arm of an `if` that none of the others is on, and the `if` depends on the scale.
        """
        around_others = [self.arms_of(other) for other in others]
        for outer, field in self.arms_of(node):
            if any((outer, field) in arms for arms in around_others):
                continue
            if isinstance(outer, (ast.If, ast.IfExp)) and self._depends_on_scale(outer):
                return True
        return False

    def _depends_on_scale(self, branch: ast.If | ast.IfExp) -> bool:
        """Return whether a test names the precision, or an arm runs a scaled backward pass or `scaler.step`."""
        if _CONDITION.search(ast.unparse(branch.test)):
            return True
        inside = set(ast.walk(branch))
        return any(call in inside for call in (*self.scaled_backwards, *self.steps))

    def between(self, calls: list[ast.Call], first: ast.AST, last: ast.AST) -> Iterator[ast.Call]:
        """Yield the calls that stand between two nodes in the text of one function."""
        frame = self._script.frame(first)
        for call in calls:
            if end(first) <= position(call) < position(last) and self._script.frame(call) is frame:
                yield call

    def may_train_between(self, first: ast.AST, last: ast.AST) -> bool:
        """Return whether a function that may run a backward pass, by its name, is called between two nodes."""
        for call in self.between(self._script.calls, first, last):
            name = function_of(call).lower()
            if any(word in name for word in ("backward", "loss", "train", "update_", "optimize", "manual")):
                return True
        return False

    def unscales_before(self, first: ast.AST, last: ast.AST) -> bool:
        """Return whether gradients may be unscaled between two nodes: a name tells of it, or the scale is read."""
        for node in self._script.nodes:
            if not end(first) <= position(node) < position(last):
                continue
            if isinstance(node, ast.Call) and ("unscale" in function_of(node) or "get_scale" in function_of(node)):
                return True
            if isinstance(node, ast.Attribute) and node.attr in ("unscale_", "unscale", "_scale"):
                return True
        return False


def _is_call_of(call: ast.Call, names: set[str]) -> bool:
    """Return whether a call is of a function with one of these names, or of such a method of `self`."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return function_of(call) in names and (owner is None or text_of(owner) == "self")


def grade(flow: ScalerFlow) -> Severity:
    """Return the severity of a fault that exists only while the GradScaler is enabled."""
    return "error" if flow.is_always_enabled else "warning"


def _is_disabled(maker: ast.Call) -> bool:
    enabled = argument_of(maker, "enabled")
    return isinstance(enabled, ast.Constant) and enabled.value is False


def _is_enabled(maker: ast.Call) -> bool:
    enabled = argument_of(maker, "enabled")
    has_options = any(keyword.arg is None for keyword in maker.keywords)
    return not has_options and (enabled is None or (isinstance(enabled, ast.Constant) and enabled.value is True))
