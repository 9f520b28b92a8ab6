"""Scales losses, unscales gradients, takes or skips steps, and casts models.

With GradScaler of torch.amp, a training loop makes four calls. Here a `scale_loss` block does the work of the first
two. `step()` does the work of the other two, in the opposite order:

    scaler.scale(loss).backward()    # scale_loss.py: LossBlock
    scaler.unscale_(optimizer)       # gradient_sums.py: GradientSums.end, at the end of the block
    scaler.step(optimizer)           # optimizer.py: OptimizerBinding._take_or_skip
    scaler.update()                  # scale_updates.py: ScaleUpdates.update

A block first multiplies the gradients that parameters already have by the scale, so that backward can add to them. The
end of the block divides them by the scale, checks the gradients of its optimizers, and moves gradients of 16-bit
parameters to their masters: it adds them to the masters' gradients, and sets the parameters' to None. A step, taken or
skipped, drops the gradients of masters, unless another optimizer has yet to step on them. Other gradients stay until
`zero_grad`.

A check for inf and NaN gives a flag, `found_inf`. Between two steps, an optimizer is in one of three states (`OptState`
in overflow_flags.py). A flag lasts until a step, or until all gradients of the optimizer are zeroed:

| state | meaning | entered when |
|---|---|---|
| READY | no block since the last step or `zero_grad` | a step; `zero_grad` outside a block |
| PENDING | its blocks check the gradients | a block begins in READY or ends in UNCHECKED |
| UNCHECKED | some gradients were checked by no block with it | reason 7 below |

A step is skipped if a flag of a dynamic scaler is set. The host reads the flags, or a fused kernel does
(`OptimizerBinding._decide` chooses). These are all reasons for such a flag, with the functions that set it:

1. A gradient of this optimizer overflowed in a `scale_loss` block with it: `GradientSums._unscale_and_check` finds it,
   and `GradientSums._report` adds the flag of the block to the flags of the optimizer.
2. A gradient of another optimizer overflowed in such a block: `_report` does so for all optimizers of the block.
3. A gradient overflowed in a parameter that this optimizer shares with an optimizer of a block: a `Block` affects all
   optimizers that share a parameter with one of its own, and `OverflowFlags.add_found_inf` adds their flags.
4. A block that was delayed, or whose gradients are reduced later, has overflowed: `GradientSums.unscale_all` reports it
   at the end of a later block, or before the step.
5. `step()` is called inside a block, and the gradients so far have overflowed: `GradientSums._unscale_inside`.
6. A block overflowed that ended with an exception (`_is_overflow`), or that never reached its end, because it was
   garbage-collected (`GradientSums._replace_lost_block`).
7. The state is UNCHECKED, and a gradient holds inf or NaN. `OverflowFlags.check_at_step` or the next block finds it.
   The gradient is from before `initialize` (`Bindings.bind`); from a backward pass outside of `scale_loss` at a level
   with masters (`GradientSums._move_unscaled`); from a block without this optimizer at such a level
   (`GradientSums._unscale_unchecked`); or of a parameter that a script has put into a group of this optimizer
   (`GradientSums._unscale_unchecked`, `OptimizerBinding._on_parameters_put_in`).
8. Gradients were zeroed after a block had checked them (`OverflowFlags.was_zeroed`), and the gradients that the script
   put in their place hold inf or NaN: `OverflowFlags.check_at_step`.
9. One of reasons 1 to 8 holds on another rank that decides together with this one: `ScaleUpdates.update`.

A step is taken, although a gradient holds inf or NaN, if

* all scales are static (`_decide`), or the step belongs to a wrapped optimizer, whose wrapper decides (`_step`);
* no loss was scaled and no masters exist, so nothing was checked, as at O0, and at O4 with a scale of 1;
* the gradient is of a parameter without a master, and no `scale_loss` block with its optimizer has checked it: it came
  from a backward pass outside of `scale_loss` or from a block without this optimizer, or the script wrote it after the
  block. At levels with masters, BatchNorm has such parameters; reason 7 then applies if another parameter of the
  optimizer has a master;
* the script wrote inf into the gradient of a master after the block;
* the last step was skipped, and the script steps again on the same gradients, without another block. This holds for
  parameters without masters.
"""

from . import gradient_patches as gradient_patches
from . import loss_scaler as loss_scaler
from . import unscaling as unscaling
from .fused_skip import StepHook as StepHook
from .gradient_sums import GradientSums as GradientSums
from .host_copy import HostCopy as HostCopy
from .masters import Masters as Masters
from .model import ModelBinding as ModelBinding
from .model import ids_beside_opaque as ids_beside_opaque
from .model_hooks import PATCHED_LAYERS as PATCHED_LAYERS
from .model_hooks import take_any_input as take_any_input
from .optimizer import OptimizerBinding as OptimizerBinding
from .overflow_flags import OptState as OptState
from .overflow_flags import OverflowFlags as OverflowFlags
from .rule_regions import RuleRegions as RuleRegions
from .scale_loss import LossBlock as LossBlock
from .scale_loss import UnscaledBlock as UnscaledBlock
from .scale_updates import ScaleUpdates as ScaleUpdates
from .step_was_skipped import get_step_was_skipped as get_step_was_skipped
from .step_was_skipped import install_property as install_property
from .step_was_skipped import remove_step_was_skipped as remove_step_was_skipped
from .step_was_skipped import set_step_was_skipped as set_step_was_skipped
from .stochastic_rounding import StochasticRounding as StochasticRounding
