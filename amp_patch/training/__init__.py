"""From a scaled loss to a step: scalers, gradients, masters, and models and optimizers as a session changes them."""

from . import gradient_patches as gradient_patches
from . import loss_scaler as loss_scaler
from . import unscaling as unscaling
from .decisions import Decisions as Decisions
from .fused_skip import StepHook as StepHook
from .ledger import Ledger as Ledger
from .ledgers import Ledgers as Ledgers
from .masters import Masters as Masters
from .model import ModelBinding as ModelBinding
from .model import ids_beside_opaque as ids_beside_opaque
from .model_hooks import PATCHED_LAYERS as PATCHED_LAYERS
from .model_hooks import take_any_input as take_any_input
from .optimizer import OptimizerBinding as OptimizerBinding
from .rule_regions import RuleRegions as RuleRegions
from .scale_loss import LossBlock as LossBlock
from .scale_loss import UnscaledBlock as UnscaledBlock
