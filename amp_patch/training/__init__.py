"""From a scaled loss to a step: scalers, gradients, masters, and models and optimizers as a session changes them."""

from . import gradient_patches as gradient_patches
from . import loss_scaler as loss_scaler
from . import unscaling as unscaling
from .fused_skip import StepHook as StepHook
from .gradient_sums import GradientSums as GradientSums
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
