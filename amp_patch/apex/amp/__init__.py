"""`apex.amp` on top of `amp_patch`: Apex's public functions, and private names of Apex that scripts use.

As in Apex, `amp._amp_state` is the object `_amp_state` of the submodule `_amp_state`, and not the submodule.
"""

__role__ = "amp"  # the role of this code in reports; `insight/sites.py` lists the roles

from . import __version__ as __version__
from . import _initialize as _initialize
from . import _process_optimizer as _process_optimizer
from . import amp as amp
from . import compat as compat
from . import frontend as frontend
from . import handle as handle
from . import lists as lists
from . import opt as opt
from . import rnn_compat as rnn_compat
from . import scaler as scaler
from . import utils as utils
from ._amp_state import _amp_state as _amp_state
from ._amp_state import master_params as master_params
from .amp import float_function as float_function
from .amp import half_function as half_function
from .amp import init as init
from .amp import promote_function as promote_function
from .amp import register_float_function as register_float_function
from .amp import register_half_function as register_half_function
from .amp import register_promote_function as register_promote_function
from .frontend import initialize as initialize
from .frontend import load_state_dict as load_state_dict
from .frontend import state_dict as state_dict
from .handle import disable_casts as disable_casts
from .handle import scale_loss as scale_loss
