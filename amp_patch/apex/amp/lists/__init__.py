"""The op lists under Apex's names.

Scripts may edit these lists before they call `initialize` or `init`, which then registers the differences.
"""

from types import ModuleType

from ..._core import Registration, replace_registered
from . import functional_overrides, tensor_overrides, torch_overrides

_MODULES = (functional_overrides, torch_overrides, tensor_overrides)
_RULES = {
    "FP16_FUNCS": "whitelist",
    "FP32_FUNCS": "blacklist",
    "CASTS": "promote",
    "SEQUENCE_CASTS": "sequence_promote",
    "BANNED_FUNCS": "banned",
}


def _read_rules(module: ModuleType) -> dict[str, str]:
    """Return the rule of each function that a module lists, by the name of the function."""
    return {
        (entry if isinstance(entry, str) else entry[0]): rule
        for key, rule in _RULES.items()
        for entry in vars(module).get(key, ())
    }


_SHIPPED = {module.__name__: _read_rules(module) for module in _MODULES}
_registered: list[Registration] = []


def register_edits() -> None:
    """Register the script's edits of these lists for the next session."""
    edits = []
    for module in _MODULES:
        shipped, present = _SHIPPED[module.__name__], _read_rules(module)
        edited = [name for name in shipped.keys() | present.keys() if shipped.get(name) != present.get(name)]
        # neutral: the script has removed the name from its list
        edits += [
            Registration(module.MODULE, name, present.get(name, "neutral"))
            for name in sorted(edited)
            if hasattr(module.MODULE, name)
        ]
    replace_registered(_registered, edits)
    _registered[:] = edits
