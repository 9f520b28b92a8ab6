"""`apex.fp16_utils`: parts for training in float16 by hand. `amp.initialize(opt_level="O2")` does it all for you."""

from typing import NoReturn

from .._finder import refuse_name
from . import fp16_optimizer, fp16util, loss_scaler
from .fp16_optimizer import FP16_Optimizer
from .fp16util import (
    BN_convert_float,
    clip_grad_norm,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from .loss_scaler import DynamicLossScaler, LossScaler

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "fp16_optimizer",
    "fp16util",
    "loss_scaler",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]


def __getattr__(name: str) -> NoReturn:
    refuse_name(__name__, name)
