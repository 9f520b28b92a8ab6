"""The seeded faults, moved to a later step of a run that is healthy until then.

    python tests/support/moved_faults.py 200

moves each to step 200, and prints which an armed run finds, with the same line and cause.
"""

import sys
import types
import warnings

import torch
from seeded_faults import CASES, Given, as_given, take_step
from torch import nn

import amp_patch as amp
from amp_patch import NonFiniteError, insight

ONLY_QUIET = {
    "rms_norm_in_every_block": "loss and gradients stay finite",
    "batch_norm": "loss and gradients stay finite",
    "checkpointed": "loss and gradients stay finite",
    "compiled": "loss and gradients stay finite",
    "scale_too_small": "gradients become zero, and stay finite",
    "gan_gradient_left_behind": "the gradients of one step are used in the next",
}
"""The cases that an armed run does not find, and why."""


class _Mended(Given):
    """How a case runs until its fault: mended, while `is_mended` of the class is True."""

    is_whole = True

    def __getattribute__(self, name):
        return _Mended.is_whole if name == "is_mended" else super().__getattribute__(name)


def _parts(value, seen):
    """Yield the tensors and optimizers that a step holds, in a fixed order."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
        for module in value.modules():
            yield from _parts(getattr(module, "function", None), seen)
    elif isinstance(value, (torch.Tensor, torch.optim.Optimizer)):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _parts(item, seen)
    elif isinstance(value, types.FunctionType) and value.__module__ == "seeded_faults":
        for cell in value.__closure__ or ():
            yield from _parts(cell.cell_contents, seen)


def _parts_of(step):
    return list(_parts(step, set()))


def _break(step, faulty):
    """Put the values of the faulty script into the mended one: its data, weights and learning rates."""
    _Mended.is_whole = False
    with torch.no_grad():
        for part, value in zip(_parts_of(step), faulty, strict=True):
            if isinstance(part, torch.Tensor):
                part.copy_(value)
            else:
                part.param_groups[0]["lr"] = value


def _make_healthy(case):
    """Return a step of another, healthy training in the session of a case."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(4, 8)
    amp.initialize(model, optimizer, opt_level=case.level, loss_scale=case.loss_scale, verbosity=0)
    return lambda: take_step(model(x).float().square().mean(), optimizer)


def move(case):
    """Return a healthy step, the function that lets the fault in, and the faulty step."""
    if case.helps == "script":  # data, weights and learning rates that go wrong
        faulty = [
            part.detach().clone() if isinstance(part, torch.Tensor) else part.param_groups[0]["lr"]
            for part in _parts_of(case.make(as_given(case)))
        ]
        amp.reset()
        _Mended.is_whole = True
        step = case.make(_Mended(case.level, case.loss_scale))
        return step, lambda: _break(step, faulty), step
    step = case.make(as_given(case))
    if case.level not in ("O1", "O4") or case.name == "in_a_thread":  # a second training
        return _make_healthy(case), lambda: None, step
    groups = [
        group for part in _parts_of(step) if isinstance(part, torch.optim.Optimizer) for group in part.param_groups
    ]
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0

    def warm_up():  # float32 until 16 bits are switched on
        with amp.disable_casts():
            step()

    def switch_on():
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    return warm_up, switch_on, step


def find_moved(case, steps):
    """Return the first fault, and the recording of an armed run with the fault from step `steps` on."""
    healthy, begin, step = move(case)
    fault = None
    try:
        with insight.armed(record=0) as recording:
            for _ in range(steps):
                healthy()
            begin()
            for _ in range(case.steps if case.steps < 10 else 100):
                step()
    except NonFiniteError as error:
        fault = error.fault
    finally:
        amp.reset()
    return fault, recording


def is_right(case, fault):
    """Return whether the line and the cause of a fault are those of its case."""
    if fault is None or fault.cause != case.cause:
        return False
    return fault.site in case.lines or fault.phase == "step"


def main():
    """Print what an armed run finds."""
    warnings.simplefilter("ignore")
    right = []
    for case in CASES.values():
        fault, recording = find_moved(case, int(sys.argv[1]))
        right.append(is_right(case, fault))
        differences = [text for trouble in recording.troubles for text in trouble.differences]
        print("found" if right[-1] else "missed", case.name, *differences, flush=True)
    print(f"{sum(right)} of {len(right)}")


if __name__ == "__main__":
    main()
