"""What the user writes and passes: levels, op lists and module rules, read from YAML into frozen values."""

from . import explain as explain
from . import op_lists as op_lists
from . import presets as presets
from . import schema as schema
from . import shipped as shipped
from .module_rules import ModuleRule as ModuleRule
from .op_lists import OpLists as OpLists
from .op_lists import load_oplists as load_oplists
from .policy import Policy as Policy
from .presets import make_policy as make_policy
