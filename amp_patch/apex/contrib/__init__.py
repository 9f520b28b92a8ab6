"""`apex.contrib`: the parts of Apex's package of that name for which torch or amp_patch has a counterpart."""

from typing import NoReturn

from .._finder import refuse_name
from . import clip_grad as clip_grad
from . import optimizers as optimizers
from . import xentropy as xentropy


def __getattr__(name: str) -> NoReturn:
    refuse_name(__name__, name)
