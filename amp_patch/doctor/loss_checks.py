"""Rules of the doctor about losses in `amp.scale_loss` blocks, and about training without mixed precision."""

import ast
import re
from collections.abc import Iterator

from .rules import Fault, rule
from .script import Script
from .tree import function_of, names_in, text_of

_BLOCK = "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()"
CLIPPERS = tuple(
    f"{module}.{name}"
    for module in ("torch.nn.utils", "apex.contrib.clip_grad", "apex.fp16_utils")
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")
)
_MIXED_PRECISION = re.compile(
    r"\bamp\b|\bapex\b|autocast|GradScaler|float16|[bf]p?16|\.half\b|\baccelerate\b|deepspeed|lightning", re.IGNORECASE
)
"""Words of scripts that may use mixed precision, by amp, by other means, or through a library."""

_READERS = ("item", "detach", "cpu", "numpy", "tolist")
"""Methods that scripts call on a loss to log it, and not to run a backward pass."""


@rule(
    "AMP301",
    "an unscaled loss inside scale_loss",
    bad="""
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            loss.backward()  # AMP301
    """,
    good="""
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    """,
)
def unscaled_in_block(script: Script) -> Iterator[Fault]:
    """At its end, the block divides gradients by the loss scale. Gradients of an unscaled loss become almost zero."""
    if not script.expected.scales:
        return

    # An expression counts as scaled if it contains one of these names: `amp.scale_loss`, `amp.scale`, the `scaled_loss`
    # of a block, or a name to which a scaled expression is assigned.
    scaled = {text_of(node) for node in script.nodes if script.names.resolve(node) & {"amp.scale_loss", "amp.scale"}}
    for block in script.blocks:
        scaled |= {block.name, text_of(block.call.func)}
    for assignment in script.assignments:  # in the order of the text, so that values of values are found, too
        if names_in(assignment.value) & scaled:
            scaled.add(assignment.target)

    for call, loss in script.method_calls("backward"):
        if call.args or text_of(loss) in ("self", "cls", "ctx"):
            continue  # `engine.backward(loss)`, or a method named `backward` of the script's own
        called = {function_of(node) for node in ast.walk(loss) if isinstance(node, ast.Call)}
        # `scaler.scale(loss).backward()` of a GradScaler, or `super().backward()`
        if called & {"scale", "super"}:
            continue
        if script.is_in_block(call) and not names_in(loss) & scaled:
            message = f"{text_of(loss)} is not the scaled loss: the block divides its gradients by the scale"
            yield Fault(call, "error", message, f"Write `{_BLOCK}`.")


@rule(
    "AMP305",
    "clipping inside scale_loss",
    bad="""
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # AMP305
    """,
    good="""
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    """,
)
def clips_in_block(script: Script) -> Iterator[Fault]:
    """Inside the block, gradients are still multiplied by the loss scale, so nearly all of them are clipped."""
    for call in script.calls_of(*CLIPPERS):
        if script.expected.scales and script.is_in_block(call):
            message = "clipping inside the scale_loss block sees gradients that are multiplied by the loss scale"
            yield Fault(call, "error", message, "Move it after the last scale_loss block before the step.")


@rule(
    "AMP313",
    "a scaled loss in a log",
    bad="""
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        total += scaled_loss.item()  # AMP313
    """,
    good="""
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        total += loss.item()
    """,
)
def logged_scaled_losses(script: Script) -> Iterator[Fault]:
    """The scaled loss is the loss times the loss scale. A dynamic scale starts at 65536, and changes during the run."""
    if not script.expected.scales or not script.blocks:
        return
    names = {block.name for block in script.blocks}
    for name in script.nodes:
        if not isinstance(name, ast.Name) or name.id not in names or not isinstance(name.ctx, ast.Load):
            continue
        last_binding: ast.AST | None = None  # the last place before this use where the name gets a value
        for node in script.nodes:
            is_binding = isinstance(node, ast.Name) and node.id == name.id and isinstance(node.ctx, ast.Store)
            if is_binding and script.is_before(node, name):
                last_binding = node
        if last_binding is None:
            continue
        if not any(script.parent(last_binding) in block.statement.items for block in script.blocks):
            continue  # the name has another value by now
        logged = _find_logged(script, name)
        if logged is not None:
            message = f"{text_of(logged)} is the scaled loss: the loss times the loss scale"
            yield Fault(logged, "warning", message, "Log the loss that scale_loss was given.")


def _find_logged(script: Script, name: ast.Name) -> ast.AST | None:
    """Return the expression that logs a scaled loss, such as `scaled_loss.item()`.

    Returns None if the loss is not logged, if a string in the statement contains "scale", or if the loss is an operand,
    as in `scaled_loss / scale`.
    """
    for node in ast.walk(script.parent_statement(name)):
        if isinstance(node, ast.Constant) and "scale" in str(node.value).lower():
            return None  # a string in the statement says that it is scaled
    if any(isinstance(outer, ast.BinOp) for outer, _ in script.around(name)):
        return None
    outer = script.parent(name)
    if isinstance(outer, ast.Attribute) and outer.attr in _READERS and isinstance(script.parent(outer), ast.Call):
        return script.parent(outer)
    if isinstance(outer, ast.Call) and name in outer.args and text_of(outer.func) in ("float", "print"):
        return outer
    if isinstance(outer, ast.AugAssign):
        return name  # total += scaled_loss
    return None


@rule(
    "AMP314",
    "a training without mixed precision",
    bad="""
        import torch

        optimizer = torch.optim.AdamW(model.parameters())
        loss = model(batch).mean()
        loss.backward()  # AMP314
        optimizer.step()
    """,
    good="""
        import torch

        optimizer = torch.optim.AdamW(model.parameters())
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch).mean()
        loss.backward()
        optimizer.step()
    """,
)
def trains_in_float32(script: Script) -> Iterator[Fault]:
    """A script without mixed precision trains in the dtype of its weights, usually float32."""
    if "torch" not in script.text or _MIXED_PRECISION.search(script.text):
        return
    steps = any(script.is_optimizer(receiver) for _, receiver in script.method_calls("step"))
    first = next((call for call, _ in script.method_calls("backward")), None)
    if steps and first is not None:
        message = "the script trains in the dtype of its weights: nothing in it casts to 16 bits"
        advice = (
            "Put torch.autocast around the model and the loss, or call amp.initialize. To see first what bfloat16 costs"
            f" and saves: amp-patch compare --everywhere {script.path}."
        )
        yield Fault(first, "note", message, advice)
