"""`ScalerFlow`: the calls of a script on its GradScaler, and the order in which they run.

The script is not run. So all answers are guesses from its text.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cached_property

from .rules import Severity
from .script import Script
from .tree import argument_of, end, function_of, names_in, position, text_of

_SCALER = re.compile(r"scaler$", re.IGNORECASE)
_CONDITION = re.compile(r"scal|amp|fp16|half|mixed|precision|autocast|enabled", re.IGNORECASE)
"""Text in the condition of an `if` that may decide whether losses are scaled."""

_BRANCHES = (ast.If, ast.IfExp, ast.Try, ast.Match, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler)
"""Nodes whose parts may run seldom, never, or several times.

An *arm* is one such part: the node, and the name of its field that holds the part, such as (an `if`, "orelse").
"""


class ScalerFlow:
    """The calls on GradScalers in a script, and their order within a function."""

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
            if not _alternatives_of(assignment.value).isdisjoint(self.makers)
        )

    @cached_property
    def is_used(self) -> bool:
        """Whether the script may use an enabled GradScaler.

        It may if its text contains "scaler", and if not all GradScalers that it makes have `enabled=False`. A script
        that makes none may get one from elsewhere.
        """
        if "scaler" not in self._script.text.lower():
            return False
        return not self.makers or not all(map(_is_disabled, self.makers))

    @cached_property
    def is_always_enabled(self) -> bool:
        """Whether the script makes GradScalers, each with `enabled` left out or True."""
        return bool(self.makers) and all(map(_is_enabled, self.makers))

    def is_scaler(self, node: ast.expr) -> bool:
        """Return whether an expression seems to be a GradScaler.

        It does if the script assigns a GradScaler to it, or if its name ends in "scaler" in any case.
        """
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
    def _assigning_frames(self) -> dict[str, set[ast.AST]]:
        """For each name, the functions (or the module) that assign to it."""
        frames: dict[str, set[ast.AST]] = {}
        for assignment in self._script.assignments:
            frames.setdefault(assignment.target, set()).add(self._script.frame(assignment.value))
        return frames

    @cached_property
    def _scaling_frames(self) -> dict[str, set[ast.AST]]:
        """For each name that may hold a scaled loss, or a value computed from one: the functions (or the module) that
        assign such a value to it.
        """
        frames: dict[str, set[ast.AST]] = {}
        for assignment in self._script.assignments:
            if self._is_scaled(assignment.value, frames):
                frames.setdefault(assignment.target, set()).add(self._script.frame(assignment.value))
        return frames

    def is_scaled(self, value: ast.expr) -> bool:
        """Return whether an expression may be a scaled loss, or be computed from one."""
        return self._is_scaled(value, self._scaling_frames)

    def _is_scaled(self, value: ast.expr, scaling_frames: dict[str, set[ast.AST]]) -> bool:
        """Do the work of `is_scaled`. `scaling_frames` holds the names known so far (see `_scaling_frames`)."""
        if self._has_scale(value):
            return True
        frame = self._script.frame(value)
        for name in names_in(value) & scaling_frames.keys():
            # a name that this function assigns is its own variable, even if another function uses the same name
            is_local = "." not in name and frame in self._assigning_frames[name]
            if not is_local or frame in scaling_frames[name]:
                return True
        return False

    def _has_scale(self, value: ast.AST) -> bool:
        """Return whether an expression contains a call `scaler.scale(loss)`."""
        return any(call in self._scale_calls for call in ast.walk(value))

    @cached_property
    def _scale_calls(self) -> frozenset[ast.AST]:
        """The calls `scaler.scale(loss)`."""
        return frozenset(self._calls_of("scale"))

    @cached_property
    def _backwards(self) -> list[tuple[ast.Call, bool]]:
        """The calls `loss.backward()` without positional arguments, each with the answer of `is_scaled(loss)`.

        Calls on `self`, `cls`, `ctx` and `super()` are left out.
        """
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
        """The backward passes of losses that nothing seems to scale.

        No name in such a loss, or in a value that is assigned to it, contains "scal".
        """
        plain = []
        for call, is_scaled in self._backwards:
            loss = call.func.value if isinstance(call.func, ast.Attribute) else call
            values = [loss, *self._script.values_of(text_of(loss))]
            names = {name.lower() for value in values for name in names_in(value)}
            if not is_scaled and not any("scal" in name for name in names):
                plain.append(call)
        return plain

    # ---- calls, also through functions of the script --------------------------------------------------------------

    @cached_property
    def _functions(self) -> dict[str, list[ast.AST]]:
        """The functions that call a scaler's `unscale_`, `step` or `update`, or run a backward pass, by name."""
        functions: dict[str, list[ast.AST]] = {}
        for call in (*self.scaled_backwards, *self.plain_backwards, *self.unscales, *self.steps, *self.updates):
            frame = self._script.frame(call)
            if isinstance(frame, (ast.FunctionDef, ast.AsyncFunctionDef)):
                functions.setdefault(frame.name, []).append(frame)
        return functions

    def _with_callers(self, calls: list[ast.Call], *, without: Sequence[ast.Call] = ()) -> list[ast.Call]:
        """Return `calls`, and the calls of the script's functions whose body has a call in `calls`.

        Functions whose body has a call in `without` do not count.
        """
        functions = {self._script.frame(call) for call in calls}
        functions -= {self._script.frame(call) for call in without}
        names = {node.name for node in functions if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
        # if functions share a name, a call does not tell which one it runs, so all of them must be in `functions`
        names = {name for name in names if set(self._functions.get(name, ())) <= functions}
        callers = [call for call in self._script.calls if call not in calls and _is_call_of(call, names)]
        return [*calls, *callers]

    @cached_property
    def scaled_backwards_and_callers(self) -> list[ast.Call]:
        """The backward passes of scaled losses, and calls of functions that have one and no unscale, step or update."""
        return self._with_callers(self.scaled_backwards, without=[*self.unscales, *self.steps, *self.updates])

    @cached_property
    def _steps_and_callers(self) -> list[ast.Call]:
        """The calls `scaler.step(optimizer)`, and calls of functions that have one and no backward pass or unscale."""
        passes = [*self.scaled_backwards, *self.plain_backwards]
        return self._with_callers(self.steps, without=[*self.unscales, *passes])

    @cached_property
    def _ends_of_scaled(self) -> list[ast.Call]:
        """The calls after which gradients may no longer be scaled, and calls of functions with such a call."""
        return self._with_callers([*self.updates, *self.steps, *self.zeroings, *self.unscales])

    @cached_property
    def plain_steps(self) -> list[ast.Call]:
        """The calls `optimizer.step()`."""
        return [call for call, receiver in self._script.method_calls("step") if self._script.is_optimizer(receiver)]

    @cached_property
    def zeroings(self) -> list[ast.Call]:
        """The calls `zero_grad()`, of optimizers and models."""
        return [call for call, _ in self._script.method_calls("zero_grad")]

    def meets_scaled_gradients(self, node: ast.AST) -> bool:
        """Return whether a node seems to run between a scaled backward pass and `scaler.step`, while gradients are
        multiplied by the loss scale.

        Returns False if the node may belong to runs without a loss scale (see `may_be_without_scale`).
        """
        for loss in self.scaled_backwards_and_callers:
            for step in self._steps_and_callers:
                if not self.are_in_order(loss, node, step) or self.may_unscale_between(loss, node):
                    continue
                if any(self.between(self._ends_of_scaled, loss, node)):
                    continue
                if not self.may_be_without_scale(node, loss, step):
                    return True
        return False

    # ---- order -------------------------------------------------------------------------------------------------------

    def are_in_order(self, *nodes: ast.AST) -> bool:
        """Return whether one pass through a function may run these nodes in this order."""
        pairs = list(zip(nodes, nodes[1:], strict=False))
        return all(
            self._script.is_before(first, second) and not self._script.exits_before(first, second)
            for first, second in pairs
        )

    def arms_of(self, node: ast.AST) -> set[tuple[ast.AST, str]]:
        """Return the arms around a node in its function, such as {(the `if`, "body"), (the `for`, "body")}."""
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

        It does so under three conditions. An `if` with a modulo in its test, such as `if (i + 1) % k == 0`, is around
        the first alone. No branch that may vary (see `_may_vary`) is around the second alone. And the two nodes are not
        on different arms of one `if`, `try` or `match`.
        """
        if any(self._may_vary(outer) for outer, _ in self.arms_of(second) - self.arms_of(first)):
            return False
        for outer, _ in self.arms_of(first) - self.arms_of(second):
            if isinstance(outer, ast.If) and any(isinstance(part, ast.Mod) for part in ast.walk(outer.test)):
                return not self._script.are_exclusive(first, second)
        return False

    def _may_vary(self, branch: ast.AST) -> bool:
        """Return whether a branch may be taken in some iterations of a loop, and not in others.

        An `if` may, if its test calls a function, or reads a name that the loop assigns. Branches of other kinds, such
        as a `try`, always may.
        """
        if not isinstance(branch, (ast.If, ast.IfExp)):
            return True
        if any(isinstance(part, ast.Call) for part in ast.walk(branch.test)):
            return True
        loops = [
            outer for outer, _ in self._script.around(branch) if isinstance(outer, (ast.For, ast.AsyncFor, ast.While))
        ]
        stored = {
            part.id
            for loop in loops
            for part in ast.walk(loop)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        }
        return bool(names_in(branch.test) & stored)

    def may_be_without_scale(self, node: ast.AST, *scaled: ast.AST) -> bool:
        """Return whether a node may run in runs without a loss scale, unlike the nodes `scaled`.

        That is so if it is on an arm of an `if` that none of `scaled` is on, and this `if` seems to choose between
        training with and without a scale.
        """
        arms_of_scaled = set[tuple[ast.AST, str]]().union(*map(self.arms_of, scaled))
        for outer, _ in self.arms_of(node) - arms_of_scaled:
            if isinstance(outer, (ast.If, ast.IfExp)) and self._depends_on_scale(outer):
                return True
        return False

    def _depends_on_scale(self, branch: ast.If | ast.IfExp) -> bool:
        """Return whether the test of an `if` has text such as "amp", or whether a scaled backward pass or a
        `scaler.step` is inside the `if`.
        """
        if _CONDITION.search(ast.unparse(branch.test)):
            return True
        inside = set(ast.walk(branch))
        return any(call in inside for call in (*self.scaled_backwards, *self.steps))

    def between(self, calls: list[ast.Call], first: ast.AST, last: ast.AST) -> Iterator[ast.Call]:
        """Yield the items of `calls` that stand between two nodes, in the function of `first`."""
        frame = self._script.frame(first)
        for call in calls:
            if end(first) <= position(call) < position(last) and self._script.frame(call) is frame:
                yield call

    def find_only_loss(self, event: ast.Call, step: ast.Call) -> ast.Call | None:
        """Return the last scaled backward pass before `event`, if `step`, a call after `event`, uses the gradients of
        that pass.

        Returns None if this is not sure, for example if another backward pass may run between `event` and `step`.
        """
        if not self.are_in_order(event, step) or not self.surely_runs(event, step):
            return None
        passes_before = [call for call in self.scaled_backwards if self.are_in_order(call, event)]
        passes_after = self.between([*self.scaled_backwards, *self.plain_backwards], event, step)
        if not passes_before or any(passes_after) or self.may_train_between(event, step):
            return None
        return passes_before[-1]

    def may_train_between(self, first: ast.AST, last: ast.AST) -> bool:
        """Return whether a function whose name suggests a backward pass is called between two nodes."""
        for call in self.between(self._script.calls, first, last):
            name = function_of(call).lower()
            if any(word in name for word in ("backward", "loss", "train", "update_", "optimize", "manual")):
                return True
        return False

    def may_unscale_between(self, first: ast.AST, last: ast.AST) -> bool:
        """Return whether gradients may be unscaled between two nodes: "unscale" is in a name, or the scale is read."""
        for node in self._script.nodes:
            if not end(first) <= position(node) < position(last):
                continue
            if isinstance(node, ast.Call) and ("unscale" in function_of(node) or "get_scale" in function_of(node)):
                return True
            if isinstance(node, ast.Attribute) and node.attr in ("unscale_", "unscale", "_scale"):
                return True
        return False


def _alternatives_of(value: ast.expr) -> set[ast.expr]:
    """Return the expressions whose value an expression may have: `a` and `b` for `a if c else b` and for `a or b`."""
    if isinstance(value, ast.IfExp):
        return _alternatives_of(value.body) | _alternatives_of(value.orelse)
    if isinstance(value, ast.BoolOp):
        return set[ast.expr]().union(*map(_alternatives_of, value.values))
    return {value}


def _is_call_of(call: ast.Call, names: set[str]) -> bool:
    """Return whether a call runs one of these functions of the script: `train(...)` or `self.train(...)`."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return function_of(call) in names and (owner is None or text_of(owner) == "self")


def grade(flow: ScalerFlow) -> Severity:
    """Return the severity of a fault that only an enabled GradScaler causes.

    It is "error" if `flow.is_always_enabled`, or else "warning".
    """
    return "error" if flow.is_always_enabled else "warning"


def _is_disabled(maker: ast.Call) -> bool:
    enabled = argument_of(maker, "enabled")
    return isinstance(enabled, ast.Constant) and enabled.value is False


def _is_enabled(maker: ast.Call) -> bool:
    enabled = argument_of(maker, "enabled")
    has_options = any(keyword.arg is None for keyword in maker.keywords)
    return not has_options and (enabled is None or (isinstance(enabled, ast.Constant) and enabled.value is True))
