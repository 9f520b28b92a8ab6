"""Reads levels, op lists and module rules from YAML files and arguments into frozen values."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import explain as explain
    from . import levels as levels
    from . import list_names as list_names
    from . import op_arguments as op_arguments
    from . import op_lists as op_lists
    from . import op_names as op_names
    from . import op_rules as op_rules
    from . import presets as presets
    from . import shipped as shipped
    from .levels import DEFAULT_LEVEL as DEFAULT_LEVEL
    from .module_rules import ModuleRule as ModuleRule
    from .op_lists import OpLists as OpLists
    from .op_lists import load_oplists as load_oplists
    from .op_rules import OpRule as OpRule
    from .policy import Policy as Policy
    from .presets import make_policy as make_policy

# The module of each exported name, and the exported modules. `__getattr__` imports them when they are first used.
_HOMES = {
    "DEFAULT_LEVEL": "levels",
    "ModuleRule": "module_rules",
    **dict.fromkeys(("OpLists", "load_oplists"), "op_lists"),
    "OpRule": "op_rules",
    "Policy": "policy",
    "make_policy": "presets",
}
_MODULES = ("explain", "levels", "list_names", "op_arguments", "op_lists", "op_names", "op_rules", "presets", "shipped")


def __getattr__(name: str) -> Any:
    """Return an exported module or object. It is imported when it is first used.

    Most modules of this package import torch. Commands that need only the names of lists and levels do not.
    """
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
