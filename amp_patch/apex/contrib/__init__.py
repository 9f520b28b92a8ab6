"""`apex.contrib`: the parts of it that have a counterpart in torch or here."""

from . import clip_grad as clip_grad
from . import optimizers as optimizers
from . import xentropy as xentropy
