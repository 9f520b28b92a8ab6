"""Apex's op lists, such as `amp.lists.torch_overrides.FP16_FUNCS`, filled from the op list `lists/apex.yaml`.

Scripts may edit these Python lists before they call `initialize` or `init`. These calls then register each function
that the script has moved, added or taken off. A registered rule overrides the rule in `lists/apex.yaml`.
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
    """Return the rule of each function in the lists of a module, such as {"exp": "blacklist"}."""
    rules: dict[str, str] = {}
    for list_name, rule in _RULES.items():
        for entry in vars(module).get(list_name, ()):
            # entries of BANNED_FUNCS are tuples: (name, message)
            name = entry if isinstance(entry, str) else entry[0]
            rules[name] = rule
    return rules


_UNEDITED = {module.__name__: _read_rules(module) for module in _MODULES}
_registered: list[Registration] = []  # the registrations of the last `register_edits`


def register_edits() -> None:
    """Register the script's edits of these lists for the next session."""
    edits: list[Registration] = []
    for module in _MODULES:
        unedited, present = _UNEDITED[module.__name__], _read_rules(module)
        for name in sorted(unedited.keys() | present.keys()):
            if unedited.get(name) != present.get(name) and hasattr(module.MODULE, name):
                # a function that the script has taken off its list gets the rule "neutral": its arguments are not cast
                edits.append(Registration(module.MODULE, name, present.get(name, "neutral")))
    replace_registered(removed=_registered, added=edits)
    _registered[:] = edits
