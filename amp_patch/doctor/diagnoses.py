"""The table of checks, and running it over one script.

A code is for good: people silence it by `# amp-patch: ignore[CODE]`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import (
    argument_checks,
    backward_checks,
    capture_checks,
    checkpoint_checks,
    import_checks,
    model_checks,
    native_amp_checks,
    optimizer_checks,
    step_checks,
)
from .context import Context
from .findings import Fault, Finding


@dataclass(frozen=True, slots=True)
class Check:
    """One check: `find` yields the faults of one script.

    Codes without `find` come from the reader and from the look at the machine. `is_for_all`: the check is for scripts
    that do not run under amp, too.
    """

    code: str
    summary: str
    find: Callable[[Context], Iterator[Fault]] | None = None
    is_for_all: bool = False


CHECKS: tuple[Check, ...] = (
    Check("AMP001", "a file that cannot be read or parsed"),
    Check("AMP002", "an ignore comment with an unknown code"),
    Check("AMP101", "an import of apex that the stand-in covers", import_checks.covered_imports, is_for_all=True),
    Check(
        "AMP102",
        "a name that the stand-in, or amp_patch, does not have",
        import_checks.uncovered_names,
        is_for_all=True,
    ),
    Check("AMP201", "an opt_level that is no level", argument_checks.unknown_levels),
    Check("AMP202", "arguments of initialize that contradict each other", argument_checks.contradicting_arguments),
    Check("AMP203", "a parallel wrapper before initialize", model_checks.wrapped_models),
    Check("AMP204", "TorchScript and initialize", model_checks.scripted_models),
    Check("AMP205", "an optimizer that initialize does not know", optimizer_checks.unseen_optimizers),
    Check("AMP206", "a model cast to 16 bits before initialize", model_checks.low_models),
    Check("AMP207", "a cast to 16 bits by hand", model_checks.casts_by_hand),
    Check("AMP208", "a model moved to its device after initialize", model_checks.models_moved_late),
    Check("AMP209", "a copy of a model that amp has cast", model_checks.copied_models),
    Check("AMP301", "an unscaled loss inside scale_loss", backward_checks.unscaled_in_block),
    Check("AMP302", "a scaled loss after its scale_loss", backward_checks.scaled_after_block),
    Check("AMP303", "a backward pass without scale_loss", backward_checks.unscaled_losses),
    Check("AMP304", "optimizer.step() inside scale_loss", step_checks.steps_in_block),
    Check("AMP305", "clipping inside scale_loss", step_checks.clips_in_block),
    Check("AMP307", "torch.autocast or a GradScaler beside amp", native_amp_checks.native_amp),
    Check("AMP308", "autocast(enabled=False) to turn casts off", native_amp_checks.autocast_switched_off),
    Check("AMP309", "an LR scheduler that counts skipped steps", step_checks.unguarded_schedulers),
    Check("AMP310", "a loss_id without a loss scaler", backward_checks.loss_ids),
    Check("AMP311", "step(closure) with a dynamic loss scale", step_checks.closures),
    Check("AMP312", "a gradient penalty on unscaled outputs", backward_checks.gradient_penalties),
    Check("AMP401", "a listed function where it cannot be replaced", capture_checks.captured_functions),
    Check("AMP402", "a loss on probabilities", capture_checks.probability_losses),
    Check("AMP501", "a checkpoint without amp's state", checkpoint_checks.saves_without_amp),
    Check("AMP502", "a checkpoint loaded without amp's state", checkpoint_checks.loads_without_amp),
    Check("AMP503", "amp's state before initialize", checkpoint_checks.state_before_initialize),
    Check("AMP901", "another package under the name apex"),
    Check("AMP902", "a torch, wrapt or PyYAML that is too old"),
    Check("AMP903", "a presets file in AMP_PATCH_PRESETS that cannot be used"),
)

CODES = frozenset(check.code for check in CHECKS)


def diagnose(context: Context) -> Iterator[Finding]:
    """Yield the findings of every check in one script, but for those that a comment silences."""
    script = context.script
    for check in CHECKS:
        if check.find is None or not (check.is_for_all or context.runs_under_amp):
            continue
        for fault in check.find(context):
            if not script.is_ignored(check.code, fault.node):
                line, column = script.line_and_column(fault.node)
                yield Finding(check.code, fault.severity, fault.message, fault.fix, script.path, line, column)
    for line, codes in script.ignored.items():
        for code in sorted(codes - CODES - {"*"}):
            message = f"{code!r} in an ignore comment is no code of a check"
            yield Finding("AMP002", "note", message, "`amp-patch doctor --list` shows the codes.", script.path, line, 1)
