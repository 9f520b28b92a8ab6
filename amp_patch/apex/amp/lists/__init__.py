"""The op lists under Apex's names.

Scripts may edit these lists before they call `initialize`; the differences are registered then.
"""

from types import ModuleType

from ....casting import Registration
from ....session import current
from . import functional_overrides, tensor_overrides, torch_overrides

_MODULES = (functional_overrides, torch_overrides, tensor_overrides)
_KINDS = {
    "FP16_FUNCS": "whitelist",
    "FP32_FUNCS": "blacklist",
    "CASTS": "promote",
    "SEQUENCE_CASTS": "sequence_promote",
    "BANNED_FUNCS": "banned",
}


def _names(module: ModuleType) -> dict[str, str]:
    """Return the kind of each function that a module lists."""
    return {
        (entry if isinstance(entry, str) else entry[0]): kind
        for key, kind in _KINDS.items()
        for entry in vars(module).get(key, ())
    }


_SHIPPED = {module.__name__: _names(module) for module in _MODULES}
_registered: list[Registration] = []


def register_edits() -> None:
    """Have the next session follow what scripts have added to these lists, moved or taken off them by now."""
    registered = current.state.registered
    registered[:] = [entry for entry in registered if not any(entry is edit for edit in _registered)]
    _registered.clear()
    for module in _MODULES:
        shipped, now = _SHIPPED[module.__name__], _names(module)
        edited = [name for name in shipped.keys() | now.keys() if shipped.get(name) != now.get(name)]
        _registered.extend(
            (module.MODULE, name, now.get(name, "neutral")) for name in sorted(edited) if hasattr(module.MODULE, name)
        )
    registered.extend(_registered)
