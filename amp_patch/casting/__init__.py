"""Casts the arguments of listed ops: wrappers around the ops, the switch for them, and the cache of 16-bit weights."""

__role__ = "cast"  # the role of this code in reports; `insight/sites.py` lists the roles

from . import compiling as compiling
from . import op_patches as op_patches
from .autocast import Autocast as Autocast
from .autocast import ModuleRulesSwitch as ModuleRulesSwitch
from .float32_products import Float32Products as Float32Products
from .mode import Mode as Mode
from .mode import Switch as Switch
from .op_patches import DeferredOps as DeferredOps
from .op_patches import Registration as Registration
from .tensor_cast import cast_tree as cast_tree
from .weight_cache import SMALL_ON_CPU as SMALL_ON_CPU
from .weight_cache import RegionCache as RegionCache
from .weight_cache import WeightCache as WeightCache
from .wrappers import OpCasts as OpCasts
